"""Smooth maps, and bring them to other grids.

Sums of shifted copies in NumPy. Not Pillow, which takes one map at a time, nor matrix products, whose threads would get
in training's way.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.floating[Any]]

FINEST = 64
"""Cells of a side. `smoothed` leaves no finer detail, so a finer map can be shrunk to this before."""

_LONGEST = 256  # cells of a side, whatever its other side is
_COARSEST = 12  # cells of a side that is smoothed: 14 are those of a 16th of 224 pixels, where strides draw dots, too


def smoothed(maps: Floats) -> Floats:
    """Return the maps, `(N, *S)`, smoothed with a Gaussian of σ = max(1, side / 32) cells, cut off at 3 σ.

    Sides of fewer than 12 cells are left as they are; the shortest of the others is the one that σ is taken of. Maps
    are continued beyond their edges by their mirror image.
    """
    sigma = max(1.0, _shortest_fine_side(maps) / 32.0)
    for axis, side in enumerate(maps.shape[1:], 1):
        if side >= _COARSEST:
            maps = _smoothed_axis(maps, axis, sigma)
    return maps


def resized(planes: Floats, height: int, width: int) -> Floats:
    """Return `(N, H, W)` in this size, interpolated bilinearly."""
    return resized_axis(resized_axis(planes, 2, width), 1, height)


def shrunk(planes: Floats) -> Floats:
    """Return `(N, H, W)` with at most 64 cells along the shorter side (at most 256 along any), as `smoothed` needs."""
    zoom = min(1.0, FINEST / max(_shortest_fine_side(planes), 1))
    for axis in (1, 2):
        side = planes.shape[axis]
        wanted = min(max(round(side * zoom), min(side, _COARSEST)), _LONGEST)
        if wanted < side:
            planes = resized_axis(planes, axis, wanted)
    return planes


def _shortest_fine_side(maps: Floats) -> int:
    return min((side for side in maps.shape[1:] if side >= _COARSEST), default=0)


def _smoothed_axis(maps: Floats, axis: int, sigma: float) -> Floats:
    side = maps.shape[axis]
    weights = _half_gaussian(sigma)
    reach = len(weights) - 1
    padded = maps.take(_mirrored(side, reach), axis)

    def shifted(by: int) -> Floats:
        return padded[(slice(None),) * axis + (slice(reach + by, reach + by + side),)]

    total: Floats = shifted(0) * weights[0]
    both = np.empty_like(total)
    for distance in range(1, reach + 1):
        np.add(shifted(-distance), shifted(distance), out=both)
        both *= weights[distance]
        total += both
    return total


@lru_cache(maxsize=64)
def _half_gaussian(sigma: float) -> npt.NDArray[np.float32]:
    """Return the weights of the middle cell and of those on one side of it; over both sides they add up to 1."""
    half: Floats = np.exp(-0.5 * (np.arange(math.ceil(3.0 * sigma) + 1) / sigma) ** 2)
    weights: Floats = half / (2.0 * half.sum() - half[0])
    return weights.astype(np.float32)


@lru_cache(maxsize=64)
def _mirrored(side: int, reach: int) -> npt.NDArray[np.intp]:
    """Return the indices along an axis that is mirrored at each end: 1 0 | 0 1 2 3 | 3 2."""
    indices = np.arange(-reach, side + reach) % (2 * side)
    return np.minimum(indices, 2 * side - 1 - indices)


def resized_axis(values: Floats, axis: int, wanted: int) -> Floats:
    """Return `(N, H, W)` with this many cells along one axis, interpolated bilinearly; smoothed where it shrinks."""
    taps = _taps(values.shape[axis], wanted)
    parts = [values.take(cells, axis) * (weights if axis == 2 else weights[:, None]) for cells, weights in taps]
    total: Floats = sum(parts[1:], parts[0])
    return total


@lru_cache(maxsize=64)
def _taps(size: int, wanted: int) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]]:
    """Return what to add up for an axis of another size: cells of the old one, and their weights.

    Where it grows these are the two neighbours of each new cell; where it shrinks, all cells that fall into it.
    """
    step = size / wanted
    reach = max(step, 1.0)
    centres = (np.arange(wanted) + 0.5) * step - 0.5
    first = np.ceil(centres - reach)
    cells = first[:, None] + np.arange(math.ceil(2.0 * reach))
    weights = np.maximum(1.0 - np.abs(cells - centres[:, None]) / reach, 0.0) * ((cells >= 0) & (cells < size))
    weights /= weights.sum(axis=1, keepdims=True)
    inside = cells.clip(0, size - 1).astype(np.intp)
    return [(inside[:, tap], weights[:, tap].astype(np.float32)) for tap in range(cells.shape[1])]
