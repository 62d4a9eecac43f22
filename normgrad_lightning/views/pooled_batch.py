"""The maps of a whole batch on coarse grids: what patches, atlas and curves are collected from.

They are collected at every tenth step or so, over many images and perhaps a thousand classes. A grid of about 28 × 28
cells is fine enough to say where the training signal comes from, and coarse enough to cost next to nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from normgrad_lightning.functional import geometric_mean
from normgrad_lightning.maps import MapSet, numbered_tags
from normgrad_lightning.maths.signal import signal
from normgrad_lightning.views.resampling import Floats
from normgrad_lightning.views.tag_namer import ALL, COMBINED, UNLABELLED, TagNamer
from normgrad_lightning.views.typical import per_map_mean

_CELLS = {1: 256, 2: 28 * 28, 3: 14 * 14 * 14}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_ROUNDING = 1e-3  # of masks that were resized

Guard = Callable[[str], AbstractContextManager[Any]]
"""A context for what one view does: it may stop an exception, and the other views go on."""


@dataclass(frozen=True)
class PooledBatch:
    """The maps of a batch on coarse grids.

    Attributes:
        namer: makes their tags and captions.
        layers: the maps `(N, *S)` of each layer that is not zero everywhere, each on its own grid.
        energy: the sum of each layer's maps, at full resolution.
        focus: what patches and atlas are made of, by the name in their tags: maps `(N, *S)` on one grid.
        labels: the class of each image, or `ALL`.
        shares: each image's part of the batch's signal.
        images: `(N, C, *S)`, where training has them; not a copy.
        masks: where the object is, on the grid of each layer and, under `combined`, on that of the focus.
    """

    namer: TagNamer
    layers: Mapping[str, Floats]
    energy: Mapping[str, float]
    focus: Mapping[str, Floats]
    labels: Sequence[int]
    shares: Sequence[float]
    images: Tensor | None
    masks: Mapping[str, Floats]

    @cached_property
    def even_layers(self) -> dict[str, Floats]:
        """The maps of each layer, each divided by its own mean."""
        return {name: per_map_mean(maps) for name, maps in self.layers.items()}

    @cached_property
    def even_focus(self) -> dict[str, Floats]:
        """The same of the focus."""
        return {name: per_map_mean(maps) for name, maps in self.focus.items()}


def pooled(batch: MapSet) -> MapSet:
    """Return the maps of a batch on coarse grids, where they are: of the layers that saw the same images."""
    names = batch.layers_of_one_input
    count = min(len(batch.maps[name]) for name in names)
    images = batch.images_of[names[0]]
    images = None if images is None else images[:count]
    return replace(
        batch,
        maps={name: _pooled(batch.maps[name][:count]) for name in names},
        images=images,
        images_of=dict.fromkeys(names, images),
        sums={name: batch.sums[name][:count] for name in names},
        largest={},
    )


def pooled_batch(batch: MapSet, guard: Guard = nullcontext) -> PooledBatch | None:
    """Return what views collect from; None if there are no maps, or one has a value that is not finite.

    Args:
        batch: the maps of a batch on coarse grids, on the CPU.
        guard: takes what is wrong with the masks; the rest goes on.

    Raises:
        ValueError: masks that do not fit the images.
    """
    maps = {name: m for name, m in batch.maps.items() if bool(m.any())}
    if not maps or not all(bool(m.isfinite().all()) for m in maps.values()):
        return None
    count = len(next(iter(maps.values())))
    grid = max((m.shape[1:] for m in maps.values()), key=math.prod)
    tags = numbered_tags("", batch.layers)
    masks: dict[str, Floats] = {}
    with guard("reading masks"):
        grids = {**{tags[name][1:]: m.shape[1:] for name, m in maps.items()}, COMBINED: grid}
        masks = _masks(batch.masks, count, grids)
    return PooledBatch(
        TagNamer(batch.step, batch.group, batch.classes),
        {tags[name][1:]: m.numpy() for name, m in maps.items()},
        {tags[name][1:]: float(batch.sums[name].sum(dtype=torch.float64)) for name in maps},
        {tags.get(name, f"/{name}")[1:]: m.numpy() for name, m in _focus(maps, grid).items()},
        _labels(batch.labels, count),
        signal(batch.sums, count).tolist(),
        batch.images,
        masks,
    )


def _pooled(maps: Tensor) -> Tensor:
    """Return means on a grid with the aspect of `(N, *S)`, but no more cells than are needed."""
    axes = maps.dim() - 1
    zoom = min(1.0, (_CELLS[axes] / math.prod(maps.shape[1:])) ** (1 / axes))
    grid = [max(1, round(side * zoom)) for side in maps.shape[1:]]
    return maps if zoom == 1.0 else F.interpolate(maps[:, None], grid, mode="area")[:, 0]


def _focus(maps: Mapping[str, Tensor], grid: Sequence[int]) -> dict[str, Tensor]:
    """Return what patches and atlas are made of, on one grid: the combined map, and that of the last layer."""
    last = list(maps)[-1]
    return {COMBINED: geometric_mean(list(maps.values()), grid), last: resized(maps[last], grid)}


def resized(maps: Tensor, grid: Sequence[int]) -> Tensor:
    """Return maps `(N, *S)` on another grid, interpolated."""
    mode = _LINEAR[len(grid)]
    return F.interpolate(maps[:, None], list(grid), mode=mode, align_corners=False)[:, 0]


def _labels(labels: Any, count: int) -> list[int]:
    if labels is None or len(labels) < count:
        return [ALL] * count
    return [label if label >= 0 else UNLABELLED for label in labels[:count]]


def _masks(masks: Tensor | None, count: int, grids: Mapping[str, Sequence[int]]) -> dict[str, Floats]:
    """Return the masks on each grid: the part of each cell that the object covers."""
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
