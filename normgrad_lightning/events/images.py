"""Which images of a batch to show."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from normgrad_lightning.events.settings import Which

RANDOM_SEED = 0


class ImageChoice:
    """Chooses images, with a random generator of its own, and so that all classes have their turn."""

    def __init__(self) -> None:
        self._random = random.Random(RANDOM_SEED)
        self._times_shown: Counter[int] = Counter()

    def places(
        self, which: Which, maps: Mapping[str, Tensor], count: int, labels: Sequence[int] | None = None
    ) -> list[int]:
        """The places in the batch of the images to show.

        Args:
            which: the flags.
            maps: order-0 maps of the batch, where the choice depends on them.
            count: how many images there are to choose from.
            labels: the class of each, if known.
        """
        shown = min(count, which.num_images)
        if which.images == "random":
            return self._random.sample(range(count), shown)
        if which.by_signal:
            order: list[int] = signal(maps, count).argsort(descending=which.images == "hardest", stable=True).tolist()
            return order[:shown]
        if which.images == "balanced" and labels is not None and len(labels) == count:
            return self.balanced(labels, shown)
        return list(range(shown))

    def balanced(self, labels: Sequence[int], shown: int) -> list[int]:
        """The places of images of all classes in turn, by class. Those shown least so far have the first turn."""
        waiting: dict[int, list[int]] = {}
        for place, label in enumerate(labels):
            waiting.setdefault(label, []).append(place)
        chosen: list[int] = []
        while len(chosen) < min(shown, len(labels)):
            for label in sorted(waiting, key=lambda label: (self._times_shown[label], label))[: shown - len(chosen)]:
                chosen.append(waiting[label].pop(0))
                self._times_shown[label] += 1
            waiting = {label: places for label, places in waiting.items() if places}
        return sorted(chosen, key=lambda place: (labels[place], place))

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to draw the same images."""
        version, numbers, gauss = self._random.getstate()
        return {"random": [version, list(numbers), gauss], "times_shown": dict(self._times_shown)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        version, numbers, gauss = state["random"]
        self._random.setstate((version, tuple(numbers), gauss))
        self._times_shown = Counter(state.get("times_shown", {}))


def signal(maps: Mapping[str, Tensor], count: int) -> Tensor:
    """The part of the training signal that comes from each image: its share of each layer's maps, averaged.

    It adds up to 1 over the batch. Layers whose maps are zero everywhere do not count.
    """
    totals = [m[:count].flatten(1).sum(1) for m in maps.values()]
    shares = [total / total.sum() for total in totals if total.sum() > 0]
    return torch.stack(shares).mean(0) if shares else torch.zeros(count)


def rows(t: Tensor, places: Sequence[int] | None) -> Tensor:
    """The rows of these images; None: of all."""
    if places is None:
        return t
    there = [place for place in places if place < len(t)]
    return t[: len(there)] if there == list(range(len(there))) else t[there]


def picked(images: Tensor | None, places: Sequence[int] | None) -> Tensor | None:
    """A copy of these images on the CPU: the batch belongs to training."""
    return None if images is None else rows(images, places).to("cpu", copy=True)
