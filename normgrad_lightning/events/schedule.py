"""Which steps are events, also after a resume."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from normgrad_lightning.events.event import Event
from normgrad_lightning.events.settings import When

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


@dataclass
class Schedule:
    """The latest events of each kind. The first step is an event, and so is the last."""

    last_event: int | None = None
    last_order1: int | None = None
    last_reading: int | None = None

    def is_due(self, step: int, when: When, *, is_last: bool = False) -> bool:
        """Whether this step is an event; `is_last`: whether it is known to be the last one of training."""
        is_due = _has_passed(step, when.every_n_steps, self.last_event) or (is_last and self.last_event != step)
        return is_due or self.order1_is_due(step, when, is_last=is_last)

    def order1_is_due(self, step: int, when: When, *, is_last: bool = False) -> bool:
        """Whether this step is an event with order-1 maps."""
        every = when.order1_every_n_steps
        if every is None:
            return False
        return _has_passed(step, every, self.last_order1) or (is_last and self.last_order1 != step)

    def reading_is_due(self, step: int, when: When) -> bool:
        """Whether the maps of this step are collected, if it is no event."""
        return _has_passed(step, when.read_every_n_steps, self.last_reading)

    def note(self, event: Event) -> None:
        """Keep the step of an event that is over. If training skipped its batch, the event waits for the next one."""
        if event.trained:
            self.last_reading = event.step
        if event.trained and not event.is_reading:
            self.last_event = event.step
        if event.with_order1 and (event.trained or event.has_order1):
            self.last_order1 = event.step

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        steps = [state["last_event"], state["last_order1"], state.get("last_reading")]  # 0.1.0 had no readings
        self.last_event, self.last_order1, self.last_reading = [None if step is None else int(step) for step in steps]


def is_last_step(trainer: Trainer, batch_idx: int) -> bool:
    """Whether `max_steps` or `max_epochs` ends training with the step that this batch belongs to.

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
    """Whether a multiple of `every` has come since the last event. Steps may come in twos."""
    return last is None or step // every > last // every
