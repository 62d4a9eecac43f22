"""The typical map: an oracle in float64, and that what all images share goes while a spot of one image's own stays."""

import io

import numpy as np
import pytest
import torch
from whole_batches import spot

from normgrad_lightning.views.typical import TypicalMaps, per_map_mean

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("grid", [(12,), (7, 9), (3, 4, 5)])
def test_it_is_the_formula(grid):
    typical = TypicalMaps()
    for layer in "abc":
        typical.add(layer, RNG.exponential(size=(20, *grid)))
    raised = [typical.of(layer) + 0.1 * typical.of(layer).mean() for layer in "abc"]
    expected = np.exp(sum(np.log(t / t.mean()) for t in raised) / 3)
    np.testing.assert_allclose(typical.usual("abc", grid)[0], expected, rtol=1e-5)
    np.testing.assert_allclose(typical.usual(["b"], grid)[0], raised[1] / raised[1].mean(), rtol=1e-5)


def test_the_mean_starts_with_eight_even_maps_and_the_past_can_count_half():
    first, second = RNG.exponential(size=(3, 6, 6)), RNG.exponential(size=(4, 6, 6))
    typical = TypicalMaps()
    typical.add("a", first)
    typical.halve()
    typical.add("a", second)
    total = first.sum(0) / 2 + second.sum(0)
    np.testing.assert_allclose(typical.of("a"), (total + 8) / (1.5 + 4 + 8), rtol=1e-5)
    typical.add("a", RNG.exponential(size=(2, 3, 3)))  # another grid
    assert typical.of("a").shape == (3, 3)


def test_dots_in_all_maps_go_and_a_spot_in_one_stays():
    dots = np.ones((28, 28), np.float32)
    dots[::4, ::4] = 6.0
    maps = np.stack([dots] * 40)
    maps[0] *= spot((28, 28), (0.6, 0.4), strength=1.0).numpy()
    typical = TypicalMaps()
    typical.add("a", per_map_mean(maps))
    assert maps[0].argmax() % 4 == 0  # a dot
    own, *others = maps / typical.usual("a", (28, 28))
    at = np.unravel_index(own.argmax(), (28, 28))
    assert (np.array(at) + 0.5) / 28 == pytest.approx((0.6, 0.4), abs=0.1)
    others = others[0]
    assert others.std() / others.mean() < 0.25 < dots.std() / dots.mean()


def test_each_map_by_its_own_mean():
    np.testing.assert_allclose(per_map_mean(np.array([[1.0, 3.0], [0.0, 0.0]])), [[0.5, 1.5], [0.0, 0.0]])


def test_where_all_maps_are_zero_nothing_is_divided_by_zero():
    typical = TypicalMaps()
    typical.add("a", np.zeros((3, 4, 4)))
    np.testing.assert_allclose(typical.usual("a", (8, 8)), 1.0)


def test_a_resumed_run_has_the_same_means():
    typical, resumed, file = TypicalMaps(), TypicalMaps(), io.BytesIO()
    typical.add("a", RNG.exponential(size=(3, 6, 6)))
    torch.save(typical.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    np.testing.assert_array_equal(resumed.of("a"), typical.of("a"))
    TypicalMaps().load_state_dict({})  # of an older version
