"""The maps of a whole batch on coarse grids: what patches, atlas and curves are collected from.

They are collected at every tenth step or so, over many images and perhaps a thousand classes. A grid of about 28 × 28
cells is fine enough to say where the training signal comes from, and coarse enough to cost next to nothing.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from normgrad_lightning.functional import combine
from normgrad_lightning.kinds import MapSet, class_name, numbered_tags
from normgrad_lightning.views.resampling import Floats

COMBINED, LAST = "combined", "last"
ALL, UNLABELLED = -1, -2
"""In place of a class: every image, if no class is known; images whose label is negative."""

_CELLS = {1: 256, 2: 28 * 28, 3: 14 * 14 * 14}
_LINEAR = {1: "linear", 2: "bilinear", 3: "trilinear"}
_LONGEST = 64  # letters of a class in a tag
_CAPTION = 20  # the same in a caption
_ROUNDING = 1e-3  # of masks that were resized

Guard = Callable[[str], AbstractContextManager[Any]]


class Origin(NamedTuple):
    """Where maps come from, for tags and captions.

    Attributes:
        step: of training.
        group: what all tags begin with.
        classes: the names of the classes, if known.
    """

    step: int
    group: str
    classes: Sequence[str] | None

    def name(self, label: int) -> str:
        """What a class is called."""
        return {ALL: "all", UNLABELLED: "unlabelled"}.get(label) or class_name(label, self.classes) or str(label)

    def names(self, labels: Iterable[int]) -> dict[int, str]:
        """What classes are called; those of one name are told apart by their number."""
        return _told_apart({label: self.name(label) for label in labels}, " ")

    def captions(self, labels: Iterable[int], longest: int = _CAPTION) -> dict[int, str]:
        """The same on one short line: what stands behind it must be seen, too."""
        return _told_apart({label: _line(self.name(label), longest) or str(label) for label in labels}, " ")

    def picture_tag(self, view: str, name: str) -> str:
        """The tag of a view of one map. By its number, TensorBoard puts the combined one before those of layers."""
        return f"{self.group}/{view}/{'0_' * (name == COMBINED)}{name}"

    def tags(self, of: str, labels: Iterable[int]) -> dict[int, str]:
        """The tag of a number of each class; classes of one name are told apart by their number.

        All classes count, shown or not: a class keeps its tag from event to event.
        """
        wanted = list(labels)
        legal = {label: name or str(label) for label, name in enumerate(_legal_names(tuple(self.classes or ())))}
        others = {label: _legal(self.name(label)) for label in wanted if label not in legal}
        names = _told_apart({**legal, **others}, "_")
        return {label: f"{self.group}/{of}/{names[label]}" for label in wanted}


@lru_cache(maxsize=8)
def _legal_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_legal, names))


def _legal(name: str) -> str:
    """A name with nothing in it that a tag must not have."""
    return re.sub(r"[^\w.-]+", "_", name[:_LONGEST]).strip("_.")


def _line(name: str, longest: int) -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _told_apart(names: Mapping[int, str], link: str) -> dict[int, str]:
    """The names with their number behind those that are there twice, also after that."""
    found = dict(names)
    for _ in range(3):
        times = Counter(found.values())
        found = {label: name if times[name] == 1 else f"{name}{link}{label}" for label, name in found.items()}
    return found


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
