"""The maps of a whole batch on coarse grids: what patches, atlas and curves are collected from.

They are collected at every tenth step or so, over many images and perhaps a thousand classes. A grid of about 28 × 28
cells is fine enough to say where the training signal comes from, and coarse enough to cost next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normgrad_lightning.functional import combine
from normgrad_lightning.kinds import MapSet, numbered_tags
from normgrad_lightning.views.origin import ALL, COMBINED, UNLABELLED, Origin
from normgrad_lightning.views.resampling import Floats

LAST = "last"

_CELLS = {1: 256, 2: 28 * 28, 3: 14 * 14 * 14}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_ROUNDING = 1e-3  # of masks that were resized

Guard = Callable[[str], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Coarse:
    """The maps of a batch on coarse grids.

    Attributes:
        origin: where they come from.
        layers: the maps `(N, *S)` of each layer that is not zero everywhere, each on a grid of its own.
        energy: the sum of each layer's maps, at full resolution.
        focus: what patches and atlas are made of, by the name in their tags: maps `(N, *S)` on one grid.
        labels: the class of each image, or `ALL`.
        shares: each image's part of the batch's signal.
        images: `(N, C, *S)`, where training has them; not a copy.
        masks: where the object is, on the grid of each layer and, under `combined`, on that of the focus.
    """

    origin: Origin
    layers: Mapping[str, Floats]
    energy: Mapping[str, float]
    focus: Mapping[str, Floats]
    labels: Sequence[int]
    shares: Sequence[float]
    images: Tensor | None
    masks: Mapping[str, Floats]


def _unguarded(doing: str) -> AbstractContextManager[Any]:
    return nullcontext()


def coarse(batch: MapSet, wanted: Sequence[str] = (COMBINED, LAST), guard: Guard = _unguarded) -> Coarse | None:
    """The maps of a batch on coarse grids; None if there are none, or one has a value that is not finite.

    Args:
        batch: order-0 maps of all images of a batch.
        wanted: what patches and atlas are made of: `"combined"`, `"last"`, or names or globs of layers.
        guard: takes what is wrong with one of these or with the masks; the rest goes on.

    Raises:
        ValueError: a name that matches no layer, or masks that do not fit the images.
    """
    names = batch.layers_of_one_input if batch.maps else []
    count = min((len(batch.maps[name]) for name in names), default=0)
    pooled = {name: _pooled(batch.maps[name][:count]).cpu() for name in names}
    pooled = {name: m for name, m in pooled.items() if bool(m.any())}
    if not pooled or not all(bool(m.isfinite().all()) for m in pooled.values()):
        return None
    grid = max((m.shape[1:] for m in pooled.values()), key=math.prod)
    tags = numbered_tags("", batch.layers)
    images = batch.images_of[names[0]]
    masks: dict[str, Floats] = {}
    with guard("reading masks"):
        grids = {**{tags[name][1:]: m.shape[1:] for name, m in pooled.items()}, COMBINED: grid}
        masks = _masks(batch.masks, count, grids)
    return Coarse(
        Origin(batch.step, batch.group, batch.classes),
        {tags[name][1:]: m.numpy() for name, m in pooled.items()},
        {tags[name][1:]: float(batch.maps[name].sum(dtype=torch.float64)) for name in pooled},
        {tags.get(name, f"/{name}")[1:]: m.numpy() for name, m in _focus(pooled, grid, wanted, guard).items()},
        _labels(batch.labels, count),
        list(batch.shares or [1 / count] * count)[:count],
        None if images is None else images[:count],
        masks,
    )


def _pooled(maps: Tensor) -> Tensor:
    """Means on a grid with the aspect of `(N, *S)`, but no more cells than are needed."""
    axes = maps.dim() - 1
    zoom = min(1.0, (_CELLS[axes] / math.prod(maps.shape[1:])) ** (1 / axes))
    grid = [max(1, round(side * zoom)) for side in maps.shape[1:]]
    return maps if zoom == 1.0 else F.interpolate(maps[:, None], grid, mode="area")[:, 0]


def _focus(maps: Mapping[str, Tensor], grid: Sequence[int], wanted: Sequence[str], guard: Guard) -> dict[str, Tensor]:
    """The combined map and those of single layers, on one grid."""
    found: dict[str, Tensor] = {}
    for name in wanted:
        with guard("choosing layers for patches and atlas"):
            if name == COMBINED:
                found[COMBINED] = combine(maps, list(grid))
            else:
                found |= {layer: resized(maps[layer], grid) for layer in _matching(maps, name)}
    return found


def _matching(maps: Mapping[str, Tensor], name: str) -> list[str]:
    """The layers that a name or glob of `patch_layers` means."""
    layers = [list(maps)[-1]] if name == LAST else [layer for layer in maps if fnmatchcase(layer, name)]
    if not layers:
        raise ValueError(
            f"`patch_layers`: expected {COMBINED!r}, {LAST!r}, or layers that have maps, but got {name!r}. "
            f"Those with maps are {', '.join(maps)}."
        )
    return layers


def resized(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """Maps `(N, *S)` on another grid, interpolated."""
    mode = _LINEAR[len(grid)]
    return F.interpolate(maps[:, None], list(grid), mode=mode, align_corners=False)[:, 0]


def _labels(labels: Sequence[int] | None, count: int) -> list[int]:
    if labels is None or len(labels) < count:
        return [ALL] * count
    return [label if label >= 0 else UNLABELLED for label in labels[:count]]


def _masks(masks: Tensor | None, count: int, grids: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
    """The masks on each grid: the part of each cell that the object covers."""
    if masks is None:
        return {}
    axes = len(grids[COMBINED])
    masks = masks[:, 0] if masks.dim() == axes + 2 and masks.shape[1] == 1 else masks
    if masks.dim() != axes + 1 or len(masks) != count:
        raise ValueError(
            f"`normgrad_masks`: expected a mask for each of the {count} images, with {axes} axes, but got a tensor of "
            f"shape {tuple(masks.shape)}. Return one of shape (N, height, width), 1 where the object is, else 0."
        )
    values = masks.detach().double()[:, None]
    found = {name: F.interpolate(values, list(grid), mode="area")[:, 0].cpu().numpy() for name, grid in grids.items()}
    if not all(bool(((m > -_ROUNDING) & (m < 1 + _ROUNDING)).all()) for m in found.values()):
        low, high = (float(value) for value in values.aminmax())
        raise ValueError(
            f"`normgrad_masks`: expected values from 0 to 1, 1 where the object is, but got some from {low:g} to "
            f"{high:g}. If it has numbers of classes or of colours, compare them: `masks == number`."
        )
    return found


def per_map_mean(maps: Floats) -> Floats:
    """Return maps `(N, *S)` divided by their own mean; a map that is zero everywhere stays zero."""
    mean = maps.mean(axis=tuple(range(1, maps.ndim)), keepdims=True)
    even: Floats = np.divide(maps, mean, out=np.zeros_like(maps), where=mean > 0)
    return even
