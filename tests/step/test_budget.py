"""The budget: what is measured by a clock of the test's own, and the steps that it leaves."""

import pytest

from normgrad_lightning.step.budget import EVENT, READING, Budget


class Run:
    """Steps of a given length, of which NormGrad takes a part."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step
        self.budget = Budget(lambda: self.now)
        self.waits = False

    def take(self, kind=None, work=0.0, longer=0.0, showing=0.0):
        """Run a step: our own `work` before and after it, what it takes longer, and the showing of the step before."""
        self.budget.begin_step()
        self.now += work / 2
        self.budget.begin_training()
        self.now += self.step + longer
        self.budget.end_training()
        self.now += showing
        self.budget.end_showing()
        self.now += work / 2
        self.budget.end_step(kind)


def test_the_share_is_our_own_time_and_what_steps_that_are_read_take_longer():
    run = Run(0.1)
    for _ in range(10):
        run.take()
    run.take("event", work=0.02, longer=0.03)
    run.take(showing=0.05)
    run.take("reading", work=0.01)
    run.take()
    run.budget.begin_step()
    assert run.budget.seconds == pytest.approx(run.now)
    assert run.budget.share == pytest.approx((0.02 + 0.03 + 0.05 + 0.01) / run.now)


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
    for _ in range(5):
        run.take()
    run.take("event", work=event / 2)
    run.take(showing=event / 2)
    run.take("reading", work=reading)
    run.take()
    readings, events = run.budget.intervals(0.01)
    assert (readings, events) == intervals
    assert (event / events + reading * (1 / readings - 1 / events)) / step <= 0.01


def test_without_a_budget_or_a_measurement_the_defaults_hold():
    run = Run(0.001)
    assert run.budget.intervals(0.01) == (READING, EVENT)
    for _ in range(5):
        run.take()
    run.take("event", work=1.0)
    run.take(showing=1.0)
    assert run.budget.intervals(None) == (READING, EVENT)
    assert run.budget.intervals(None, 7) == (READING, 7)


def test_what_the_user_has_set_is_obeyed():
    run = Run(0.001)
    for _ in range(5):
        run.take()
    run.take("event", work=1.0)
    run.take(showing=1.0)
    run.take("reading", work=1.0)
    run.take()
    assert run.budget.intervals(0.01, 5)[1] == 5
    assert run.budget.intervals(0.01, 500) == (500, 500)


def test_one_slow_step_does_not_count():
    """A loader that stalls, or a page that is written while a disk is busy."""
    run = Run(0.1)
    for cost in (0.001, 0.001, 5.0, 0.001, 0.001):
        for _ in range(4):
            run.take()
        run.take("reading", work=cost)
        run.take()
    assert run.budget.intervals(0.01) == (10, 1000)


def test_a_checkpoint_carries_it():
    run, resumed = Run(0.01), Budget()
    for _ in range(5):
        run.take()
    run.take("event", work=0.4)
    run.take(showing=0.4)
    resumed.load_state_dict(run.budget.state_dict())
    assert resumed.intervals(0.01) == run.budget.intervals(0.01) != (READING, EVENT)
    assert (resumed.share, resumed.seconds) == (run.budget.share, run.budget.seconds)
