"""Norms of values of any size: float32 squares values below 1e-19 to zero, and those above 1e19 to infinity.

Scaling by a power of two is exact. So a norm that needs no scaling has the same bits with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor


def at_any_scale(norm: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """`norm(t)`, computed on scaled images where squares would vanish or overflow.

    A CPU tries without scaling and looks at the result, which is many times smaller than `t`. On other devices a look
    would wait for the device, so all images are scaled there.

    Args:
        norm: squares, adds up and takes the root, image by image: `norm(a·t) = a·norm(t)`.
        t: floating-point, `(N, …)`.
    """
    if not t.numel():
        return norm(t)
    if _can_look_at(t):
        result = norm(t)
        if _is_safe(result):
            return result
    scale = unit_scale(t)
    result = norm(t * scale)
    return result / scale.reshape(-1, *(1,) * (result.dim() - 1))


def unit_scale(t: Tensor) -> Tensor:
    """The power of two for each image that brings its largest absolute value near 1, `(N, 1, …)`, in float32 or wider.

    It is 1 for an image that is not finite.
    """
    dims = tuple(range(1, t.dim()))
    dtype = torch.promote_types(t.dtype, torch.float32)
    largest = torch.maximum(t.amax(dims, keepdim=True), -t.amin(dims, keepdim=True)).to(dtype)
    tiny = torch.finfo(dtype).tiny
    largest = largest.nan_to_num(1.0, posinf=1.0).clamp(tiny, 0.25 / tiny)
    return torch.frexp(largest).mantissa / largest


def _can_look_at(t: Tensor) -> bool:
    """Whether the values of a tensor can be known now, at no cost."""
    if torch.compiler.is_compiling() or not t.is_cpu or type(t) is not Tensor:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(t)  # as inside of `vmap`


def _is_safe(norms: Tensor) -> bool:
    """Whether no image has squares that vanished beside its largest norm: below 1e-10 of it, in float32."""
    least = torch.finfo(norms.dtype).tiny ** 0.25
    return all(least <= largest < math.inf for largest in norms.amax(tuple(range(1, norms.dim()))).tolist())
