"""How much patches look alike: pair by pair, shift by shift."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest

from normgrad_lightning.views.crops import Box, Crop

SCRIPT = Path(__file__).parents[2] / "examples" / "sameness.py"


def slow_sameness(crops):
    scores = []
    for a, b in itertools.combinations(range(len(crops)), 2):
        best = -1.0
        for one, other in ((a, b), (b, a)):
            middle = crops[one][3:-3, 3:-3].ravel()
            for y, x in itertools.product(range(7), repeat=2):
                height, width = (side - 6 for side in crops.shape[1:3])
                window = crops[other][y : y + height, x : x + width].ravel()
                best = max(best, np.corrcoef(middle, window)[0, 1])
        scores.append(best)
    return np.mean(scores)


@pytest.mark.parametrize(("count", "channels", "seed"), [(2, 3, 0), (5, 1, 1), (8, 3, 2)])
def test_it_is_the_mean_of_the_best_correlations(example, count, channels, seed):
    crops = np.random.default_rng(seed).uniform(0, 255, (count, 16, 16, channels))
    assert example.sameness(crops) == pytest.approx(slow_sameness(crops), abs=1e-9)


def test_plain_cases(example):
    rng = np.random.default_rng(0)
    scene = rng.uniform(0, 255, (30, 30, 3))
    assert example.sameness(np.stack([scene[:16, :16]] * 3)) == pytest.approx(1.0)
    assert example.sameness(rng.uniform(0, 255, (6, 16, 16, 3))) < 0.3
    assert math.isnan(example.sameness(scene[None, :16, :16]))
    assert example.sameness(np.zeros((3, 16, 16, 3))) == 0.0


def test_thumbnails_are_means_of_the_pixels(example):
    sides = ((32, 64), (48, 48), (32, 64))
    pixels = [np.random.default_rng(0).integers(0, 255, (*of, 4)).astype(np.uint8) for of in sides]
    crops = [Crop(1.0, 0.0, 0, Box((0, 0), one.shape[:2]), pixels=one) for one in pixels]
    for one, small in zip(pixels, example.thumbnails(crops), strict=True):
        cells = one[..., :3].reshape(16, one.shape[0] // 16, 16, one.shape[1] // 16, 3)
        np.testing.assert_allclose(small, cells.mean(axis=(1, 3)), rtol=1e-5)
