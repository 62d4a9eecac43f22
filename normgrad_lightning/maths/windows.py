"""The sliding window of a convolution: sums over it, and where each sum came from, without unfolding a patch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from normgrad_lightning.checks import check_choice
from normgrad_lightning.maths.scaling import at_any_scale

PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


class Window:
    """The sliding window of a convolution on one grid: sums over it, and the adjoint of that sum.

    The sum over a box is a sum along each axis in turn, and each of these a sum of `kernel` shifted slices. So neither
    direction needs memory for more than the grid itself, whatever the kernel.
    """

    def __init__(
        self,
        shape: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        padding_mode: str,
        output_shape: Sequence[int],
    ) -> None:
        self.shape = tuple(shape)
        self.kernel = tuple(kernel)
        self.stride = tuple(stride)
        self.padding = tuple(padding)
        self.dilation = tuple(dilation)
        self.padding_mode = padding_mode
        self.output_shape = tuple(output_shape)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int] | str,
        dilation: int | Sequence[int],
        padding_mode: str,
    ) -> Window:
        """Return the window of a convolution with these arguments on a grid of this shape."""
        check_choice("padding_mode", padding_mode, PADDING_MODES)
        axes = len(shape)
        kernel = _per_axis("kernel_size", kernel_size, axes)
        steps = _per_axis("stride", stride, axes)
        dilations = _per_axis("dilation", dilation, axes)
        pads = _pad_pairs(padding, kernel, dilations)
        output_shape = [
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, k, s, pad, d in zip(shape, kernel, steps, pads, dilations, strict=True)
        ]
        if min(output_shape) < 1:
            raise ValueError(
                f"`kernel_size`: expected a window that fits the grid {tuple(shape)}, but got {kernel} with "
                f"dilation {dilations} and padding {pads}."
            )
        return cls(shape, kernel, steps, pads, dilations, padding_mode, output_shape)

    @classmethod
    def of_transposed(
        cls,
        x_shape: Sequence[int],
        g_shape: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
    ) -> Window:
        """Return the window that each location of a transposed convolution's input writes to, on its output's grid."""
        window = cls.of(g_shape[2:], kernel_size, stride, padding, dilation, "zeros")
        least = [
            (size - 1) * s - sum(pad) + d * (k - 1) + 1
            for size, k, s, pad, d in zip(
                x_shape[2:], window.kernel, window.stride, window.padding, window.dilation, strict=True
            )
        ]
        most = [low + max(s, d) - 1 for low, s, d in zip(least, window.stride, window.dilation, strict=True)]
        fits = all(low <= size <= high for low, size, high in zip(least, g_shape[2:], most, strict=True))
        if x_shape[0] != g_shape[0] or not fits:
            raise ValueError(
                f"`g`: expected a batch of {x_shape[0]} and a grid from {tuple(least)} to {tuple(most)} for an input "
                f"of {tuple(x_shape)} and this geometry, but got {tuple(g_shape)}. "
                "Pass the gradient at the transposed convolution's output."
            )
        # Output padding of a stride or more leaves room for windows that no input location has: they are left out.
        window.output_shape = tuple(x_shape[2:])
        return window

    def norm(self, norms: Tensor, *, rescale: bool = True) -> Tensor:
        """Return the norm of each patch, `sqrt(box(norms²))`; see `at_any_scale`."""
        return at_any_scale(lambda norms: self.sum(norms.square()).sqrt(), norms, rescale=rescale)

    def sum(self, t: Tensor) -> Tensor:
        """Return `box(t)`: `(N, G, *S)` to `(N, G, *S_out)`."""
        t = self._pad(t)
        for axis in range(len(self.shape)):
            slices = [t[index] for index in self._slices(axis)]
            t = slices[0] if len(slices) == 1 else slices[0] + slices[1]
            for further in slices[2:]:
                t += further
        return t

    def spread(self, t: Tensor) -> Tensor:
        """Return `boxᵀ(t)`: `(N, *S_out)` to `(N, *S)`, the exact adjoint of `sum`, padding included."""
        t = t.unsqueeze(1)
        for axis in reversed(range(len(self.shape))):
            shape = list(t.shape)
            shape[axis + 2] = self.shape[axis] + sum(self.padding[axis])
            wide = t.new_zeros(shape)
            for index in self._slices(axis):
                wide[index] += t
            t = self._unpad(wide, axis)
        return t.squeeze(1)

    def _slices(self, axis: int) -> list[tuple[slice, ...]]:
        """Return where the k-th element of every window stands along one axis, for k in order."""
        step, size = self.stride[axis], self.output_shape[axis]
        before = (slice(None),) * (axis + 2)
        starts = (k * self.dilation[axis] for k in range(self.kernel[axis]))
        return [(*before, slice(start, start + (size - 1) * step + 1, step)) for start in starts]

    def _pad(self, t: Tensor) -> Tensor:
        if not any(map(sum, self.padding)):
            return t
        pads = [amount for pair in reversed(self.padding) for amount in pair]
        return F.pad(t, pads, mode=PADDING_MODES[self.padding_mode])

    def _unpad(self, t: Tensor, axis: int) -> Tensor:
        """Return the adjoint of padding along one axis."""
        before, after = self.padding[axis]
        size, dim = self.shape[axis], axis + 2
        if before == after == 0:
            return t
        if self.padding_mode == "zeros":
            return t.narrow(dim, before, size)
        indices = torch.arange(size, dtype=torch.float32, device=t.device)
        source = F.pad(indices[None, None], (before, after), mode=PADDING_MODES[self.padding_mode]).flatten().long()
        shape = list(t.shape)
        shape[dim] = size
        return t.new_zeros(shape).index_add_(dim, source, t)


def _per_axis(name: str, value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Return one number for each axis, as torch's convolutions take them."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    if len(values) == 1:
        values *= axes
    least = 0 if name == "padding" else 1
    if len(values) != axes or any(not isinstance(v, int) or v < least for v in values):
        raise ValueError(f"`{name}`: expected a number of at least {least}, or {axes} of them, but got {value!r}.")
    return values


def _pad_pairs(
    padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """Return what is added before and after each axis."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise ValueError(f"`padding`: expected a number, one for each axis, 'same' or 'valid', but got {padding!r}.")
    return [(p, p) for p in _per_axis("padding", padding, len(kernel))]
