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
        return (is_last and self.last_event != step) or step >= self.next_event(when, every)

    def next_event(self, when: ScheduleFlags, every: int) -> float:
        """Return the step from which on an event is due, if training goes on."""
        early = EARLY if when.every_n_steps is None else ()
        to_come = [step for step in early if self.last_event is None or step > self.last_event]
        return min(*to_come[:1], _next(every, self.last_event), self.next_order1(when))

    def order1_is_due(self, step: int, when: ScheduleFlags, *, is_last: bool = False) -> bool:
        """Return whether this step is an event with order-1 maps."""
        is_wanted = when.order1_every_n_steps is not None
        return step >= self.next_order1(when) or (is_wanted and is_last and self.last_order1 != step)

    def next_order1(self, when: ScheduleFlags) -> float:
        """Return the step from which on an event with order-1 maps is due."""
        every = when.order1_every_n_steps
        return math.inf if every is None else _next(every, self.last_order1)

    def next_reading(self, every: int) -> int:
        """Return the step from which on maps are collected, if it is not an event."""
        return _next(every, self.last_reading)

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
    """Return whether `max_steps` or `max_epochs` ends training with the step that this batch belongs to."""
    step, batch = end_of(trainer)
    is_known = trainer.num_training_batches != math.inf
    return trainer.global_step >= step or (batch_idx >= batch and (is_known or trainer.is_last_batch))


def end_of(trainer: Trainer) -> tuple[float, float]:
    """Return the first step and the first batch of this epoch that may belong to the last step; infinite for none.

    Other ends come without notice: early stopping, `max_time`, `trainer.should_stop`.
    """
    automatic = trainer.lightning_module.automatic_optimization
    steps_of_a_batch = 1 if automatic else max(1, len(trainer.optimizers))
    step = math.inf if trainer.max_steps == -1 else trainer.max_steps - steps_of_a_batch
    if trainer.max_epochs in (None, -1) or trainer.current_epoch + 1 < trainer.max_epochs:
        return step, math.inf
    if trainer.num_training_batches == math.inf:
        return step, 0
    accumulated = trainer.accumulate_grad_batches if automatic else 1
    return step, (int(trainer.num_training_batches) - 1) // accumulated * accumulated


def _next(every: int, last: int | None) -> int:
    """Return the next multiple of `every` after the last event. Steps may come in twos, and leave it out."""
    return 0 if last is None else (last // every + 1) * every
