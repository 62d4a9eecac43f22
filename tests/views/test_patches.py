"""Patches: which crops are shown, where they are, and what stands beside them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from whole_batches import LOOK, PLACES, as_pixels, spot, whole_batch

from normgrad_lightning.views import patches as module
from normgrad_lightning.views import table
from normgrad_lightning.views.coarse import coarse
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.patches import PER_CLASS, Box, Crop, Patches, box_around, fingerprints, peaks, thumbnails
from normgrad_lightning.views.patches import _Images as Images
from normgrad_lightning.views.resampling import smoothed
from normgrad_lightning.views.statistics import sameness

SIGNAL = {label: 1.0 for label in range(-2, 40)}


def collected(*batches, look=LOOK):
    view = Patches()
    for batch in batches:
        view.add(coarse(batch), look, SIGNAL)
    return view


def written(monkeypatch, view, shown=(0, 1), look=LOOK):
    words, original = [], table.write
    monkeypatch.setattr(
        table, "write", lambda picture, text, *rest: (words.append(text), original(picture, text, *rest))
    )
    return view.page(shown, look), words


@pytest.mark.parametrize("place", PLACES)
def test_the_peak_is_where_the_spot_is(place):
    maps = np.stack([spot((28, 28), place).numpy()])
    (peak,) = peaks(maps, (112, 112))
    assert peak.place == pytest.approx(place, abs=1 / 28)
    planes = smoothed(maps)
    assert peak.ratio == pytest.approx(planes.max() / maps.mean())


def test_a_rim_of_half_a_crop_does_not_count():
    edge = spot((28, 28), (0.02, 0.5), strength=50.0) + spot((28, 28), (0.6, 0.6), strength=3.0)
    (peak,) = peaks(edge.numpy()[None], (112, 112))
    assert min(*peak.place, *(1 - at for at in peak.place)) >= 0.15
    (coarsest,) = peaks(np.array([[[1.0, 0.0]]]), (8, 8))  # no cell has its middle away from the rim
    assert coarsest.ratio == pytest.approx(2.0)
    (zero,) = peaks(np.zeros((1, 28, 28)), (112, 112))
    assert zero.ratio == 0


@pytest.mark.parametrize(
    ("place", "size", "box"),
    [
        ((0.5, 0.5), (100, 100), Box((35, 35), (30, 30))),
        ((0.01, 0.99), (100, 100), Box((0, 70), (30, 30))),
        ((0.5, 0.5), (100, 200), Box((35, 85), (30, 30))),
        ((0.5,), (1000,), Box((350,), (300,))),
        ((0.5, 0.5, 0.5), (10, 40, 40), Box((4, 14, 14), (1, 12, 12))),
        ((0.5, 0.5), (6, 6), Box((0, 0), (6, 6))),
    ],
)
def test_a_crop_is_shifted_where_it_would_reach_over_an_edge(place, size, box):
    assert box_around(place, size) == box


def test_crops_are_the_images_own_pixels_around_the_spot():
    batch = whole_batch(size=(64, 64), grids=((16, 16),))
    view = collected(batch)
    for label in (0, 1):
        for crop in view.crops("combined", label):
            numbers = [n for n in range(4) if fingerprints(batch.images)[n] == crop.image]
            (number,) = numbers
            assert batch.labels[number] == label
            (top, left), (height, width) = crop.box
            assert ((top + height / 2) / 64, (left + width / 2) / 64) == pytest.approx(PLACES[number], abs=0.05)
            expected = as_pixels(batch.images[number, :, top : top + height, left : left + width])
            np.testing.assert_array_equal(crop.pixels[..., :3], expected)


def test_without_mean_and_std_a_crop_has_the_colours_of_its_whole_image():
    batch = whole_batch(size=(64, 64), grids=((16, 16),))
    stretched = (batch.images - batch.images.amin((1, 2, 3), True)) / (
        batch.images.amax((1, 2, 3), True) - batch.images.amin((1, 2, 3), True)
    )
    crop = collected(batch, look=Look()).crops("combined", 0)[0]
    number = next(n for n in range(4) if fingerprints(batch.images)[n] == crop.image)
    (top, left), (height, width) = crop.box
    expected = as_pixels(stretched[number, :, top : top + height, left : left + width])
    assert np.abs(crop.pixels[..., :3].astype(int) - expected).max() <= 1


def test_thumbnails_are_means_of_the_pixels():
    sides = ((32, 64), (48, 48), (32, 64))
    crops = [Crop(1.0, 0.0, 0, Box((0, 0), of), np.random.default_rng(0).integers(0, 255, (*of, 4))) for of in sides]
    for crop, small in zip(crops, thumbnails(crops), strict=True):
        height, width = crop.pixels.shape[0] // 16, crop.pixels.shape[1] // 16
        cells = crop.pixels[..., :3].reshape(16, height, 16, width, 3)
        np.testing.assert_allclose(small, cells.mean(axis=(1, 3)), rtol=1e-5)


def test_those_that_stand_out_most_are_shown_the_strongest_first():
    strengths = list(np.linspace(1, 9, 24))
    one = whole_batch(labels=[0] * 12, strengths=strengths[:12], seed=1)
    two = whole_batch(labels=[0] * 12, strengths=strengths[12:], seed=2)
    crops = collected(one, two).crops("combined", 0)
    assert len(crops) == PER_CLASS
    ratios = [crop.ratio for crop in crops]
    assert ratios == sorted(ratios, reverse=True)
    everything = sorted(
        (peak.ratio for b in (one, two) for peak in peaks(coarse(b).focus["combined"], (32, 32))), reverse=True
    )
    assert ratios == pytest.approx(everything[:PER_CLASS])


def test_an_image_is_shown_once_at_its_strongest():
    weak, strong = (whole_batch(step=step, strengths=[s] * 4) for step, s in ((1, 3.0), (2, 6.0)))
    for batches in ((weak, strong), (strong, weak)):
        crops = collected(*batches).crops("combined", 0)
        assert len(crops) == len({crop.image for crop in crops}) == 2
        assert {crop.step for crop in crops} == {2}


def test_a_page_has_a_row_for_each_class_with_its_numbers(monkeypatch):
    view = collected(whole_batch(step=5, labels=[0, 1] * 6))
    crops = {label: view.crops("combined", label) for label in (0, 1)}
    page, words = written(monkeypatch, view)
    assert [picture.tag for picture in page.pictures] == [
        "normgrad/2_patches/0_combined",
        "normgrad/2_patches/02_net.layer2",
    ]
    assert page.step == 5
    titles = [text for text in words if text.startswith("the strongest training signal")]
    assert titles == [f"the strongest training signal ({of})" for of in ("all layers combined", "net.layer2")]
    alike = {label: sameness(thumbnails(of)) for label, of in crops.items()}
    for label, name in enumerate(("cat", "dog")):
        assert f"{name}: 6 of 6 images, sameness {alike[label]:.2f}" in words
        assert page.scalars[f"normgrad/sameness/{name}"] == pytest.approx(alike[label])
    assert view.shown["combined"]["cat"] == crops[0]


def test_the_numbers_of_the_first_event_stand_beside_later_ones_also_after_a_resume(monkeypatch):
    view = collected(whole_batch(labels=[0, 1] * 6))
    first = view.page((0, 1), LOOK).scalars["normgrad/sameness/cat"]
    resumed = Patches()
    resumed.load_state_dict(torch.load(io.BytesIO(saved(view.state_dict())), weights_only=True))
    for later in (view, resumed):
        later.add(coarse(whole_batch(step=100, labels=[0, 1] * 6, seed=3)), LOOK, SIGNAL)
        _, words = written(monkeypatch, later)
        assert any(word.startswith("cat") and word.endswith(f", first {first:.2f}") for word in words)


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_each_event_begins_anew():
    view = collected(whole_batch())
    assert view.page((0, 1), LOOK).pictures
    assert view.crops("combined", 0) == []
    assert view.page((0, 1), LOOK) is None


def test_many_classes_show_those_asked_for_and_say_so(monkeypatch):
    view = collected(whole_batch(labels=list(range(20)), classes=None))
    _, words = written(monkeypatch, view, shown=(3, 7))
    assert "2 of 20 classes: those with the most signal" in words
    assert [word.split(":")[0] for word in words if "images" in word] == ["3", "7"] * 2


def test_memory_is_bounded_for_many_classes_of_large_images():
    view = Patches()
    for start in range(0, 1000, 50):
        labels = list(range(start, start + 50))
        batch = whole_batch(labels=labels, size=(500, 500), grids=((8, 8),), seed=start)
        view.add(coarse(batch), LOOK, {label: 1000.0 - label for label in range(start + 50)})
    kept = [crop for crops in view._crops.values() for of in crops.values() for crop in of]
    assert sum(crop.pixels.nbytes for crop in kept) < 16e6
    assert {label for crops in view._crops.values() for label in crops} == set(range(module._CLASSES))
    assert max(max(crop.pixels.shape) for crop in kept) <= 96


@pytest.mark.parametrize("channels", [1, 3, 10])
def test_any_number_of_channels(channels):
    batch = whole_batch(channels=channels, size=(64, 64))
    crop = collected(batch).crops("combined", 0)[0]
    grey = crop.pixels[..., 0] == crop.pixels[..., 1]
    assert grey.all() == (channels != 3)


@pytest.mark.parametrize(
    ("size", "grids", "place"),
    [((400,), ((100,), (50,)), (0.4,)), ((8, 40, 40), ((8, 20, 20), (4, 5, 5)), (0.7, 0.4, 0.6))],
)
def test_signals_as_strips_and_volumes_as_the_slice_with_the_peak(size, grids, place):
    batch = whole_batch(size=size, grids=grids, places=[place], channels=1)
    view = collected(batch)
    crop = view.crops("combined", 0)[0]
    number = next(n for n in range(4) if fingerprints(batch.images)[n] == crop.image)
    if len(size) == 3:
        (depth, top, left), (_, height, width) = crop.box
        assert depth == pytest.approx(0.7 * 8, abs=1)
        expected = as_pixels(batch.images[number, :, depth, top : top + height, left : left + width])[..., 0]
        np.testing.assert_array_equal(crop.pixels[..., 0], expected)
    else:
        assert crop.box.starts[0] + 60 == pytest.approx(160, abs=8)
        assert crop.pixels.shape == (1, 96, 4)  # a strip
    drawn = Image.open(io.BytesIO(view.page((0, 1), LOOK).pictures[0].jpeg))
    assert drawn.width > 100
    assert drawn.height > 2 * 48


def test_a_batch_that_cannot_be_cut_leaves_the_others_as_they_are():
    view, look = Patches(), Look(mean=[0.5] * 3, std=[1.0] * 3)
    view.add(coarse(whole_batch()), look, {0: 1.0, 1: 1.0})
    before = view.crops("combined", 0)
    with pytest.raises(ValueError, match="`std`: expected one number or 1"):
        view.add(coarse(whole_batch(channels=1, strengths=[9.0] * 4, seed=1)), look, {0: 1.0, 1: 1.0})
    assert view.crops("combined", 0) == before
    assert view.page((0, 1), look).pictures


def test_without_images_there_is_nothing_to_crop():
    batch = whole_batch()
    view = collected(type(batch)(**{**vars(batch), "images": None, "images_of": dict.fromkeys(batch.maps)}))
    assert view.page((0, 1), LOOK) is None


def test_nothing_of_the_batch_is_kept():
    import weakref

    batch = whole_batch(grids=((16, 16),))
    gone = [weakref.ref(batch.images), weakref.ref(batch.maps["net.layer0"])]
    view = collected(batch)
    del batch
    assert [ref() for ref in gone] == [None, None]
    assert view.crops("combined", 0)


def test_images_with_values_that_are_not_finite_are_known_again_and_drawn():
    images = torch.rand(3, 3, 32, 32)
    plain, seen = (Crop(1.0, 0.0, 0, Box((8, 8), (16, 16))) for _ in range(2))
    Images(images, Look()).cut({1: plain})
    images[0, 0, 0, 0], images[1, 0, 0, 0], images[2, :, 0, 0] = float("nan"), float("inf"), float("-inf")
    numbers = fingerprints(images)
    assert numbers == fingerprints(images)
    assert len(set(numbers)) == 3
    Images(images, Look()).cut({1: seen})
    assert abs(seen.pixels.astype(int) - plain.pixels).max() <= 2


def test_classes_of_one_name_have_a_row_each_in_code():
    view = collected(whole_batch(classes=["dog", "dog"]))
    view.page([0, 1], LOOK)
    assert set(view.shown["combined"]) == {"dog 0", "dog 1"}


def test_a_long_name_does_not_hide_the_numbers(monkeypatch):
    _, words = written(monkeypatch, collected(whole_batch(classes=["x" * 500, "a\nb"])))
    assert any(text.startswith("x" * 19 + "…: 2 of 2 images") for text in words)
    assert any(text.startswith("a b: 2 of 2 images") for text in words)
