"""Norms of values of any size: float32 squares values below 1e-19 to zero, and those above 1e19 to infinity.

Scaling by a power of two is exact. So a norm that needs no scaling has the same bits with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

CHUNK_VALUES = 2**20
"""How many values a temporary copy may hold: with fewer, threads wait for each other more often than they work."""

DEVICE_CHUNK_VALUES = 2**27
"""The same on other devices than a CPU, where small pieces gain nothing and each costs the host a launch."""


def some_images(t: Tensor) -> Sequence[Tensor]:
    """Return a few images at a time: what is computed of all at once would take as much memory as they do."""
    most, values = CHUNK_VALUES if t.is_cpu else DEVICE_CHUNK_VALUES, t.numel()
    return [t] if values <= most else torch.split(t, max(1, most * len(t) // values))


def at_any_scale(norm: Callable[[Tensor], Tensor], t: Tensor, *, rescale: bool = True) -> Tensor:
    """Return `norm(t)`, computed on scaled images where squares would vanish or overflow.

    A CPU tries without scaling and looks at the result, which is many times smaller than `t`. On other devices a look
    would wait for the device, so all images are scaled there; but not those in float16, whose squares fit float32.

    Args:
        norm: squares in float32 or wider, adds up and takes the root, image by image: `norm(a·t) = a·norm(t)`.
        t: floating-point, `(N, …)`.
        rescale: whether to scale also where looking is not possible, which reads `t` three times and writes it once.
    """
    if not t.numel() or t.dtype == torch.float16:
        return norm(t)
    if can_look_at(t):
        result = norm(t)
        if _is_safe(result):
            return result
    elif not rescale:
        return norm(t)
    pieces = [_scaled(norm, images) for images in some_images(t)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _scaled(norm: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    scale = unit_scale(t)
    result = norm(t * scale)
    return result / scale.reshape(-1, *(1,) * (result.dim() - 1))


_EXPONENT_BITS = {torch.float32: (torch.int32, 0x7F800000), torch.float64: (torch.int64, 0x7FF0000000000000)}


_WITH_FREXP = ("cpu", "cuda")
"""Devices that are known to have `frexp`: MPS has not. `vmap` of old versions of torch cannot look at bits."""


def unit_scale(t: Tensor) -> Tensor:
    """Return the power of two for each image that brings its largest value near 1, `(N, 1, …)`, in float32 or wider.

    It is 1 for an image that is not finite.
    """
    return _unit_scale(_largest(t))


def unit_scales(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the `unit_scale` of each of these tensors, which have as many images and axes, on one device."""
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors))
    return _unit_scale(torch.stack([_largest(t).to(dtype) for t in tensors])).unbind()


def _largest(t: Tensor) -> Tensor:
    dtype = torch.promote_types(t.dtype, torch.float32)
    largest: Tensor = torch.linalg.vector_norm(t, math.inf, tuple(range(1, t.dim())), keepdim=True, dtype=dtype)
    return largest


def _unit_scale(largest: Tensor) -> Tensor:
    dtype = largest.dtype
    tiny = torch.finfo(dtype).tiny
    largest = largest.nan_to_num(1.0, posinf=1.0).clamp(tiny, 0.25 / tiny)
    power: Tensor
    if largest.device.type in _WITH_FREXP:
        power = largest / (2.0 * torch.frexp(largest).mantissa)
    else:
        integers, exponent = _EXPONENT_BITS[dtype]
        power = (largest.view(integers) & exponent).view(dtype)
    return 0.5 / power


def can_look_at(t: Tensor) -> bool:
    """Return whether the values of a tensor can be known now, at no cost."""
    if torch.compiler.is_compiling() or not t.is_cpu or type(t) is not Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(t)  # as inside of `vmap`


def _is_safe(norms: Tensor) -> bool:
    """Return whether no image has squares that vanished beside its largest norm: below 1e-10 of it, in float32."""
    least = torch.finfo(norms.dtype).tiny ** 0.25
    return all(least <= largest < math.inf for largest in norms.amax(tuple(range(1, norms.dim()))).tolist())
