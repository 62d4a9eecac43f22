"""Overview: one picture of an event. A row for each image, with its map of all depths combined, and of each depth.

A card of TensorBoard is 350 pixels wide, and a picture in it is shrunk to that. Letters are as large as it takes to
read them there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.combined import combined_planes
from normgrad_lightning.views.drawing import Pixels, greys_of, jpeg, overlays
from normgrad_lightning.views.lettering import fitted, line_height, write
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.panels import tiles_of

_TILE = 96
_ROWS = 8
_DEPTHS = 5
_GAP = 2
_WIDE_GAP = 6  # before what begins anew: the depths, the next row
_CARD = 350  # pixels of TensorBoard's card
_LETTERS = 10  # pixels in that card
_WHITE, _GREY, _BLACK = 255, 64, 0


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
    layers = _layers_of_one_input(one)
    images = one.images_of[layers[0]]
    maps = {layer: one.maps[layer][:_ROWS] for layer in layers}
    tiles = tiles_of(None if images is None else images[:_ROWS], maps, look, _TILE)
    heads = ["input", *(() if signed else ("combined",)), *_short(_spread(layers))]
    sheet = _Table(tiles, heads, _captions(one)[:_ROWS], _title(one))
    arrays = {layer: m.numpy() for layer, m in maps.items()}
    combined = [] if signed else [combined_planes(arrays.values(), *tiles.shape[1:3])]
    columns = [*combined, *(arrays[layer] for layer in _spread(layers))]
    greys, colormap = greys_of(tiles), look.colormap_of(signed=signed)
    sheet.fill(0, tiles)
    for number, values in enumerate(columns, 1):
        painted = overlays(greys, values, colormap=colormap, opacity=look.opacity, scale=look.scale, signed=signed)
        sheet.fill(number, painted)
    return sheet.picture


def _layers_of_one_input(one: MapSet) -> list[str]:
    """The layers whose maps belong to the same images, which are there if any are: in a GAN not all do."""
    groups: dict[int, list[str]] = {}
    for layer in one.maps:
        groups.setdefault(id(one.images_of[layer]), []).append(layer)
    return max(groups.values(), key=lambda layers: (one.images_of[layers[0]] is not None, len(layers)))


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


class _Table:
    """A picture with a row for each image and a column for each map; the first two columns stand together.

    Args:
        tiles: the images, `(N, H, W, 4)`.
        heads: what stands above each column.
        captions: what stands above each row; without any, there is no room for them.
        title: what stands above all.
    """

    def __init__(self, tiles: Pixels, heads: Sequence[str], captions: Sequence[str], title: str) -> None:
        count, self._height, self._width, _ = tiles.shape
        width = self._left(len(heads)) - _GAP
        size = max(math.ceil(width * _LETTERS / _CARD), _LETTERS)
        line = line_height(size)
        above = line if any(captions) else 0
        self._top, self._down = 2 * line + above, self._height + _WIDE_GAP + above
        height = self._top - above + count * self._down - _WIDE_GAP
        self.picture: Pixels = np.full((height, width, 4), _WHITE, np.uint8)
        self._write(title, width, size, (0, 0), _GREY)
        for number, head in enumerate(heads):
            self._write(head, self._width, math.ceil(0.9 * size), (line, self._left(number)), _GREY, keep_end=True)
        for number, caption in enumerate(captions):
            self._write(caption, width, size, (self._top + number * self._down - above, 0), _BLACK)

    def _left(self, column: int) -> int:
        left: int = column * (self._width + _GAP) + (_WIDE_GAP - _GAP) * (column > 1)
        return left

    def _write(
        self, text: str, width: int, size: int, at: tuple[int, int], level: int, *, keep_end: bool = False
    ) -> None:
        write(self.picture, fitted(text, width - 2, size, keep_end=keep_end), size, (at[0], at[1] + 2), level)

    def fill(self, column: int, tiles: Pixels) -> None:
        """Put a tile into each row of a column."""
        left = self._left(column)
        for number, tile in enumerate(tiles):
            top = self._top + number * self._down
            self.picture[top : top + self._height, left : left + self._width] = tile
