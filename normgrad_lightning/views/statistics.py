"""Numbers that say how maps are spread: pure functions of arrays."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from normgrad_lightning.views.resampling import Floats

RIM = 0.1
"""Of each side of an image: what is nearer to an edge is the border."""

_PRIOR = 8.0  # images of the other classes that each class starts with: few images make no large lift
_FLOOR = 0.25  # of the mean: where hardly any signal is, its ratios mean nothing


def concentration(maps: Floats) -> Floats:
    """Return the share of the area that holds half of each map `(N, *S)`: 0.5 for an even map, near 0 for one spot.

    The cells are sorted, the largest first; the last one that is needed counts in part. A zero map has 0.5.
    """
    values = np.sort(maps.reshape(len(maps), -1), axis=1)[:, ::-1]
    total = values.sum(axis=1)
    held = np.cumsum(values, axis=1)
    half = total[:, None] / 2
    whole = (held < half).sum(axis=1).clip(max=values.shape[1] - 1)
    rows = np.arange(len(values))
    needed, cell = half[:, 0] - (held - values)[rows, whole], values[rows, whole]
    part = np.divide(needed, cell, out=np.zeros_like(needed), where=cell > 0)
    shares: Floats = np.where(total > 0, (whole + part) / values.shape[1], 0.5)
    return shares


def border_share(maps: Floats) -> Floats:
    """Return the part of each map `(N, *S)` that is within a tenth of a side of an edge: 0.36 if a plane's map is even.

    A cell that reaches into the rim counts in part.
    """
    axes = tuple(range(1, maps.ndim))
    total = maps.sum(axis=axes)
    inside = (maps * inner_area(maps.shape[1:])).sum(axis=axes)
    shares: Floats = 1.0 - np.divide(inside, total, out=np.ones_like(total), where=total > 0)
    return shares


@lru_cache(maxsize=64)
def inner_area(grid: tuple[int, ...], rim: float = RIM) -> Floats:
    """Return the part of each cell that is inside of the rim."""
    parts: list[Floats] = []
    for side in grid:
        edges = np.arange(side + 1) / side
        parts.append(np.clip(np.minimum(edges[1:], 1 - rim) - np.maximum(edges[:-1], rim), 0, None) * side)
    area: Floats = np.ones(grid)
    for part in np.ix_(*parts):
        area = area * part
    return area


def share_on_object(maps: Floats, masks: Floats) -> Floats:
    """Return the part of each map `(N, *S)` that is on its mask, from 0 to 1; NaN for a zero map."""
    axes = tuple(range(1, maps.ndim))
    total = maps.sum(axis=axes)
    on_object = (maps * masks).sum(axis=axes)
    shares: Floats = np.divide(on_object, total, out=np.full_like(total, np.nan), where=total > 0)
    return shares


def lifts(means: Floats, counts: Floats) -> Floats:
    """Return how much stronger each class's mean map is than that of the other classes, cell by cell.

        D_c~ = (n_c D_c + 8 D_o) / (n_c + 8)        L_c = (D_c~ + 0.25) / (D_o + 0.25)

    with D_o the mean of the other classes' means, each class counting once, whatever its number of images. Few images
    pull the lift to 1. A class alone has a lift of 1.

    Args:
        means: `(K, *S)`, the mean map D_c of each class; every map of an image was divided by its mean.
        counts: `(K,)`, how many images n_c each mean is made of.
    """
    if len(means) < 2:
        return np.ones_like(means)
    others = (means.sum(axis=0, keepdims=True) - means) / (len(means) - 1)
    weight = (counts / (counts + _PRIOR)).reshape(-1, *(1,) * (means.ndim - 1))
    result: Floats = (weight * means + (1 - weight) * others + _FLOOR) / (others + _FLOOR)
    return result
