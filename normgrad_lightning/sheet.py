"""A sheet for people: each image, and beside it a row of maps for each kind, with a column for each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from normgrad_lightning.render import SIGNED_COLORMAP, Floats, Picture, Statistic, input_tiles, overlay, scale_maps

_GAP, _MARGIN, _LINE = 4, 20, 22
_GUTTER = 132  # for the names of kinds, and what they show
MEANINGS = {
    "order0": "training signal",
    "order1": "matters for training",
    "adversarial": "would degrade",
    "contrast": "red: order1, blue: adv.",
    "grad_cam": "speaks for the label",
}


def explanation_sheet(
    images: npt.NDArray[np.float32],
    captions: Sequence[str],
    maps: Mapping[str, Mapping[str, Floats]],
    *,
    mean: Statistic = None,
    std: Statistic = None,
    colormap: str = "inferno",
    opacity: float = 0.6,
    tile_size: int = 128,
) -> Image.Image:
    """Draw them.

    Args:
        images: ``(N, C, H, W)``, as the network saw them.
        captions: What to say of each.
        maps: ``(N, *S)`` by kind and layer, as in ``explain``. Contrast is signed.
        mean: As for ``display_image``.
        std: As for ``display_image``.
        colormap: As for ``overlay``.
        opacity: As for ``overlay``.
        tile_size: As for ``input_tiles``.
    """
    tiles = input_tiles(images, mean=mean, std=std, tile_size=tile_size)
    layers = list(dict.fromkeys(layer for of in maps.values() for layer in of))
    height, width = tiles.shape[1:3]
    across, down = width + _GAP, height + _GAP
    block = 2 * _LINE + len(maps) * down + _MARGIN
    left = _MARGIN + width + _GUTTER
    size = left + len(layers) * across - _GAP + _MARGIN, _MARGIN + len(tiles) * block - _GAP
    sheet = Image.new("RGB", size, "white")
    draw, font, small = ImageDraw.Draw(sheet), ImageFont.load_default(size=13), ImageFont.load_default(size=11)
    for i, (tile, caption) in enumerate(zip(tiles, captions, strict=True)):
        top = _MARGIN + i * block + 2 * _LINE
        draw.text((_MARGIN, top - 2 * _LINE), caption, "black", font)
        for column, layer in enumerate(layers):
            draw.text((left + column * across, top - _LINE), _fitted(layer, width, font), "dimgray", font)
        sheet.paste(Image.fromarray(tile[..., :3]), (_MARGIN, top))
        for row, (kind, of_layers) in enumerate(maps.items()):
            place = top + row * down
            draw.text((left - 10, place + height // 2 - 8), kind, "black", font, anchor="rm")
            draw.text((left - 10, place + height // 2 + 8), MEANINGS.get(kind, ""), "dimgray", small, anchor="rm")
            for layer, m in of_layers.items():
                at = left + layers.index(layer) * across, place
                covered = _covered(tile, m[i], kind == "contrast", colormap, opacity)
                sheet.paste(Image.fromarray(covered[..., :3]), at)
                if not m[i].any():
                    draw.text((at[0] + width // 2, place + height // 2), "zero", "white", font, anchor="mm")
    return sheet


def _covered(tile: Picture, m: Floats, signed: bool, colormap: str, opacity: float) -> Picture:
    scaled = scale_maps(m[None], signed=signed)[0]
    return overlay(tile, scaled, colormap=SIGNED_COLORMAP if signed else colormap, opacity=opacity, signed=signed)


def _fitted(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """The text, or as much of its end as there is room for: the ends of layers' names tell them apart."""
    start = 0
    while start < len(text) and font.getlength("…" * bool(start) + text[start:]) > width:
        start += 1
    return "…" * bool(start) + text[start:]
