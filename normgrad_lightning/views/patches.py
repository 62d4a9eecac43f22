"""Patches: what each class is learned from. A row of crops for each class, around the strongest places of its images.

For each image, the peak of its smoothed map, divided by the map's mean, says how much one place stands out. The images
with the largest ratio are shown, each once. A rim of half a crop is left out: padding attracts peaks there.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.class_signal import only, strongest
from normgrad_lightning.views.coarse import Coarse
from normgrad_lightning.views.drawing import Pixels, display_image, jpeg
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.origin import COMBINED, Origin, of_map
from normgrad_lightning.views.resampling import Floats, smoothed
from normgrad_lightning.views.statistics import sameness
from normgrad_lightning.views.table import Table

PER_CLASS = 8
SIDE = 0.3
"""Of a crop, as a share of the image's shorter side."""

_SMALLEST, _LARGEST = 48, 96  # pixels of a crop in the picture
_THUMBNAIL = 16
_CLASSES = 32  # that crops are kept of
_NOT_CUT: Pixels = np.zeros((0, 0, 4), np.uint8)


class Peak(NamedTuple):
    """The strongest place of a map: its value in units of the map's mean, and where it is, as shares of the sides."""

    ratio: float
    place: tuple[float, ...]


class Box(NamedTuple):
    """A part of an image: its first pixel and its length along each axis."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(eq=False)
class Crop:
    """A part of an image around its strongest place.

    Attributes:
        ratio: how much the place stands out.
        image: a number that tells images apart.
        step: at which it was read.
        box: where it is.
        pixels: as the network saw it, in its own resolution unless that is too large.
    """

    ratio: float
    image: float
    step: int
    box: Box
    pixels: Pixels = field(default_factory=lambda: _NOT_CUT)


def thumbnails(crops: Sequence[Crop]) -> Floats:
    """Small versions of crops, `(K, 16, 16, 3)`, to compare them with each other."""
    size = (_THUMBNAIL, _THUMBNAIL)
    found = np.empty((len(crops), *size, 3), np.float32)
    for shape in {crop.pixels.shape for crop in crops}:
        places = [place for place, crop in enumerate(crops) if crop.pixels.shape == shape]
        pixels = torch.from_numpy(np.stack([crops[place].pixels[..., :3] for place in places]))
        small = F.interpolate(pixels.permute(0, 3, 1, 2).float(), size, mode="area")
        found[places] = small.permute(0, 2, 3, 1).numpy()
    return found


class Patches:
    """Keeps the crops of the images since the last event.

    Attributes:
        shown: the crops of the last event, by map and name of the class.
    """

    def __init__(self) -> None:
        self.shown: dict[str, dict[str, list[Crop]]] = {}
        self._crops: dict[str, dict[int, list[Crop]]] = {}
        self._seen: Counter[int] = Counter()
        self._origin: Origin | None = None
        self._first: dict[str, dict[int, float]] = {}

    def add(self, batch: Coarse, look: Look, signal: Mapping[int, float]) -> None:
        """Take the images of a batch whose strongest place stands out more than those that are kept."""
        if batch.images is None:
            return
        images, kept = _Images(batch.images, look), strongest(signal, _CLASSES)
        for name, maps in batch.focus.items():
            crops = {label: list(row) for label, row in only(self._crops.get(name, {}), kept).items()}
            found, offered = peaks(maps, images.size), {}
            for number in sorted(range(len(found)), key=lambda number: -found[number].ratio):
                (ratio, place), label = found[number], batch.labels[number]
                if label in kept:
                    box = box_around(place, images.size)
                    offered[number] = Crop(ratio, images.fingerprints[number], batch.origin.step, box)
                    _offer(crops.setdefault(label, []), offered[number])
            images.cut({number: crop for number, crop in offered.items() if crop in crops[batch.labels[number]]})
            self._crops[name] = crops
        self._seen.update(batch.labels)
        self._origin = batch.origin

    def crops(self, name: str, label: int) -> list[Crop]:
        """Those kept of a class, the best first."""
        return self._crops.get(name, {}).get(label, [])

    def page(self, shown: Sequence[int], look: Look) -> Page | None:
        """A picture for each map that crops were taken of; then begin anew."""
        origin, self._origin = self._origin, None
        if origin is None:
            return None
        pictures, scalars, self.shown = [], {}, {}
        for name in self._crops:
            rows = {label: self.crops(name, label) for label in shown if self.crops(name, label)}
            names = origin.names(rows)
            self.shown[name] = {names[label]: crops for label, crops in rows.items()}
            alike = {label: sameness(thumbnails(crops)) for label, crops in rows.items()}
            if rows:
                pixels = self._drawn(name, rows, alike, origin)
                pictures.append(Picture(origin.picture_tag("2_patches", name), jpeg(pixels, 90), *pixels.shape[:2]))
            known = {label: value for label, value in alike.items() if np.isfinite(value)}
            self._first[name] = {**known, **self._first.get(name, {})}
            if name == COMBINED:
                scalars = {tag: known[label] for label, tag in origin.tags("sameness", known).items()}
        self._crops, self._seen = {}, Counter()
        return Page(origin.step, pictures, scalars)

    def _drawn(
        self, name: str, rows: Mapping[int, Sequence[Crop]], alike: Mapping[int, float], origin: Origin
    ) -> Pixels:
        tiles = [[_enlarged(crop.pixels) for crop in crops] for crops in rows.values()]
        sides = np.array([tile.shape[:2] for row in tiles for tile in row]).max(axis=0)
        first, names = self._first.get(name, {}), origin.captions(rows)
        captions = [
            f"{names[label]}: {len(crops)} of {self._seen[label]} images{_words(alike[label], first.get(label))}"
            for label, crops in rows.items()
        ]
        title = ["What each class is learned from: the places with", f"the strongest training signal ({of_map(name)})"]
        if len(rows) < len(self._seen):
            title.append(f"{len(rows)} of {len(self._seen)} classes: those with the most signal")
        table = Table((int(sides[0]), int(sides[1])), PER_CLASS, captions, title)
        for block, row in enumerate(tiles):
            for column, tile in enumerate(row):
                table.put(block, column, tile)
        return table.picture

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run compares with: the first event."""
        return {"first_sameness": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        self._first = {name: dict(of) for name, of in state.get("first_sameness", {}).items()}


def _offer(crops: list[Crop], crop: Crop) -> None:
    """Keep a crop if it is among the best, and better than the same image's from another step."""
    twin = next((other for other in crops if other.image == crop.image), None)
    if twin is not None:
        if twin.ratio >= crop.ratio:
            return
        crops.remove(twin)
    insort(crops, crop, key=lambda crop: -crop.ratio)
    del crops[PER_CLASS:]


def peaks(maps: Floats, size: Sequence[int]) -> list[Peak]:
    """The strongest place of each map `(N, *G)`, smoothed, in units of the map's mean; those near an edge do not count.

    Args:
        maps: on any grid.
        size: `*S`, pixels of the images.
    """
    grid = maps.shape[1:]
    planes = smoothed(maps)
    allowed = np.ones(grid, bool)
    for axis, (cells, pixels, length) in enumerate(zip(grid, size, _lengths(size), strict=True)):
        centres = (np.arange(cells) + 0.5) / cells
        rim = 0.0 if length == 1 else length / pixels / 2
        inside = (centres >= rim) & (centres <= 1 - rim)
        shape = [1] * len(grid)
        shape[axis] = cells
        allowed &= (inside if inside.any() else np.ones(cells, bool)).reshape(shape)
    flat = np.where(allowed, planes, -np.inf).reshape(len(maps), -1)
    best = flat.argmax(axis=1)
    mean = maps.reshape(len(maps), -1).mean(axis=1)
    values = flat[np.arange(len(maps)), best]
    ratios = np.divide(values, mean, out=np.zeros_like(mean), where=mean > 0)
    places = (np.stack(np.unravel_index(best, grid), axis=1) + 0.5) / np.asarray(grid)
    return [Peak(float(ratio), tuple(place)) for ratio, place in zip(ratios, places.tolist(), strict=True)]


def box_around(place: Sequence[float], size: Sequence[int]) -> Box:
    """The crop around a place, shifted where it would reach over an edge."""
    lengths = _lengths(size)
    starts = [
        min(max(round(share * pixels - length / 2), 0), pixels - length)
        for share, pixels, length in zip(place, size, lengths, strict=True)
    ]
    return Box(tuple(starts), lengths)


def _lengths(size: Sequence[int]) -> tuple[int, ...]:
    """Pixels of a crop along each axis: of a volume, a single slice."""
    plane = list(size)[-2:]
    side = min(max(round(SIDE * min(plane)), 8), min(plane))
    return (1,) * (len(size) - len(plane)) + (side,) * len(plane)


class _Images:
    """The images of a batch `(N, C, *S)`, to cut parts out of. What all of them are asked for is computed once."""

    def __init__(self, images: Tensor, look: Look) -> None:
        self._images, self._look = images, look
        self.size = images.shape[2:]

    @cached_property
    def _some(self) -> Tensor:
        """Every third value of each image, `(N, K)`, side by side in memory: much faster to go through."""
        return self._images.flatten(1)[:, ::3].contiguous()

    @cached_property
    def fingerprints(self) -> list[float]:
        """A number for each image by which it is known again: the sum of some of its values."""
        sums: list[float] = self._some.sum(1, dtype=torch.float64).tolist()
        if not all(map(math.isfinite, sums)):
            sums = self._some.double().nan_to_num(0.0, 0.0, 0.0).sum(1).tolist()
        return sums

    @cached_property
    def _ranges(self) -> list[tuple[float, float]]:
        """The least and the largest of some values of each image, of those that are finite."""
        low, high = self._some.amin(1), self._some.amax(1)
        if not bool((low.isfinite() & high.isfinite()).all()):
            good = self._some.isfinite()
            low = self._some.where(good, math.inf).amin(1).nan_to_num(posinf=0.0)
            high = self._some.where(good, -math.inf).amax(1).nan_to_num(neginf=0.0)
        return list(zip(low.tolist(), high.tolist(), strict=True))

    def cut(self, crops: Mapping[int, Crop]) -> None:
        """Give these crops of images their pixels, in the colours that the whole image is drawn in."""
        if not crops:
            return
        parts, look = [self._part(number, crop.box) for number, crop in crops.items()], self._look
        mean, std = (look.mean, look.std) if self._is_normalised else (0.0, 1.0)
        side_by_side = display_image(np.concatenate(parts, axis=-1), mean, std)
        for crop, pixels in zip(crops.values(), np.split(side_by_side, len(crops), axis=1), strict=True):
            crop.pixels = _shrunk(pixels)

    @property
    def _is_normalised(self) -> bool:
        return self._look.mean is not None or self._look.std is not None

    def _part(self, number: int, box: Box) -> Floats:
        """The values of a part; from 0 to 1 within the range of the whole image, unless the normalisation is known."""
        where = [slice(start, start + length) for start, length in zip(*box, strict=True)]
        values: Floats = self._images[number][(slice(None), *where)].float().cpu().numpy()
        if self._is_normalised:
            return values
        low, high = self._ranges[number]
        return (values - low) / max(high - low, 1e-12)


def fingerprints(images: Tensor) -> list[float]:
    """A number for each image `(N, C, *S)`: that of its crops."""
    return _Images(images, Look()).fingerprints


def _shrunk(pixels: Pixels) -> Pixels:
    """A copy of the crop as it is; smaller if it is large."""
    height, width = pixels.shape[:2]
    longest = max(height, width)
    if longest <= _LARGEST:
        return pixels.copy()
    size = [max(1, round(side * _LARGEST / longest)) for side in (width, height)]
    return np.asarray(Image.fromarray(pixels[..., :3]).resize(size, Image.Resampling.BOX).convert("RGBX"))


def _enlarged(pixels: Pixels) -> Pixels:
    """The crop with each pixel repeated if it is small. A strip gets a height."""
    zoom = -(-_SMALLEST // max(pixels.shape[:2]))
    down = _SMALLEST if len(pixels) == 1 else zoom
    return pixels.repeat(down, axis=0).repeat(zoom, axis=1)


def _words(alike: float, first: float | None) -> str:
    """How much a row's crops look alike, now and at the first event."""
    if not np.isfinite(alike):
        return ""
    before = "" if first is None else f", first {first:.2f}"
    return f", sameness {alike:.2f}{before}"
