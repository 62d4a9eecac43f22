"""Patches: which crops are shown, where they are, and what stands beside them."""

import io

import numpy as np
import pytest
import torch
from PIL import Image
from whole_batches import LOOK, PLACES, as_pixels, pool, spot, whole_batch

from normgrad_lightning.views import drawing, table
from normgrad_lightning.views import patches as module
from normgrad_lightning.views.crops import Box, Crop, ImageCutter, box_around, fingerprints
from normgrad_lightning.views.patches import PER_CLASS, Patches, peaks
from normgrad_lightning.views.resampling import smoothed
from normgrad_lightning.views.style import Style

SIGNAL = {label: 1.0 for label in range(-2, 40)}


def collected(*batches, style=LOOK):
    view = Patches()
    for batch in batches:
        view.add(pool(batch), style, SIGNAL)
    return view


def written(monkeypatch, view, shown=(0, 1), style=LOOK):
    words, original = [], table.write
    monkeypatch.setattr(
        table, "write", lambda picture, text, *rest: (words.append(text), original(picture, text, *rest))
    )
    return view.page([], style, shown), words


@pytest.mark.parametrize("place", PLACES)
def test_the_peak_is_where_the_spot_is(place):
    maps = np.stack([spot((28, 28), place).numpy()])
    (peak,) = peaks(maps, (112, 112))
    assert peak.place == pytest.approx(place, abs=1 / 28)
    planes = smoothed(maps)
    assert peak.ratio == pytest.approx(planes.max() / maps.mean())


def test_a_rim_does_not_count():
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
        ((0.5, 0.5), (100, 100), Box((32, 32), (36, 36))),
        ((0.01, 0.99), (100, 100), Box((0, 64), (36, 36))),
        ((0.5, 0.5), (100, 200), Box((32, 82), (36, 36))),
        ((0.5,), (1000,), Box((320,), (360,))),
        ((0.5, 0.5, 0.5), (10, 40, 40), Box((4, 13, 13), (1, 14, 14))),
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
    crop = collected(batch, style=Style()).crops("combined", 0)[0]
    number = next(n for n in range(4) if fingerprints(batch.images)[n] == crop.image)
    (top, left), (height, width) = crop.box
    expected = as_pixels(stretched[number, :, top : top + height, left : left + width])
    assert np.abs(crop.pixels[..., :3].astype(int) - expected).max() <= 1


def test_those_that_stand_out_most_are_shown_the_strongest_first():
    strengths = list(np.linspace(1, 9, 24))
    one = whole_batch(labels=[0] * 12, strengths=strengths[:12], seed=1)
    two = whole_batch(labels=[0] * 12, strengths=strengths[12:], seed=2)
    crops = collected(one, two).crops("combined", 0)
    assert len(crops) == 6  # there may be many classes
    ratios = [crop.ratio for crop in crops]
    assert ratios == sorted(ratios, reverse=True)
    fresh = Patches()
    own = [fresh._own(pool(batch))["combined"] for batch in (one, two)]
    everything = sorted((peak.ratio for maps in own for peak in peaks(maps, (32, 32))), reverse=True)
    assert ratios == pytest.approx(everything[:6])


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
        "normgrad/1_patches/0_combined",
        "normgrad/1_patches/02_net.layer2",
    ]
    assert page.step == 5
    titles = [text for text in words if text.startswith("the strongest training signal")]
    assert titles == [f"the strongest training signal ({of});" for of in ("all layers combined", "net.layer2")]
    for name in ("cat", "dog"):
        assert f"{name}: 6 of 6 images" in words
    assert view.shown["combined"]["cat"] == crops[0]


def test_each_event_starts_over():
    view = collected(whole_batch())
    assert view.page([], LOOK, (0, 1)).pictures
    assert view.crops("combined", 0) == []
    assert view.page([], LOOK, (0, 1)) is None


def event_of(view, *batches):
    """What is shown after these batches: the crops of cats, and what they were chosen from."""
    for batch in batches:
        view.add(pool(batch), LOOK, SIGNAL)
    view.page([], LOOK, (0, 1))
    return view.shown["combined"]["cat"], view.spans[0]


def test_where_few_images_came_by_the_best_of_the_windows_before_fill_up():
    strengths = [3.0 + n / 10 for n in range(24)]
    view = Patches()
    of_first, span = event_of(view, whole_batch(step=5, labels=[0] * 24, strengths=strengths))
    assert (len(of_first), span) == (6, (24, 5, 5))  # there may be many classes
    late = [whole_batch(step=step, labels=[0, 0], seed=step) for step in (7, 9)]
    shown, span = event_of(view, *late)
    assert span == (28, 5, 9)
    assert sorted(crop.step for crop in shown) == [5, 5, 7, 7, 9, 9]
    assert [crop for crop in shown if crop.step == 5] == of_first[:2]
    assert [crop.ratio for crop in shown] == sorted((crop.ratio for crop in shown), reverse=True)
    shown, span = event_of(view, whole_batch(step=12, labels=[0], seed=12))
    assert sorted(crop.step for crop in shown) == [5, 7, 7, 9, 9, 12]
    assert span == (29, 5, 12)
    shown, span = event_of(view, whole_batch(step=14, labels=[1], seed=14))  # older crops are never shown
    assert sorted(crop.step for crop in shown) == [7, 7, 9, 9, 12]
    assert span == (5, 7, 12)
    shown, span = event_of(view, whole_batch(step=20, labels=[0] * 6, seed=20))
    assert ({crop.step for crop in shown}, span) == ({20}, (6, 20, 20))


def test_a_class_that_did_not_come_by_since_the_last_event_keeps_its_patches(monkeypatch):
    view = Patches()
    cats, _ = event_of(view, whole_batch(step=5, labels=[0, 1] * 6))
    assert event_of(view, whole_batch(step=8, labels=[1] * 4, seed=1)) == (cats, (6, 5, 5))
    view.add(pool(whole_batch(step=9, labels=[0] * 2, seed=2)), LOOK, SIGNAL)
    _, words = written(monkeypatch, view)
    assert "steps 5 to 9" in words
    assert {"cat: 6 of 8 images", "dog: 6 of 10 images"} <= set(words)


def test_an_image_of_both_windows_is_shown_once():
    shown, _ = event_of(view := Patches(), whole_batch(step=5))
    again, _ = event_of(view, whole_batch(step=8))
    assert [crop.image for crop in again] == [crop.image for crop in shown]
    assert {crop.step for crop in again} == {8}


def test_many_classes_show_those_asked_for_and_say_so(monkeypatch):
    view = collected(whole_batch(labels=list(range(20)), classes=None))
    _, words = written(monkeypatch, view, shown=(3, 7))
    assert "2 of 20 classes: those with the most signal" in words
    assert [word.split(":")[0] for word in words if " images" in word] == ["3", "7"] * 2


def test_memory_is_bounded_for_many_classes_of_large_images():
    view = Patches()
    for number in range(20):
        if number in (5, 10, 15):
            view.page([], LOOK, range(12))
        start = 16 * (number % 5)
        labels = [start + n // 4 for n in range(64)]
        batch = whole_batch(labels=labels, size=(500, 500), grids=((8, 8),), seed=number)
        view.add(pool(batch), LOOK, {label: 1000.0 - label for label in range(start + 16)})
    kept = [crop for window in view._windows for crops in window.crops.values() for of in crops.values() for crop in of]
    wholes = {id(crop.whole): crop.whole.nbytes for crop in kept}  # shared by the crops of an image
    assert sum(crop.pixels.nbytes + crop.map.nbytes for crop in kept) + sum(wholes.values()) < 2 * 2 * 96 * 145e3
    assert max(max(crop.whole.shape) for crop in kept) <= 160
    assert {label for crops in view._windows[-1].crops.values() for label in crops} == set(range(module._CLASSES))
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
        assert crop.box.starts[0] + 72 == pytest.approx(160, abs=8)
        assert crop.pixels.shape == (24, 96, 4)  # a strip
    drawn = Image.open(io.BytesIO(view.page([], LOOK, (0, 1)).pictures[0].jpeg))
    assert drawn.width > 100
    assert drawn.height > 2 * 48


def test_a_batch_that_cannot_be_cut_leaves_the_others_as_they_are():
    view, style = Patches(), Style(mean=[0.5] * 3, std=[1.0] * 3)
    view.add(pool(whole_batch()), style, {0: 1.0, 1: 1.0})
    before = view.crops("combined", 0)
    with pytest.raises(ValueError, match="`std`: expected one number or 1"):
        view.add(pool(whole_batch(channels=1, strengths=[9.0] * 4, seed=1)), style, {0: 1.0, 1: 1.0})
    assert view.crops("combined", 0) == before
    assert view.page([], style, (0, 1)).pictures


def test_without_images_there_is_nothing_to_crop():
    batch = whole_batch()
    view = collected(type(batch)(**{**vars(batch), "images": None, "images_of": dict.fromkeys(batch.maps)}))
    assert view.page([], LOOK, (0, 1)) is None


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
    ImageCutter(images, Style()).cut({1: plain})
    images[0, 0, 0, 0], images[1, 0, 0, 0], images[2, :, 0, 0] = float("nan"), float("inf"), float("-inf")
    numbers = fingerprints(images)
    assert numbers == fingerprints(images)
    assert len(set(numbers)) == 3
    ImageCutter(images, Style()).cut({1: seen})
    assert abs(seen.pixels.astype(int) - plain.pixels).max() <= 2


def test_classes_of_one_name_have_a_row_each_in_code():
    view = collected(whole_batch(classes=["dog", "dog"]))
    view.page([], LOOK, [0, 1])
    assert set(view.shown["combined"]) == {"dog 0", "dog 1"}


def test_the_first_event_stands_beside_later_ones_also_after_a_resume(monkeypatch):
    view = collected(whole_batch(labels=[0, 1] * 6))
    first = {label: view.crops("combined", label) for label in (0, 1)}
    _, words = written(monkeypatch, view)
    assert "now" in words
    assert "first event" not in words
    resumed, file = Patches(), io.BytesIO()
    torch.save(view.state_dict(), file)
    file.seek(0)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    cards = []
    for later in (view, resumed):
        later.add(pool(whole_batch(step=100, labels=[0, 1] * 6, seed=3)), LOOK, SIGNAL)
        page, words = written(monkeypatch, later)
        assert "first event" in words
        cards.append(np.asarray(Image.open(io.BytesIO(page.pictures[0].jpeg)), float))
    np.testing.assert_array_equal(*cards)
    left = 4 * 98 + 4  # beside four columns, behind a wider gap
    beside = cards[0][:, left : left + 96]
    for crops in first.values():
        tile = drawing.tile_of(crops[0].pixels, 96)[..., :3].astype(float)
        rows = range(len(beside) - 96)
        assert min(np.abs(beside[top : top + 96] - tile).mean() for top in rows) < 12


def test_what_the_tab_shows_is_with_each_crop():
    batch = whole_batch(size=(64, 48), grids=((16, 12), (8, 6)))
    for crop in collected(batch).crops("combined", 0):
        number = fingerprints(batch.images).index(crop.image)
        np.testing.assert_array_equal(crop.whole[..., :3], as_pixels(batch.images[number]))
        assert crop.size == (64, 48)
        expected = pool(batch).focus["combined"][number]
        np.testing.assert_allclose(crop.map, expected / expected.mean(), rtol=2e-3)
        assert list(crop.layers) == list(pool(batch).layers)
        for layer, maps in pool(batch).layers.items():
            np.testing.assert_allclose(crop.layers[layer], maps[number] / maps[number].mean(), rtol=2e-3)


def test_of_many_layers_a_crop_keeps_a_few_from_the_first_to_the_last():
    [crop, *_] = collected(whole_batch(grids=((8, 8),) * 12)).crops("combined", 0)
    assert [int(layer.partition("_")[0]) for layer in crop.layers] == [0, 3, 6, 8, 11]


def test_what_all_images_share_attracts_no_patch():
    batch = whole_batch(labels=[0] * 24, size=(64, 64), grids=((32, 32), (16, 16)))
    for layer, maps in batch.maps.items():
        maps[:, maps.shape[1] // 4, maps.shape[2] // 4] *= 20.0
        assert (maps[0] == maps[0].max()).nonzero().tolist()[0] == [maps.shape[1] // 4] * 2, layer
    for crop in collected(batch).crops("combined", 0):
        number = fingerprints(batch.images).index(crop.image)
        middle = [(start + length / 2) / 64 for start, length in zip(*crop.box, strict=True)]
        assert middle == pytest.approx(PLACES[number % len(PLACES)], abs=0.08)


def test_many_crops_of_few_classes_and_few_of_many():
    few = Patches()
    few.add(pool(whole_batch(labels=[0] * 60, size=(16, 16))), LOOK, {0: 1.0})
    assert len(few.crops("combined", 0)) == PER_CLASS
    view, labels = Patches(), [n % 20 for n in range(200)]
    view.add(pool(whole_batch(labels=labels, size=(16, 16))), LOOK, dict.fromkeys(range(12), 1.0))
    assert {len(view.crops("combined", label)) for label in range(12)} == {8}


def test_a_long_name_does_not_hide_the_numbers(monkeypatch):
    _, words = written(monkeypatch, collected(whole_batch(classes=["x" * 500, "a\nb"])))
    assert any(text.startswith("x" * 19 + "…: 2 of 2 images") for text in words)
    assert any(text.startswith("a b: 2 of 2 images") for text in words)
