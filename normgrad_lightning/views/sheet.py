"""A sheet for people: each image, and beside it a row of maps for each kind, with a column for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from normgrad_lightning.maps import KINDS
from normgrad_lightning.views.columns import columns_of
from normgrad_lightning.views.drawing import greys_of, input_tiles
from normgrad_lightning.views.lettering import fitted, font_of
from normgrad_lightning.views.resampling import Floats
from normgrad_lightning.views.style import Style

_GAP, _MARGIN, _LINE = 4, 20, 22
_GUTTER = 172  # for the names of kinds, and what they mean
_LETTERS, _SMALL = 13, 11


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
