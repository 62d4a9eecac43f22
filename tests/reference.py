"""Slow float64 oracles for the maps, written from the formulas and sharing nothing with the package.

A patch is unfolded, an outer product is formed, a Frobenius norm is taken: everything the package avoids.
Where a pad comes from is not computed but observed: the numbers of the pixels are padded like the pixels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Returns one number for each spatial axis."""
    return (value,) * axes if isinstance(value, int) else tuple(value)


def pad_sides(padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple]:
    """Returns (before, after) for each axis; "same" puts the odd pixel after, as torch does."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in per_axis(padding, len(kernel))]


def pad(x: Tensor, sides: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Returns x (N, C, *S) padded for real."""
    flat = [amount for side in reversed(sides) for amount in side]
    return F.pad(x, flat, mode=MODES[mode])


def output_size(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    sides: Sequence[tuple[int, int]],
) -> tuple[int, ...]:
    """Returns how many windows fit along each axis, by trying them one by one."""
    counts = []
    for s, k, step, d, (before, after) in zip(size, kernel, stride, dilation, sides, strict=True):
        starts = range(0, s + before + after, step)
        counts.append(sum(start + d * (k - 1) < s + before + after for start in starts))
    return tuple(counts)


def window_positions(
    count: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[list[tuple[int, ...]]]:
    """Returns, for each window u and each offset in it, the position it reads on the padded grid."""
    return [
        [
            tuple(i * s + o * d for i, s, o, d in zip(u, stride, offset, dilation, strict=True))
            for offset in itertools.product(*map(range, kernel))
        ]
        for u in itertools.product(*map(range, count))
    ]


def unfold(padded: Tensor, positions: list[list[tuple[int, ...]]]) -> Tensor:
    """Returns the patches (N, C, L, K) of a padded x (N, C, *P)."""
    return torch.stack([torch.stack([padded[(..., *position)] for position in window], -1) for window in positions], -2)


def source_pixels(
    size: Sequence[int], sides: Sequence[tuple[int, int]], mode: str, positions: list[list[tuple[int, ...]]]
) -> Tensor:
    """Returns (L, K): the flat number of the pixel that each entry of a patch was copied from, -1 for a zero."""
    numbers = torch.arange(1, math.prod(size) + 1, dtype=torch.float64).reshape(1, 1, *size)
    return unfold(pad(numbers, sides, mode), positions)[0, 0].long() - 1


def spread(m: Tensor, pixels: Tensor, size: Sequence[int]) -> Tensor:
    """Returns (N, *size): each m_u (N, L) given to every pixel its patch was copied from."""
    total = m.new_zeros(m.shape[0], math.prod(size))
    for u, window in enumerate(pixels.tolist()):
        for pixel in window:
            if pixel >= 0:
                total[:, pixel] += m[:, u]
    return total.reshape(m.shape[0], *size)


def outer_products(still: Tensor, patches: Tensor, groups: int) -> Tensor:
    """Returns (N, groups, L, A, B, K): at each u, each group's channels of `still` times its patch.

    still (N, groups·A, L) has one pixel at each u; patches (N, groups·B, L, K) has a window at each u.
    """
    n, _, length, taps = patches.shape
    blocks = []
    for a, b in zip(still.chunk(groups, 1), patches.chunk(groups, 1), strict=True):
        a = a.permute(0, 2, 1).reshape(n, length, -1, 1, 1)
        b = b.permute(0, 2, 1, 3).reshape(n, length, 1, -1, taps)
        blocks.append(a * b)
    return torch.stack(blocks, 1)


def frobenius(products: Tensor) -> Tensor:
    """Returns (N, L): the norm, at each u, of all the blocks of its outer product."""
    return products.square().sum(dim=(1, 3, 4, 5)).sqrt()


class Conv:
    """A convolution's outer products, their norms and their sum, from its input x and output gradient g.

    Attributes: `weight_grad` (Cout, Cin/groups, *K), `on_output` (N, *So) and `on_input` (N, *S).
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> None:
        x, g = x.detach().double(), g.detach().double()
        size, axes = x.shape[2:], x.ndim - 2
        kernel, stride, dilation = (per_axis(v, axes) for v in (kernel_size, stride, dilation))
        sides = pad_sides(padding, kernel, dilation)
        count = output_size(size, kernel, stride, dilation, sides)
        assert tuple(g.shape[2:]) == count, (g.shape, count)
        positions = window_positions(count, kernel, stride, dilation)
        self.pixels = source_pixels(size, sides, padding_mode, positions)
        self.patches = unfold(pad(x, sides, padding_mode), positions)
        products = outer_products(g.flatten(2), self.patches, groups)
        m = frobenius(products)
        self.weight_grad = products.sum(dim=(0, 2)).reshape(g.shape[1], x.shape[1] // groups, *kernel)
        self.on_output = m.reshape(-1, *count)
        self.on_input = spread(m, self.pixels, size)


class ConvTranspose:
    """A transposed convolution's: pixel u of the input x times the window of g (at the output) that u wrote.

    Attributes: `weight_grad` (Cin, Cout/groups, *K), `on_input` (N, *S) and `on_output` (N, *So).
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> None:
        x, g = x.detach().double(), g.detach().double()
        size, written, axes = x.shape[2:], g.shape[2:], x.ndim - 2
        kernel, stride, dilation = (per_axis(v, axes) for v in (kernel_size, stride, dilation))
        sides = pad_sides(padding, kernel, dilation)
        positions = window_positions(size, kernel, stride, dilation)
        pixels = source_pixels(written, sides, "zeros", positions)
        products = outer_products(x.flatten(2), unfold(pad(g, sides, "zeros"), positions), groups)
        m = frobenius(products)
        self.weight_grad = products.sum(dim=(0, 2)).reshape(x.shape[1], g.shape[1] // groups, *kernel)
        self.on_input = m.reshape(-1, *size)
        self.on_output = spread(m, pixels, written)


def point_products(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, L, D, C): g_u x_uᵀ at each location, of x (N, C, *S) and g (N, D, *S)."""
    x, g = x.detach().double().flatten(2), g.detach().double().flatten(2)
    return torch.einsum("ndl,ncl->nldc", g, x)


def normgrad(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, *S): ‖g_u x_uᵀ‖_F from the explicit matrices."""
    return point_products(x, g).square().sum(dim=(2, 3)).sqrt().reshape(x.shape[0], *x.shape[2:])


def normgrad_linear(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, *S): the same with the channels last, x (N, *S, C) and g (N, *S, D)."""
    return normgrad(x.movedim(-1, 1), g.movedim(-1, 1))


def grad_cam(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, *S): max(ḡᵀ x_u, 0), number by number."""
    locations = list(itertools.product(*map(range, x.shape[2:])))
    cam = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.float64)
    for n in range(x.shape[0]):
        means = [sum(g[(n, c, *u)].item() for u in locations) / len(locations) for c in range(x.shape[1])]
        for u in locations:
            cam[(n, *u)] = max(sum(mean * x[(n, c, *u)].item() for c, mean in enumerate(means)), 0.0)
    return cam


def normgrad_conv_by_unfold(x: Tensor, g: Tensor, *, kernel_size: int, padding: int) -> Tensor:
    """Returns the 2-d map on the output's grid the tempting way, with k² times the memory of x."""
    patches = F.unfold(x, kernel_size, padding=padding)
    return (patches.norm(dim=1) * g.flatten(2).norm(dim=1)).reshape(-1, *g.shape[2:])
