"""The outer products that a weight's gradient is a sum of: their sizes, without ever forming one.

Location u of a layer contributes `g_u ⊗ x_u` to the gradient of its weight: `g_u` is the gradient and `x_u` the
activation there, or the patch that a convolution reads there. With groups (γ), only the blocks on the diagonal are
weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from normgrad_lightning.maths.scaling import at_any_scale, can_look_at, some_images
from normgrad_lightning.maths.tensor_subclasses import plain
from normgrad_lightning.maths.windows import Window

Term = tuple[float, Tensor, Tensor]
"""A factor, an activation and a gradient: `a · g ⊗ x`."""


@dataclass(frozen=True)
class OuterProducts:
    """The products of one kind of weight.

    Attributes:
        groups: the convolution's groups.
        window: what each location reads (of `x`) or, if transposed, writes (of `g`); None for a 1×1 or linear layer.
        transposed: whether the window is on `g`.
        rescale: whether values of any size are right on every device. If not, other devices than a CPU read them once,
            and squares that do not fit float32 vanish or overflow.
    """

    groups: int = 1
    window: Window | None = None
    transposed: bool = False
    rescale: bool = True

    def x_norms(self, x: Tensor) -> Tensor:
        """Return `‖x_{γ,u}‖`, `(N, γ, *L)`, of `x` `(N, C, *S)`."""
        return self._norms(x, None if self.transposed else self.window, "x")

    def g_norms(self, g: Tensor) -> Tensor:
        """Return `‖g_{γ,u}‖`, `(N, γ, *L)`, of `g` `(N, D, *S_out)`."""
        return self._norms(g, self.window if self.transposed else None, "g")

    def norm(self, x_norms: Tensor, g_norms: Tensor) -> Tensor:
        """Return `m_u = sqrt(Σ_γ ‖g_{γ,u}‖² ‖x_{γ,u}‖²)`, `(N, *L)`."""
        product = g_norms * x_norms
        return product.squeeze(1) if product.shape[1] == 1 else channel_norm(product)

    def norm_of_sum(self, terms: Sequence[Term]) -> Tensor:
        """Return `m_u = ‖Σ_i a_i g_{i,u} ⊗ x_{i,u}‖`, `(N, *L)`, through the Gram identity.

            m_u² = Σ_ij a_i a_j Σ_γ (g_i·g_j)_{γ,u} (x_i·x_j)_{γ,u}

        In float64, because the terms nearly cancel; the result has the type of the map of one term.
        """
        x_window, g_window = (None, self.window) if self.transposed else (self.window, None)
        square = torch.zeros((), dtype=torch.float64)  # a scalar of the CPU adds to tensors of any device
        for i, (a, x, g) in enumerate(terms):
            for j, (b, y, k) in enumerate(terms[: i + 1]):
                pair = self._dots(g, k, g_window, "g") * self._dots(x, y, x_window, "x")
                square = square + (1 if i == j else 2) * a * b * pair.sum(1)
        x, g = terms[0][1:]
        dtype = torch.promote_types(wide_dtype(x), wide_dtype(g))
        return square.clamp_min(0).sqrt().to(x.device, dtype)

    def spread(self, m: Tensor) -> Tensor:
        """Return each value given to every pixel of its patch, `M = boxᵀ(m)`; without a window, the map itself."""
        return m if self.window is None else self.window.spread(m)

    def _norms(self, t: Tensor, window: Window | None, name: str) -> Tensor:
        if self.groups == 1:
            norms = channel_norm(t, rescale=self.rescale).unsqueeze(1)
        else:
            norms = channel_norm(_by_group(t, self.groups, name), dim=2, rescale=self.rescale)
        return norms if window is None else window.norm(norms, rescale=self.rescale)

    def _dots(self, a: Tensor, b: Tensor, window: Window | None, name: str) -> Tensor:
        dots = channel_dot(_by_group(a, self.groups, name), _by_group(b, self.groups, name))
        return dots if window is None else window.sum(dots)


def channel_norm(t: Tensor, dim: int = 1, *, rescale: bool = True) -> Tensor:
    """Return the norm over channels at every location, in float32 or wider, without a widened copy of all of `t`.

    Args:
        t: `(N, C, *S)`.
        dim: the channels' axis.
        rescale: see `at_any_scale`.
    """
    t = plain(t).detach()
    return at_any_scale(partial(_norm, dim=dim % t.dim(), dtype=wide_dtype(t)), t, rescale=rescale)


def _norm(t: Tensor, dim: int, dtype: torch.dtype) -> Tensor:
    if not can_look_at(t) or not t.numel() or t.stride(dim) == 1:
        norm: Tensor = torch.linalg.vector_norm(t, dim=dim, dtype=dtype)
        return norm
    # A CPU adds whole planes several times faster than it reduces along an axis with gaps, and memory that was used
    # just before is faster than new memory.
    pieces = some_images(t)
    squares = torch.empty_like(pieces[0], dtype=dtype)
    norms = squares.new_empty([size for axis, size in enumerate(t.shape) if axis != dim])
    for images, result in zip(pieces, torch.split(norms, len(squares)), strict=True):
        square = squares[: len(images)]
        wide = images if images.dtype == dtype else square.copy_(images)
        torch.sum(torch.mul(wide, wide, out=square), dim, out=result)
    return norms.sqrt_()


def channel_dot(a: Tensor, b: Tensor) -> Tensor:
    """Return the inner product over channels in float64, `(N, γ, *S)` of `(N, γ, C, *S)`."""
    pieces = zip(some_images(plain(a).detach()), some_images(plain(b).detach()), strict=True)
    return torch.cat([(_double(some) * _double(others)).sum(2) for some, others in pieces])


def _double(t: Tensor) -> Tensor:
    """Return `t` in float64: on its device or, where that has no such numbers, on the CPU."""
    try:
        return t.double()
    except TypeError:
        return t.cpu().double()


def wide_dtype(t: Tensor) -> torch.dtype:
    """Return in what to compute: float64 for float64, else float32."""
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _by_group(t: Tensor, groups: int, name: str) -> Tensor:
    """Return `(N, γ, C, *S)` of `(N, γ·C, *S)`."""
    channels = t.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(f"`groups`: expected a divisor of the {channels} channels of `{name}`, but got {groups}.")
    return t.reshape(len(t), groups, channels // groups, *t.shape[2:])
