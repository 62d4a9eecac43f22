"""Which steps are events, also after a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from normgrad_lightning.settings import ScheduleFlags
from normgrad_lightning.step.context import StepContext

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

EARLY = (0, 10, 20, 50, 100, 200, 500)
"""The first events, unless the user sets `every_n_steps`: small data sets have 30 steps an epoch."""


@dataclass
class Schedule:
    """The latest events of each kind. The first step is an event, and so is the last."""

    last_event: int | None = None
    last_order1: int | None = None
    last_reading: int | None = None

    def is_due(self, step: int, when: ScheduleFlags, every: int, *, is_last: bool = False) -> bool:
        """Return whether this step is an event.

        Args:
            step: of training.
            when: the flags.
            every: steps between events, once the first ones are over.
            is_last: whether it is known to be the last one of training.
        """
        if is_last and self.last_event != step:
            return True
        is_early = when.every_n_steps is None and self._has_passed_early(step)
        return is_early or _has_passed(step, every, self.last_event) or self.order1_is_due(step, when, is_last=is_last)

    def _has_passed_early(self, step: int) -> bool:
        """Return whether one of the first events has come since the latest one."""
        return any(early <= step for early in EARLY if self.last_event is None or early > self.last_event)

    def order1_is_due(self, step: int, when: ScheduleFlags, *, is_last: bool = False) -> bool:
        """Return whether this step is an event with order-1 maps."""
        every = when.order1_every_n_steps
        if every is None:
            return False
        return _has_passed(step, every, self.last_order1) or (is_last and self.last_order1 != step)

    def reading_is_due(self, step: int, every: int) -> bool:
        """Return whether the maps of this step are collected, if it is not an event."""
        return _has_passed(step, every, self.last_reading)

    def note(self, context: StepContext, *, trained: bool, has_order1: bool) -> None:
        """Keep a step that is over. If training skipped its batch, the event waits for the next one."""
        if trained:
            self.last_reading = context.step
        if trained and context.is_event:
            self.last_event = context.step
        if context.with_order1 and (trained or has_order1):
            self.last_order1 = context.step

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        steps = [state["last_event"], state["last_order1"], state["last_reading"]]
        self.last_event, self.last_order1, self.last_reading = [None if step is None else int(step) for step in steps]


def is_last_step(trainer: Trainer, batch_idx: int) -> bool:
    """Return whether `max_steps` or `max_epochs` ends training with the step that this batch belongs to.

    Other ends come without notice: early stopping, `max_time`, `trainer.should_stop`.
    """
    automatic = trainer.lightning_module.automatic_optimization
    steps_of_a_batch = 1 if automatic else max(1, len(trainer.optimizers))
    if trainer.max_steps != -1 and trainer.global_step + steps_of_a_batch >= trainer.max_steps:
        return True
    if trainer.max_epochs in (None, -1) or trainer.current_epoch + 1 < trainer.max_epochs:
        return False
    accumulated = trainer.accumulate_grad_batches if automatic else 1
    batches = trainer.num_training_batches
    if batches == math.inf:
        return trainer.is_last_batch
    return batch_idx >= (int(batches) - 1) // accumulated * accumulated


def _has_passed(step: int, every: int, last: int | None) -> bool:
    """Return whether a multiple of `every` has come since the last event. Steps may come in twos."""
    return last is None or step // every > last // every
