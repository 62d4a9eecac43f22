"""Which images of a batch to show."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normgrad_lightning.maps import MapSet
from normgrad_lightning.maths.signal import signal
from normgrad_lightning.settings import ImageFlags

RANDOM_SEED = 0
MOST = 1000
"""Classes to count for, at most."""


class ImageChoice:
    """Chooses images with its own random generator, so that all classes have their turn."""

    def __init__(self) -> None:
        self._random = random.Random(RANDOM_SEED)
        self._times_shown: Counter[int] = Counter()

    def indices(
        self, which: ImageFlags, sums: Mapping[str, Tensor], count: int, labels: Sequence[int] | None = None
    ) -> list[int]:
        """Return the indices in the batch of the images to show.

        Args:
            which: the flags.
            sums: of order-0 maps of the batch, where the choice depends on them; see `signal`.
            count: how many images there are to choose from.
            labels: the class of each, if known.
        """
        shown = min(count, which.num_images)
        if which.images == "random":
            return self._random.sample(range(count), shown)
        if which.by_signal:
            order: list[int] = signal(sums, count).argsort(descending=which.images == "hardest", stable=True).tolist()
            return order[:shown]
        if which.images == "balanced" and labels is not None and len(labels) == count:
            return self.balanced(labels, shown)
        return list(range(shown))

    def balanced(self, labels: Sequence[int], shown: int) -> list[int]:
        """Return the indices of images of all classes in turn, by class. Those shown least so far come first."""
        waiting: dict[int, list[int]] = {}
        for index, label in enumerate(labels):
            waiting.setdefault(label, []).append(index)
        chosen: list[int] = []
        while len(chosen) < min(shown, len(labels)):
            for label in sorted(waiting, key=lambda label: (self._times_shown[label], label))[: shown - len(chosen)]:
                chosen.append(waiting[label].pop(0))
                self._times_shown[label] += 1
            if len(self._times_shown) > MOST:  # classes, or ids
                self._times_shown.clear()
            waiting = {label: indices for label, indices in waiting.items() if indices}
        return sorted(chosen, key=lambda index: (labels[index], index))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to draw the same images."""
        version, numbers, gauss = self._random.getstate()
        return {"random": [version, list(numbers), gauss], "times_shown": dict(self._times_shown)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))
        self._times_shown = Counter(state.get("times_shown", {}))


def cut(one: MapSet, indices: Sequence[int]) -> MapSet:
    """Return the maps of these images of a batch."""
    distinct = {id(images): images for images in [one.images, *one.images_of.values()]}
    parts = {key: None if images is None else _rows(images, indices) for key, images in distinct.items()}
    maps = {layer: _rows(m, indices) for layer, m in one.maps.items()}
    images_of = {layer: parts[id(images)] for layer, images in one.images_of.items()}
    labels = one.labels
    if labels is not None:
        labels = [labels[i] for i in indices] if max(indices, default=0) < len(labels) else None
    return replace(one, maps=maps, images=parts[id(one.images)], images_of=images_of, labels=labels, masks=None)


def _rows(t: Tensor, indices: Sequence[int]) -> Tensor:
    there = [index for index in indices if index < len(t)]
    if there == list(range(len(there))):
        return t[: len(there)]
    return t.index_select(0, torch.tensor(there).to(t.device, non_blocking=True))
