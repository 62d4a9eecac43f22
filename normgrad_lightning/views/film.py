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
from PIL import Image, features
from torch import Tensor

from normgrad_lightning.maps import MapSet
from normgrad_lightning.maths.spacing import evenly_spaced
from normgrad_lightning.page import Page
from normgrad_lightning.views.drawing import Pixels, plane
from normgrad_lightning.views.lettering import length_of, line_height, write
from normgrad_lightning.views.overview import drawn
from normgrad_lightning.views.resampling import shrunk
from normgrad_lightning.views.scales import wide
from normgrad_lightning.views.style import Style

MOST_FRAMES = 60
MOST_BYTES = 4_000_000
"""Of the frames in a checkpoint, at most."""

_MOST_ROWS, _MOST_LAYERS = 6, 5
_FOOTER, _MARGIN, _LETTERS = 30, 9, 15
_BAR, _REST = (203, 79, 15), (222, 222, 222)
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
        """The frames, in the order of training."""
        return [*self._frames, *([self._latest] if self._latest is not None and self._is_extra else [])]

    @property
    def _is_extra(self) -> bool:
        """Whether the latest frame is to be dropped once there is a later one."""
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
        """Return what a resumed run needs to continue the film, if there is one. Long films lose frames."""
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
        """Continue the film of a checkpoint, if the next maps are of the same images."""
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
        if self._of is None or len(self.frames) < 2 or not self._has_news or not self._layers():
            return None
        if not features.check("webp"):
            raise RuntimeError("this version of Pillow cannot write WebP. Install another one.")
        self._has_news = False
        frames, layers = self.frames, self._layers()
        last = frames[-1].step
        pictures = [_drawn(self._of, frame, layers, style, last) for frame in frames]
        return Page(last, films={f"{self._of.group}/film": _encoded(pictures)})

    def _layers(self) -> list[str]:
        """Return the layers to show: those with maps at all events; of many, some of all depths."""
        frames = self.frames
        layers = [layer for layer in frames[-1].maps if all(layer in frame.maps for frame in frames)]
        return [layers[index] for index in evenly_spaced(len(layers), _MOST_LAYERS)]


def _drawn(of: MapSet, frame: Frame, layers: Sequence[str], style: Style, last: int) -> Image.Image:
    """Return the overview of a frame, with a bar for the progress of training; `last` is its last step."""
    maps = {layer: torch.from_numpy(frame.maps[layer].astype(np.float32)) for layer in layers}
    one = replace(of, maps=maps, images_of=dict.fromkeys(maps, of.images))
    picture = drawn(one, style, ["probe"])[..., :3]
    return Image.fromarray(np.concatenate([picture, _bar(picture.shape[1], frame.step, last)]))


def _bar(width: int, step: int, last: int) -> Pixels:
    strip: Pixels = np.full((_FOOTER, width, 3), 255, np.uint8)
    length = width - length_of(f"step {last} of {last}", _LETTERS) - 2 * _MARGIN
    strip[_MARGIN:-_MARGIN, :length] = _REST
    strip[_MARGIN:-_MARGIN, : round(length * step / max(last, 1))] = _BAR
    top = (_FOOTER - line_height(_LETTERS)) // 2
    write(strip, f"step {step} of {last}", _LETTERS, (top, length + _MARGIN))
    return strip


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
    """Return the indices of the images that fit: classes take turns, so that each keeps one."""
    seen = Counter[int]()
    turns = []
    for index, label in enumerate(labels or [0] * count):
        turns.append((seen[label], index))
        seen[label] += 1
    return sorted(index for _, index in sorted(turns)[:most])


def _cut(map_set: MapSet) -> MapSet:
    """Return the maps of the images that may fit."""
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
