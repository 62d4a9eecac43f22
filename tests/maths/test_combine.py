"""The combined map of all layers, against logarithms number by number."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from normgrad_lightning import functional as NF

examples = settings(derandomize=True, max_examples=100, suppress_health_check=list(HealthCheck))


def close(actual, expected, rtol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0.0)


def maps_of(*grids, images=2, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(images, *grid, generator=generator, dtype=torch.float64).to(dtype) for grid in grids]


@st.composite
def layers(draw):
    """Returns the maps of one to four layers, on one, two or three axes, and a size: some zero or broken."""
    axes = draw(st.integers(1, 3))
    sides = st.tuples(*[st.integers(1, {1: 9, 2: 5, 3: 3}[axes])] * axes)
    maps = maps_of(*draw(st.lists(sides, min_size=1, max_size=4)), images=3, seed=draw(st.integers(0, 99)))
    for m in maps:
        m[torch.rand(m.shape, generator=torch.Generator().manual_seed(m.numel())) < 0.2] = 0.0
        broken = draw(st.sampled_from([None, 0.0, math.nan, math.inf]))
        if broken is not None:
            m[draw(st.integers(0, 2))].view(-1)[: None if broken == 0 else 1] = broken
    return maps, draw(sides)


@examples
@given(layers())
def test_it_is_the_geometric_mean_of_the_layers_that_have_a_map(given_layers):
    maps, size = given_layers
    close(NF.combine(maps, size), reference.combine(maps, size))


def test_a_dict_of_layers_and_one_number_for_all_axes_will_do():
    early, late = maps_of((8, 8), (2, 3))
    expected = reference.combine([early, late], (6, 6))
    close(NF.combine({"early": early, "late": late}, 6), expected)
    close(NF.combine((m for m in (early, late)), torch.Size([6, 6])), expected)


def test_one_layer_on_its_own_grid_is_its_map_over_its_mean():
    (m,) = maps_of((5, 7))
    close(NF.combine([m], (5, 7)), m / m.mean((1, 2), keepdim=True))


@examples
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=2))
def test_the_strength_of_a_layer_or_an_image_does_not_count(factors):
    early, late = maps_of((8, 8), (4, 4))
    factor = torch.tensor(factors, dtype=torch.float64)[:, None, None]
    close(NF.combine([early * factor, late], 8), NF.combine([early, late], 8))


def test_a_layer_that_is_zero_for_one_image_counts_for_the_others():
    early, late = maps_of((8, 8), (4, 4))
    late[0] = 0.0
    both, alone = NF.combine([early, late], 8), NF.combine([early], 8)
    close(both[0], alone[0])
    assert (both[1] - alone[1]).abs().max() > 0.1


def test_without_any_layer_left_it_is_zero():
    maps = [torch.zeros(2, 4, 4), torch.full((2, 2, 2), math.nan)]
    assert torch.equal(NF.combine(maps, 4), torch.zeros(2, 4, 4))


@pytest.mark.parametrize("unit", [1e-44, 1e-30, 1e30, 3e38])
def test_values_of_any_size_are_right(unit):
    maps = [m / m.max() * unit for m in maps_of((8, 8), (4, 4))]
    maps = [m.float() for m in maps]
    close(NF.combine(maps, 8).double(), reference.combine(maps, (8, 8)), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_types_are_widened_and_float64_is_kept(dtype):
    maps = maps_of((6, 6), (3, 3), dtype=dtype)
    combined = NF.combine(maps, 6)
    assert combined.dtype == torch.promote_types(dtype, torch.float32)
    close(combined.double(), reference.combine(maps, (6, 6)), rtol=1e-5)


def test_no_images_give_no_maps():
    assert NF.combine(maps_of((4, 4), (2, 2), images=0), 8).shape == (0, 8, 8)


def test_the_maps_stay_as_they_are_and_no_graph_hangs_on_them():
    maps = maps_of((4, 4), (2, 2))
    before = [m.clone() for m in maps]
    assert not NF.combine([m.requires_grad_() for m in maps], 8).requires_grad
    assert all(torch.equal(m, was) for m, was in zip(maps, before, strict=True))


M = torch.rand(2, 4, 4)
WRONG = {
    "none": (lambda: NF.combine([], 4), ["`maps`", "at least one layer", "none"]),
    "no tensor": (lambda: NF.combine([M.numpy()], 4), ["`maps`", "(N, *S)", "'ndarray'", "list"]),
    "a tensor": (lambda: NF.combine(M[0], 4), ["`maps`", "(N, *S)", "shape (4,)", "list"]),
    "whole numbers": (lambda: NF.combine([M.long()], 4), ["`maps`", "floating-point", "int64", "(2, 4, 4)"]),
    "too many axes": (lambda: NF.combine([M[None, None]], 4), ["`maps`", "three spatial axes", "(1, 1, 2, 4, 4)"]),
    "other images": (lambda: NF.combine([M, M[:1]], 4), ["as many images", "(2, 4, 4), (1, 4, 4)", "same images"]),
    "other axes": (lambda: NF.combine([M, M[0]], 4), ["as many axes", "(2, 4, 4), (4, 4)"]),
    "signed": (lambda: NF.combine([M, M - 0.5], 4), ["`maps`", "from 0 up", "negative"]),
    "size": (lambda: NF.combine([M], (4, 4, 4)), ["`size`", "2 of them", "(4, 4, 4)", "images.shape[2:]"]),
    "size 0": (lambda: NF.combine([M], 0), ["`size`", "from 1 up", "0"]),
    "size in floats": (lambda: NF.combine([M], (4.0, 4)), ["`size`", "whole number", "(4.0, 4)"]),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said(wrong):
    call, words = WRONG[wrong]
    with pytest.raises(ValueError, match="`") as raised:
        call()
    for word in words:
        assert word in str(raised.value)
