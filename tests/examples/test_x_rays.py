"""What X-rays are told by: patches in corners, what is covered with what, and a short run on drawn pictures."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from run_script import run_python

from normgrad_lightning.views.crops import Box

SCRIPT = Path(__file__).parents[2] / "examples" / "14_what_x_rays_are_told_by.py"


@pytest.mark.parametrize("size", [48, 96])
def test_corners_and_sides_are_as_large_and_apart(example, size):
    corners, sides = example.corners(size), example.sides(size)
    assert not (corners & sides).any()
    assert corners.float().mean() == sides.float().mean() == 0.25
    for region in (corners, sides):
        assert torch.equal(region, region.rot90())
        assert not region[size // 4 : -size // 4, size // 4 : -size // 4].any()
    assert corners[0, 0]
    assert sides[0, size // 2]


def test_a_patch_is_in_a_corner_if_its_middle_is(example):
    def crop(top, left):
        return SimpleNamespace(box=Box((top, left), (36, 36)), size=(100, 100))

    share = example.InCorners().share
    assert share([crop(0, 0), crop(0, 64), crop(64, 0), crop(64, 64)]) == 1
    assert share([crop(0, 30), crop(30, 0), crop(30, 30), crop(6, 6)]) == 0.25
    assert np.isnan(share([]))


def test_what_covers_comes_from_the_other_class_and_from_the_same_place(example):
    data = example.drawn(20, 0, 16)
    data = example.replace(data, images=torch.arange(20.0)[:, None, None, None].expand(-1, 3, 16, 16))
    where = example.corners(16)
    changed = example.covered(data, where)
    assert torch.equal(changed.images[:, :, ~where], data.images[:, :, ~where])
    donors = changed.images[:, 0, 0, 0].long()
    assert (data.labels[donors] != data.labels).all()
    assert (changed.images[:, :, where] == donors[:, None, None]).all()


def test_letters_of_drawn_pictures_are_in_upper_corners_of_one_class(example):
    data = example.drawn(400, 5)
    upper = data.images[:, 0, :12].masked_fill(~example.corners(48)[:12], -1)
    has_letter = upper.flatten(1).amax(1) > 0.8
    shares = [has_letter[data.labels == label].float().mean().item() for label in (0, 1)]
    assert shares == pytest.approx([0.7, 0.1], abs=0.1)


def test_a_folder_of_something_else_is_refused(example, tmp_path):
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("L", (8, 8)).save(tmp_path / split / name / "1.png")
    with pytest.raises(SystemExit, match=r"expected the folders covid and other, but found \['cat', 'dog'\]"):
        next(example.studies(tmp_path, quick=True))


@pytest.mark.slow
def test_letters_in_corners_are_found_and_cost_accuracy(tmp_path):
    done = run_python(tmp_path, SCRIPT, "--quick", "--json", "figures.json")
    ((run,),) = json.loads((tmp_path / "figures.json").read_text()).values()
    assert run["entries"][-1]["hits"]["combined"]["covid"] >= 0.75
    kept = {way: sum(of) / 2 for way, of in run["accuracy"].items()}
    assert kept["as they are"] > 0.7
    assert kept["corners of the other class"] < kept["sides of the other class"] - 0.1
    assert done.stdout.count("\n| --- |") == 2
