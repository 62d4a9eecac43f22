"""Overview: one picture of an event. A row for each image, with its map of all depths combined, and of each depth."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import chain

import numpy as np

from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.combined import combined_planes
from normgrad_lightning.views.drawing import Pixels, greys_of, jpeg, overlays
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.panels import tiles_of
from normgrad_lightning.views.table import Table

_TILE = 96
_ROWS = 8
_DEPTHS = 5


def overview(map_sets: Sequence[MapSet], look: Look) -> Page:
    """A picture for each source of images: of order 0, or else of the first kind that is not signed."""
    pictures = []
    for one in _chosen(map_sets):
        pixels = drawn(one, look)
        pictures.append(Picture(_tag(one), jpeg(pixels), *pixels.shape[:2]))
    return Page(map_sets[0].step, pictures)


def _chosen(map_sets: Sequence[MapSet]) -> Iterator[MapSet]:
    """One set for each tag."""
    unsigned = [one for one in map_sets if one.maps and not one.kind.signed]
    for tag in dict.fromkeys(map(_tag, unsigned)):
        yield min((one for one in unsigned if _tag(one) == tag), key=lambda one: list(KINDS).index(one.kind.name))


def _tag(one: MapSet) -> str:
    """What its overview is logged under. By its number, TensorBoard's Images tab puts it before all panels."""
    return f"{one.group}/{'0_overview' if one.source == 'batch' else f'1_{one.source}'}"


def drawn(one: MapSet, look: Look) -> Pixels:
    """The overview of a set. Signed maps have no combined map."""
    signed = one.kind.signed
    layers = one.layers_of_one_input
    images = one.images_of[layers[0]]
    maps = {layer: one.maps[layer][:_ROWS] for layer in layers}
    tiles = tiles_of(None if images is None else images[:_ROWS], maps, look, _TILE)
    heads = ["input", *(() if signed else ("combined",)), *_short(_spread(layers))]
    table = Table(tiles.shape[1:3], len(heads), _captions(one)[:_ROWS], [_title(one)], heads=heads, split=2)
    arrays = {layer: m.numpy() for layer, m in maps.items()}
    combined = [] if signed else [combined_planes(arrays.values(), *tiles.shape[1:3])]
    values = [*combined, *(arrays[layer] for layer in _spread(layers))]
    greys, colormap = greys_of(tiles), look.colormap_of(signed=signed)
    painted = (
        overlays(greys, maps, colormap=colormap, opacity=look.opacity, scale=look.scale, signed=signed)
        for maps in values
    )
    for number, column in enumerate(chain([tiles], painted)):
        for row, tile in enumerate(column):
            table.put(row, number, tile)
    return table.picture


def _spread(layers: Sequence[str]) -> list[str]:
    """As many of the layers as there is room for, evenly spread, the first and the last of them included."""
    places = np.linspace(0, len(layers) - 1, min(len(layers), _DEPTHS)).round().astype(int)
    return [layers[place] for place in places]


def _short(layers: Sequence[str]) -> list[str]:
    """The layers' names without the modules that all of them are in, but for the one that a mere number is in."""
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
    """What is known of each image: its class, and its part of the signal."""
    unknown = [""] * _count(one)
    names, shares = one.class_names or unknown, [_percent(share) for share in one.shares or ()] or unknown
    return [f"{name}  {share}".strip() for name, share in zip(names, shares, strict=True)]


def _percent(share: float) -> str:
    if not math.isfinite(share):
        return ""
    return f"{100 * share:.{0 if share >= 0.01 else 1}f} %"


def _title(one: MapSet) -> str:
    shares = ", %: the image's part of the batch's" if one.shares else ""
    cut = f", {_ROWS} of {_count(one)} images" if _count(one) > _ROWS else ""
    return f"{'' if one.kind.signed else 'bright: '}{one.kind.meaning}{shares}{cut}"
