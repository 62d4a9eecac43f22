"""Film: the maps of a probe's images through training, as one animated WebP picture."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageDraw, ImageFont, features
from torch import Tensor

from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views.colours import colours_of
from normgrad_lightning.views.columns import columns_of
from normgrad_lightning.views.drawing import greys_of, plane
from normgrad_lightning.views.lettering import fitted
from normgrad_lightning.views.panels import tiles_of
from normgrad_lightning.views.resampling import evenly_spaced, shrunk
from normgrad_lightning.views.scales import wide
from normgrad_lightning.views.style import Style

MOST_FRAMES = 60
MOST_BYTES = 4_000_000
"""Of the frames in a checkpoint, at most."""
WIDTH = 600
"""Of the picture, at most: it is shown at this size without a loss."""

_MOST_ROWS, _MOST_LAYERS = 6, 5
_LARGEST_TILE = 110
_HEIGHT_OF_ROWS = 640
_MARGIN, _GAP, _HEADER, _FOOTER = 10, 4, 50, 34
_NARROWEST, _WITH_LEGEND = 340, 450  # the title fits, and the legend beside it
_BACKGROUND, _INK, _PALE_INK, _BAR, _REST = "white", (30, 30, 30), (110, 110, 110), (203, 79, 15), (222, 222, 222)
_LENGTH = 8_000  # milliseconds, about
_SHORTEST, _LONGEST, _LAST = 80, 600, 2_500


Half: TypeAlias = npt.NDArray[np.float16]


class Frame(NamedTuple):
    """The maps `(N, h, w)` of each layer at an event, no finer than they are drawn."""

    step: int
    maps: dict[str, Half]

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(m.nbytes for m in self.maps.values())


class Film:
    """Collects small maps of each event, and draws them all in the end.

    If there are too many, every other one is dropped, and from then on every other event is kept. The first and the
    latest event are always included. A checkpoint carries the frames: a resumed run's film begins where training did.
    """

    def __init__(self) -> None:
        self._of: MapSet | None = None
        self._before: Tensor | None = None
        self._frames: list[Frame] = []
        self._latest: Frame | None = None
        self._count = 0
        self._stride = 1
        self._has_news = False

    @property
    def frames(self) -> list[Frame]:
        """Return the frames, in the order of training."""
        return [*self._frames, *([self._latest] if self._latest is not None and self._is_extra else [])]

    @property
    def _is_extra(self) -> bool:
        """Return whether the latest frame is to be dropped once there is a later one."""
        return not (self._frames and self._frames[-1] is self._latest)

    def add_event(self, map_sets: Sequence[MapSet]) -> None:
        """Add the order-0 maps of a probe that are among these, if any are, of as many images as are drawn."""
        for map_set in (_cut(one) for one in map_sets if one.source == "probe" and one.kind.name == "order0"):
            if not self._goes_on_with(map_set):
                self.__init__()  # type: ignore[misc]
            self._of, self._before = self._of or map_set, None
            self._add(Frame(map_set.step, {layer: _small(m) for layer, m in map_set.maps.items()}))

    def _goes_on_with(self, map_set: MapSet) -> bool:
        """Return whether these maps are of the same images as the frames so far."""
        if self._of is not None:
            return _about(self._of) == _about(map_set)
        return self._before is not None and _are_alike(self._before, _samples(map_set))

    def _add(self, frame: Frame) -> None:
        self._latest, self._has_news = frame, True
        if self._count % self._stride == 0:
            self._frames.append(frame)
        if len(self._frames) > MOST_FRAMES:
            self._frames = self._frames[::2]
            self._stride *= 2
        self._count += 1

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to go on with the film, if there is one. Long films lose frames."""
        if self._of is None:
            return {}
        layers, *frames, latest = self._layers(), *self.frames
        kept = [_of_layers(frame, layers) for frame in frames]
        stride, last = self._stride, _of_layers(latest, layers)
        while len(kept) > 1 and sum(frame.size for frame in (*kept, last)) > MOST_BYTES:
            kept, stride = kept[::2], 2 * stride
        saved = [
            {"step": frame.step, "maps": {layer: torch.from_numpy(m.copy()) for layer, m in frame.maps.items()}}
            for frame in (*kept, last)
        ]
        about = {"images": _samples(self._of), "count": self._count, "stride": stride}
        return {"film": {"frames": saved, "is_extra": self._is_extra, **about}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the film of a checkpoint, if the next maps are of the same images."""
        self.__init__()  # type: ignore[misc]
        kept = state.get("film")
        if kept is None:
            return
        frames = [Frame(one["step"], {k: m.numpy().copy() for k, m in one["maps"].items()}) for one in kept["frames"]]
        self._latest = frames[-1]
        self._frames = frames[:-1] if kept["is_extra"] else frames
        self._before, self._count, self._stride = kept["images"], kept["count"], kept["stride"]

    def page(self, map_sets: Sequence[MapSet], style: Style, shown: Sequence[int]) -> Page | None:
        """Add the maps of an event; the film comes at the end."""
        self.add_event(map_sets)
        return None

    def last_page(self, style: Style) -> Page | None:
        """Return the film; None if there is nothing that moves, or nothing new since the last time."""
        if self._of is None or len(self.frames) < 2 or not self._has_news:
            return None
        if not features.check("webp"):
            raise RuntimeError("this version of Pillow cannot write WebP. Install another one.")
        self._has_news = False
        frames, canvas = self.frames, _Canvas(self._of, self._layers(), style)
        last = frames[-1].step
        pictures = [canvas.drawn(frame, last) for frame in frames]
        return Page(last, films={f"{self._of.group}/film": _encoded(pictures)})

    def _layers(self) -> list[str]:
        """Return the layers to show: those with maps at all events; of many, some of all depths."""
        frames = self.frames
        layers = [layer for layer in frames[-1].maps if all(layer in frame.maps for frame in frames)]
        return [layers[index] for index in evenly_spaced(len(layers), _MOST_LAYERS)]


class _Canvas:
    """What is the same in all frames, with room for the maps.

    Args:
        of: the maps whose images to show.
        layers: a column for each, from left to right.
        style: how it looks.
    """

    def __init__(self, of: MapSet, layers: Sequence[str], style: Style) -> None:
        self._layers, self._style = layers, style
        self._combines = len(layers) > 1
        columns = 1 + self._combines + len(layers)
        side = min(_LARGEST_TILE, (WIDTH - 2 * _MARGIN - (columns - 1) * _GAP) // columns)
        tiles = tiles_of(of.images, of.maps, style, side)
        self._height, self._width = tiles.shape[1:3]
        rows = max(1, min(len(tiles), _HEIGHT_OF_ROWS // (self._height + _GAP)))
        self._shown = _in_turn(of.labels, len(tiles), rows)
        self._tiles = tiles[self._shown]
        self._greys = greys_of(self._tiles)
        self._fonts = {size: ImageFont.load_default(size=size) for size in (12, 15)}
        width = max(_NARROWEST, 2 * _MARGIN + columns * (self._width + _GAP) - _GAP)
        self._picture = Image.new("RGB", (width, _HEADER + rows * (self._height + _GAP) - _GAP + _FOOTER), _BACKGROUND)
        self._write_captions([of.class_names[index] for index in self._shown] if of.labels is not None else [])

    def _write_captions(self, classes: Sequence[str]) -> None:
        draw = ImageDraw.Draw(self._picture)
        draw.text((_MARGIN, 6), "Where the training signal comes from", _INK, self._fonts[15])
        self._draw_legend(draw)
        names = ["image", *(["combined"] if self._combines else []), *self._layers]
        for column, name in enumerate(names):
            middle = self._corner(0, column)[0] + self._width // 2
            draw.text((middle, _HEADER - 5), self._fitted(name), _PALE_INK, self._fonts[12], anchor="ms")
        for row, tile in enumerate(self._tiles):
            left, top = self._corner(row, 0)
            self._picture.paste(Image.fromarray(tile[..., :3]), (left, top))
            if row < len(classes) and classes[row]:
                bottom, name = top + self._height, self._fitted(classes[row])
                length = round(self._fonts[12].getlength(name))
                draw.rectangle((left, bottom - 16, left + length + 7, bottom - 1), _INK)
                draw.text((left + 4, bottom - 4), name, "white", self._fonts[12], anchor="ls")

    def _draw_legend(self, draw: ImageDraw.ImageDraw) -> None:
        """Draw the colours from weak to strong, where there is room."""
        right, length = self._picture.width - _MARGIN, 70
        if right < _WITH_LEGEND:
            return
        draw.text((right, 18), "strong", _PALE_INK, self._fonts[12], anchor="rs")
        right -= 40
        colours = (255 * colours_of(self._style.colormap)).astype(np.uint8)
        for x in range(length):
            draw.line((right - length + x, 9, right - length + x, 18), tuple(colours[x * 255 // (length - 1)].tolist()))
        draw.text((right - length - 5, 18), "weak", _PALE_INK, self._fonts[12], anchor="rs")

    def drawn(self, frame: Frame, last: int) -> Image.Image:
        """Return a picture of the frame, with a bar for the progress of training; `last` is its last step."""
        picture = self._picture.copy()
        maps = {layer: frame.maps[layer][self._shown].astype(np.float32) for layer in self._layers}
        columns = columns_of(self._greys, maps, self._style)
        for column, tiles in enumerate(columns.values(), 1):
            for row, covered in enumerate(tiles):
                picture.paste(Image.fromarray(covered[..., :3]), self._corner(row, column))
        self._draw_bar(picture, frame.step, last)
        return picture

    def _draw_bar(self, picture: Image.Image, step: int, last: int) -> None:
        draw, (width, height) = ImageDraw.Draw(picture), picture.size
        room = 70 + 18 * len(str(last))
        top, bottom, left, right = height - 22, height - 12, _MARGIN, width - _MARGIN - room
        draw.rectangle((left, top, right, bottom), _REST)
        if step > 0:
            draw.rectangle((left, top, left + round((right - left) * step / last), bottom), _BAR)
        draw.text((width - _MARGIN, bottom + 1), f"step {step} of {last}", _INK, self._fonts[15], anchor="rs")

    def _corner(self, row: int, column: int) -> tuple[int, int]:
        """Return left and top of a tile."""
        return _MARGIN + column * (self._width + _GAP), _HEADER + row * (self._height + _GAP)

    def _fitted(self, text: str) -> str:
        return fitted(text, self._width - 8, 12, keep_end=True)


def _encoded(pictures: Sequence[Image.Image]) -> bytes:
    """Return an animated WebP that starts again after a pause at its end."""
    each = int(min(max(_LENGTH / len(pictures), _SHORTEST), _LONGEST))
    durations = [each] * (len(pictures) - 1) + [_LAST]
    file = io.BytesIO()
    pictures[0].save(
        file, "WEBP", save_all=True, append_images=pictures[1:], duration=durations, loop=0, quality=70, method=1
    )
    return file.getvalue()


def _in_turn(labels: Sequence[int] | None, count: int, most: int) -> list[int]:
    """Return the indices of the images that there is room for: classes take turns, so that each keeps one."""
    seen = Counter[int]()
    turns = []
    for index, label in enumerate(labels or [0] * count):
        turns.append((seen[label], index))
        seen[label] += 1
    return sorted(index for _, index in sorted(turns)[:most])


def _cut(map_set: MapSet) -> MapSet:
    """Return the maps of the images that there may be room for."""
    count = len(next(iter(map_set.maps.values()), ()))
    labels = map_set.labels if len(map_set.labels or ()) == count else None
    shown = _in_turn(labels, count, _MOST_ROWS)
    return replace(
        map_set,
        maps={layer: m[shown] for layer, m in map_set.maps.items()},
        images=None if map_set.images is None else map_set.images[shown],
        labels=None if labels is None else [labels[index] for index in shown],
    )


def _of_layers(frame: Frame, layers: Sequence[str]) -> Frame:
    return Frame(frame.step, {layer: frame.maps[layer] for layer in layers})


def _about(map_set: MapSet) -> object:
    """Return what must be equal for two events to be frames of one film; training may resize images."""
    return map_set.labels, len(next(iter(map_set.maps.values()), ()))


def _samples(map_set: MapSet) -> Tensor:
    """Return a few pixels of each image, `(N, 256)` or fewer, to recognise it by in a checkpoint."""
    if map_set.images is None:
        return torch.zeros(0)
    pixels = map_set.images.detach().flatten(1)
    some = torch.linspace(0, pixels.shape[1] - 1, min(pixels.shape[1], 256), dtype=torch.float64).long()
    return pixels[:, some].float()


def _are_alike(some: Tensor, others: Tensor) -> bool:
    """Return whether these are samples of the same images; another device may round in another way."""
    return some.shape == others.shape and torch.allclose(some, others, rtol=1e-2, atol=1e-2, equal_nan=True)


def _small(maps: Tensor) -> Half:
    """Return what is drawn of maps, each divided by its largest value: float16 has no room for small numbers."""
    planes = shrunk(plane(wide(maps.detach().numpy())))
    largest = planes.max(axis=(1, 2), keepdims=True, initial=1e-38)
    half: Half = (planes / largest).astype(np.float16)
    return half
