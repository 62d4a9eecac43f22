"""A figure of one set of maps, as a picture: what a notebook shows."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import replace

from PIL import Image, ImageDraw, ImageFont

from normgrad_lightning.maps import MapSet
from normgrad_lightning.views.overview import drawn
from normgrad_lightning.views.style import Style

_BAND = 40  # for a heading


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
