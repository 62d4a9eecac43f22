"""Regions: the right places, sizes and forms, against slow references in float64."""

import itertools

import numpy as np
import pytest
import torch

from normgrad_lightning.check import regions


def slow_smoothed(m):
    """Twice the mean of the three cells around each one, along each side that is long enough."""
    for _ in range(2):
        out = np.empty_like(m)
        for at in np.ndindex(m.shape):
            window = tuple(
                slice(max(i - 1, 0), i + 2) if side >= 12 else slice(i, i + 1)
                for i, side in zip(at, m.shape, strict=True)
            )
            out[at] = m[window].mean()
        m = out
    return m


def slow_square(m, size):
    peak = np.unravel_index(slow_smoothed(m).argmax(), m.shape)
    inside = np.zeros(size, bool)
    lengths = [max(1, round(0.2 * side)) for side in size]
    starts = [
        min(max(round((i + 0.5) * side / cells - length / 2), 0), side - length)
        for i, side, cells, length in zip(peak, size, m.shape, lengths, strict=True)
    ]
    inside[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))] = True
    return inside


GRIDS = [((7,), (40,)), ((14, 14), (64, 64)), ((5, 13), (50, 130)), ((28, 28), (28, 28)), ((6, 6, 6), (20, 30, 24))]


@pytest.mark.parametrize(("grid", "size"), GRIDS)
def test_squares_lie_around_the_peak(grid, size):
    maps = torch.rand(9, *grid, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = regions.peak_squares(maps, size)
    expected = np.stack([slow_square(m.numpy(), size) for m in maps])
    assert np.array_equal(found.numpy(), expected)


def test_a_peak_at_the_edge_has_a_whole_square():
    maps = torch.zeros(4, 14, 14)
    for number, at in enumerate(itertools.product((0, 13), repeat=2)):
        maps[(number, *at)] = 1
    found = regions.peak_squares(maps, (70, 70))
    assert found.flatten(1).sum(1).tolist() == [14 * 14] * 4
    assert found[0, 0, 0]
    assert found[3, 69, 69]


@pytest.mark.parametrize(("grid", "size"), GRIDS)
def test_the_square_to_compare_with_is_as_large_and_never_overlaps(grid, size):
    maps = torch.rand(40, *grid, generator=torch.Generator().manual_seed(2))
    squares = regions.peak_squares(maps, size)
    others = regions.moved_squares(squares)
    assert torch.equal(others.flatten(1).sum(1), squares.flatten(1).sum(1))
    assert not (others & squares).any()
    for square, other in zip(squares, others, strict=True):  # of the same form, in one piece
        spans = [(t.nonzero().amax(0) - t.nonzero().amin(0)).tolist() for t in (square, other)]
        assert spans[0] == spans[1]


@pytest.mark.parametrize(("grid", "size"), GRIDS)
def test_the_strongest_tenth_is_a_tenth_and_the_strongest(grid, size):
    maps = torch.rand(5, *grid, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = regions.strongest_tenths(maps, size)
    pixels = int(np.prod(size))
    assert found.flatten(1).sum(1).tolist() == [round(0.1 * pixels)] * 5
    mode = {1: "linear", 2: "bilinear", 3: "trilinear"}[len(size)]
    for m, inside in zip(maps, found, strict=True):
        smooth = torch.from_numpy(slow_smoothed(m.numpy()))[None, None]
        fine = torch.nn.functional.interpolate(smooth, size, mode=mode, align_corners=False)[0, 0]
        assert fine[inside].min() >= fine[~inside].max() - 1e-12


def test_a_region_of_any_form_keeps_it_and_moves_to_where_it_overlaps_least():
    bars = torch.zeros(1, 40, 40, dtype=torch.bool)
    bars[:, :2] = bars[:, -2:] = True
    moved = regions.moved_around(bars)
    assert moved.sum() == bars.sum()
    assert not (moved & bars).any()
    assert moved[0].all(1).nonzero().flatten().tolist() in ([8, 9, 10, 11], [18, 19, 20, 21], [28, 29, 30, 31])


def test_pixels_are_put_into_the_region_alone():
    images, what = torch.zeros(2, 3, 8, 8), torch.ones(2, 3, 8, 8)
    region = torch.zeros(2, 8, 8, dtype=torch.bool)
    region[0, 2:4, 5:7] = True
    changed = regions.put_into(region, what, images)
    assert changed.sum() == 3 * 4
    assert changed[0, :, 2:4, 5:7].all()


def test_the_map_is_that_of_all_layers_coarse_and_even():
    maps = {"early": torch.rand(3, 112, 56) * 1e-9, "late": torch.rand(3, 7, 4) * 1e9}
    m = regions.coarse_map(maps)
    assert m.shape == (3, 40, 20)
    torch.testing.assert_close(m.flatten(1).mean(1), torch.ones(3))
    torch.testing.assert_close(
        regions.coarse_map({"one": maps["late"]}), maps["late"] / maps["late"].mean((1, 2), True)
    )
    assert not regions.coarse_map({"one": torch.zeros(2, 5, 5)}).any()
