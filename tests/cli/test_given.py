"""What `explain` finds in a checkpoint and is told of classes and normalisation."""

from argparse import Namespace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from networks import ResNet
from omegaconf import OmegaConf
from PIL import Image

from normgrad_lightning.cli.classes import class_name, class_number, read_classes
from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.hyperparameters import class_names, class_path, normalisation
from normgrad_lightning.cli.loading import load_images

COLOURS = ((250, 20, 30), (20, 200, 40), (30, 60, 240), (240, 240, 20))


def biased(guess=2):
    """A network whose guess does not depend on the image."""
    torch.manual_seed(0)
    net = ResNet()
    with torch.no_grad():
        net.fc.bias.copy_(torch.eye(5)[guess] * 100)
    return net


def by_colour():
    """A network that guesses class 0, 1 or 2 for red, green and blue."""

    class Colours(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = torch.nn.Conv2d(3, 3, 1, bias=False)

        def forward(self, x):
            return self.conv(x).mean((2, 3))

    net = Colours()
    torch.nn.init.dirac_(net.conv.weight)
    return net


@pytest.fixture
def explained(tmp_path, monkeypatch, capsys):
    """Runs `explain` on four pictures, of a network with these hyperparameters."""

    def explain(maker, *options, images=4, hyperparameters=None, **contents):
        saved = {"state_dict": globals()[maker]().state_dict(), **contents}
        if hyperparameters is not None:
            saved["hyper_parameters"] = hyperparameters
        torch.save(saved, tmp_path / "a.ckpt")
        files = []
        for i in range(images):
            files.append(f"{tmp_path}/{i}.png")
            Image.new("RGB", (12, 16), COLOURS[i]).save(files[-1])
        command = ["explain", f"{tmp_path}/a.ckpt", *files, "--module", f"{__file__}:{maker}", "--maps", "order0"]
        code = main([*command, "--out", f"{tmp_path}/maps", *options])
        said = capsys.readouterr().err.splitlines()
        numbers = dict(np.load(tmp_path / "maps.npz")) if code == 0 else {}
        return SimpleNamespace(code=code, said=said, numbers=numbers, sheet=tmp_path / "maps.png", files=files)

    return explain


# ---------------------------------------------------------------- one guess for all

DOUBT = "All {} images get one guess, {}: is the normalisation right? --mean and --std set it."


def test_one_guess_for_all_images_is_doubted(explained):
    result = explained("biased", images=3)
    assert DOUBT.format(3, 2) in result.said
    assert "label 2 (the model's own guess, 100%)" in result.said[0]
    doubted = Image.open(result.sheet).copy()
    plain = Image.open(explained("biased", "--label", "2", images=3).sheet)
    band = doubted.height - plain.height
    assert band > 20
    heading = np.asarray(doubted.crop((0, 0, doubted.width, band)))
    assert heading.min() < 60  # it is written there
    below = np.asarray(doubted.crop((0, band, plain.width, doubted.height))).astype(int)
    tiles = np.abs(below - np.asarray(plain)).max(-1) > 0
    assert tiles.mean() < 0.05  # and the rest is the same, but for captions


@pytest.mark.parametrize(
    ("maker", "options", "images"),
    [("biased", ("--label", "2"), 4), ("biased", (), 2), ("biased", (), 1), ("by_colour", (), 3)],
    ids=["labels are given", "two images", "one image", "guesses differ"],
)
def test_nothing_else_is_doubted(maker, options, images, explained):
    result = explained(maker, *options, images=images)
    assert result.code == 0
    assert not any("normalisation" in line for line in result.said)


# ---------------------------------------------------------------- classes


def test_classes_have_names_in_captions_labels_and_numbers(explained, tmp_path):
    names = ["red car", "green tree", "blue sea"]
    (tmp_path / "names.txt").write_text("\n".join(names) + "\n\n")
    for options, saved in (
        (("--classes", "red car, green tree,blue sea"), None),
        (("--classes", f"{tmp_path}/names.txt"), {"classes": ["a", "b", "c"]}),
        ((), {"class_names": names}),
        ((), {"classes": tuple(names)}),
    ):
        result = explained("by_colour", *options, images=3, hyperparameters=saved)
        assert [line.split(": label ")[1].split(" (")[0] for line in result.said] == names
        assert result.numbers["classes"].tolist() == names
        assert result.numbers["labels"].tolist() == [0, 1, 2]


def test_labels_are_names_or_numbers(explained):
    result = explained("by_colour", "--classes", "cat,dog,10", "--label", "dog", "0", "10", images=3)
    assert result.numbers["labels"].tolist() == [1, 0, 2]
    assert [line.split(": label ")[1] for line in result.said] == ["dog", "cat", "10"]
    assert explained("by_colour", "--label", "dog").code == 1


def test_names_that_do_not_fit_the_model(explained):
    result = explained("by_colour", hyperparameters={"classes": ["a", "b"]})
    assert result.code == 0
    assert result.said[0] == "The checkpoint has names for 2 classes, but the model knows 3: they are not used."
    assert ": label 0 (the model's own guess, " in result.said[1]
    result = explained("by_colour", "--classes", "a,b")
    assert result.code == 1
    assert "expected 3 names" in result.said[0]


def test_a_number_of_classes_is_no_list_of_names():
    for value in (7, None, [], [1, 2], "cat,dog", ["cat"]):
        assert class_names({"hyper_parameters": {"classes": value}}) is None
    both = {"hyper_parameters": {"classes": 3}, "datamodule_hyper_parameters": {"class_names": ["a", "b", "c"]}}
    assert class_names(both) == ["a", "b", "c"]


def test_many_names_between_commas():
    names = [f"class number {i}" for i in range(1000)]
    assert read_classes(",".join(names)) == names  # longer than a file's name can be


def test_a_name_counts_before_a_number():
    assert class_number(3, ["3", "2", "1", "0"]) == 0
    assert class_number(3, ["a", "b"]) == 3
    assert [class_name(i, ["a", "b"]) for i in (1, 2)] == ["b", "2"]


# ---------------------------------------------------------------- mean and std


def test_the_mean_and_std_of_the_checkpoint_are_used_and_told(explained):
    mean, std = [0.5, 0.25, 0.125], [0.5, 0.25, 0.2]
    result = explained("by_colour", hyperparameters={"mean": mean, "std": std})
    told = "Images are normalised with mean 0.5,0.25,0.125 and std 0.5,0.25,0.2, from the checkpoint's hyperparameters."
    assert result.said[0] == told
    expected = (torch.tensor(COLOURS)[:, :, None, None] / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[
        :, None, None
    ]
    np.testing.assert_allclose(result.numbers["images"], expected.expand(-1, -1, 16, 12), rtol=1e-5, atol=1e-6)
    sheet = np.asarray(Image.open(result.sheet)).reshape(-1, 3).tolist()
    assert all(list(colour) in sheet for colour in COLOURS)  # drawn as the files have them


def test_what_is_given_counts_before_the_checkpoint(explained):
    saved = {"mean": [0.1, 0.2, 0.3], "std": 0.5}
    result = explained("by_colour", "--mean", "0.25", "--std", "0.125", hyperparameters=saved)
    assert "normalised" not in result.said[0]
    images = load_images(result.files, mean=[0.25], std=[0.125])
    np.testing.assert_allclose(result.numbers["images"], images)
    result = explained("by_colour", "--mean", "0.25", hyperparameters=saved)
    assert result.said[0] == "Images are normalised with std 0.5, from the checkpoint's hyperparameters."


@pytest.mark.parametrize(
    "saved",
    [
        {"mean": [0.5], "std": [0.25]},
        {"mean": 0.5, "std": 0.25},
        {"mean": torch.tensor([0.5]), "std": (0.25,)},
        {"mean": 127.5, "std": 63.75},  # for pixels from 0 to 255
        Namespace(mean=0.5, std=0.25),
        OmegaConf.create({"mean": [0.5], "std": [0.25]}),
    ],
    ids=["lists", "numbers", "tensors", "bytes", "Namespace", "OmegaConf"],
)
@pytest.mark.parametrize("place", ["hyper_parameters", "datamodule_hyper_parameters"])
def test_however_they_are_saved(saved, place):
    assert normalisation({place: saved}, 3) == {"mean": [0.5], "std": [0.25]}


def test_the_module_counts_before_the_data_module():
    contents = {"hyper_parameters": {"mean": 0.5}, "datamodule_hyper_parameters": {"mean": 0.1, "std": 0.2}}
    assert normalisation(contents, 3) == {"mean": [0.5], "std": [0.2]}


def test_what_cannot_be_a_normalisation_is_left_alone():
    for mean in ("imagenet", [0.1, 0.2], [[0.5]], True, float("nan"), None, {"red": 0.5}):
        assert normalisation({"hyper_parameters": {"mean": mean, "std": 0.0}}, 3) == {}
    assert normalisation({}, 3) == normalisation({"hyper_parameters": None}, 3) == {}


def test_the_class_that_a_checkpoint_names():
    assert class_path({"hyper_parameters": {"_class_path": "a.b.C"}}) == "a.b:C"
    assert class_path({"hyper_parameters": {"_target_": "a.C"}}) == "a:C"
    assert class_path({"hyper_parameters": {"_class_path": "C"}}) is None
    assert class_path({}) is None


@pytest.mark.parametrize(
    ("mean", "std", "said"),
    [
        ([0.5, 0.5], [0.2, 0.2, 0.2], "mean [0.5, 0.5]"),
        ("imagenet", "imagenet", "mean 'imagenet' and std 'imagenet'"),
        ([0.5] * 3, 0.0, "std 0.0"),
    ],
)
def test_half_of_a_normalisation_is_not_used_and_that_is_said(explained, mean, std, said):
    result = explained("by_colour", hyperparameters={"mean": mean, "std": std})
    assert result.said[0] == (
        f"The checkpoint's hyperparameters have {said}, which cannot normalise images of 3 channels: nothing of them "
        "is used. Set --mean and --std."
    )
    assert np.array_equal(result.numbers["images"], explained("by_colour").numbers["images"])
    result = explained("by_colour", "--mean", "0.5", "--std", "0.2", hyperparameters={"mean": mean, "std": std})
    assert not any("hyperparameters" in line for line in result.said)


def test_a_class_without_a_name_has_its_number():
    assert [class_name(label, ["a", "", "c"]) for label in range(4)] == ["a", "1", "c", "3"]
