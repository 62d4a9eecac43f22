"""How much of the training signal comes from each class, and so which classes are worth a row."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import TypeVar

from normgrad_lightning.views.coarse import Coarse

Kept = TypeVar("Kept")

ROWS = 12
"""Classes in a picture, at most."""

MOST = 1000
"""Classes that anything is kept of, at most."""


class ClassSignal:
    """The part of the signal of each class, summed up over batches; at each event, what came before counts half.

    Attributes:
        totals: by class.
    """

    def __init__(self) -> None:
        self.totals: dict[int, float] = {}

    def add(self, batch: Coarse) -> None:
        """Add the images of a batch."""
        for label, share in zip(batch.labels, batch.shares, strict=True):
            self.totals[label] = self.totals.get(label, 0.0) + share
        if len(self.totals) > MOST:
            self.totals = {label: self.totals[label] for label in strongest(self.totals, MOST)}

    @property
    def shown(self) -> list[int]:
        """The classes with the most signal, in the order of their numbers."""
        return sorted(strongest(self.totals, ROWS))

    def begin_anew(self) -> None:
        """An event is over."""
        self.totals = {label: total / 2 for label, total in self.totals.items()}


def strongest(totals: Mapping[int, float], count: int) -> list[int]:
    """The classes with the largest totals."""
    return sorted(totals, key=lambda label: -totals[label])[:count]


def only(of_class: Mapping[int, Kept], labels: Container[int]) -> dict[int, Kept]:
    """What is kept of these classes."""
    return {label: kept for label, kept in of_class.items() if label in labels}
