"""How often the check is right: what counts, and one short pair of runs."""

from pathlib import Path

import pytest
from run_script import run_python

from normgrad_lightning.check.rounds import Check, Measured
from normgrad_lightning.check.rule import rests

SCRIPT = Path(__file__).parents[2] / "examples" / "15_how_often_the_check_is_right.py"


@pytest.mark.parametrize(
    ("hits", "count", "text"),
    [(10, 10, "10 of 10 (72% – 100%)"), (0, 20, "0 of 20 (0% – 16%)"), (1, 20, "1 of 20 (1% – 24%)")],
)
def test_intervals_are_wilsons(example, hits, count, text):
    """Against the table of Brown, Cai and DasGupta's method, as statsmodels gives it."""
    assert example.interval(hits, count) == text


def state_of(rises):
    """What a checkpoint has of a check in which covering and pasting add so much to the losses of each class."""
    check = Check()
    check.names = dict(enumerate(rises))
    check._now = {label: Measured() for label in range(len(rises))}
    for label, rise in enumerate(rises.values()):
        for image in range(8):
            noise = 0.01 * image
            check._now[label].add("square", image, [0.1, rise + noise, 0.0, rise - noise, 0.0, 1.0, 0.0])
    return check.state_dict()["check"]


def run_of(example, accuracy, *rises, case="drawn"):
    states = [(10 * number, state_of(of)) for number, of in enumerate(rises, 1)]
    return example.Run(case, list(accuracy), 0, 16, accuracy, states)


def test_a_kept_run_is_judged_by_the_rule_as_it_is(example, tmp_path, monkeypatch):
    run = run_of(example, {"cat": (1.0, 0.3)}, {"cat": 0.2, "dog": 0.1}, {"cat": 5.0, "dog": 0.4}, {"cat": 6.0})
    file = tmp_path / "runs.json"
    file.write_text(example.json.dumps([example.asdict(run)]))
    (read,) = example.kept([file])
    told, largest = example.judged(read)
    assert told == {"cat": 20}
    assert largest == pytest.approx(6.0 - 0.035)
    assert read.learned == ["cat"]
    monkeypatch.setattr(example, "rests", lambda found: rests(found) and found.covered > 5.5)  # says less
    assert example.judged(read).told == {"cat": 30}


def test_the_table_counts_runs(example):
    learned, not_learned = {"cat": (1.0, 0.3), "dog": (0.9, 0.9)}, {"cat": (0.9, 0.8), "dog": (0.9, 0.9)}
    high, low = {"cat": 5.0, "dog": 0.0}, {"cat": 0.5, "dog": 0.2}
    runs = [
        run_of(example, learned, low, high),  # step 20: within two epochs of 16 steps
        run_of(example, learned, low, low, low, high),  # at 40: too late
        run_of(example, learned, low, {"cat": 0.0, "dog": 5.0}),  # another class that has a mark: not told
        run_of(example, learned, {**high, "bird": 5.0}),
        run_of(example, not_learned, high),
        run_of(example, {}, low),
        run_of(example, {}, high),
    ]
    cells = example.row("drawn", runs)
    assert cells[1] == "4 of 5"
    assert cells[2].startswith("2 of 4 ")
    assert cells[3].startswith("3 of 4 ")
    assert cells[4] == "10 – 40"
    assert cells[5].startswith("1 of 5 ")
    assert cells[6] == "1 of 1"
    assert cells[7].startswith("1 of 2 ")
    assert len(example.HEAD) == len(cells)


@pytest.mark.slow
def test_a_mark_is_told_and_pictures_without_it_are_not(tmp_path):
    done = run_python(
        tmp_path, SCRIPT, "--quick", "--only", "corner", "--runs", "1", "--first", "99", "--json", "runs.json"
    )
    marked, clean, *_, last = done.stdout.strip().splitlines()
    assert "marked, learned ['star']: told {'star': " in marked
    assert "clean: told nothing" in clean
    again = run_python(tmp_path, SCRIPT, "--judge", "runs.json")
    assert again.stdout.strip().splitlines()[-1] == last
