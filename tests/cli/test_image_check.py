"""`normgrad-lightning explain` does the check for the given images, and says what it measured."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from normgrad_lightning.check import card
from normgrad_lightning.cli.command import main

PLACE = (slice(5, 7), slice(14, 16))  # of images of 20 x 20


class ByPlace(nn.Module):
    """Class 1 if the place is white: the scores differ by 4, either way."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 1, bias=False)
        nn.init.dirac_(self.conv.weight)

    def forward(self, x):
        score = 8 * self.conv(x)[(slice(None), 0, *PLACE)].mean((1, 2)) - 4
        return torch.stack([torch.zeros_like(score), score], 1)


class ByChance(ByPlace):
    """What enters the layer is another image each time."""

    def forward(self, x):
        return super().forward(x + torch.rand(1, generator=torch.Generator().manual_seed(next(DRAWS))))


DRAWS = iter(range(10_000))


@pytest.fixture
def explain(tmp_path, capsys):
    """Runs `explain` on as many images of each class; what it tells, and the sheet."""

    def run(maker, counts):
        torch.save(ByPlace().state_dict(), tmp_path / "a.pt")
        files, labels = [], [label for label, count in enumerate(counts) for _ in range(count)]
        for number, label in enumerate(labels):
            pixels = np.full((20, 20, 3), number, np.uint8)  # no image counts twice
            pixels[..., 0] = 0
            pixels[PLACE] = 255 * label
            files.append(f"{tmp_path}/{number}.png")
            Image.fromarray(pixels).save(files[-1])
        options = ["--maps", "order0", "--layers", "conv", "--label", *map(str, labels), "--out", f"{tmp_path}/maps"]
        options += ["--mean", "0"]
        assert main(["explain", f"{tmp_path}/a.pt", *files, "--module", f"{__name__}:{maker}", *options]) == 0
        told = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("[")]
        return told, np.asarray(Image.open(tmp_path / "maps.png"))

    return run


def test_it_says_and_draws_what_the_classes_rest_on(explain):
    told, sheet = explain("ByPlace", [10, 10])
    low, high = (f"{math.log(1 + math.exp(x)):.2f}" for x in (-4, 4))
    assert told[0].startswith(
        f"1 rests on one small place: covering 4 % of its images raises their loss from {low} to {high}"
    )
    assert told[1:] == [
        f"  0, 8 images: loss {low}, place covered {low}, another {low}; others with the place pasted {low}, with "
        f"another part {low}",
        f"  1, 10 images: loss {low}, place covered {high}, another {low}; others with the place pasted {high}, with "
        f"another part {low}",
    ]
    assert (sheet == card._OF_REGION).all(2).sum() > 2 * 300 * 10  # two red bars, nearly as long as can be


def test_of_few_images_it_says_nothing(explain):
    told, sheet = explain("ByPlace", [3, 4])
    assert told == []
    assert not (sheet == card._OF_REGION).all(2).any()
    (line,) = explain("ByPlace", [5, 5])[0]
    assert "fewer than 8 images of each class" in line


def test_where_it_cannot_be_done_the_maps_are_there_all_the_same(explain):
    (told,), _ = explain("ByChance", [10, 10])
    assert told.startswith("The check cannot be done: the images that the maps belong to did not enter the network")
