"""How much of the training time NormGrad takes, measured as training goes, and how often it may read.

The cost of a step that is read is the time of our own code, and what the step takes longer than plain ones do. On an
accelerator that is the time of the training thread: work on the device shows in it as soon as training waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from statistics import median
from time import perf_counter
from typing import Any, Literal

Kind = Literal["reading", "event"]
"""A step that is only read, or one whose maps are shown."""

READING, EVENT = 10, 1000
"""Steps from one reading, or event, to the next, if the budget allows: events are denser in the first 1000 steps."""

_ROOM = 0.8  # of the budget that is planned with: measurements scatter
_PLAIN, _COSTS = 50, 5  # latest measurements that count
_FROM = 3  # plain steps that it takes to say anything


class Budget:
    """Measures steps and our own work.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._periods: deque[float] = deque(maxlen=_PLAIN)
        self._spans: deque[float] = deque(maxlen=_PLAIN)
        self._costs: dict[str, deque[float]] = {"reading": deque(maxlen=_COSTS), "event": deque(maxlen=_COSTS)}
        self._spent = self._elapsed = 0.0
        self.stop()

    def stop(self) -> None:
        """Forget the step that is measured: training has ended, or was broken off."""
        self._began: float | None = None
        self._was_plain = False
        self._pending: tuple[Kind, float] | None = None
        self._planned: dict[Any, tuple[int, int]] = {}

    def begin_step(self) -> None:
        """Note that a batch begins; our own work comes first."""
        now = self._clock()
        if self._began is not None:
            period = now - self._began
            self._elapsed += period
            if self._was_plain:
                self._periods.append(period)
        self._began, self._was_plain = now, False

    def begin_training(self) -> None:
        """Note that training's own part of the step begins."""
        self._training_from = self._clock()

    @contextmanager
    def interruption(self) -> Iterator[None]:
        """Count work of our own in the midst of training's part with what comes before it."""
        began = self._clock()
        try:
            yield
        finally:
            self._training_from += self._clock() - began

    def end_training(self) -> None:
        """Note that training's own part is over; the maps of the step before are shown next."""
        self._training_to = self._clock()

    def end_showing(self) -> None:
        """Note that they are shown."""
        self._shown_at = self._clock()
        self._showing = 0.0
        if self._pending is not None:
            kind, cost = self._pending
            self._showing = self._shown_at - self._training_to
            self._costs[kind].append(cost + self._showing)
            self._pending = None
            self._planned.clear()

    def end_step(self, kind: Kind | None) -> None:
        """Note that the batch is over, and how it was read; None: not at all."""
        if self._began is None:
            return
        span = self._training_to - self._training_from
        self._spent += self._showing
        if kind is None:
            self._was_plain = self._showing == 0.0
            if self._was_plain:
                self._spans.append(span)
            return
        longer = max(0.0, span - median(self._spans)) if len(self._spans) >= _FROM else 0.0
        cost = self._training_from - self._began + longer + self._clock() - self._shown_at
        self._spent += cost
        self._pending = kind, cost

    @property
    def share(self) -> float:
        """The part of the training time so far that went to NormGrad; 0 before anything is known."""
        return self._spent / self._elapsed if self._elapsed > 0 else 0.0

    @property
    def seconds(self) -> float:
        """The training time so far that was measured."""
        return self._elapsed

    def intervals(self, budget: float | None, event: int | None = None) -> tuple[int, int]:
        """Return the steps from one reading to the next, and from one event to the next, that keep within a budget.

        Args:
            budget: the share of the time that may be taken; None: as much as it takes.
            event: steps between events, if the user has said so. None: as many as the budget asks for.
        """
        if (budget, event) not in self._planned:
            self._planned[budget, event] = self._plan(budget, event)
        return self._planned[budget, event]

    def _plan(self, budget: float | None, event: int | None) -> tuple[int, int]:
        if budget is None or len(self._periods) < _FROM or not any(self._periods):
            return READING, event or EVENT
        costs = {kind: median(costs) if costs else 0.0 for kind, costs in self._costs.items()}
        of_a_step = _ROOM * budget * median(self._periods)
        events = event or next(steps for steps in _one_two_five(EVENT) if costs["event"] / steps <= of_a_step)
        for steps in _one_two_five(READING):
            readings = costs["reading"] * max(0.0, 1 / steps - 1 / events)
            if steps >= events or readings + costs["event"] / events <= of_a_step:
                return min(steps, max(events, READING)), events
        raise AssertionError("the series has no end")

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to keep to the budget from its first step."""
        kept = {"periods": self._periods, "spans": self._spans, **self._costs}
        return {"budget": {**{name: list(values) for name, values in kept.items()}, "total": self._total()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        kept = state.get("budget")
        if kept is not None:
            for name, values in {"periods": self._periods, "spans": self._spans, **self._costs}.items():
                values.clear()
                values.extend(float(value) for value in kept[name])
            self._spent, self._elapsed = map(float, kept["total"])

    def _total(self) -> list[float]:
        return [self._spent, self._elapsed]


def _one_two_five(least: int) -> Iterator[int]:
    """Return 10, 20, 50, 100, … from `least` on."""
    return (least * factor * 10**power for power in count() for factor in (1, 2, 5))
