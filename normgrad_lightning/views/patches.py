"""Patches: what each class is learned from. Crops for each class, around the strongest places of its images.

What is the same in all images of a layer, its typical map, is removed first. For each image, the peak of its smoothed
map, divided by the map's mean, says how much one place stands out. The images with the largest ratio are shown, each
once. A rim is left out: padding attracts peaks there.

Images are those since the last event. Where they give fewer crops than there is room for, as at the end of training,
the strongest of the window before fill up, and of the one before that.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from normgrad_lightning.maps import MapSet
from normgrad_lightning.maths.spacing import evenly_spaced
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.class_signal import ROWS, only, strongest
from normgrad_lightning.views.crops import Crop, ImageCutter, box_around, shrunk_picture
from normgrad_lightning.views.drawing import Pixels, jpeg, plane, tile_of
from normgrad_lightning.views.pooled_batch import PooledBatch
from normgrad_lightning.views.resampling import Floats, smoothed
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.table import Table
from normgrad_lightning.views.tag_namer import COMBINED, TagNamer, of_map
from normgrad_lightning.views.typical import TypicalMaps

PER_CLASS = 24
"""Crops of a class, at most."""

_RIM = 0.15  # the same of the rim, whose peaks do not count
_CLASSES = 16  # that crops are collected of
_CROPS = 96  # of all classes together, but six of each class
_WINDOWS = 3  # from one event to the next, the latest one first: older crops are never shown
_LAYERS = 5  # whose maps a crop keeps
_TILE, _FIRST_TILE = 96, 64  # pixels of a crop in the card, and of one that is stored of the first event
_ACROSS, _ACROSS_FIRST, _GAP = 4, 2, 2


class Peak(NamedTuple):
    """The strongest place of a map: its value in units of the map's mean, and where it is, as shares of the sides."""

    ratio: float
    place: tuple[float, ...]


class Span(NamedTuple):
    """What the patches of a class were chosen from: how many images, of which steps."""

    images: int
    first: int
    last: int


@dataclass(eq=False)
class _Window:
    """What was collected from one event to the next.

    Attributes:
        crops: by map and class, strongest first.
        seen: images of each class.
        steps: of the first and the last batch.
        most: crops of a class.
    """

    crops: dict[str, dict[int, list[Crop]]] = field(default_factory=dict)
    seen: Counter[int] = field(default_factory=Counter)
    steps: tuple[int, ...] = ()
    most: int = PER_CLASS


@dataclass(eq=False)
class _FirstCrop:
    """A crop of a class's first event: as a checkpoint has it, and as it is drawn at each event."""

    pixels: Pixels

    @cached_property
    def tile(self) -> Pixels:
        return tile_of(self.pixels, _TILE)


class Patches:
    """Collects the crops of the images since the last event.

    Attributes:
        shown: the crops of the last event, by map and name of the class.
        spans: what those of each class were chosen from.
        typical: the typical map of each layer.
    """

    def __init__(self) -> None:
        self.shown: dict[str, dict[str, list[Crop]]] = {}
        self.spans: dict[int, Span] = {}
        self._windows = [_Window()]
        self._namer: TagNamer | None = None
        self.typical = TypicalMaps()
        self._first: dict[str, dict[int, list[_FirstCrop]]] = {}

    def add(self, batch: PooledBatch, style: Style, signal: Mapping[int, float]) -> None:
        """Take the images of a batch whose strongest place stands out most."""
        if batch.images is None:
            return
        images, classes = ImageCutter(batch.images, style), strongest(signal, _CLASSES)
        now = self._windows[0]
        now.most = most = min(PER_CLASS, max(_CROPS // max(len(classes), 1), 6))
        names = list(batch.layers)
        layers = [names[index] for index in evenly_spaced(len(names), _LAYERS)]
        for name, maps in self._own(batch).items():
            crops = {label: row[:most] for label, row in only(now.crops.get(name, {}), classes).items()}
            found, offered = peaks(maps, images.size), {}
            for number in sorted(range(len(found)), key=lambda number: -found[number].ratio):
                (ratio, place), label = found[number], batch.labels[number]
                if label in classes and _may_enter(row := crops.setdefault(label, []), ratio, most):
                    box, fingerprint = box_around(place, images.size), images.fingerprint(number)
                    offered[number] = Crop(ratio, fingerprint, batch.namer.step, box, tuple(images.size))
                    _offer(row, offered[number], most)
            taken = {number: crop for number, crop in offered.items() if crop in crops[batch.labels[number]]}
            images.cut(taken)
            for number, crop in taken.items():
                place = found[number].place
                crop.map = _flat(batch.even_focus[name][number], place)
                crop.layers = {of: _flat(batch.even_layers[of][number], place) for of in layers}
            now.crops[name] = crops
        now.seen.update(batch.labels)
        now.steps = (*now.steps[:1], batch.namer.step)
        self._namer = batch.namer

    def _own(self, batch: PooledBatch) -> dict[str, Floats]:
        """Return the batch's combined map and that of its last layer without what is typical."""
        for layer, even in batch.even_layers.items():
            self.typical.add(layer, even)
        return {
            name: maps / self.typical.usual(batch.layers if name == COMBINED else [name], maps.shape[1:])
            for name, maps in batch.focus.items()
        }

    def crops(self, name: str, label: int) -> list[Crop]:
        """Return the crops of a class since the last event, the best first."""
        return self._windows[0].crops.get(name, {}).get(label, [])

    def _used(self, label: int) -> list[_Window]:
        """Return the windows that the crops of a class are chosen from: no more than it takes."""
        windows = [window for window in self._windows if window.seen[label]]
        for count in range(1, len(windows)):
            if all(len(_merged(windows[:count], name, label)) >= self._windows[0].most for name in windows[0].crops):
                return windows[:count]
        return windows

    def page(self, map_sets: Sequence[MapSet], style: Style, shown: Sequence[int]) -> Page | None:
        """Return a card for each map that crops were taken of, and start over."""
        namer, self._namer = self._namer, None
        if namer is None:
            return None
        pictures, self.shown = [], {}
        used = {label: windows for label in shown if (windows := self._used(label))}
        self.spans = {label: _span(windows, label) for label, windows in used.items()}
        for name in self._windows[0].crops:
            found = {label: _merged(windows, name, label) for label, windows in used.items()}
            rows = {
                label: sorted(crops[: self._windows[0].most], key=lambda crop: -crop.ratio)
                for label, crops in found.items()
                if crops
            }
            names = namer.names(rows)
            self.shown[name] = {names[label]: crops for label, crops in rows.items()}
            if rows:
                pixels = self._drawn(name, rows, namer, style)
                pictures.append(Picture(namer.picture_tag("patches", name), jpeg(pixels, 90), *pixels.shape[:2]))
        self._windows = [_Window(), *_trimmed(self._windows)][:_WINDOWS]
        self.typical.halve()
        return Page(namer.step, pictures)

    def _drawn(self, name: str, rows: Mapping[int, Sequence[Crop]], namer: TagNamer, style: Style) -> Pixels:
        """Return the card: a block of patches for each class, and beside them those of its first event."""
        first, names, down = self._first.setdefault(name, {}), namer.captions(rows), 3 if len(rows) <= 4 else 2
        across = _ACROSS if first else _ACROSS + _ACROSS_FIRST
        heads = ["now", *[""] * (across - 1), *(["first event", ""] if first else [])]
        tiles = {
            label: [tile_of(crop.pixels, _TILE) for crop in crops[: across * down]] for label, crops in rows.items()
        }
        height, width = np.array([tile.shape[:2] for row in tiles.values() for tile in row]).max(axis=0).tolist()
        captions = [f"{names[label]}: {len(tiles[label])} of {self.spans[label].images} images" for label in rows]
        spans = [self.spans[label] for label in rows]
        classes = {label for window in self._windows for label in window.seen}
        title = [
            "What each class is learned from: the places with",
            f"the strongest training signal ({of_map(name)});",
            f"images of the training batches, {style.colours},",
            f"steps {min(span.first for span in spans)} to {max(span.last for span in spans)}",
        ]
        if len(rows) < len(classes):
            title.append(f"{len(rows)} of {len(classes)} classes: those with the most signal")
        table = Table(
            (down * (height + _GAP) - _GAP, width),
            len(heads),
            captions,
            title,
            heads=heads,
            split=across if first else None,
        )
        for block, label in enumerate(rows):
            early = [crop.tile for crop in first.get(label, [])]
            for column in range(across):
                table.put(block, column, _stacked(tiles[label][column::across], height, width))
            for column in range(len(heads) - across):
                table.put(block, across + column, _stacked(early[column::_ACROSS_FIRST][:down], height, width))
            if label not in first and len(first) < ROWS:
                crops = rows[label][: 3 * _ACROSS_FIRST]
                first[label] = [_FirstCrop(shrunk_picture(crop.pixels, _FIRST_TILE)) for crop in crops]
        return table.picture

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run compares with: six small crops of each of twelve classes, at most 1.8 MB."""
        first = {
            name: {label: [torch.tensor(crop.pixels[..., :3]) for crop in crops] for label, crops in of.items()}
            for name, of in self._first.items()
        }
        return {"first_patches": first, "typical_maps": self.typical.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._first = {
            name: {
                label: [_FirstCrop(np.pad(crop, ((0, 0), (0, 0), (0, 1)))) for crop in crops]
                for label, crops in of.items()
            }
            for name, of in state.get("first_patches", {}).items()
        }
        self.typical.load_state_dict(state.get("typical_maps", {}))


def _merged(windows: Sequence[_Window], name: str, label: int) -> list[Crop]:
    """Return the crops of a class in these windows; those of the first come first, and each image once."""
    crops: dict[float, Crop] = {}
    for window in windows:
        for crop in window.crops.get(name, {}).get(label, []):
            crops.setdefault(crop.image, crop)
    return list(crops.values())


def _trimmed(windows: Sequence[_Window]) -> Sequence[_Window]:
    """Return these windows with no more crops than may be shown with those of the next one."""
    most = windows[0].most
    for name in {name for window in windows for name in window.crops}:
        for label in {label for window in windows for label in window.crops.get(name, {})}:
            kept = set(map(id, _merged(windows, name, label)[:most]))
            for rows in (window.crops.get(name, {}) for window in windows):
                rows[label] = [crop for crop in rows.get(label, []) if id(crop) in kept]
    return windows


def _span(windows: Sequence[_Window], label: int) -> Span:
    """Return what crops of these windows, the latest first, were chosen from."""
    return Span(sum(window.seen[label] for window in windows), windows[-1].steps[0], windows[0].steps[-1])


def _may_enter(crops: Sequence[Crop], ratio: float, most: int) -> bool:
    """Return whether a crop may be among the best."""
    return len(crops) < most or ratio > crops[-1].ratio


def _offer(crops: list[Crop], crop: Crop, most: int) -> None:
    """Add a crop if it is among the best, and better than the same image's from another step."""
    twin = next((other for other in crops if other.image == crop.image), None)
    if twin is not None:
        if twin.ratio >= crop.ratio:
            return
        crops.remove(twin)
    insort(crops, crop, key=lambda crop: -crop.ratio)
    del crops[most:]


def _flat(values: Floats, place: Sequence[float]) -> npt.NDArray[np.float16]:
    """Return a copy of a map `(*S)` as `(h, w)`; of a volume, of the slice with a place."""
    if values.ndim == 3:
        values = values[min(int(place[0] * len(values)), len(values) - 1)]
    flat: npt.NDArray[np.float16] = plane(values[None])[0].astype(np.float16)
    return flat


def peaks(maps: Floats, size: Sequence[int]) -> list[Peak]:
    """Return the strongest place of each map `(N, *G)`, smoothed, in units of its mean, but for a rim at the edges.

    Args:
        maps: on any grid.
        size: `*S`, pixels of the images.
    """
    grid = maps.shape[1:]
    planes = smoothed(maps)
    allowed = np.ones(grid, bool)
    for axis, (cells, pixels) in enumerate(zip(grid, size, strict=True)):
        centres = (np.arange(cells) + 0.5) / cells
        rim = _RIM * min(size[-2:]) / pixels if axis >= len(size) - 2 else 0.0
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


def _stacked(tiles: Sequence[Pixels], height: int, width: int) -> Pixels:
    """Return tiles below each other, each in the upper left of as much room."""
    column: Pixels = np.full((len(tiles) * (height + _GAP), width, 4), 255, np.uint8)
    for number, tile in enumerate(tiles):
        column[number * (height + _GAP) :][: len(tile), : tile.shape[1]] = tile
    return column
