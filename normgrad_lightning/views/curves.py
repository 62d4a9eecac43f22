"""Curves: a few numbers for each layer and each class, each the mean since the last event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normgrad_lightning.kinds import MapSet, numbered_tags
from normgrad_lightning.page import Page
from normgrad_lightning.views.coarse import Coarse
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.origin import ALL, COMBINED, Origin
from normgrad_lightning.views.statistics import border_share, concentration, share_on_object

_BY_LAYER = {"concentration": concentration, "border_share": border_share}


class _Mean:
    """A mean that grows."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, values: Any) -> None:
        """Add numbers; those that are not known do not count."""
        known = np.asarray(values, float)
        known = known[np.isfinite(known)]
        self._sum, self._count = self._sum + float(known.sum()), self._count + known.size

    @property
    def value(self) -> float:
        """The mean, or NaN."""
        return self._sum / self._count if self._count else float("nan")


class Curves:
    """Means of numbers of each layer, and of those on the object of each class."""

    def __init__(self) -> None:
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._layers: dict[str, _Mean] = {}
        self._on_object: dict[int, _Mean] = {}
        self._signal: dict[int, float] = {}
        self._batches = 0
        self._origin: Origin | None = None

    def add(self, batch: Coarse, look: Look, signal: Mapping[int, float]) -> None:
        """Add the numbers of a batch."""
        self._origin, self._batches = batch.origin, self._batches + 1
        for label, share in zip(batch.labels, batch.shares, strict=True):
            self._signal[label] = self._signal.get(label, 0.0) + share
        for layer, maps in batch.layers.items():
            for name, number in _BY_LAYER.items():
                self._add(f"{name}/{layer}", number(maps))
            self._add(f"energy/{layer}", batch.energy[layer])
            if layer in batch.masks:
                self._add(f"share_on_object/{layer}", share_on_object(maps, batch.masks[layer]))
        if batch.masks and COMBINED in batch.focus:
            shares = share_on_object(batch.focus[COMBINED], batch.masks[COMBINED])
            self._add(f"share_on_object/{COMBINED}", shares)
            for label, share in zip(batch.labels, shares, strict=True):
                if label in signal:
                    self._on_object.setdefault(label, _Mean()).add(share)

    def _add(self, name: str, values: Any) -> None:
        self._layers.setdefault(name, _Mean()).add(values)

    def page(self, shown: Sequence[int], look: Look) -> Page | None:
        """The means; then begin anew."""
        origin = self._origin
        if origin is None:
            return None
        by_class = {
            "part_of_signal": {label: total / self._batches for label, total in self._signal.items()},
            "share_on_object_by_class": {label: mean.value for label, mean in self._on_object.items()},
        }
        scalars = {f"{origin.group}/{name}": mean.value for name, mean in self._layers.items()}
        for name, values in by_class.items():
            tags = origin.tags(name, [label for label in shown if label in values and label != ALL])
            scalars |= {tag: values[label] for label, tag in tags.items()}
        self._begin_anew()
        return Page(origin.step, scalars={tag: value for tag, value in scalars.items() if np.isfinite(value)})


class Drift:
    """How much the maps of a probe change: 1 minus the cosine between a map and that of the event before."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def page(self, map_sets: Sequence[MapSet]) -> Page | None:
        """The mean over the images of a probe, for each layer."""
        of_probe = [one for one in map_sets if one.source == "probe" and not one.kind.needs_passes][:1]
        for one in of_probe:
            maps = {layer: m.flatten(1).double().numpy() for layer, m in one.maps.items()}
            tags = numbered_tags(f"{one.group}/drift", one.layers)
            scalars = {
                tags[layer]: drift(m, self._before[layer])
                for layer, m in maps.items()
                if layer in self._before and self._before[layer].shape == m.shape
            }
            self._before = maps
            return Page(one.step, scalars={tag: value for tag, value in scalars.items() if np.isfinite(value)})
        return None


def drift(maps: Any, before: Any) -> float:
    """Return the mean over images of 1 - cos of two maps, `(N, D)` each; NaN if all are zero."""
    lengths = np.linalg.norm(maps, axis=1) * np.linalg.norm(before, axis=1)
    known = lengths > 0
    cosines = (maps * before).sum(axis=1)[known] / lengths[known]
    return float(np.mean(1.0 - cosines)) if known.any() else float("nan")
