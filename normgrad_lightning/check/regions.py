"""Regions of images to cover and to paste: where a map is strongest, and places of the same form to compare with.

All functions are pure, take whole batches, run where their tensors are, and never wait for a device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from normgrad_lightning.functional import geometric_mean

SIDE = 0.2
"""Side of a square region, as a share of the image's: 4 % of a plane's area."""

TENTH = 0.1
"""Area of a region of any form, as a share of the image's."""

_CELLS = {1: 256, 2: 28, 3: 14}  # along each axis: finer maps are averaged down to this
_SMOOTH = 12  # cells of a side from which on it is smoothed
_POOLS = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}


def coarse_map(maps: Mapping[str, Tensor]) -> Tensor:
    """Return the map to take regions from, in units of its mean: that of all layers combined, or of the only one.

    Args:
        maps: `(N, *S)` of each layer, for the same images.

    Returns:
        `(N, *G)`, on a coarse grid.
    """
    pooled = [_pooled(m) for m in maps.values()]
    grid = max((m.shape[1:] for m in pooled), key=math.prod)
    return _even(geometric_mean(pooled, grid) if len(pooled) > 1 else pooled[0])


def peak_squares(maps: Tensor, size: Sequence[int], side: float = SIDE) -> Tensor:
    """Return the square around the peak of each smoothed map; at an edge it is shifted, not cut.

    Args:
        maps: `(N, *G)`.
        size: `*S`, pixels of the images.
        side: the square's, as a share of each side of the image.

    Returns:
        `(N, *S)`, true inside.
    """
    grid = maps.shape[1:]
    flat = _smoothed(maps).flatten(1).argmax(1)
    starts = []
    for axis in reversed(range(len(grid))):
        cell, flat = flat % grid[axis], flat // grid[axis]
        length = _length(size[axis], side)
        start = ((cell + 0.5) * (size[axis] / grid[axis]) - length / 2).round().long()
        starts.append(start.clamp(0, size[axis] - length))
    return _boxes(torch.stack(starts[::-1], 1), size, side)


def strongest_tenths(maps: Tensor, size: Sequence[int], share: float = TENTH) -> Tensor:
    """Return the strongest pixels of each smoothed map, whatever form they have: `share` of the image, `(N, *S)`."""
    mode = _LINEAR[maps.dim() - 1]
    fine = F.interpolate(_smoothed(maps)[:, None], list(size), mode=mode, align_corners=False).flatten(1)
    count = max(1, round(share * fine.shape[1]))
    inside = torch.zeros_like(fine, dtype=torch.bool)
    return inside.scatter(1, fine.topk(count, dim=1).indices, True).reshape(len(maps), *size)


def moved_squares(squares: Tensor, side: float = SIDE) -> Tensor:
    """Return for each square one of the same size elsewhere, which it never overlaps.

    Its start is moved by half of the room that there is, along one axis or several, by turns from image to image.

    Args:
        squares: `(N, *S)`, from `peak_squares` with this `side`.
        side: the square's.
    """
    size = squares.shape[1:]
    starts, axes = [], len(size)
    turn = torch.arange(len(squares), device=squares.device) % (2**axes - 1) + 1  # which axes: bits of 1, 2, 3 …
    for axis in range(axes):
        others = [other for other in range(1, axes + 1) if other != axis + 1]
        along = (
            squares.any(others[0]) if len(others) == 1 else squares.flatten(1) if not others else squares.amax(others)
        )
        room = size[axis] - _length(size[axis], side) + 1
        by = (turn >> axis & 1) * (room // 2)
        starts.append((along.int().argmax(1) + by) % room)
    return _boxes(torch.stack(starts, 1), size, side)


def moved_around(regions: Tensor) -> Tensor:
    """Return each region moved by a quarter, half or three quarters of the sides, where it overlaps itself least.

    What leaves at one edge comes in at the other, so size and form stay.

    Args:
        regions: `(N, *S)`, booleans.
    """
    size = regions.shape[1:]
    axes = list(range(1, len(size) + 1))
    quarters = torch.cartesian_prod(*[torch.arange(4) for _ in size]).reshape(-1, len(size))[1:].tolist()
    best, least = regions, regions.flatten(1).sum(1)
    for shift in quarters:
        other = regions.roll([number * side // 4 for number, side in zip(shift, size, strict=True)], axes)
        overlap = (other & regions).flatten(1).sum(1)
        better = overlap < least
        best = torch.where(better.reshape(-1, *[1] * len(size)), other, best)
        least = torch.where(better, overlap, least)
    return best


def put_into(region: Tensor, what: Tensor, images: Tensor) -> Tensor:
    """Return images `(N, C, *S)` with the pixels of `what` inside of `region`, `(N, *S)`."""
    return torch.where(region[:, None], what, images)


def _length(pixels: int, side: float) -> int:
    return max(1, round(side * pixels))


def _boxes(starts: Tensor, size: Sequence[int], side: float) -> Tensor:
    """Return boxes `(N, *S)` that begin at these pixels, `(N, axes)`."""
    inside = torch.ones(len(starts), *[1] * len(size), dtype=torch.bool, device=starts.device)
    for axis, pixels in enumerate(size):
        where = torch.arange(pixels, device=starts.device) - starts[:, axis, None]
        along = (where >= 0) & (where < _length(pixels, side))
        inside = inside & along.reshape(len(starts), *[pixels if other == axis else 1 for other in range(len(size))])
    return inside


def _pooled(maps: Tensor) -> Tensor:
    """Return means on a grid with the same aspect, and no more cells than are needed."""
    axes = maps.dim() - 1
    zoom = min(1.0, (_CELLS[axes] ** axes / math.prod(maps.shape[1:])) ** (1 / axes))
    grid = [max(1, round(side * zoom)) for side in maps.shape[1:]]
    return maps if zoom == 1.0 else F.interpolate(maps[:, None], grid, mode="area")[:, 0]


def _even(maps: Tensor) -> Tensor:
    """Return each map divided by its own mean; one that is zero everywhere stays zero."""
    mean = maps.mean(tuple(range(1, maps.dim())), keepdim=True)
    return torch.where(mean > 0, maps / mean, torch.zeros_like(maps))


def _smoothed(maps: Tensor) -> Tensor:
    """Return maps smoothed by about a Gaussian of one cell, twice a mean of three; short sides are left as they are."""
    axes = maps.dim() - 1
    kernel = [3 if side >= _SMOOTH else 1 for side in maps.shape[1:]]
    padding = [width // 2 for width in kernel]
    for _ in range(2):
        pooled = _POOLS[axes](maps[:, None], kernel, 1, padding, count_include_pad=False)
        maps = pooled[:, 0]
    return maps
