"""Where a layer's features change if the picture changes in one corner: the same corner, or its grid is wrong.

The picture is changed in one corner at a time (a quadrant; an octant of a volume), and the features' change is laid out
on the layer's grid, as the recorder reads it for its maps. A transposed, flipped or shuffled grid has the change
elsewhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

HERE, ELSEWHERE, UNCLEAR, SHIFTED = "here", "elsewhere", "unclear", "shifted"
MARGIN, REVERSE_MARGIN = 1.25, 0.8
SHARP, MANY, TOO_FAR = 1.5, 6, 0.75
Corner = tuple[int, ...]


def corners(axes: int) -> list[Corner]:
    """Each corner of a picture: 0 for the first half of an axis, 1 for the second."""
    return list(itertools.product((0, 1), repeat=axes))


def changed(images: Tensor, other: Tensor, corner: Corner) -> Tensor:
    """The images, with that corner of the others."""
    halves = zip(corner, images.shape[2:], strict=True)
    place = (..., *(slice(size // 2, None) if half else slice(size // 2) for half, size in halves))
    result = images.clone()
    result[place] = other[place]
    return result


def size_of_change(before: Tensor, after: Tensor) -> Tensor:
    """The norm of each cell's change, the mean over the images: `(*grid)` of two `(N, C, *grid)`."""
    return torch.linalg.vector_norm((after - before).double(), dim=1).mean(0)


def ratio(changes: Mapping[Corner, Tensor]) -> float:
    """How many times larger the change is in the corner that was changed than in any other, for the worst corner.

    Below 1, the change is somewhere else for at least one corner. Some corners of the picture change more than others,
    and some cells of the grid answer more to any change (those at the border less). So the table of changes
    `T[corner of the picture, corner of the grid]` is first scaled to equal sums of its rows and columns (Sinkhorn).

    Args:
        changes: for each corner that was changed, the size of the change `(*grid)`.
    """
    grid = next(iter(changes.values())).shape
    if math.prod(grid) == 1:
        return 1.0
    places = list(dict.fromkeys(_place(grid, corner) for corner in changes))
    table = torch.zeros(len(places), len(places), dtype=torch.float64)
    for corner, change in changes.items():
        row = places.index(_place(grid, corner))
        table[row] += torch.stack([change[_slices(place)].mean() for place in places])
    if not table.any():
        return 1.0
    for _ in range(100):
        table = table / table.sum(1, keepdim=True).clamp_min(1e-300)
        table = table / table.sum(0, keepdim=True).clamp_min(1e-300)
    own, others = table.diagonal(), table - torch.diag(table.diagonal())
    return float((own / others.amax(1).clamp_min(1e-9)).min())


def _place(grid: Sequence[int], corner: Corner) -> tuple[tuple[int, int], ...]:
    """The first and last cell of a corner along each axis; those in the middle of an odd axis are in no corner.

    Where frames of a video are images of their own, the grid lacks the first axis.
    """
    return tuple(
        (0, 1) if size == 1 else (size - size // 2, size) if half else (0, size // 2)
        for size, half in zip(grid, corner[-len(grid) :], strict=True)
    )


def _slices(place: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    return tuple(slice(*cells) for cells in place)


def displacement(changes: Mapping[Corner, Tensor]) -> tuple[float, ...]:
    """By how many cells along each axis the features lie after the place where they belong; 0 for a right grid.

    Strided convolutions displace by up to half a cell, and a decoder behind them by that many of its finer cells. A
    class token that is taken for a patch displaces by one.
    """
    axes = len(next(iter(changes.values())).shape)
    return tuple(_displacement(changes, axis) for axis in range(axes))


def _displacement(changes: Mapping[Corner, Tensor], axis: int) -> float:
    """The displacement along one axis, from how well the changes fit a picture that is divided off its middle.

    The fit falls linearly on both sides of the truth, so the best of five and its neighbours tell where that is.
    """
    fits = {step: _fit(changes, axis, step) for step in range(-2, 3)}
    best = max(fits, key=lambda step: (fits[step], -abs(step)))
    if abs(best) == 2:
        return float(best)
    before, after = fits[best] - fits[best - 1], fits[best] - fits[best + 1]
    slope = max(before, after)
    return best + ((before - after) / (2 * slope) if slope > 0 else 0.0)


def _fit(changes: Mapping[Corner, Tensor], axis: int, step: int) -> float:
    """How well the changes along an axis fit a picture that is divided `step` cells after its middle."""
    total = 0.0
    for corner, change in changes.items():
        others = [other for other in range(change.dim()) if other != axis]
        along = change.sum(others) if others else change
        size, half = len(along), corner[-change.dim() :][axis]
        second = (torch.arange(1, size + 1, dtype=along.dtype) - (size / 2 + step)).clamp(0, 1)
        pair = torch.stack([second if half else 1 - second, along])
        total += float(torch.corrcoef(pair)[0, 1].nan_to_num())
    return total


def verdict(value: float, displaced: Sequence[float] = (), grid: Sequence[int] = ()) -> str:
    """What a ratio and a displacement say about the grid; few cells, and those that mix, do not show the latter."""
    if value <= REVERSE_MARGIN:
        return ELSEWHERE
    if value < MARGIN:
        return UNCLEAR
    seen = zip(displaced, grid, strict=True) if displaced and value >= SHARP else ()
    return SHIFTED if any(size >= MANY and abs(cells) > TOO_FAR for cells, size in seen) else HERE
