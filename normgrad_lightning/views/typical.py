"""The typical map of a layer: what is the same in all images. Without it, what is left of a map is its image's own.

Strides draw dots, padding draws edges, and most objects are in the middle: such a pattern is in every map of a layer
and tells nothing about an image.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from normgrad_lightning.functional import geometric_mean
from normgrad_lightning.views.drawing import plane
from normgrad_lightning.views.resampling import Floats

_PRIOR = 8.0  # even maps that a mean starts with: of few images nothing is typical yet
_FLOOR = 0.1  # of the typical map's mean: where hardly any signal is, ratios mean nothing


def per_map_mean(maps: Floats) -> Floats:
    """Return maps `(N, *S)` divided by their own mean; a map that is zero everywhere stays zero."""
    mean = maps.mean(axis=tuple(range(1, maps.ndim)), keepdims=True)
    even: Floats = np.divide(maps, mean, out=np.zeros_like(maps), where=mean > 0)
    return even


class TypicalMaps:
    """Running mean of each layer's maps, each divided by its own mean.

    Each mean starts with eight even maps, so that few images change little. `halve` lets the past count less.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Floats] = {}
        self._counts: dict[str, float] = {}

    def add(self, layer: str, even: Floats) -> None:
        """Add the maps `(N, *S)` of a layer, `per_map_mean`. On another grid than before, its mean starts again."""
        total = even.sum(axis=0, dtype=np.float64).astype(np.float32)
        before = self._sums.get(layer)
        goes_on = before is not None and before.shape == total.shape
        self._sums[layer] = before + total if before is not None and goes_on else total
        self._counts[layer] = len(even) + (self._counts[layer] if goes_on else 0.0)

    def of(self, layer: str) -> Floats:
        """Return the typical map of a layer, `(*S)`."""
        mean: Floats = (self._sums[layer] + np.float32(_PRIOR)) / (self._counts[layer] + _PRIOR)
        return mean

    def planes(self) -> dict[str, Floats]:
        """Return the typical map `(h, w)` of each layer, as it is drawn."""
        return {layer: plane(self.of(layer)[None])[0] for layer in self._sums}

    def usual(self, layers: Iterable[str], grid: Sequence[int]) -> Floats:
        """Return what maps of these layers combined are divided by, `(1, *grid)`, so that each image's own is left.

            m_n~ = m_n / combine_l( t_l + 0.1 mean(t_l) )

        with t_l the typical map of a layer.
        """
        typical = [torch.from_numpy(self.of(layer))[None] for layer in layers]
        combined: Floats = geometric_mean([t + _FLOOR * t.mean() for t in typical], grid).numpy()
        return combined

    def halve(self) -> None:
        """Let what was added so far count half from now on."""
        self._sums = {layer: total / 2 for layer, total in self._sums.items()}
        self._counts = {layer: count / 2 for layer, count in self._counts.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and counts, for a checkpoint: about 3 kB for each layer."""
        return {"sums": {k: torch.from_numpy(v.copy()) for k, v in self._sums.items()}, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._sums = {layer: total.numpy().copy() for layer, total in state.get("sums", {}).items()}
        self._counts = dict(state.get("counts", {}))
