"""Overview: a row for each image, with its combined map and the map of each depth."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from normgrad_lightning.functional import combine
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.maths.spacing import evenly_spaced
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.drawing import Pixels, greys_of, jpeg, overlays, plane
from normgrad_lightning.views.panels import tiles_of
from normgrad_lightning.views.resampling import FINEST, Floats, shrunk
from normgrad_lightning.views.scales import wide
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.table import Table
from normgrad_lightning.views.tag_namer import COMBINED, card_tag

_TILE = 96
_ROWS = 8
_DEPTHS = 4
_IMAGES_OF = {"batch": "images of the training batch", "probe": "probe: the same images at every event"}


def overview(map_sets: Sequence[MapSet], style: Style) -> Page:
    """Return a card for each kind of maps and source of images."""
    pictures = []
    for one in map_sets:
        if one.maps:
            pixels = drawn(one, style, [_IMAGES_OF.get(one.source, f"images: {one.source}")])
            pictures.append(Picture(_tag(one), jpeg(pixels), *pixels.shape[:2]))
    return Page(map_sets[0].step, pictures)


def _tag(one: MapSet) -> str:
    """Return the tag of its card. The number of its kind makes TensorBoard show the cards in the order of kinds."""
    card = card_tag(one.group, "overview" if one.source == "batch" else "probe")
    return f"{card}/{list(KINDS).index(one.kind.name)}_{one.kind.name}{one.variant}"


def drawn(one: MapSet, style: Style, about: Sequence[str] = ()) -> Pixels:
    """Return the overview of a set. Signed maps have no combined map, nor has a single layer.

    Args:
        one: the maps.
        style: how they look.
        about: what the title says of the images, but for their colours.
    """
    signed = one.kind.signed
    layers = one.layers_of_one_input
    images = one.images_of[layers[0]]
    maps = {layer: one.maps[layer][:_ROWS] for layer in layers}
    tiles = tiles_of(None if images is None else images[:_ROWS], maps, style, _TILE)
    shown = [layers[index] for index in evenly_spaced(len(layers), _DEPTHS)]
    arrays = {layer: m.numpy() for layer, m in maps.items()}
    columns = columns_of(greys_of(tiles), arrays, style, signed=signed, shown=shown)
    heads = ["input", *([COMBINED] if COMBINED in columns else []), *_short(shown)]
    title = [_meaning(one), ", ".join([*about, *([] if images is None else [style.colours])])]
    captions, split = _captions(one)[:_ROWS], 1 + (COMBINED in columns)
    table = Table(tiles.shape[1:3], len(heads), captions, list(filter(None, title)), heads=heads, split=split)
    for number, column in enumerate([tiles, *columns.values()]):
        for row, tile in enumerate(column):
            table.put(row, number, tile)
    return table.picture


def _short(layers: Sequence[str]) -> list[str]:
    """Return the layers' names without the modules that all of them are in; a number keeps the module it is in."""
    parts = [layer.split(".") for layer in layers]
    shared = 0
    while len({tuple(names[: shared + 1]) for names in parts}) == 1 and all(len(names) > shared + 1 for names in parts):
        shared += 1
    if shared and any(names[shared].isdigit() for names in parts):
        shared -= 1
    return [".".join(names[shared:]) for names in parts]


def _count(one: MapSet) -> int:
    return len(next(iter(one.maps.values())))


def _captions(one: MapSet) -> list[str]:
    """Return each image's class; nothing if there is not one for each, as where a label belongs to a whole video."""
    return one.class_names if len(one.class_names) == _count(one) else [""] * _count(one)


def _meaning(one: MapSet) -> str:
    cut = f", {_ROWS} of {_count(one)} images" if _count(one) > _ROWS else ""
    return f"{one.kind.name}, {'' if one.kind.signed else 'bright: '}{one.kind.meaning}{cut}"


def columns_of(
    greys: npt.NDArray[np.uint8],
    maps: Mapping[str, npt.NDArray[Any]],
    style: Style,
    *,
    signed: bool = False,
    shown: Sequence[str] | None = None,
) -> dict[str, Pixels]:
    """Return what each column shows, `(N, H, W, 4)`: the combined map of several layers first, unless signed.

    Args:
        greys: `(N, H, W)`, from `greys_of`.
        maps: `(N, *S)` of each layer, for the same images.
        style: how they look.
        signed: as for `overlays`.
        shown: the layers that have a column; None: all.
    """
    columns = {layer: maps[layer] for layer in (maps if shown is None else shown)}
    if len(maps) > 1 and not signed:
        columns = {COMBINED: combined_planes(maps.values(), *greys.shape[1:]), **columns}
    return {name: overlays(greys, of_column, style, signed=signed) for name, of_column in columns.items()}


def combined_planes(maps: Iterable[Floats], height: int, width: int) -> Floats:
    """Return `functional.combine` of what is drawn of the layers' maps, `(N, h, w)`.

    Args:
        maps: `(N, *S)` of each layer, for the same images.
        height: of the picture that they are for; only the aspect counts.
        width: of the picture.
    """
    zoom = FINEST / max(height, width)
    size = max(1, round(height * zoom)), max(1, round(width * zoom))
    planes = [torch.from_numpy(shrunk(plane(wide(m)))) for m in maps]
    together: Floats = combine(planes, size).numpy()
    return together
