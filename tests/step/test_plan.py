"""What is due at a step: the same as if every part were asked at each step, though nobody is asked in between."""

import math
from types import SimpleNamespace

import pytest
from twice import Lit, loader, train

from normgrad_lightning import NormGradCallback
from normgrad_lightning.fit import state
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.budget import Budget
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.plan import Plan
from normgrad_lightning.step.schedule import Schedule

DEFAULTS = NormGradCallback()._settings


def asked_each_time(plan, *args, **options):
    """What is due, with nothing known of the steps before."""
    plan._quiet_until = 0, 0
    return plan.due(*args, **options)


class Run:
    """Batches of a run, and what is due at each; the weights move at every `accumulated` batches."""

    def __init__(self, epochs=1, batches=1300, accumulated=1, max_steps=-1, optimizers=0):
        module = SimpleNamespace(automatic_optimization=not optimizers)
        self.epochs, self.batches, self.accumulated, self.stride = epochs, batches, accumulated, max(1, optimizers)
        self.trainer = SimpleNamespace(
            lightning_module=module,
            optimizers=[None] * optimizers,
            max_steps=max_steps,
            max_epochs=epochs,
            num_training_batches=batches,
            accumulate_grad_batches=accumulated,
            is_last_batch=False,
            global_step=0,
            current_epoch=0,
        )

    def due(self, ask, flags=None, skipped=()):
        schedule, budget, trainer, found = Schedule(), Budget(), self.trainer, []
        plan = Plan(schedule, budget, Messenger("raise"))
        settings, later = DEFAULTS, dict(flags or {})
        count = 0
        for epoch in range(self.epochs):
            for batch in range(self.batches if self.batches != math.inf else 60):
                trainer.current_epoch, trainer.global_step = epoch, count // self.accumulated * self.stride
                trainer.is_last_batch = batch == 59
                settings = Settings.of({**DEFAULTS.flags(), **later.pop(count)}) if count in later else settings
                due = ask(plan, trainer, trainer.global_step, batch, settings, checking=False, reads=lambda _: True)
                if due is not None:
                    found.append((epoch, batch, due))
                    context = SimpleNamespace(step=trainer.global_step, **due._asdict())
                    schedule.note(context, trained=count not in skipped, has_order1=False)
                count += 1
        return found


RUNS = {
    "one epoch": {},
    "epochs": {"epochs": 4, "batches": 30},
    "accumulated": {"epochs": 3, "batches": 41, "accumulated": 4},
    "steps": {"max_steps": 777},
    "unknown length": {"epochs": 2, "batches": math.inf},
    "two optimizers": {"optimizers": 2, "batches": 200, "max_steps": 400},
}
FLAGS = {
    "defaults": None,
    "often": {0: {"every_n_steps": 7, "read_every_n_steps": 3}},
    "order 1": {0: {"order1_every_n_steps": 25}},
    "set on the way": {0: {"every_n_steps": 500}, 33: {"read_every_n_steps": 2}, 50: {"every_n_steps": 11}},
}


@pytest.mark.parametrize("flags", FLAGS.values(), ids=FLAGS)
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_what_is_due_is_the_same_as_if_it_were_asked_each_time(run, flags):
    found, expected = (Run(**run).due(ask, flags, skipped=(0, 10, 21)) for ask in (Plan.due, asked_each_time))
    assert found == expected
    assert found[-1][2].is_last
    assert {due.is_event for _, _, due in found} == {True, False}


def test_in_plain_steps_nobody_is_asked_and_most_look_at_the_clock_once(tmp_path, monkeypatch):
    asked, looks = [], []

    class Clock:
        def __call__(self):
            looks.append(callback._session._last_step if callback._session else -1)
            return 0.01 * len(looks)

    class Asked(Schedule):
        def is_due(self, step, *args, **options):
            asked.append(step)
            return super().is_due(step, *args, **options)

    monkeypatch.setattr(state, "Budget", lambda: Budget(Clock()))
    monkeypatch.setattr(state, "Schedule", Asked)
    callback = NormGradCallback(every_n_steps=200, read_every_n_steps=200, check=False, on_error="raise")
    train(Lit, tmp_path, callback, data=lambda: loader(4 * 150))
    assert asked == [0, 1, 149]
    of_plain_steps = [looks.count(step) for step in range(70, 140)]
    assert of_plain_steps.count(1) == 63
    assert sum(of_plain_steps) <= 63 + 7 * 6
