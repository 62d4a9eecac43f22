"""How much of the training signal comes from each class: it decides which classes get a row."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from normgrad_lightning.views.pooled_batch import PooledBatch

Value = TypeVar("Value")

ROWS = 12
"""Classes in a picture, at most."""

MOST = 1000
"""Classes to collect for, at most."""


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

    @property
    def shown(self) -> list[int]:
        """Return the classes with the most signal, in the order of their numbers."""
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
