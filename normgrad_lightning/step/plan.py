"""What is due at a step, by the flags, the schedule and the budget. Nobody asks them in the steps in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from normgrad_lightning.settings import ScheduleFlags, Settings
from normgrad_lightning.step.budget import EVENT, READING, Budget, Intervals
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.schedule import Schedule, end_of, is_last_step

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_LONG_ENOUGH, _TOO_MUCH = 30.0, 0.1
"""Seconds of training, and the part of it, from which on the user is warned of the cost."""


class Due(NamedTuple):
    """What is due at a step.

    Attributes:
        is_event: whether maps are shown; else the step is only read.
        with_order1: whether order-1 maps are.
        with_check: whether there is time for a piece of the check.
        is_last: whether the step is known to be the last one.
    """

    is_event: bool
    with_order1: bool
    with_check: bool
    is_last: bool


class Plan:
    """Says what is due, and when there was too little time for what the user might expect.

    Args:
        schedule: which steps were events.
        budget: what they have cost.
        messenger: for announcements.
    """

    def __init__(self, schedule: Schedule, budget: Budget, messenger: Messenger) -> None:
        self._schedule, self._budget, self._messenger = schedule, budget, messenger
        self._between: Intervals | None = None
        self._settings: Settings | None = None
        self._quiet_until: tuple[float, float] = 0, 0

    def due(
        self,
        trainer: Trainer,
        step: int,
        batch_idx: int,
        settings: Settings,
        *,
        checking: bool,
        reads: Callable[[Settings], bool],
    ) -> Due | None:
        """Return what is due; None if nothing is.

        Args:
            trainer: runs the training.
            step: `trainer.global_step`.
            batch_idx: of the batch, in its epoch.
            settings: all flags.
            checking: whether the check has something to do.
            reads: returns whether somebody wants maps of steps that are no events.
        """
        next_step, next_batch = self._quiet_until
        is_known = settings is self._settings and not self._budget.has_news
        if is_known and step < next_step and 0 < batch_idx < next_batch:
            return None
        when, schedule = settings.schedule, self._schedule
        between = self._intervals(trainer, when, checking=checking)
        is_last = is_last_step(trainer, batch_idx)
        is_event = schedule.is_due(step, when, between.events, is_last=is_last)
        next_reading = schedule.next_reading(between.readings) if reads(settings) else float("inf")
        if is_event or step >= next_reading:
            with_order1 = is_event and schedule.order1_is_due(step, when, is_last=is_last)
            return Due(is_event, with_order1, is_event or step >= schedule.next_reading(between.pieces), is_last)
        last_step, last_batch = end_of(trainer)
        self._settings = settings
        self._quiet_until = min(next_reading, schedule.next_event(when, between.events), last_step), last_batch
        return None

    def _intervals(self, trainer: Trainer, when: ScheduleFlags, *, checking: bool) -> Intervals:
        """Return the steps between readings and so on: those that the user has set, else what time allows."""
        between = self._budget.intervals(when.budget, when.every_n_steps, checking=checking)
        if when.read_every_n_steps is not None:
            between = Intervals(when.read_every_n_steps, between.events, when.read_every_n_steps)
        if between != self._between and self._budget.is_settled:
            self._between = between
            self._announce(trainer, when, between)
        return between

    def _announce(self, trainer: Trainer, when: ScheduleFlags, between: Intervals) -> None:
        """Say once that the budget makes readings or events rarer."""
        readings, events, _ = between
        wanted = when.read_every_n_steps or READING, when.every_n_steps or EVENT
        if when.budget is not None and (readings, events) != wanted:
            later = " and, after the first 500 steps," if when.every_n_steps is None else " and"
            share = f"{100 * when.budget:g} % of the training time (`budget={when.budget:g}`)"
            self._messenger.announce(
                trainer,
                f"NormGrad plans for {share}: it reads every {readings} steps{later} shows maps every {events}.",
                cause="budget",
            )

    def warn_of_cost(self, settings: Settings) -> None:
        """Warn if what the user has asked for takes a tenth of the time or more."""
        budget, is_asked_for = self._budget, settings.images.asks_for_probe or settings.general.check
        if not is_asked_for and settings.schedule == ScheduleFlags():
            return
        if budget.seconds > _LONG_ENOUGH and budget.share > _TOO_MUCH:
            self._messenger.warn_once(
                f"NormGrad takes {100 * budget.share:.0f} % of the training time, as its flags ask for. A larger "
                "`every_n_steps`, `read_every_n_steps` or `order1_every_n_steps`, fewer `num_images`, `probe=False` or "
                "`check=False` make it cheaper.",
                cause="cost",
            )
