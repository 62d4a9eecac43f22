"""How much of the training signal comes from each class: it decides which classes get a row."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from normgrad_lightning.maps import MapSet
from normgrad_lightning.views.pooled_batch import PooledBatch
from normgrad_lightning.views.tag_namer import ALL

Value = TypeVar("Value")

ROWS = 12
"""Classes in a picture, at most."""

MOST = 1000
"""Classes to collect for, at most."""


TAGGED = 24
"""Classes that have curves, at most."""

_EXPECTED = 3.0  # pairs of images of one class in a batch, if there were a hundred classes; ids have none


class IdDetector:
    """Tells classes from ids, which two images of a batch never share: such labels would make a curve for each image.

    A later batch in which two images share a label shows that labels are classes after all.
    """

    def __init__(self) -> None:
        self._expected = 0.0
        self._are_classes = False

    def are_ids(self, batch: MapSet) -> bool:
        """Return whether the labels of this batch and of those before can hardly be classes."""
        labels = [label for label in batch.labels or () if label >= 0]
        pairs = len(labels) * (len(labels) - 1) / 2
        self._expected += pairs / 100
        self._are_classes |= len(set(labels)) < len(labels)
        return self._expected >= _EXPECTED and not self._are_classes and batch.classes is None


class ClassSignal:
    """Each class's part of the signal: a sum over batches, halved at every event.

    Attributes:
        totals: by class.
    """

    def __init__(self) -> None:
        self.totals: dict[int, float] = {}

    def add(self, batch: PooledBatch) -> None:
        """Add the images of a batch."""
        for label, share in zip(batch.labels, batch.shares, strict=True):
            self.totals[label] = self.totals.get(label, 0.0) + share
        if len(self.totals) > MOST:
            self.totals = {label: self.totals[label] for label in strongest(self.totals, MOST)}

    def forget_classes(self) -> None:
        """Keep only what is of all images: the labels are not those of classes."""
        self.totals = only(self.totals, (ALL,))

    @property
    def shown(self) -> list[int]:
        """The classes with the most signal, in the order of their numbers."""
        return sorted(strongest(self.totals, ROWS))

    def halve(self) -> None:
        """Let what there is count half, as an event is over."""
        self.totals = {label: total / 2 for label, total in self.totals.items()}


def strongest(totals: Mapping[int, float], count: int) -> list[int]:
    """Return the classes with the largest totals."""
    return sorted(totals, key=lambda label: -totals[label])[:count]


def only(of_class: Mapping[int, Value], labels: Container[int]) -> dict[int, Value]:
    """Return the values of these classes."""
    return {label: value for label, value in of_class.items() if label in labels}
