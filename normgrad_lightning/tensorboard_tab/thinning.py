"""How many events are stored: all of a short run, an even selection of a long one."""

from __future__ import annotations

from typing import NamedTuple

BUDGET = 64 * 2**20
"""Bytes that a run may store for the tab."""


class Event(NamedTuple):
    """A stored event: its step and its blob."""

    step: int
    blob: bytes


class Thinning:
    """Decides which events are stored. A log is append-only, so what is stored stays.

    The first event is stored. Whenever half of what was left of the budget is used up, only every second of the events
    that would have been stored is. The last event is kept back if it was not stored, and comes with `finish`.

    Args:
        budget: bytes for a run.

    Attributes:
        stride: how many events there are for each that is stored.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.stride = 1
        self._left, self._limit = budget, budget / 2
        self._count = 0
        self._last: Event | None = None

    def add(self, event: Event) -> Event | None:
        """Return the event if it is stored now."""
        is_due = self._count % self.stride == 0
        self._count += 1
        if not is_due or (self._count > 1 and len(event.blob) > self._left / 2):
            self._last = event
            return None
        self._last = None
        self._left -= len(event.blob)
        while self._left < self._limit and self._limit > 1:
            self._limit /= 2
            self.stride *= 2
        return event

    def finish(self) -> Event | None:
        """Return the last event if it has not been stored."""
        last, self._last = self._last, None
        return last
