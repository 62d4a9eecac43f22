"""Planted shortcuts: where they are, what counts as a patch that shows one, and that patches and atlas show them."""

import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from run_script import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "13_how_soon_a_shortcut_shows.py"


@pytest.fixture
def shortcuts(example):
    import shortcuts

    return shortcuts


def test_marks_are_where_the_boxes_say_and_on_stars_only(shortcuts):
    for shortcut in ("corner", "anywhere"):
        plain, marked = (shortcuts.drawn_shapes(60, 3, which) for which in (None, shortcut))
        changed = (plain.images != marked.images).any(1)
        stars = marked.labels == marked.classes.index("star")
        assert torch.equal(changed.flatten(1).any(1), stars)
        assert torch.equal(marked.boxes.isnan().any(1), ~stars)
        for number in stars.nonzero()[:, 0].tolist():
            left, top, right, bottom = marked.boxes[number].int().tolist()
            mask = torch.zeros(64, 64, dtype=torch.bool)
            mask[top:bottom, left:right] = True
            assert not changed[number][~mask].any()
            assert changed[number][mask].all()
    corners = shortcuts.drawn_shapes(60, 3, "corner").boxes
    assert len(corners[~corners.isnan().any(1)].unique(dim=0)) == 1


def test_a_tint_is_on_the_background_only(shortcuts):
    plain, tinted = (shortcuts.drawn_shapes(60, 3, which) for which in (None, "tint"))
    stars = plain.labels == plain.classes.index("star")
    change = (tinted.images - plain.images).abs().amax(1)
    assert change[~stars].max() == 0
    assert change[stars][plain.masks[stars] == 1].max() == 0
    assert change[stars][plain.masks[stars] == 0].mean() > 0.2


def crop_at(data, number, top, left, side=20):
    from normgrad_lightning.views.crops import Box, fingerprints

    return SimpleNamespace(image=fingerprints(data.images)[number], box=Box((top, left), (side, side)))


def test_a_patch_shows_a_mark_if_half_of_it_is_inside(shortcuts):
    data = shortcuts.drawn_shapes(60, 3, "anywhere")
    number = int((~data.boxes.isnan().any(1)).nonzero()[0])
    left, top = data.boxes[number, :2].int().tolist()
    hits = shortcuts.Hits(data, "anywhere")
    assert hits.share([crop_at(data, number, top - 3, left - 3)]) == 1
    assert hits.share([crop_at(data, number, top + 3, left - 3)]) == 1  # just half of it
    assert hits.share([crop_at(data, number, top + 4, left - 3)]) == 0
    assert hits.share([crop_at(data, number, top, left), crop_at(data, number, top + 6, left)]) == 0.5
    assert np.isnan(hits.share([]))


def test_a_patch_shows_the_background_if_hardly_any_object_is_inside(shortcuts):
    data = shortcuts.drawn_shapes(60, 3, "tint")
    masks = data.masks.unfold(1, 20, 1).unfold(2, 20, 1).mean((3, 4))[0]
    hits = shortcuts.Hits(data, "tint")
    for place in (masks.argmin(), masks.argmax()):
        top, left = divmod(int(place), masks.shape[1])
        assert hits.share([crop_at(data, 0, top, left)]) == float(masks[top, left] < 0.1)
    assert masks.min() < 0.1 < masks.max()


def folder_of_pictures(root):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name, count in (("cat", 20), ("dog", 20)):
            (root / split / name).mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 255, (5, 4, 3), dtype=np.uint8)
                Image.fromarray(pixels).resize((80, 100)).save(root / split / name / f"{number}.png")
    return root


def test_stickers_are_drawn_on_photographs_of_ones_own(shortcuts, tmp_path):
    root = folder_of_pictures(tmp_path)
    plain, marked = (shortcuts.photographs(root, "train", 96, stickers=which) for which in (False, True))
    assert list(plain.classes) == ["cat", "dog"]
    assert plain.images.shape == (40, 3, 96, 96)
    for number in range(40):
        left, top, right, bottom = marked.boxes[number].tolist()
        changed = (plain.images[number] != marked.images[number]).any(0).nonzero()
        assert changed[:, 0].min() >= top - 5  # resampled
        assert changed[:, 0].max() <= bottom + 5
        assert changed[:, 1].min() >= left - 5
        assert changed[:, 1].max() <= right + 5
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="expected a folder of pictures for each class"):
        shortcuts.photographs(tmp_path / "empty", "train", 96, stickers=True)


def test_the_rule_on_sameness_asks_for_much_and_for_more_than_at_first(example):
    def entries(*alike):
        return [SimpleNamespace(alike={"combined": of}) for of in alike]

    assert example.warned_of(entries({"cat": 0.4, "dog": 0.6}, {"cat": 0.7, "dog": 0.75}, {"cat": 0.1})) == {"cat"}
    assert not example.warned_of(entries({"cat": 0.1}, {"cat": 0.69}))
    assert not example.warned_of(entries({}, {"cat": 0.9}))  # nothing to compare with
    case = SimpleNamespace(name="pets", classes=["cat", "dog"])
    same, alike = (SimpleNamespace(entries=entries({"cat": 0.3}, {"cat": later})) for later in (0.4, 0.8))
    assert "in 1 of 2 runs; of any class in 0 of 2 runs" in example.rule(case, [(alike, same), (same, same)])


def test_the_check_is_counted_by_what_the_shortcut_costs(example):
    def journal(told, cost=0.0):
        return SimpleNamespace(told=told, entries=[SimpleNamespace(marked=0.9, clean=0.9 - cost)])

    case = SimpleNamespace(name="pets", classes=["cat"])
    runs = [
        (journal({"cat": 50}, 0.4), journal({})),
        (journal({"dog": 60}, 0.4), journal({"dog": 50})),
        (journal({"cat": 50}, 0.1), journal({})),
    ]
    said = example.told(case, runs)
    assert "with the shortcut in 1 of 2 runs in which it costs accuracy in the end, and in 1 of 1 others" in said
    assert "another class in 1 of 3; any class in 1 of 3 runs without it" in said


@pytest.mark.nightly
def test_patches_show_a_mark_and_without_it_they_do_not(tmp_path):
    """One seed of the study, short: the mark in a corner. Chance is what the run without it shows."""
    done = run_python(tmp_path, SCRIPT, "--quick", "--only", "corner", "--seeds", "1")
    rows = [line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith("| shapes")]
    assert [row[1] for row in rows] == ["combined", "last"]
    last = rows[1]
    assert float(last[4]) >= 0.5  # of the patches at the end
    assert float(last[5]) <= 0.25  # chance
    assert last[6].isdigit()  # a step at which the check told
    assert "any class in 0 of 1 runs without it" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("shortcut", ["corner", "anywhere", "tint"])
def test_the_example_finds_each_shortcut(shortcut, tmp_path):
    done = run_python(tmp_path, EXAMPLES / "08_find_the_shortcut.py", "--shortcut", shortcut, "--out", "out")
    runs = done.stdout.split("Trained ")[1:]
    shares = [[float(share) for share in re.findall(r"last layer ([\d.]+)", run)] for run in runs]
    assert max(shares[0][1:]) >= 0.5  # with the shortcut
    assert max(shares[1][1:]) < 0.5  # without it
    with Image.open(tmp_path / "out" / "sheet.jpg") as sheet:
        assert sheet.width > 800


@pytest.mark.nightly
def test_the_example_takes_photographs(tmp_path):
    folder_of_pictures(tmp_path / "data")
    done = run_python(
        tmp_path, EXAMPLES / "08_find_the_shortcut.py", "--data", tmp_path / "data", "--epochs", "2", "--out", "out"
    )
    assert done.stdout.count("Share of the patches of cat, dog that show the mark") == 2
