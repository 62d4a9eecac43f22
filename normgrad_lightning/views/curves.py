"""Curves: scalars of each layer and each class, each the mean since the last event."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normgrad_lightning.maps import MapSet, numbered_tags
from normgrad_lightning.page import Page
from normgrad_lightning.views.class_signal import TAGGED
from normgrad_lightning.views.pooled_batch import PooledBatch
from normgrad_lightning.views.statistics import border_share, concentration, share_on_object
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tag_namer import ALL, COMBINED, TagNamer

_BY_LAYER = {"concentration": concentration, "border_share": border_share}


def _tag(group: str, name: str) -> str:
    """Return the tag of a number. What tells little by itself is one group down, behind the telling numbers."""
    return f"{group}/{name}" if name.startswith("share_on_object") else f"{group}_layers/{name}"


class _Mean:
    """Running mean."""

    def __init__(self) -> None:
        self._sum, self._count = 0.0, 0

    def add(self, values: Any) -> None:
        """Add numbers; those that are not finite do not count."""
        known = np.asarray(values, float)
        known = known[np.isfinite(known)]
        self._sum, self._count = self._sum + float(known.sum()), self._count + known.size

    @property
    def value(self) -> float:
        """The mean, or NaN."""
        return self._sum / self._count if self._count else float("nan")


class Curves:
    """Running means of each layer's numbers, and of each class's share on the object."""

    def __init__(self) -> None:
        self._drift = Drift()
        self._tagged: dict[int, None] = {}
        self._reset()

    def _reset(self) -> None:
        self._layers: dict[str, _Mean] = {}
        self._on_object: dict[int, _Mean] = {}
        self._namer: TagNamer | None = None

    def add(self, batch: PooledBatch, style: Style, signal: Mapping[int, float]) -> None:
        """Add the numbers of a batch."""
        self._namer = batch.namer
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

    def page(self, map_sets: Sequence[MapSet], style: Style, shown: Sequence[int]) -> Page | None:
        """Return the means and the drift of a probe, and start over."""
        pages = [page for page in (self._means(shown), self._drift.page(map_sets)) if page is not None]
        return Page.joined(pages) if pages else None

    def _means(self, shown: Sequence[int]) -> Page | None:
        namer = self._namer
        if namer is None:
            return None
        scalars = {_tag(namer.group, name): mean.value for name, mean in self._layers.items()}
        known = [label for label in shown if label in self._on_object and label != ALL]
        self._tagged |= dict.fromkeys(known)
        labels = [label for label in known if label in list(self._tagged)[:TAGGED]]
        tags = namer.tags("share_on_object_by_class", labels)
        scalars |= {tag: self._on_object[label].value for label, tag in tags.items()}
        self._reset()
        return Page(namer.step, scalars={tag: value for tag, value in scalars.items() if np.isfinite(value)})


class Drift:
    """How much a probe's maps change: 1 minus the cosine between a map and that of the event before."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def page(self, map_sets: Sequence[MapSet]) -> Page | None:
        """Return the mean over the images of a probe, for each layer."""
        of_probe = [one for one in map_sets if one.source == "probe" and not one.kind.needs_passes][:1]
        for one in of_probe:
            maps = {layer: m.flatten(1).double().numpy() for layer, m in one.maps.items()}
            tags = numbered_tags(_tag(one.group, "drift"), one.layers)
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
