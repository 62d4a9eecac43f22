"""A long run stores no more than its budget: all events at first, then fewer, the first and the last always."""

from itertools import pairwise

import pytest

from normgrad_lightning.tensorboard_tab.thinning import Event, Thinning


def stored(count, size, budget):
    thinning = Thinning(budget)
    kept = [event for step in range(count) if (event := thinning.add(Event(step, bytes(size))))]
    last = thinning.finish()
    return [event.step for event in kept], None if last is None else last.step


def test_a_short_run_is_stored_whole():
    assert stored(10, 100, 10_000) == (list(range(10)), None)


@pytest.mark.parametrize("count", [1, 2, 100, 1001, 20_000])
@pytest.mark.parametrize("size", [10, 333])
def test_a_long_run_stays_below_its_budget(count, size):
    steps, last = stored(count, size, 20_000)
    assert size * len(steps) <= 20_000
    assert steps[0] == 0
    assert max(steps) == count - 1 or last == count - 1


def test_what_is_left_out_is_left_out_evenly():
    steps, _ = stored(20_000, 100, 40_000)
    gaps = [after - before for before, after in pairwise(steps)]
    assert gaps == sorted(gaps)
    assert set(gaps) <= {2**n for n in range(20)}
    assert len(steps) > 200


def test_the_first_event_is_stored_whatever_its_size():
    assert stored(1, 100, 10) == ([0], None)
