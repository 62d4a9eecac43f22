"""Atlas: mean maps of classes, their lift, and that a fixed mark is a hot spot in one tile."""

import io
import re
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from whole_batches import LOOK, PLACES, pool, spot, whole_batch

from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views import atlas, table
from normgrad_lightning.views.atlas import LIMITS, Atlas
from normgrad_lightning.views.class_signal import MOST, ROWS, ClassSignal
from normgrad_lightning.views.resampling import smoothed
from normgrad_lightning.views.statistics import lifts
from normgrad_lightning.views.style import colours_of

SIGNAL = {label: 1.0 for label in range(-2, 40)}
CORNER = (0.1, 0.9)


def collected(*batches, signal=SIGNAL):
    view = Atlas()
    for batch in batches:
        view.add(pool(batch), LOOK, signal)
    return view


def marked_batch(seed=0, count=16, **options):
    """Of four classes, class 2 has a spot in the corner; the others have theirs anywhere."""
    rng = np.random.default_rng(seed)
    labels = [n % 4 for n in range(count)]
    places = [CORNER if label == 2 else tuple(rng.uniform(0.2, 0.8, 2)) for label in labels]
    return whole_batch(labels=labels, places=places, classes=list("abcd"), seed=seed, **options)


def test_means_are_of_maps_divided_by_their_mean_and_each_class_counts_once():
    one = whole_batch(labels=[0] * 9 + [1], strengths=[1.0] * 9 + [4.0], grids=((16, 16),))
    two = whole_batch(labels=[1, 1, 1], strengths=[1.0, 2.0, 30.0], grids=((16, 16),), seed=1)
    means, lift_of = collected(one, two).lifts("combined")
    by_class = {0: [], 1: []}
    for batch in (one, two):
        for label, m in zip(batch.labels, pool(batch).focus["combined"], strict=True):
            by_class[label].append(m / m.mean())
    expected = np.stack([smoothed(np.mean(by_class[label], axis=0)[None])[0] for label in (0, 1)])
    for label in (0, 1):
        np.testing.assert_allclose(means[label], expected[label], rtol=1e-5)
        np.testing.assert_allclose(lift_of[label], lifts(expected, np.array([9.0, 4.0]))[label], rtol=1e-5)


def test_a_mark_at_a_fixed_place_is_the_hot_spot_of_one_class():
    view = collected(*(marked_batch(seed) for seed in range(4)))
    _, lift_of = view.lifts("combined")
    place = np.unravel_index(lift_of[2].argmax(), lift_of[2].shape)
    assert (np.array(place) + 0.5) / lift_of[2].shape == pytest.approx(CORNER, abs=0.08)
    page = view.page([], LOOK, range(4))
    spots = [page.scalars[f"normgrad/hot_spot/{name}"] for name in "abcd"]
    assert spots[2] > 3
    assert max(spots[:2] + spots[3:]) < spots[2] / 1.5


def test_the_class_frequencies_of_the_batch_make_no_difference():
    even = whole_batch(labels=[0, 1] * 40, places=[(0.3, 0.3), (0.7, 0.7)])
    skewed = whole_batch(labels=[0] * 79 + [1] * 40, places=[(0.3, 0.3)])
    skewed.maps["net.layer0"][79:] = spot((32, 32), (0.7, 0.7))
    for layer, side in (("net.layer1", 16), ("net.layer2", 4)):
        skewed.maps[layer][79:] = spot((side, side), (0.7, 0.7))
    lift = [collected(batch).lifts("combined")[1][1] for batch in (even, skewed)]
    np.testing.assert_allclose(*lift, rtol=0.02)


def test_a_page_names_its_tiles_and_says_the_largest_lifts(monkeypatch):
    words, original = [], table.write
    monkeypatch.setattr(
        table, "write", lambda picture, text, *rest: (words.append(text), original(picture, text, *rest))
    )
    view = collected(marked_batch())
    page = view.page([], LOOK, range(4))
    assert [picture.tag for picture in page.pictures] == [
        "normgrad/4_atlas/0_combined",
        "normgrad/4_atlas/02_net.layer2",
    ]
    assert all(f"Where each class is learned ({of}):" in words for of in ("all layers combined", "net.layer2"))
    spots = {name: page.scalars[f"normgrad/hot_spot/{name}"] for name in "abcd"}
    assert all(f"{name}: lift up to {value:.1f}" in words for name, value in spots.items())
    view.add(pool(marked_batch(1, step=100)), LOOK, SIGNAL)
    words.clear()
    later = view.page([], LOOK, range(4))
    assert [words.count(head) for head in ("mean map", "lift", "first lift")] == [4, 4, 4]  # two blocks in two cards
    assert any(word.startswith("c: lift up to") and word.endswith(f"first {spots['c']:.1f}") for word in words)
    assert later.step == 100


def limit(values):
    return next(one for one in LIMITS if one >= np.max(values))


@pytest.mark.parametrize("strength", [1.0, 5.0])
def test_the_scales_fit_the_data_and_are_written_below(strength, monkeypatch):
    words, original = [], atlas.write
    monkeypatch.setattr(
        atlas, "write", lambda picture, text, *rest: (words.append(text), original(picture, text, *rest))
    )
    view = collected(marked_batch(size=(64, 64), strengths=[strength] * 16))
    means, lift_of = view.lifts("combined")
    brightest = limit(list(means.values()))
    largest = limit([np.maximum(lift, 1 / lift) for lift in lift_of.values()])
    pixels = np.asarray(Image.open(io.BytesIO(view.page([], LOOK, range(4)).pictures[0].jpeg)).convert("RGB")).astype(
        int
    )
    top, left = find_tile(pixels)
    value, lift = means[0].mean() / brightest, np.log(lift_of[0]).mean() / (2 * np.log(largest)) + 0.5
    for at, expected, colormap in ((left, value, "inferno"), (left + 98, lift, "matplotlib:coolwarm")):
        middle = pixels[top + 4 : top + 92, at + 4 : at + 92].mean((0, 1))
        assert np.abs(middle - 255 * colours_of(colormap)[round(255 * expected)]).max() < 25
    assert words[:4] == ["mean map: 0", f"{brightest:g} times its mean", f"lift: 1/{largest:g}", f"{largest:g} times"]


def find_tile(pixels):
    dark = (pixels.sum(2) < 500).mean(1)
    top = int(np.argmax(dark > 0.4))
    return top, 0


def test_one_class_has_a_mean_map_only():
    page = collected(whole_batch(labels=None, places=[(0.5, 0.5)] * 4)).page([], LOOK, [-1])
    assert [picture.width for picture in page.pictures] == [350, 350]  # room for the title
    assert page.scalars == {}


def test_what_came_before_counts_half():
    view = collected(whole_batch(labels=[0, 1], places=[(0.3, 0.3)]))
    view.page([], LOOK, (0, 1))
    view.add(pool(whole_batch(labels=[0, 1], places=[(0.7, 0.7)], seed=1)), LOOK, SIGNAL)
    old, new = (
        pool(whole_batch(labels=[0], places=[place])).focus["combined"][0] for place in ((0.3, 0.3), (0.7, 0.7))
    )
    expected = smoothed((old / old.mean() / 2 + new / new.mean())[None] / 1.5)[0]
    np.testing.assert_allclose(view.lifts("combined")[0][0], expected, rtol=1e-5)


def test_images_of_another_size_are_added():
    view = collected(whole_batch(grids=((8, 8),)), whole_batch(grids=((8, 12),), size=(32, 48)))
    assert view.lifts("combined")[0][0].shape == (8, 12)
    assert view.page([], LOOK, (0, 1)).pictures


def test_a_thousand_classes_fit_into_memory_and_more_are_left_out():
    signal, view = ClassSignal(), Atlas()
    tracemalloc.start()
    for start in range(0, 3000, 100):
        labels = list(range(start, start + 100))
        maps = {name: torch.rand(100, 28, 28) for name in ("a", "b")}
        images = torch.zeros(100, 1, 28, 28)
        batch = pool(
            MapSet(
                KINDS["order0"],
                0,
                maps,
                images,
                dict.fromkeys(maps, images),
                ["a", "b"],
                labels=labels,
            )
        )
        batch = replace(batch, shares=[(label + 1) / 1e4 for label in labels])
        signal.add(batch)
        view.add(batch, LOOK, signal.totals)
        del batch, maps, images
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert used < 12e6
    assert set(view._counts) == set(range(3000 - MOST, 3000))
    page = view.page([], LOOK, signal.shown)
    assert signal.shown == list(range(3000 - ROWS, 3000))
    assert len(page.scalars) == ROWS


def test_a_resumed_run_compares_with_the_first_event():
    view = collected(marked_batch())
    view.page([], LOOK, range(4))
    resumed = Atlas()
    resumed.load_state_dict(view.state_dict())
    for name, of_class in view._first.items():
        np.testing.assert_equal(resumed._first[name], of_class)
    Atlas().load_state_dict({})  # of an older version


@pytest.mark.parametrize("other", [(16, 24), (32, 48)])
def test_images_of_another_size_count_as_before(other):
    view = Atlas()
    for number in range(6):
        grids = ((32, 32),) if number % 2 else (other,)
        view.add(pool(whole_batch(grids=grids, size=grids[0], places=PLACES[:2])), LOOK, {0: 1.0, 1: 1.0})
    means, lift_of = view.lifts("combined")
    for label, place in enumerate(PLACES[:2]):
        assert means[label].mean() == pytest.approx(1.0, abs=0.05)
        at = np.unravel_index(means[label].argmax(), means[label].shape)
        assert (np.array(at) + 0.5) / means[label].shape == pytest.approx(place, abs=0.06)
    assert lift_of[1].max() > 1.5


def test_images_with_other_axes_start_over():
    view = Atlas()
    view.add(pool(whole_batch()), LOOK, {0: 1.0, 1: 1.0})
    signals = whole_batch(grids=((64,),), size=(64,), places=[(0.5,), (0.2,)])
    view.add(pool(signals), LOOK, {0: 1.0, 1: 1.0})
    means, _ = view.lifts("combined")
    assert means[0].shape == (64,)
    assert means[0].mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("size", [(32, 32), (400, 5)])
def test_long_names_and_tall_images_do_not_hide_the_numbers(size, monkeypatch):
    words, original = [], table.write
    monkeypatch.setattr(
        table, "write", lambda picture, text, *rest: (words.append(text), original(picture, text, *rest))
    )
    names = ["x" * 500, "dog"] if size == (32, 32) else ["cat", "dog"]
    view = collected(whole_batch(size=size, grids=(size,), classes=names))
    view.page([], LOOK, [0, 1])
    view.add(pool(whole_batch(size=size, grids=(size,), classes=names)), LOOK, SIGNAL)
    words.clear()
    view.page([], LOOK, [0, 1])
    captions = {text for text in words if text.startswith(("xxx", "cat", "dog"))}
    assert len(captions) == 2
    assert all(re.search(r": lift up to \d\.\d, first \d\.\d$", text) for text in captions), captions
