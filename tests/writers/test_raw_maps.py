"""Raw maps as bytes, and back."""

import json
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from normgrad_lightning.writers import raw_maps

RATIO = hnp.arrays(
    np.float64,
    hnp.array_shapes(min_dims=2, max_dims=4, min_side=1, max_side=5),
    elements=st.one_of(st.just(0.0), st.floats(-1, 1)),
)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)


def assert_kept(maps):
    """Each value is kept to float16's precision, or to that of the smallest float16 times the map's largest value."""
    kept = raw_maps.decode(raw_maps.encode(maps))
    assert kept.dtype == np.float32
    assert kept.shape == maps.shape
    exact = maps.astype(np.float64)
    largest = np.abs(exact).max(axis=tuple(range(1, maps.ndim)), keepdims=True)
    allowed = np.maximum(2.0**-11 * np.abs(exact), 2.0**-25 * largest) * (1 + 1e-6) + SMALLEST
    assert (np.abs(kept - exact) <= allowed).all()


@given(RATIO, st.floats(-30, 30))
def test_maps_of_any_magnitude_come_back(ratio, power):
    assert_kept((ratio * 10**power).astype(np.float32))


@given(st.integers(1, 5), st.integers(1, 3), st.data())
def test_each_map_has_its_own_magnitude(count, dims, data):
    powers = data.draw(st.lists(st.floats(-30, 30), min_size=count, max_size=count))
    maps = np.random.default_rng(0).random((count, *[4] * dims))
    assert_kept((maps * 10.0 ** np.reshape(powers, (count, *[1] * dims))).astype(np.float32))


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 4, 5), (2, 3, 4, 5), (0, 4, 4), (2, 0), (3,)])
def test_zeros_and_empty_maps(shape):
    kept = raw_maps.decode(raw_maps.encode(np.zeros(shape, np.float32)))
    assert kept.shape == shape
    assert not kept.any()


def test_what_is_not_finite_stays_so_and_spoils_nothing_else():
    maps = np.float32([[[1, 2], [np.nan, -4]], [[np.inf, 0], [0, -np.inf]]])
    assert np.array_equal(raw_maps.decode(raw_maps.encode(maps)), maps, equal_nan=True)


def test_the_layout_is_the_one_that_is_documented():
    data = raw_maps.encode(np.float32([[0, 8], [0.5, -0.25]]))
    (length,) = struct.unpack_from("<I", data)
    assert (4 + length) % 8 == 0
    assert json.loads(data[4 : 4 + length]) == {"version": 1, "shape": [2, 2], "maximum": [8, 0.5]}
    assert raw_maps.header_of(data)["shape"] == [2, 2]
    assert data[4 + length :] == np.array([0, 1, 1, -0.5], "<f2").tobytes()


def test_another_version_is_an_error():
    data = raw_maps.encode(np.ones((1, 2))).replace(b'"version":1', b'"version":2')
    with pytest.raises(ValueError, match="expected raw maps of version 1, but got version 2"):
        raw_maps.decode(data)


def test_it_takes_two_bytes_for_each_value():
    assert len(raw_maps.encode(np.ones((8, 56, 56)))) < 2 * 8 * 56 * 56 + 200


def test_import_takes_neither_torch_nor_lightning():
    code = "import sys, normgrad_lightning.writers.raw_maps as r; r.decode(r.encode([[1.0]])); print(*sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "lightning", "pytorch_lightning", "tensorboard", "PIL"} & set(out)
