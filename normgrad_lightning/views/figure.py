"""Pictures for people: a set of maps as a notebook shows it, and the sheet of several kinds that `explain` writes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views.drawing import greys_of, input_tiles
from normgrad_lightning.views.lettering import fitted, font_of
from normgrad_lightning.views.overview import columns_of, drawn
from normgrad_lightning.views.resampling import Floats
from normgrad_lightning.views.style import Style

_BAND = 40  # for a heading
_GAP, _MARGIN, _LINE = 4, 20, 22
_GUTTER = 172  # for the names of kinds, and what they mean
_LETTERS, _SMALL = 13, 11


def figure_of(map_set: MapSet, style: Style) -> Image.Image:
    """Return the overview of these maps. Layers that belong to other images get a second one."""
    groups = dict[int, list[str]]()
    for layer in map_set.maps:
        groups.setdefault(id(map_set.images_of[layer]), []).append(layer)
    parts = [replace(map_set, maps={layer: map_set.maps[layer] for layer in layers}) for layers in groups.values()]
    return _stacked([Image.fromarray(drawn(part, style)[..., :3]) for part in parts])


def latest_figure(latest: Mapping[str, MapSet], kind: str, style: Style) -> Image.Image:
    """Return the figure of the latest maps of this kind, with its step.

    Raises:
        ValueError: there are none.
    """
    if not latest:
        raise ValueError("`figure`: no maps yet. Call it after the first step of `trainer.fit`, or after training.")
    if kind not in latest:
        kinds = ", ".join(map(repr, latest))
        raise ValueError(f"`kind`: expected a kind of map that this run has, {kinds}, but got {kind!r}.")
    return with_heading(figure_of(latest[kind], style), f"step {latest[kind].step}", left=2)


def with_heading(picture: Image.Image, text: str, left: int = 20) -> Image.Image:
    """Return the picture below a line of text, which begins where the picture's own text does."""
    font = ImageFont.load_default(size=15)
    width = max(picture.width, round(font.getlength(text)) + 2 * left)
    whole = Image.new("RGB", (width, picture.height + _BAND), "white")
    whole.paste(picture, (0, _BAND))
    ImageDraw.Draw(whole).text((left, _BAND // 2), text, "black", font, anchor="lm")
    return whole


def jpeg_of(picture: Image.Image) -> bytes:
    """Return the picture encoded as JPEG, good enough for small text."""
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90, subsampling=0)
    return buffer.getvalue()


def _stacked(pictures: Sequence[Image.Image]) -> Image.Image:
    """Return the pictures below each other."""
    if len(pictures) == 1:
        return pictures[0]
    whole = Image.new("RGB", (max(p.width for p in pictures), sum(p.height for p in pictures)), "white")
    top = 0
    for picture in pictures:
        whole.paste(picture, (0, top))
        top += picture.height
    return whole


def explanation_sheet(
    images: npt.NDArray[np.float32],
    captions: Sequence[str],
    maps: Mapping[str, Mapping[str, Floats]],
    style: Style,
) -> Image.Image:
    """Return the sheet.

    Where there are several layers, the first column is their combined map, of kinds that are not signed.

    Args:
        images: `(N, C, H, W)`, as the network saw them.
        captions: what to say of each.
        maps: `(N, *S)` by kind and layer, as in `explain`.
        style: how it looks.
    """
    tiles = input_tiles(images, mean=style.mean, std=style.std, tile_size=style.tile_size)
    greys = greys_of(tiles)
    covered = {name: columns_of(greys, of_layers, style, signed=KINDS[name].signed) for name, of_layers in maps.items()}
    columns = list(dict.fromkeys(column for of in covered.values() for column in of))
    height, width = tiles.shape[1:3]
    across, down = width + _GAP, height + _GAP
    block = 2 * _LINE + len(maps) * down + _MARGIN
    left = _MARGIN + width + _GUTTER
    size = left + len(columns) * across - _GAP + _MARGIN, _MARGIN + len(tiles) * block - _GAP
    sheet = Image.new("RGB", size, "white")
    draw, font, small = ImageDraw.Draw(sheet), font_of(_LETTERS), font_of(_SMALL)
    for i, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        top = _MARGIN + i * block + 2 * _LINE
        draw.text((_MARGIN, top - 2 * _LINE), caption, "black", font)
        for number, column in enumerate(columns):
            name = fitted(column, width, _LETTERS, keep_end=True)
            draw.text((left + number * across, top - _LINE), name, "dimgray", font)
        sheet.paste(Image.fromarray(tile[..., :3]), (_MARGIN, top))
        for row, (name, of_columns) in enumerate(covered.items()):
            kind, above = KINDS[name], top + row * down
            draw.text((left - 10, above + height // 2 - 8), kind.name, "black", font, anchor="rm")
            draw.text((left - 10, above + height // 2 + 8), kind.meaning, "dimgray", small, anchor="rm")
            for column, pictures in of_columns.items():
                at = left + columns.index(column) * across, above
                sheet.paste(Image.fromarray(pictures[i][..., :3]), at)
    return sheet
