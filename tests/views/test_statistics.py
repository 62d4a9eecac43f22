"""The numbers of the curves, the atlas and the patches, against slow versions of their definitions."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from normgrad_lightning.views.curves import drift
from normgrad_lightning.views.statistics import (
    border_share,
    concentration,
    inner_area,
    lifts,
    share_on_object,
)

grids = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)


def maps_of(grid, count=3, seed=0):
    return np.random.default_rng(seed).gamma(0.5, size=(count, *grid))


def slow_concentration(values):
    """Take cells, the largest first, until half of the sum is there; of the last one only what is needed."""
    left, taken = values.sum() / 2, 0.0
    for value in sorted(values.ravel(), reverse=True):
        if value >= left:
            return (taken + left / value) / values.size
        left, taken = left - value, taken + 1
    raise AssertionError


@given(grids, st.integers(0, 99))
def test_concentration_is_the_area_that_holds_half(grid, seed):
    maps = maps_of(grid, seed=seed)
    np.testing.assert_allclose(concentration(maps), [slow_concentration(m) for m in maps], rtol=1e-9)


def test_concentration_of_plain_cases():
    spot = np.zeros((10, 10))
    spot[3, 4] = 7.0
    two = np.zeros((10, 10))
    two[0, 0] = two[9, 9] = 1.0
    found = concentration(np.stack([np.ones((10, 10)), spot, two, np.zeros((10, 10))]))
    np.testing.assert_allclose(found, [0.5, 0.005, 0.01, 0.5])


def fine_border_share(values, fine=40):
    """Each cell cut into many, and those near an edge counted."""
    for axis in range(values.ndim):
        values = values.repeat(fine, axis)
    rim = np.zeros(values.shape, bool)
    for axis, side in enumerate(values.shape):
        at = (np.arange(side) + 0.5) / side
        shape = [1] * values.ndim
        shape[axis] = side
        rim |= ((at < 0.1) | (at > 0.9)).reshape(shape)
    return values[rim].sum() / values.sum()


@pytest.mark.parametrize("grid", [(1,), (5,), (10,), (1, 1), (3, 3), (4, 7), (20, 20), (2, 3, 4)])
def test_border_share_counts_cells_in_part(grid):
    maps = maps_of(grid)
    fine = 40 if len(grid) < 3 else 10
    np.testing.assert_allclose(border_share(maps), [fine_border_share(m, fine) for m in maps], atol=1e-9)


def test_border_share_of_an_even_map_is_the_area_of_the_rim():
    assert border_share(np.ones((1, 28, 28)))[0] == pytest.approx(1 - 0.8**2)
    assert border_share(np.zeros((1, 4, 4)))[0] == 0.0
    assert inner_area((5, 5)).sum() == pytest.approx(25 * 0.64)


def test_share_on_object():
    maps = np.array([[[1.0, 3.0]], [[0.0, 0.0]], [[2.0, 2.0]]])
    masks = np.array([[[0.0, 1.0]], [[1.0, 1.0]], [[0.5, 0.0]]])
    np.testing.assert_allclose(share_on_object(maps, masks), [0.75, math.nan, 0.25])


@given(st.integers(2, 5), grids, st.integers(0, 99))
def test_lift_is_over_the_other_classes_each_counting_once(classes, grid, seed):
    rng = np.random.default_rng(seed)
    means, counts = rng.gamma(2.0, size=(classes, *grid)), rng.integers(1, 50, classes).astype(float)
    found = lifts(means, counts)
    for c in range(classes):
        for u in itertools.product(*map(range, grid)):
            others = np.mean([means[d][u] for d in range(classes) if d != c])
            own = (counts[c] * means[c][u] + 8 * others) / (counts[c] + 8)
            assert found[c][u] == pytest.approx((own + 0.25) / (others + 0.25))


def test_lift_of_few_images_is_near_one_and_of_a_class_alone_is_one():
    means = np.array([[[10.0, 1.0]], [[1.0, 1.0]]])
    few, many = (lifts(means, np.array([count, count]))[0, 0, 0] for count in (1.0, 1000.0))
    assert 1 < few < 2 < 8 < many
    np.testing.assert_array_equal(lifts(means[:1], np.array([5.0])), np.ones((1, 1, 2)))


def test_drift_is_one_minus_the_cosine():
    before = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    now = np.array([[0.0, 2.0], [3.0, 3.0], [1.0, 1.0]])
    assert drift(now, before) == pytest.approx(0.5)  # 1 and 0; a zero map has no direction
    assert math.isnan(drift(np.zeros((1, 2)), np.ones((1, 2))))
