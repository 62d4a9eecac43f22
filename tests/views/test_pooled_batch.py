"""Maps of a whole batch on coarse grids."""

import math
from contextlib import contextmanager

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from whole_batches import pool, whole_batch

from normgrad_lightning import functional as NF
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views.tag_namer import ALL, UNLABELLED, TagNamer

sides = st.lists(st.integers(1, 70), min_size=2, max_size=2).map(tuple)


def of(maps, **options):
    maps = {name: m for name, m in maps.items()}
    return pool(MapSet(KINDS["order0"], 3, maps, None, dict.fromkeys(maps), list(maps), **options))


@given(sides, st.integers(0, 9))
def test_a_grid_has_the_aspect_of_the_map_and_no_more_cells_than_needed(grid, seed):
    m = torch.rand(2, *grid, generator=torch.Generator().manual_seed(seed))
    (found,) = of({"a": m}).layers.values()
    assert math.prod(found.shape[1:]) <= 28 * 28 * 1.2
    zoom = [after / before for after, before in zip(found.shape[1:], grid, strict=True)]
    assert all(
        abs(a - min(1, (784 / math.prod(grid)) ** 0.5) * b) <= 1 for a, b in zip(found.shape[1:], grid, strict=True)
    )
    if min(zoom) == 1:
        np.testing.assert_array_equal(found, m.double())


def test_cells_are_means():
    m = torch.rand(2, 56, 56)
    (found,) = of({"a": m}).layers.values()
    np.testing.assert_allclose(found, F.avg_pool2d(m[:, None].double(), 2)[:, 0], rtol=1e-6)


@pytest.mark.parametrize(("grid", "most"), [((5000,), 256), ((3, 900), 1000), ((40, 40, 40), 14**3), ((7, 7), 49)])
def test_signals_volumes_and_long_images(grid, most):
    found = of({"a": torch.rand(2, *grid)})
    assert found.layers["00_a"].ndim == 1 + len(grid)
    assert math.prod(found.layers["00_a"].shape[1:]) <= most
    assert found.focus["combined"].shape == found.layers["00_a"].shape


def test_focus_is_the_combined_map_and_the_last_layers_on_the_finest_grid():
    batch = whole_batch(grids=((16, 16), (8, 8), (4, 4)))
    found = pool(batch)
    assert list(found.focus) == ["combined", "02_net.layer2"]
    np.testing.assert_allclose(found.focus["combined"], NF.combine(batch.maps, 16), rtol=1e-5)
    last = F.interpolate(batch.maps["net.layer2"][:, None], (16, 16), mode="bilinear")[:, 0]
    np.testing.assert_allclose(found.focus["02_net.layer2"], last, rtol=1e-5)


def test_a_layer_of_zeros_is_left_out_and_what_is_not_finite_is_not_read():
    a, zero = torch.rand(2, 8, 8), torch.zeros(2, 4, 4)
    assert list(of({"a": a, "zero": zero}).layers) == ["00_a"]
    assert list(of({"a": a, "zero": zero}).focus) == ["combined", "00_a"]
    assert of({"zero": zero}) is None
    assert of({"a": a, "b": torch.tensor([[[math.inf]], [[1.0]]])}) is None


def test_energy_is_the_sum_at_full_resolution():
    m = torch.rand(3, 100, 100)
    assert of({"a": m}).energy["00_a"] == pytest.approx(m.double().sum().item())


def test_labels_that_are_missing_short_or_negative():
    assert pool(whole_batch(labels=None, places=[(0.5, 0.5)] * 3)).labels == [ALL] * 3
    assert pool(whole_batch(labels=[0, -100, 1, -1])).labels == [0, UNLABELLED, 1, UNLABELLED]
    batch = whole_batch()
    assert pool(MapSet(**{**vars(batch), "labels": [0, 1]})).labels == [ALL] * 4


def test_masks_are_the_covered_part_of_each_cell():
    masks = torch.zeros(4, 32, 32)
    masks[:, :, :12] = 1
    found = pool(whole_batch(masks=masks.bool())).masks
    np.testing.assert_allclose(found["02_net.layer2"], np.tile([1.0, 0.5, 0.0, 0.0], (4, 4, 1)))
    np.testing.assert_allclose(found["01_net.layer1"][0, 0], [1] * 6 + [0] * 10)
    np.testing.assert_array_equal(
        pool(whole_batch(masks=masks[:, None])).masks["02_net.layer2"], found["02_net.layer2"]
    )


@pytest.mark.parametrize("shape", [(3, 32, 32), (4, 2, 32, 32), (4, 32)])
def test_masks_that_do_not_fit_are_refused(shape):
    with pytest.raises(ValueError, match=r"`normgrad_masks`: expected a mask for each of the 4 images, with 2 axes"):
        pool(whole_batch(masks=torch.zeros(shape)))


def test_tags_of_classes_are_legal_and_differ():
    origin = TagNamer(0, "normgrad", ["a/b", "a b", "..", "ok"])
    assert origin.tags("x", [0, 1, 2, 3, 9]) == {
        0: "normgrad/x/a_b_0",
        1: "normgrad/x/a_b_1",
        2: "normgrad/x/2",
        3: "normgrad/x/ok",
        9: "normgrad/x/9",
    }
    assert [origin.name(label) for label in (ALL, UNLABELLED, 3)] == ["all", "unlabelled", "ok"]


def test_no_two_classes_share_a_tag_and_none_changes_with_what_is_shown():
    origin = TagNamer(0, "normgrad", ["a", "a", "a_0", "a_1", "", "4"])
    tags = origin.tags("x", range(8))
    assert len(set(tags.values())) == 8
    for label, tag in tags.items():
        assert origin.tags("x", [label]) == {label: tag}
    (long,) = TagNamer(0, "normgrad", ["x" * 5000]).tags("x", [0]).values()
    assert len(long) < 100


def test_names_are_told_apart_and_captions_are_one_short_line():
    origin = TagNamer(0, "normgrad", ["a", "a", "", "b\n\x00c", "x" * 5000])
    assert list(origin.names([0, 1, 2]).values()) == ["a 0", "a 1", "2"]
    assert list(origin.captions([0, 2, 3]).values()) == ["a", "2", "b c"]
    assert origin.captions([4])[4] == "x" * 19 + "…"


@pytest.mark.parametrize(("value", "words"), [(255, "from 0 to 255"), (-1, "from -1 to 0"), (math.nan, "nan")])
def test_masks_that_are_not_from_0_to_1_are_refused(value, words):
    masks = torch.zeros(4, 32, 32)
    masks[:, :16] = value
    with pytest.raises(ValueError, match=rf"`normgrad_masks`: expected values from 0 to 1.*{words}"):
        pool(whole_batch(masks=masks))


def test_what_is_wrong_with_masks_leaves_the_rest():
    told = []

    @contextmanager
    def guard(doing):
        try:
            yield
        except ValueError as error:
            told.append(f"{doing}: {error}")

    found = pool(whole_batch(masks=torch.zeros(3, 9)), guard=guard)
    assert list(found.focus) == ["combined", "02_net.layer2"]
    assert found.masks == {}
    assert [sentence.split("`")[1] for sentence in told] == ["normgrad_masks"]
