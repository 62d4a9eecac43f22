"""Atlas: where each class is learned. For each class the mean of its maps, and how it differs from the other classes'.

A mark at a fixed place of one class is a bright spot in one tile. All tiles of a card have the same scale, as wide as
its classes and the first event beside them need.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.class_signal import TAGGED, only
from normgrad_lightning.views.drawing import Pixels, in_steps, jpeg, plane
from normgrad_lightning.views.lettering import length_of, line_height, write
from normgrad_lightning.views.pooled_batch import PooledBatch, resized
from normgrad_lightning.views.resampling import Floats, smoothed
from normgrad_lightning.views.statistics import lifts
from normgrad_lightning.views.style import SIGNED_COLORMAP, Style, colours_of
from normgrad_lightning.views.table import Table
from normgrad_lightning.views.tag_namer import COMBINED, TagNamer, of_map

LIMITS = (1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
"""Where scales of mean maps (from 0) and of lifts (from one over it) may end; what is above has the same colour."""

_TILE = 96
_NARROWEST = 2 / 3  # of a tile, width by height: the numbers above it need room
_LONGEST = 12  # letters of a class


class Atlas:
    """Adds up the maps of each class. At each event, the sums are halved.

    Attributes:
        shown: the mean map of each class and its lift at the last event, by map.
    """

    def __init__(self) -> None:
        self.shown: dict[str, tuple[dict[int, Floats], dict[int, Floats]]] = {}
        self._sums: dict[str, dict[int, Floats]] = {}
        self._counts: dict[int, float] = {}
        self._namer: TagNamer | None = None
        self._aspect = 1.0
        self._first: dict[str, dict[int, Floats]] = {}

    def add(self, batch: PooledBatch, style: Style, signal: Mapping[int, float]) -> None:
        """Add the maps of a batch."""
        labels, starts, counts = np.unique(np.sort(batch.labels), return_index=True, return_counts=True)
        by_label = np.argsort(batch.labels, kind="stable")
        self._fit_to(next(iter(batch.focus.values())).shape[1:] if batch.focus else None)
        for name, even in batch.even_focus.items():
            sums, totals = self._sums.setdefault(name, {}), np.add.reduceat(even[by_label], starts, axis=0)
            for label, total in zip(labels.tolist(), totals.astype(np.float32), strict=True):
                sums[label] = sums[label] + total if label in sums else total
        for label, count in zip(labels.tolist(), counts.tolist(), strict=True):
            self._counts[label] = self._counts.get(label, 0.0) + count
        self._counts = only(self._counts, signal)
        self._sums = {name: only(sums, self._counts) for name, sums in self._sums.items()}
        self._namer, self._aspect = batch.namer, _aspect(batch)

    def _fit_to(self, grid: tuple[int, ...] | None) -> None:
        """Bring the sums to the grid of images of another size; with other axes, start over."""
        before = next((total.shape for sums in self._sums.values() for total in sums.values()), grid)
        if grid is None or before is None or before == grid:
            return
        if len(before) != len(grid):
            self._sums, self._counts = {}, {}
        self._sums = {
            name: dict(zip(sums, _on_grid(np.stack(list(sums.values())), grid), strict=True))
            for name, sums in self._sums.items()
            if sums
        }

    def lifts(self, name: str) -> tuple[dict[int, Floats], dict[int, Floats]]:
        """Return the mean map of each class, and its lift over the other classes."""
        sums = self._sums[name]
        labels = list(sums)
        counts = np.asarray([self._counts[label] for label in labels])
        means = smoothed(np.stack([sums[label] / self._counts[label] for label in labels]).astype(np.float64))
        return dict(zip(labels, means, strict=True)), dict(zip(labels, lifts(means, counts), strict=True))

    def page(self, map_sets: Sequence[MapSet], style: Style, shown: Sequence[int]) -> Page | None:
        """Return a card for each map, and halve the sums."""
        namer, self._namer = self._namer, None
        if namer is None:
            return None
        pictures, scalars = [], {}
        self.shown = {name: self.lifts(name) for name in self._sums}
        for name, (means, lift_of) in self.shown.items():
            seen = [label for label in shown if label in lift_of]
            pixels = self._drawn(name, means, lift_of, seen, style, namer)
            pictures.append(Picture(namer.picture_tag("atlas", name), jpeg(pixels), *pixels.shape[:2]))
            first = self._first.setdefault(name, {})
            first |= {label: lift_of[label] for label in seen[: TAGGED - len(first)] if label not in first}
            if name == COMBINED and len(lift_of) > 1:
                tags = namer.tags("hot_spot", [label for label in seen if label in first])
                scalars = {tag: float(lift_of[label].max()) for label, tag in tags.items()}
        self._sums = {name: {label: m / 2 for label, m in sums.items()} for name, sums in self._sums.items()}
        self._counts = {label: count / 2 for label, count in self._counts.items()}
        return Page(namer.step, pictures, scalars)

    def _drawn(
        self,
        name: str,
        means: Mapping[int, Floats],
        lift_of: Mapping[int, Floats],
        shown: Sequence[int],
        style: Style,
        namer: TagNamer,
    ) -> Pixels:
        """Return the card: for each class its mean map, its lift if there are other classes, and its first lift."""
        first, alone = self._first.get(name, {}), len(lift_of) < 2
        names = namer.captions(shown, _LONGEST)
        title = [
            f"Where each class is learned ({of_map(name)}):",
            "the mean map of a class; lift: that divided by others'",
        ]
        if len(shown) < len(means):
            title.append(f"{len(shown)} of {len(means)} classes: those with the most signal")
        captions = [
            names[label] + ("" if alone else _largest_lifts(lift_of[label], first.get(label))) for label in shown
        ]
        heads = ["mean map", *([] if alone else ["lift"]), *([] if alone or not first else ["first lift"])]
        height, width = _tile_size(self._aspect)
        table = Table((height, width), len(heads), captions, title, heads=heads, across=min(2, len(captions)))
        columns = [] if alone else [lift_of, {label: first[label] for label in shown if label in first}]
        lifts_shown = [[of[label] for label in shown if label in of] for of in columns]
        brightest = _limit([means[label].max() for label in shown])
        largest = _limit([max(lift.max(), 1 / lift.min()) for of in lifts_shown for lift in of])
        brightness = _coloured([means[label] / brightest for label in shown], height, width, style.colormap)
        for block, tile in enumerate(brightness):
            table.put(block, 0, tile)
        for column, (of, values) in enumerate(zip(columns, lifts_shown, strict=True), 1):
            scaled = [0.5 + np.log(lift.astype(np.float64)) / (2 * math.log(largest)) for lift in values]
            blocks = [block for block, label in enumerate(shown) if label in of]
            for block, tile in zip(blocks, _coloured(scaled, height, width, SIGNED_COLORMAP), strict=True):
                table.put(block, column, tile)
        bars = [("mean map: 0", f"{brightest:g} times its mean", style.colormap)]
        if not alone:
            bars.append((f"lift: 1/{largest:g}", f"{largest:g} times", SIGNED_COLORMAP))
        return np.concatenate([table.picture, *(_bar(*bar, table) for bar in bars)])

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run compares with: the first lifts, about 3 kB for each of 24 classes."""
        first = {
            name: {label: torch.from_numpy(lift) for label, lift in of.items()} for name, of in self._first.items()
        }
        return {"first_lifts": first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        first = state.get("first_lifts", {})
        self._first = {name: {label: lift.numpy() for label, lift in of.items()} for name, of in first.items()}


def _on_grid(maps: Floats, grid: Sequence[int]) -> Floats:
    """Return maps `(N, *S)` on another grid, interpolated."""
    return resized(torch.from_numpy(maps), grid).numpy()


def _largest_lifts(lift: Floats, first: Floats | None) -> str:
    """Return the words on the largest lift, now and at the first event."""
    return f": lift up to {lift.max():.1f}" + ("" if first is None else f", first {first.max():.1f}")


def _limit(values: Sequence[float]) -> float:
    """Return the end of a scale that has room for these values."""
    return next((limit for limit in LIMITS if limit >= max(values, default=0.0)), LIMITS[-1])


def _aspect(batch: PooledBatch) -> float:
    """Return the width of the images by their height; of a signal, that of a strip."""
    size = next(iter(batch.layers.values())).shape[1:] if batch.images is None else batch.images.shape[2:]
    return 4.0 if len(size) == 1 else size[-1] / size[-2]


def _tile_size(aspect: float) -> tuple[int, int]:
    aspect = min(max(aspect, _NARROWEST), 4.0)
    return max(1, round(_TILE / max(aspect, 1.0))), max(1, round(_TILE * min(aspect, 1.0)))


def _coloured(maps: Sequence[Floats], height: int, width: int, colormap: str) -> list[Pixels]:
    """Return maps `(*S)` from 0 to 1 in colours, interpolated before; all at once if they are of one grid."""
    if len({values.shape for values in maps}) > 1:
        return [pixels for values in maps for pixels in _coloured([values], height, width, colormap)]
    if not maps:
        return []
    steps = in_steps(plane(np.stack(maps).astype(np.float32).clip(0.0, 1.0)), height, width)
    return list(_palette(colormap).take(steps).view(np.uint8).reshape(*steps.shape, 4))


@lru_cache(maxsize=8)
def _palette(colormap: str) -> npt.NDArray[np.uint32]:
    """Return the 256 colours, the four bytes of each as one number."""
    colours = np.zeros((256, 4), np.uint8)
    colours[:, :3] = 255.0 * colours_of(colormap) + 0.5
    return colours.view(np.uint32).reshape(-1)


def _bar(low: str, high: str, colormap: str, table: Table) -> Pixels:
    """Return a line with a scale of colours between what its ends mean."""
    size, width = table.letters, table.picture.shape[1]
    line = line_height(size)
    pixels: Pixels = np.full((line + 2, width, 4), 255, np.uint8)
    left, right = length_of(low, size) + 8, width - length_of(high, size) - 8
    write(pixels, low, size, (2, 2), 64)
    if right > left:
        shades = np.linspace(0, 255, right - left).astype(np.uint8)
        pixels[5 : line - 1, left:right] = _palette(colormap)[shades].view(np.uint8).reshape(-1, 4)
    write(pixels, high, size, (2, max(right + 6, 0)), 64)
    return pixels
