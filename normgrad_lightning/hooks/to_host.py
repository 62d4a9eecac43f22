"""Takes tensors to the host, and back, without making the training thread wait for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from normgrad_lightning.maths.tensor_subclasses import plain

_COPIES_BESIDE = ("cuda", "xpu")
"""Devices that copy to pinned memory while the host goes on, and know when it is safe to reuse that memory."""

_Arrive = Callable[[], list[Tensor]]


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all values of all tensors are finite; one wait for each device."""
    return all(OnTheWay([t.isfinite().all() for t in tensors]).arrived())


def from_host(t: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device; nobody waits for it, if the device can do that."""
    return t.to(device, non_blocking=device.type in _COPIES_BESIDE)


class OnTheWay:
    """Tensors on their way to the host, each device's packed into one copy.

    What arrives has the values that the tensors have now, however they are changed later, and shares no memory with
    them. Tensors of one device arrive in one buffer, which lives as long as any of them: copy what is kept for long.

    Args:
        tensors: of any devices, types and shapes.

    Example:
        >>> import torch
        >>> from normgrad_lightning.hooks.to_host import OnTheWay
        >>> maps = torch.ones(2)
        >>> copy = OnTheWay([maps, maps.sum()])
        >>> _ = maps.zero_()
        >>> copy.arrived()
        [tensor([1., 1.]), tensor(2.)]
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        indices = defaultdict[torch.device, list[int]](list)
        for index, t in enumerate(tensors):
            indices[t.device].append(index)
        self._parts = [(of, _sent(device, [plain(tensors[i]).detach() for i in of])) for device, of in indices.items()]
        self._arrived: dict[int, Tensor] = {}

    def arrived(self) -> list[Tensor]:
        """Return the tensors on the CPU, in their order; wait for those that are not there yet."""
        while self._parts:
            indices, arrive = self._parts.pop()
            self._arrived.update(zip(indices, arrive(), strict=True))
        return [self._arrived[index] for index in range(len(self._arrived))]


def _sent(device: torch.device, tensors: list[Tensor]) -> _Arrive:
    """Begin the copy of one device's tensors; what is returned finishes it."""
    if device.type == "cpu":
        copies = [t.clone() for t in tensors]
        return lambda: copies
    # The widest types first, so that each begins at a multiple of its own width.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].element_size())
    kinds = [(tensors[index].dtype, tensors[index].shape) for index in order]
    buffer = torch.cat([tensors[index].contiguous().reshape(-1).view(torch.uint8) for index in order])
    fetch = _fetched_beside(buffer) if device.type in _COPIES_BESIDE else buffer.cpu

    def arrive() -> list[Tensor]:
        unpacked = dict(zip(order, _unpacked(fetch(), kinds), strict=True))
        return [unpacked[index] for index in range(len(tensors))]

    return arrive


def _fetched_beside(buffer: Tensor) -> Callable[[], Tensor]:
    """Queue a copy of `buffer` to the host; what is returned waits for it, if it has to, and gives it."""
    module = torch.get_device_module(buffer.device)
    try:
        host = _pinned(buffer)
    except RuntimeError:  # no memory that may be pinned is left
        return buffer.cpu
    host.copy_(buffer, non_blocking=True)
    done = module.Event()
    done.record(module.current_stream(buffer.device))

    def fetch() -> Tensor:
        if not done.query():
            done.synchronize()
        return host

    return fetch


def _pinned(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=True)


def _unpacked(buffer: Tensor, kinds: Sequence[tuple[torch.dtype, torch.Size]]) -> list[Tensor]:
    sizes = [shape.numel() * dtype.itemsize for dtype, shape in kinds]
    parts = torch.split(buffer, sizes)
    return [part.view(dtype).view(shape) for part, (dtype, shape) in zip(parts, kinds, strict=True)]
