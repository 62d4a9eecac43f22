"""How many events are stored: all of a short run, an even selection of a long one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUDGET = 64 * 2**20
"""Bytes that a run may store for the tab."""


class Thinning:
    """Decides which events are stored. A log is append-only, so what is stored stays.

    The first event is stored. Whenever half of what was left of the budget is used up, only every second of the events
    that would have been stored is.

    Args:
        budget: bytes for a run.

    Attributes:
        stride: how many events there are for each that is stored.
    """

    def __init__(self, budget: int = BUDGET) -> None:
        self.stride = 1
        self._left, self._limit = budget, budget / 2
        self._count = 0

    def takes(self, size: int) -> bool:
        """Return whether an event of this many bytes is stored."""
        is_first, is_due = self._count == 0, self._count % self.stride == 0
        self._count += 1
        if not is_due or (not is_first and size > self._left / 2):
            return False
        self._left -= size
        while self._left < self._limit and self._limit > 1:
            self._limit /= 2
            self.stride *= 2
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to stay within the budget of the whole run."""
        return {"stride": self.stride, "left": self._left, "limit": self._limit}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. The next event is stored: the log may be a new one."""
        self.stride, self._left, self._limit = state["stride"], state["left"], state["limit"]
        self._count = 0
