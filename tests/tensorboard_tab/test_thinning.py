"""A long run stores no more than its budget: all events at first, then fewer, the first always."""

from itertools import pairwise

import pytest

from normgrad_lightning.tensorboard_tab.thinning import Thinning


def stored(count, size, budget):
    thinning = Thinning(budget)
    return [step for step in range(count) if thinning.takes(size)]


def test_a_short_run_is_stored_whole():
    assert stored(10, 100, 10_000) == list(range(10))


@pytest.mark.parametrize("count", [1, 2, 100, 1001, 20_000])
@pytest.mark.parametrize("size", [10, 333])
def test_a_long_run_stays_below_its_budget(count, size):
    steps = stored(count, size, 20_000)
    assert size * len(steps) <= 20_000
    assert steps[0] == 0


def test_what_is_left_out_is_left_out_evenly():
    steps = stored(20_000, 100, 40_000)
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps == sorted(gaps)
    assert set(gaps) <= {2**n for n in range(20)}
    assert len(steps) > 200


def test_the_first_event_is_stored_whatever_its_size():
    assert stored(1, 100, 10) == [0]
