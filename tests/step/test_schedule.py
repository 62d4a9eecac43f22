"""Which steps are events."""

from types import SimpleNamespace

import pytest

from normgrad_lightning.settings import ScheduleFlags
from normgrad_lightning.step.schedule import Schedule


def events(when, every, steps, stride=1, skipped=()):
    schedule, found = Schedule(), []
    for step in range(0, steps, stride):
        if schedule.is_due(step, when, every):
            trained = step not in skipped
            schedule.note(
                SimpleNamespace(step=step, is_event=True, with_order1=False), trained=trained, has_order1=False
            )
            found += [step] if trained else []
    return found


def test_by_default_events_come_early_and_then_regularly():
    when = ScheduleFlags()
    assert events(when, 1000, 3500) == [0, 10, 20, 50, 100, 200, 500, 1000, 2000, 3000]
    assert events(when, 2000, 5000) == [0, 10, 20, 50, 100, 200, 500, 2000, 4000]
    assert events(when, 1000, 120, stride=4) == [0, 12, 20, 52, 100]
    assert events(when, 1000, 60, skipped=(0, 10)) == [1, 11, 20, 50]


@pytest.mark.parametrize("every", [1, 7, 100])
def test_a_number_of_the_users_is_obeyed_to_the_letter(every):
    assert events(ScheduleFlags(every_n_steps=every), every, 300) == list(range(0, 300, every))
