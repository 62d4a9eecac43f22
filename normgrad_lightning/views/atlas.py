"""Atlas: where each class is learned. For each class the mean of its maps, and how it differs from the other classes'.

A mark at a fixed place of one class is a bright spot in one tile. Both tiles have fixed scales, so that classes and
events can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.class_signal import only
from normgrad_lightning.views.coarse import Coarse, per_map_mean, resized
from normgrad_lightning.views.colours import SIGNED_COLORMAP, colours_of
from normgrad_lightning.views.drawing import Pixels, jpeg, plane
from normgrad_lightning.views.lettering import length_of, line_height, write
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.origin import COMBINED, Origin, of_map
from normgrad_lightning.views.resampling import Floats, resized_axis, smoothed
from normgrad_lightning.views.statistics import lifts
from normgrad_lightning.views.table import Table

BRIGHTEST = 4.0
"""Of a mean map, in units of its mean: what is above has the same colour."""

LARGEST_LIFT = 8.0
"""The scale of lifts goes from an eighth to this."""

_TILE = 96
_NARROWEST = 2 / 3  # of a tile, width by height: the numbers above it need room
_LONGEST = 12  # letters of a class


class Atlas:
    """Adds up the maps of each class. At each event, what came before counts half from then on."""

    def __init__(self) -> None:
        self._sums: dict[str, dict[int, Floats]] = {}
        self._counts: dict[int, float] = {}
        self._origin: Origin | None = None
        self._aspect = 1.0
        self._first: dict[str, dict[int, float]] = {}

    def add(self, batch: Coarse, look: Look, signal: Mapping[int, float]) -> None:
        """Add the maps of a batch."""
        labels = np.asarray(batch.labels)
        self._fit_to(next(iter(batch.focus.values())).shape[1:] if batch.focus else None)
        for name, maps in batch.focus.items():
            sums, even = self._sums.setdefault(name, {}), per_map_mean(maps)
            for label in np.unique(labels).tolist():
                total = even[labels == label].sum(axis=0).astype(np.float32)
                sums[label] = sums[label] + total if label in sums else total
        for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
            self._counts[int(label)] = self._counts.get(int(label), 0.0) + float(count)
        self._counts = only(self._counts, signal)
        self._sums = {name: only(sums, self._counts) for name, sums in self._sums.items()}
        self._origin, self._aspect = batch.origin, _aspect(batch)

    def _fit_to(self, grid: tuple[int, ...] | None) -> None:
        """Bring what is there to the grid of images of another size; with other axes, begin anew."""
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
        """The mean map of each class, and its lift over the other classes."""
        sums = self._sums[name]
        labels = list(sums)
        counts = np.asarray([self._counts[label] for label in labels])
        means = smoothed(np.stack([sums[label] / self._counts[label] for label in labels]).astype(np.float64))
        return dict(zip(labels, means, strict=True)), dict(zip(labels, lifts(means, counts), strict=True))

    def page(self, shown: Sequence[int], look: Look) -> Page | None:
        """A picture for each map; then let what is there count half."""
        origin, self._origin = self._origin, None
        if origin is None:
            return None
        pictures, scalars = [], {}
        for name in self._sums:
            means, lift_of = self.lifts(name)
            spots = {label: float(lift_of[label].max()) for label in shown if label in lift_of}
            pixels = self._drawn(name, means, lift_of, spots, look, origin)
            pictures.append(Picture(origin.picture_tag("3_atlas", name), jpeg(pixels), *pixels.shape[:2]))
            self._first[name] = {**spots, **self._first.get(name, {})}
            if name == COMBINED and len(lift_of) > 1:
                scalars = {tag: spots[label] for label, tag in origin.tags("hot_spot", spots).items()}
        self._sums = {name: {label: m / 2 for label, m in sums.items()} for name, sums in self._sums.items()}
        self._counts = {label: count / 2 for label, count in self._counts.items()}
        return Page(origin.step, pictures, scalars)

    def _drawn(
        self,
        name: str,
        means: Mapping[int, Floats],
        lift_of: Mapping[int, Floats],
        spots: Mapping[int, float],
        look: Look,
        origin: Origin,
    ) -> Pixels:
        first, alone = self._first.get(name, {}), len(lift_of) < 2
        names = origin.captions(spots, _LONGEST)
        title = [
            f"Where each class is learned ({of_map(name)}):",
            "its mean map" if alone else "its mean map, and its lift over others",
        ]
        if len(spots) < len(means):
            title.append(f"{len(spots)} of {len(means)} classes: those with the most signal")
        captions = [
            names[label] + ("" if alone else f": hot spot {spot:.1f}{_before(first.get(label))}")
            for label, spot in spots.items()
        ]
        height, width = _tile_size(self._aspect)
        table = Table((height, width), 2, captions, title, across=min(2, len(captions)))
        for block, label in enumerate(spots):
            table.put(block, 0, _coloured(means[label] / BRIGHTEST, height, width, look.colormap))
            if not alone:
                scaled = 0.5 + np.log(lift_of[label]) / (2 * math.log(LARGEST_LIFT))
                table.put(block, 1, _coloured(scaled, height, width, SIGNED_COLORMAP))
        bars = [("mean map: 0", f"{BRIGHTEST:.0f} times its mean", look.colormap)]
        if not alone:
            bars.append((f"lift: 1/{LARGEST_LIFT:.0f}", f"{LARGEST_LIFT:.0f} times", SIGNED_COLORMAP))
        return np.concatenate([table.picture, *(_bar(*bar, table) for bar in bars)])

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run compares with: the first event."""
        return {"first_hot_spots": self._first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        self._first = {name: dict(of) for name, of in state.get("first_hot_spots", {}).items()}


def _on_grid(maps: Floats, grid: Sequence[int]) -> Floats:
    """Maps `(N, *S)` on another grid, interpolated."""
    return resized(torch.from_numpy(maps), grid).numpy()


def _before(first: float | None) -> str:
    return "" if first is None else f", first {first:.1f}"


def _aspect(batch: Coarse) -> float:
    """Width of the images by their height; of a signal, that of a strip."""
    size = next(iter(batch.layers.values())).shape[1:] if batch.images is None else batch.images.shape[2:]
    return 4.0 if len(size) == 1 else size[-1] / size[-2]


def _tile_size(aspect: float) -> tuple[int, int]:
    aspect = min(max(aspect, _NARROWEST), 4.0)
    return max(1, round(_TILE / max(aspect, 1.0))), max(1, round(_TILE * min(aspect, 1.0)))


def _coloured(values: Floats, height: int, width: int, colormap: str) -> Pixels:
    """Return values `(*S)` from 0 to 1 in colours, interpolated before."""
    flat = plane(values[None].clip(0.0, 1.0).astype(np.float32))
    steps = (255.0 * resized_axis(resized_axis(flat, 2, width), 1, height)[0] + 0.5).astype(np.uint8)
    pixels: Pixels = _palette(colormap)[steps]
    return pixels


@lru_cache(maxsize=8)
def _palette(colormap: str) -> Pixels:
    colours = np.zeros((256, 4), np.uint8)
    colours[:, :3] = 255.0 * colours_of(colormap) + 0.5
    return colours


def _bar(low: str, high: str, colormap: str, table: Table) -> Pixels:
    """A line with a scale of colours between what its ends mean."""
    size, width = table.letters, table.picture.shape[1]
    line = line_height(size)
    pixels: Pixels = np.full((line + 2, width, 4), 255, np.uint8)
    left, right = length_of(low, size) + 8, width - length_of(high, size) - 8
    write(pixels, low, size, (2, 2), 64)
    if right > left:
        shades = np.linspace(0, 255, right - left).astype(np.uint8)
        pixels[5 : line - 1, left:right] = _palette(colormap)[shades]
    write(pixels, high, size, (2, max(right + 6, 0)), 64)
    return pixels
