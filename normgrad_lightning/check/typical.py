"""What the maps of other classes have, too: strides, padding and centred objects draw it into every map."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normgrad_lightning.hooks.to_host import from_host

_PRIOR = 8.0  # even maps that a mean starts with: of few images nothing is typical yet
_FLOOR = 0.1  # where others have hardly any signal, ratios mean nothing
_CLASSES = 64  # whose own sums are kept


class TypicalOfOthers:
    """Running sums of the maps of each class; they stay where the maps are, and nothing waits for them."""

    def __init__(self) -> None:
        self._of: dict[int, Tensor] = {}
        self._counts: dict[int, float] = {}
        self._total: Tensor | None = None
        self._count = 0.0

    def add(self, maps: Tensor, labels: Sequence[int]) -> None:
        """Add maps `(N, *G)`, in units of their means; on another grid than before, the sums start over."""
        if self._total is None or self._total.shape != maps.shape[1:] or self._total.device != maps.device:
            self._of, self._counts, self._total, self._count = {}, {}, torch.zeros_like(maps[0]), 0.0
        maps = maps.nan_to_num(0.0, 0.0, 0.0)
        self._total, self._count = self._total + maps.sum(0), self._count + len(maps)
        for label in dict.fromkeys(labels):
            if label in self._of or len(self._of) < _CLASSES:
                rows = [row for row, other in enumerate(labels) if other == label]
                self._of[label] = self._of.get(label, 0.0) + maps[from_host(torch.tensor(rows), maps.device)].sum(0)
                self._counts[label] = self._counts.get(label, 0.0) + len(rows)

    def removed(self, maps: Tensor, labels: Sequence[int]) -> Tensor:
        """Return maps divided by what is typical of other classes' maps.

            m_n~ = m_n / (t_n + 0.1)

        Args:
            maps: `(N, *G)`, the maps m.
            labels: the class of each: t_n is the mean of the maps of all others, and of eight that are 1 everywhere.
        """
        return maps / (torch.stack([self._typical(label, maps) for label in labels]) + _FLOOR)

    def halve(self) -> None:
        """Let what was added so far count half from now on."""
        if self._total is not None:
            self._total, self._count = self._total / 2, self._count / 2
        self._of = {label: total / 2 for label, total in self._of.items()}
        self._counts = {label: count / 2 for label, count in self._counts.items()}

    def _typical(self, label: int, maps: Tensor) -> Tensor:
        if self._total is None:
            return torch.ones_like(maps[0])
        total = self._total - self._of.get(label, 0.0)
        return (total + _PRIOR) / (self._count - self._counts.get(label, 0.0) + _PRIOR)
