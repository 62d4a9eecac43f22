"""The budget: what is measured by a clock of the test's own, and the steps that it leaves."""

import logging
from functools import partial

import pytest
from torch import nn
from twice import Lit, loader, train

from normgrad_lightning import NormGradCallback
from normgrad_lightning.fit import state
from normgrad_lightning.step.budget import EVENT, READING, Budget


class Run:
    """Steps of a given length, of which NormGrad takes a part."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step
        self.budget = Budget(lambda: self.now)
        self.waits = False

    def warm_up(self):
        """Take plain steps, and one of each other kind: the first of a kind does not count."""
        for kind in (None, None, None, None, "event", None, "reading", None, None):
            self.take(kind, piece=1e-9 if kind else 0.0)

    def take(self, kind=None, work=0.0, longer=0.0, showing=0.0, piece=0.0):
        """Run a step: our own `work` before and after it, what it takes longer, and the showing of the step before."""
        self.budget.begin_step()
        self.now += work / 2
        self.budget.begin_training()
        self.now += self.step + longer
        self.budget.end_training()
        self.now += showing
        self.budget.end_showing()
        self.now += work / 2
        if piece:
            with self.budget.piece():
                self.now += piece
        self.budget.end_step(kind)


def test_the_share_is_our_own_time_and_what_steps_that_are_read_take_longer():
    run = Run(0.1)
    for _ in range(10):
        run.take()
    run.take("event", work=0.02, longer=0.03, piece=0.04)
    run.take(showing=0.05)
    run.take("reading", work=0.01)
    run.take(work=0.002)
    run.budget.begin_step()
    assert run.budget.seconds == pytest.approx(run.now)
    assert run.budget.share == pytest.approx((0.02 + 0.03 + 0.04 + 0.05 + 0.01 + 0.002) / run.now)


@pytest.mark.parametrize(
    ("step", "reading", "event", "intervals"),
    [
        (1.0, 0.001, 0.01, (10, 1000)),
        (0.1, 0.01, 0.05, (20, 1000)),
        (0.01, 0.005, 0.04, (200, 1000)),
        (0.003, 0.01, 0.04, (2000, 2000)),
        (0.003, 0.01, 0.4, (5000, 20000)),
    ],
)
def test_readings_become_rarer_before_events_do_and_both_keep_within_it(step, reading, event, intervals):
    run = Run(step)
    run.warm_up()
    run.take("event", work=event / 2)
    run.take(showing=event / 2)
    run.take("reading", work=reading)
    run.take()
    readings, events, _ = run.budget.intervals(0.01)
    assert (readings, events) == intervals
    assert (event / events + reading * (1 / readings - 1 / events)) / step <= 0.01


def test_without_a_budget_or_a_measurement_the_defaults_hold():
    run = Run(0.001)
    assert run.budget.intervals(0.01) == (READING, EVENT, READING)
    run.warm_up()
    run.take("event", work=1.0)
    run.take(showing=1.0)
    assert run.budget.intervals(None) == (READING, EVENT, READING)
    assert run.budget.intervals(None, 7) == (READING, 7, READING)


def test_what_the_user_has_set_is_obeyed():
    run = Run(0.001)
    run.warm_up()
    run.take("event", work=1.0)
    run.take(showing=1.0)
    run.take("reading", work=1.0)
    run.take()
    assert run.budget.intervals(0.01, 5).events == 5
    assert run.budget.intervals(0.01, 500)[:2] == (500, 500)


@pytest.mark.parametrize(
    ("step", "reading", "piece", "while_checking", "afterwards"),
    [
        (1.0, 0.01, 0.03, (10, 10), (10, 10)),
        (0.2, 0.01, 0.1, (20, 100), (10, 200)),
        (0.1, 0.01, 0.2, (50, 500), (20, 1000)),
        (0.01, 0.003, 0.02, (200, 500), (100, 1000)),
    ],
)
def test_pieces_of_the_check_make_readings_no_rarer_than_twice(step, reading, piece, while_checking, afterwards):
    run = Run(step)
    run.warm_up()
    run.take("event", work=0.02, piece=piece)
    run.take()
    for _ in range(3):
        run.take("reading", work=reading, piece=piece)
        run.take()
    for checking, expected in ((True, while_checking), (False, afterwards)):
        readings, events, pieces = run.budget.intervals(0.01, checking=checking)
        assert (readings, pieces) == expected
        more = reading * max(0, 1 / readings - 1 / events) + piece * max(0, 1 / pieces - 1 / events)
        assert more + (0.02 + piece) / events <= 0.01 * step


def test_code_of_ours_in_plain_steps_counts_too():
    free, busy = Run(0.003), Run(0.003)
    for run, idle in ((free, 0.0), (busy, 1e-5)):
        for kind in (None, None, None, None, "event", None, "event", None, "reading", None, "reading", None):
            run.take(kind, work=0.002 if kind else idle)
    assert free.budget.intervals(0.01).readings == 100
    assert busy.budget.intervals(0.01).readings == 200


def test_one_slow_step_does_not_count():
    """A loader that stalls, or a page that is written while a disk is busy."""
    run = Run(0.1)
    run.warm_up()
    for cost in (0.001, 0.001, 5.0, 0.001, 0.001):
        for _ in range(4):
            run.take()
        run.take("reading", work=cost)
        run.take()
    assert run.budget.intervals(0.01) == (10, 1000, 10)


def test_a_checkpoint_carries_it():
    run, resumed = Run(0.01), Budget()
    run.warm_up()
    run.take("event", work=0.4)
    run.take(showing=0.4)
    run.budget.stop()
    resumed.load_state_dict(run.budget.state_dict())
    assert resumed.intervals(0.01) == run.budget.intervals(0.01) != (READING, EVENT, READING)
    assert (resumed.share, resumed.seconds) == (run.budget.share, run.budget.seconds)


class Timed(Lit):
    """Steps of 4 ms, by the test's clock; what is read of one takes 2 ms."""

    def __init__(self):
        super().__init__()
        self.now, self.read = [0.0], []

    def training_step(self, batch, batch_idx):
        self.now[0] += 0.004
        return super().training_step(batch, batch_idx)

    def normgrad_labels(self, batch):
        self.now[0] += 0.002
        self.read.append(self.global_step)
        return batch[1]


def test_in_a_fit_readings_become_as_rare_as_they_must_and_it_is_said_once(tmp_path, monkeypatch, caplog):
    module = Timed()
    monkeypatch.setattr(state, "Budget", partial(Budget, lambda: module.now[0]))
    callback = NormGradCallback(check=False, views="patches", on_error="raise")
    with caplog.at_level(logging.INFO, "pytorch_lightning"):
        train(lambda: module, tmp_path, callback, data=lambda: loader(600))
    assert module.read == [0, 10, 20, 30, 40, 50, 100, 149]
    said = [record.message for record in caplog.records if "plans for" in record.message]
    assert said == [
        "NormGrad plans for 1 % of the training time (`budget=0.01`): it reads every 100 steps and, after the first "
        "500 steps, shows maps every 1000."
    ]
    assert callback.cost == pytest.approx(8 * 0.002 / (150 * 0.004 + 8 * 0.002))


CLOCK = [0.0]
"""Out of reach of what passes put back."""


class TimedPasses(Lit):
    """Steps and passes of a second for each image, by the test's clock; what is read of a step takes two."""

    def __init__(self):
        super().__init__(
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5))
        )

    def loss(self, batch):
        CLOCK[0] += len(batch[0])
        return 2 * super().loss(batch)  # which the network alone does not give: all passes are those of the step

    def normgrad_labels(self, batch):
        CLOCK[0] += 2
        return batch[1]


@pytest.mark.parametrize(
    ("asked", "advised"),
    [
        ({"every_n_steps": 1}, {"every_n_steps": 20}),
        ({"read_every_n_steps": 1}, {"read_every_n_steps": 20}),
        ({"order1_every_n_steps": 4, "num_images": 1}, {"order1_every_n_steps": 400}),
        ({"every_n_steps": 20, "order1_every_n_steps": 400, "num_images": 4}, {"num_images": 1}),
        ({"every_n_steps": 5, "probe": "train"}, {"probe": False}),
        ({"check": True}, {"check": False}),
    ],
    ids=lambda flags: " ".join(flags),
)
def test_what_costs_much_because_it_was_asked_for_is_told_and_what_is_advised_makes_it_cheaper(
    asked, advised, tmp_path, monkeypatch
):
    monkeypatch.setattr(state, "Budget", partial(Budget, lambda: CLOCK[0]))
    told = {}
    for name, flags in (("asked", asked), ("advised", {**asked, **advised})):
        flags = {"check": False, "budget": None, "views": "patches", "on_error": "warn", **flags}
        run = train(TimedPasses, tmp_path / name, NormGradCallback(**flags), data=lambda: loader(320))
        told[name] = [text for text in run.warned if "% of the training time" in text], run.callback.cost
    ((text,), cost), (_, less) = told.values()
    assert all(f"`{flag}" in text for flag in advised), text
    assert less < 0.6 * cost


@pytest.mark.parametrize("flags", [{}, {"every_n_steps": 40}], ids=["defaults", "rare"])
def test_what_was_not_asked_for_or_costs_little_is_not_told(flags, tmp_path, monkeypatch):
    """Steps of 2 s, by the test's clock; what is read of one takes as long."""
    module = Timed()
    monkeypatch.setattr(state, "Budget", partial(Budget, lambda: 500 * module.now[0]))
    callback = NormGradCallback(views="patches", on_error="raise", **flags)
    run = train(lambda: module, tmp_path, callback, data=lambda: loader(160))
    assert not [text for text in run.warned if "of the training time" in text]


def test_plain_steps_that_nobody_measures_count_as_those_before_them():
    run = Run(0.01)
    for _ in range(50):
        run.take(work=0.001)
    before = run.now, run.budget.share
    for _ in range(90):
        run.budget.begin_step()
        if run.budget.skips():
            run.now += 0.011
        else:
            run.now += 0.0005
            run.budget.begin_training()
            run.now += 0.01
            run.budget.end_training()
            run.budget.end_showing()
            run.now += 0.0005
            run.budget.end_step(None)
    assert run.now > 2 * before[0]
    assert run.budget.share == pytest.approx(before[1]) == pytest.approx(1 / 11)
