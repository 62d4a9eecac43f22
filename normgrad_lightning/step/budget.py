"""How much of the training time NormGrad takes, measured as training goes, and how often it may read.

The cost of a step that is read is the time of our own code, and what the step takes longer than plain ones do; the
pieces of the check that are done in it are measured by themselves, as they come in some of these steps only. On an
accelerator that is the time of the training thread: work on the device shows in it as soon as training waits for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from statistics import median, median_low
from time import perf_counter
from typing import Any, Literal, NamedTuple

Kind = Literal["reading", "event"]
"""A step that is only read, or one whose maps are shown."""

READING, EVENT = 10, 1000
"""Steps from one reading, or event, to the next, if the budget allows: events are denser in the first 1000 steps."""

_ROOM = 0.8  # of the budget that is planned with: measurements scatter
_LEAST = 0.1  # of it that is left where the code of plain steps alone takes more
_PLAIN, _COSTS = 50, 5  # latest measurements that count
_FROM = 3  # plain steps that it takes to say anything
_MEASURED = 10  # one in so many plain steps is, once there were enough


class Intervals(NamedTuple):
    """Steps from one reading to the next, from one event to the next, and between pieces of the check."""

    readings: int
    events: int
    pieces: int


class Budget:
    """Measures steps and our own work.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock = clock
        self._periods: deque[float] = deque(maxlen=_PLAIN)
        self._spans: deque[float] = deque(maxlen=_PLAIN)
        self._idle: deque[float] = deque(maxlen=_PLAIN)
        self._costs = {kind: deque[float](maxlen=_COSTS) for kind in ("reading", "event", "piece")}
        self._is_warm = {kind: False for kind in self._costs}
        self._spent = self._elapsed = 0.0
        self._began: float | None = None
        self._count, self._usual = 0, 0.0
        self.stop()

    def stop(self) -> None:
        """End the step that is measured: training has ended, or was broken off."""
        self._elapsed += self._of_this_step
        self._began = None
        self._was_plain = False
        self._pending: tuple[Kind, float] | None = None
        self._piece = 0.0
        self._planned: dict[Any, Intervals] = {}

    def begin_step(self) -> None:
        """Note that a batch begins; our own work comes first."""
        now = self._clock()
        if self._began is not None:
            period = now - self._began
            self._elapsed += period
            if self._was_plain:
                self._periods.append(period)
        self._began, self._was_plain = now, False

    def skips(self) -> bool:
        """Return whether to leave a plain step at that: most cost what those before have cost, and clocks cost, too."""
        self._count += 1
        if not self.is_settled or self._count % _MEASURED == 0:
            return False
        self._was_plain = True
        self._spent += self._usual
        return True

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
            self._note(kind, cost + self._showing)
            self._pending = None

    @contextmanager
    def piece(self) -> Iterator[None]:
        """Note that what happens inside is a piece of the check, if it takes any time."""
        began = self._clock()
        try:
            yield
        finally:
            self._piece += self._clock() - began

    def _note(self, kind: str, cost: float) -> None:
        """Keep what one has cost. The first of its kind does not count: it loads code and makes caches."""
        if self._is_warm[kind]:
            self._costs[kind].append(cost)
            self._planned.clear()
        self._is_warm[kind] = True

    def end_step(self, kind: Kind | None) -> None:
        """Note that the batch is over, and how it was read; None: not at all."""
        if self._began is None:
            return
        span = self._training_to - self._training_from
        own = self._training_from - self._began + self._clock() - self._shown_at
        self._spent += own + self._showing
        if kind is None:
            self._was_plain = self._showing == 0.0
            if self._was_plain:
                self._spans.append(span)
                self._idle.append(own)
                self._usual = median(self._idle)
            return
        longer = max(0.0, span - median(self._spans)) if len(self._spans) >= _FROM else 0.0
        self._spent += longer
        self._pending = kind, own + longer - self._piece
        if self._piece:
            self._note("piece", self._piece)
        self._piece = 0.0

    @property
    def share(self) -> float:
        """The part of the training time so far that went to NormGrad; 0 before anything is known."""
        elapsed = self._elapsed + self._of_this_step
        return self._spent / elapsed if elapsed > 0 else 0.0

    @property
    def _of_this_step(self) -> float:
        return 0.0 if self._began is None else self._clock() - self._began

    @property
    def is_settled(self) -> bool:
        """Whether enough was measured for plans that will last."""
        return len(self._periods) == _PLAIN

    @property
    def seconds(self) -> float:
        """The training time so far that was measured."""
        return self._elapsed

    @property
    def has_news(self) -> bool:
        """Whether something was measured since plans were made."""
        return not self._planned

    def intervals(self, budget: float | None, event: int | None = None, *, checking: bool = False) -> Intervals:
        """Return how many steps there should be in between, to keep within a budget. An event has a piece, too.

        Args:
            budget: the share of the time that may be taken; None: as much as it takes.
            event: steps between events, if the user has said so. None: as many as the budget asks for.
            checking: whether the check has something to do, so that readings leave half of the time to it.
        """
        if (budget, event, checking) not in self._planned:
            self._planned[budget, event, checking] = self._plan(budget, event, checking)
        return self._planned[budget, event, checking]

    def _plan(self, budget: float | None, event: int | None, checking: bool) -> Intervals:
        if budget is None or len(self._periods) < _FROM or not any(self._periods):
            return Intervals(READING, event or EVENT, READING)
        reading, of_event, piece = (median_low(costs) if costs else 0.0 for costs in self._costs.values())
        of_event += piece
        all_of_it = _ROOM * budget * median(self._periods)
        left = max(all_of_it - self._usual, _LEAST * all_of_it)
        events = event or next(steps for steps in _one_two_five(EVENT) if of_event / steps <= left)
        left -= of_event / events
        readings = _rarer(reading, events, left / 2 if checking else left)
        left -= _more(reading, readings, events)
        return Intervals(readings, events, max(readings, _rarer(piece, events, left)))

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to keep to the budget from its first step."""
        kept = {name: list(values) for name, values in self._measured.items()}
        return {"budget": {**kept, "total": [self._spent, self._elapsed]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an earlier version has measured less."""
        kept = state.get("budget")
        if kept is not None:
            for name, values in self._measured.items():
                values.clear()
                values.extend(float(value) for value in kept.get(name, ()))
            self._spent, self._elapsed = map(float, kept["total"])
            self._usual = median(self._idle) if self._idle else 0.0

    @property
    def _measured(self) -> dict[str, deque[float]]:
        return {"periods": self._periods, "spans": self._spans, "idle": self._idle, **self._costs}


def _rarer(cost: float, events: int, left: float) -> int:
    """Return how often to do what costs this beside events, so that it takes no more of a step than is left."""
    steps = next(steps for steps in _one_two_five(READING) if steps >= events or _more(cost, steps, events) <= left)
    return min(steps, max(events, READING))


def _more(cost: float, steps: int, events: int) -> float:
    """Return what it costs a step to do this every so many steps that are no events."""
    return cost * max(0.0, 1 / steps - 1 / events)


def _one_two_five(least: int) -> Iterator[int]:
    """Return 10, 20, 50, 100, … from `least` on."""
    return (least * factor * 10**power for power in count() for factor in (1, 2, 5))
