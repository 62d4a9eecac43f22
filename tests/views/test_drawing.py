"""Pictures against slow, independent re-implementations."""

import functools
import io
import math
import subprocess
import sys
from typing import get_args

import cmap
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from PIL import Image

from normgrad_lightning.views.drawing import Sheet, display_image, greys_of, input_tiles, jpeg, overlay, overlays
from normgrad_lightning.views.scales import scale_maps
from normgrad_lightning.views.style import SIGNED_COLORMAP, Scale, Style, check_colormap

RNG = np.random.default_rng(0)
SCALES = get_args(Scale)
LEVEL = 1 / 255


def picture_of(image):
    """An image in [0, 1] as a picture of bytes, with the fourth that says nothing."""
    levels = np.rint(np.asarray(image) * 255)
    return np.concatenate([levels, np.zeros_like(levels[..., :1])], -1).astype(np.uint8)


def unit(picture):
    """A picture of bytes as red, green and blue in [0, 1]."""
    assert picture.dtype == np.uint8
    assert picture.shape[-1] == 4
    return picture[..., :3] * LEVEL


def slow_min_max(values, constant):
    """Min–max in Python floats, value by value."""
    flat = [float(v) for v in np.asarray(values).ravel()]
    finite = [v for v in flat if math.isfinite(v)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    unit = [0.0 if not math.isfinite(v) else constant if low == high else (v - low) / (high - low) for v in flat]
    return np.array(unit).reshape(np.shape(values))


def slow_robust(values, signed=False):
    """The robust scale of one map `(*S)` in float64, cell by cell: smoothed where it is finite, cut off, scaled."""
    values = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    if not finite.any():
        return np.full(values.shape, 0.5 if signed else 0.0)
    largest = np.abs(values[finite]).max() or 1.0
    known = np.where(finite, values, 0.0) / largest
    fine = [side for side in values.shape if side >= 12]
    smooth, weight = known, finite.astype(np.float64)
    for axis, side in enumerate(values.shape):
        if side >= 12:
            smooth, weight = (slow_gaussian(v, axis, max(1.0, min(fine) / 32)) for v in (smooth, weight))
    smooth = smooth / np.where(weight > 0, weight, 1.0)
    cells = sorted(abs(v) if signed else v for v in smooth[finite])
    limit = cells[math.ceil(0.995 * (len(cells) - 1))]
    low = 0.0 if signed else cells[0]
    limit = limit if limit > low else cells[-1]
    if limit == low or (not signed and np.ptp(known[finite]) == 0):
        scaled = np.zeros(values.shape)
    else:
        scaled = np.clip((smooth - low) / (limit - low), -1.0, 1.0)
    scaled = np.where(finite, scaled, 0.0)
    return 0.5 + scaled / 2 if signed else scaled


def slow_gaussian(values, axis, sigma):
    """A weighted mean of the cells up to three σ away, along one axis; beyond an edge is the mirror image."""
    side, reach = values.shape[axis], math.ceil(3 * sigma)
    out = np.empty_like(values)
    for place in np.ndindex(values.shape):
        total = weights = 0.0
        for offset in range(-reach, reach + 1):
            at = place[axis] + offset
            at = -1 - at if at < 0 else 2 * side - 1 - at if at >= side else at
            weight = math.exp(-(offset**2) / (2 * sigma**2))
            total += weight * values[(*place[:axis], at, *place[axis + 1 :])]
            weights += weight
        out[place] = total / weights
    return out


@functools.cache
def colour_of(colormap, level):
    return np.array([*cmap.Colormap(colormap)(level / 255).rgba][:3])


def slow_overlay(image, values, colormap, opacity):
    """The formula of the docstring, pixel by pixel, with cmap's own colouring; values on the image's grid."""
    out = np.empty(image.shape)
    for y, x in np.ndindex(values.shape):
        level = round(float(values[y, x]) * 255)
        red, green, blue = (float(c) for c in image[y, x])
        alpha = opacity ** (2 - level / 255)
        out[y, x] = (1 - alpha) * (0.299 * red + 0.587 * green + 0.114 * blue) + alpha * colour_of(colormap, level)
    return out


def interpolated(values, height, width):
    tensor = torch.as_tensor(values, dtype=torch.float64)[None, None]
    return torch.nn.functional.interpolate(tensor, (height, width), mode="bilinear", align_corners=False)[0, 0].numpy()


shapes = st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.integers(1, 6)] * n))


@st.composite
def arrays(draw, leading):
    """``(leading, *S)`` of any float type, with NaN, infinities, subnormals and repeated values."""
    dtype = draw(st.sampled_from([np.float16, np.float32, np.float64]))
    bound = 1e300 if dtype is np.float64 else float(np.finfo(dtype).max)
    bits = np.dtype(dtype).itemsize * 8
    elements = st.floats(-bound, bound, width=bits, allow_subnormal=False) | st.sampled_from(
        [0.0, 1.0, math.nan, math.inf, -math.inf]
    )
    shape = (draw(leading), *draw(shapes))
    return draw(hnp.arrays(dtype, shape, elements=elements, fill=st.sampled_from([0.0, 1.0, math.nan])))


# --- scaling -----------------------------------------------------------------------------------------------------


@given(arrays(st.integers(1, 4)))
def test_scale_maps_is_min_max_of_each_map_or_of_all(maps):
    each = np.stack([slow_min_max(m, 0.0) for m in maps])
    np.testing.assert_allclose(scale_maps(maps, "image"), each, atol=1e-6)
    np.testing.assert_allclose(scale_maps(maps, "shared"), slow_min_max(maps, 0.0), atol=1e-6)


@pytest.mark.parametrize("unit", [1e-45, 1e-38, 6e-8, 1.0, 1e30, 1e38])
@pytest.mark.parametrize("scale", SCALES)
def test_scale_maps_keeps_the_steps_of_tiny_and_huge_values(unit, scale):
    maps = np.array([[[0, 1], [2, 3]]], dtype=np.float32) * np.float32(unit)
    np.testing.assert_allclose(scale_maps(maps, scale), [[[0, 1 / 3], [2 / 3, 1]]], atol=1e-6)


def test_scale_maps_keeps_float16_subnormals():
    maps = np.array([[6e-8, 1.2e-7, 1.8e-7]], dtype=np.float16)
    np.testing.assert_allclose(scale_maps(maps), [[0, 0.5, 1]], atol=1e-6)


def test_scale_maps_and_display_image_span_all_of_float32():
    values = np.array([[[-3e38, 0, 3e38]]], dtype=np.float32)
    np.testing.assert_allclose(scale_maps(values), [[[0, 0.5, 1]]], atol=1e-6)
    np.testing.assert_allclose(unit(display_image(values))[..., 0], [[0, 0.5, 1]], atol=0.501 * LEVEL)


def test_shared_scale_keeps_the_order_between_maps():
    maps = np.array([[0.0, 1.0], [0.0, 4.0]])
    np.testing.assert_array_equal(scale_maps(maps, "image"), [[0, 1], [0, 1]])
    np.testing.assert_array_equal(scale_maps(maps, "shared"), [[0, 0.25], [0, 1]])


@given(maps=hnp.arrays(np.float32, (3, 4, 5), elements=st.floats(-(2**40), 2**40, width=32, allow_subnormal=False)))
def test_a_signed_map_has_its_zero_in_the_middle_and_its_largest_value_at_an_end(maps):
    for scale in SCALES:
        groups = [maps] if scale == "shared" else maps
        expected = [[0.5 + 0.5 * float(v) / (np.abs(group).max() or 1) for v in group.ravel()] for group in groups]
        scaled = scale_maps(maps, scale, signed=True)
        np.testing.assert_allclose(scaled.ravel(), np.ravel(expected), atol=1e-6)


def test_a_signed_map_without_values_is_neutral_and_a_broken_one_ignores_what_is_broken():
    maps = np.array([[0.0, 0.0], [np.nan, np.inf], [np.nan, -2.0], [3e38, -3e38]], np.float32)[:, None]
    assert scale_maps(maps, signed=True)[:, 0].tolist() == [[0.5, 0.5], [0.5, 0.5], [0.5, 0.0], [1.0, 0.0]]


grids = st.one_of(
    st.tuples(st.integers(1, 40)),
    st.tuples(st.integers(1, 24), st.integers(1, 24)),
    st.sampled_from([(16, 40), (3, 70), (3, 18, 17)]),
)


@settings(max_examples=30)
@given(grids, st.booleans(), st.sampled_from([1e-40, 1.0, 1e38]), st.integers(0, 999))
def test_robust_is_a_smoothed_map_up_to_its_99_5th_percentile(grid, signed, unit, seed):
    rng = np.random.default_rng(seed)
    maps = rng.exponential(size=(2, *grid)) ** 3 * (rng.normal(size=(2, *grid)) if signed else 1.0)
    maps = (maps / np.abs(maps).max() * unit).astype(np.float32)
    before = maps.copy()
    expected = np.stack([slow_robust(m, signed) for m in maps])
    np.testing.assert_allclose(scale_maps(maps, "robust", signed=signed), expected, atol=1e-4)
    np.testing.assert_array_equal(maps, before)


@given(arrays(st.integers(1, 4)), st.booleans())
def test_robust_ignores_what_is_not_finite_and_takes_any_range(maps, signed):
    expected = np.stack([slow_robust(m, signed) for m in maps])
    np.testing.assert_allclose(scale_maps(maps, "robust", signed=signed), expected, atol=1e-5)


@pytest.mark.parametrize("signed", [False, True])
def test_robust_smooths_around_cells_that_are_not_finite(signed):
    maps = RNG.exponential(size=(3, 20, 20)).astype(np.float32)
    maps[0, 3:6, 4] = np.nan
    maps[1, 0, 0] = np.inf
    maps[2] = np.nan
    expected = np.stack([slow_robust(m, signed) for m in maps])
    np.testing.assert_allclose(scale_maps(maps, "robust", signed=signed), expected, atol=1e-4)


@pytest.mark.parametrize("grid", [(7, 7), (15, 15), (16, 16), (64, 64), (1, 300)])
@pytest.mark.parametrize("signed", [False, True])
def test_robust_shows_a_single_cell_and_no_more_of_a_constant_than_others(grid, signed):
    one, constant = np.zeros((1, *grid), np.float32), np.full((1, *grid), 0.1, np.float32)
    one[0, grid[0] // 2, grid[1] // 2] = 1e-3
    scaled = scale_maps(one, "robust", signed=signed)
    assert scaled[0, grid[0] // 2, grid[1] // 2] == scaled.max() == 1.0
    assert scaled.min() == (0.5 if signed else 0.0)
    np.testing.assert_allclose(scale_maps(constant, "robust", signed=signed), 1.0 if signed else 0.0, atol=1e-6)


@pytest.mark.parametrize("grid", [(112, 112), (224, 224), (130, 96), (97, 400)])
@pytest.mark.parametrize("signed", [False, True])
def test_a_fine_map_is_drawn_as_if_it_had_been_smoothed_on_its_own_grid(grid, signed):
    rng = np.random.default_rng(0)
    maps = rng.exponential(size=(1, *grid)) ** 2 * np.exp(-(np.linspace(-2, 1, grid[1]) ** 2))
    maps[:, ::2, ::2] *= 3.0  # a stride
    maps = maps - maps.mean() if signed else maps
    greys = np.zeros((1, 96, 96), np.uint8)
    drawn = overlays(greys, maps, Style(colormap="gray", opacity=1.0), signed=signed)[0] * LEVEL
    exact, colormap = scale_maps(maps, "robust", signed=signed)[0], SIGNED_COLORMAP if signed else "gray"
    wanted = overlay(np.zeros((96, 96, 4), np.uint8), exact, colormap=colormap, opacity=1.0, signed=signed)
    assert np.abs(drawn - wanted * LEVEL).mean() < 0.03
    assert np.abs(drawn - wanted * LEVEL).max() < 0.15


def test_robust_is_what_pictures_are_drawn_with():
    assert Style().scale == "robust"
    maps = RNG.exponential(size=(2, 20, 20))
    np.testing.assert_array_equal(scale_maps(maps), scale_maps(maps, "robust"))
    tiles = input_tiles(RNG.random((2, 3, 32, 32)), tile_size=32)
    np.testing.assert_array_equal(Sheet(tiles).panel(maps), Sheet(tiles).panel(maps, Style(scale="robust")))


def test_unknown_scale_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"`scale`: expected one of 'robust', 'image', 'shared', but got 'global'"):
        scale_maps(np.zeros((1, 2, 2)), "global")


# --- the input ---------------------------------------------------------------------------------------------------


def slow_display(image, mean, std):
    channels = len(image)
    if mean is None:
        unit = slow_min_max(image, 0.5)
    else:
        unit = np.zeros(image.shape)
        for c in range(channels):
            for place in np.ndindex(image.shape[1:]):
                v = float(image[(c, *place)])
                if math.isfinite(v):
                    unit[(c, *place)] = min(max(v * std[c] + mean[c], 0.0), 1.0)
    if channels != 3:
        unit = np.stack([sum(unit) / channels] * 3)
    return np.stack(list(unit), axis=-1)


@given(arrays(st.sampled_from([1, 2, 3, 10])), st.booleans())
def test_display_image_shows_any_channels_axes_and_values(image, normalised):
    mean, std = ([0.4 + 0.01 * c for c in range(len(image))], [0.2 + 0.01 * c for c in range(len(image))])
    plane = {2: lambda a: a[:, None], 3: lambda a: a, 4: lambda a: a[:, a.shape[1] // 2]}[image.ndim](image)
    expected = slow_display(plane, mean if normalised else None, std)
    got = display_image(image, mean, std) if normalised else display_image(image)
    np.testing.assert_allclose(unit(got), expected, atol=0.501 * LEVEL)


@pytest.mark.parametrize(("mean", "std"), [((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)), (0.5, 0.25), ([0.5], [2])])
def test_display_image_undoes_a_normalisation(mean, std):
    original = RNG.random((3, 5, 7))
    by_channel = [np.reshape(np.broadcast_to(np.ravel(v), 3), (3, 1, 1)) for v in (mean, std)]
    seen = (original - by_channel[0]) / by_channel[1]
    np.testing.assert_allclose(unit(display_image(seen, mean, std)), original.transpose(1, 2, 0), atol=0.501 * LEVEL)


def test_display_image_takes_bytes_and_a_mean_or_a_std_alone():
    image = np.array([[[0, 51], [102, 255]]], dtype=np.uint8)
    np.testing.assert_array_equal(display_image(image)[..., 1], image[0])
    np.testing.assert_array_equal(display_image(image, std=1 / 255)[..., 1], image[0])
    np.testing.assert_array_equal(display_image(image / 255, mean=0.2)[..., 1], [[51, 102], [153, 255]])


@pytest.mark.parametrize("name", ["mean", "std"])
def test_mean_or_std_of_the_wrong_length_is_refused(name):
    with pytest.raises(ValueError, match=rf"`{name}`: expected one number or 3, one for each channel.*but got 2. Give"):
        display_image(np.zeros((3, 4, 4)), **{name: (0.5, 0.5)})


def test_tiles_of_the_right_size_are_the_images_themselves():
    images = RNG.random((2, 3, 24, 32)).astype(np.float32)
    expected = np.stack([display_image(image) for image in images])
    np.testing.assert_array_equal(input_tiles(images, tile_size=32), expected)


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((3, 224, 224), (64, 64)),
        ((3, 30, 60), (32, 64)),
        ((1, 60, 30), (64, 32)),
        ((1, 500), (16, 64)),
        ((10, 5, 8, 8), (64, 64)),
        ((3, 1000, 3), (64, 16)),
        ((1, 1, 1), (64, 64)),
    ],
)
def test_tiles_keep_the_aspect_and_the_brightness(shape, size):
    ramp = np.broadcast_to(np.linspace(0, 1, shape[-1]), shape) if shape[-1] > 1 else np.full(shape, 0.5)
    (tile,) = input_tiles(ramp[None], mean=0, std=1, tile_size=64)
    assert tile.shape == (*size, 4)
    assert unit(tile).mean() == pytest.approx(0.5, abs=0.01)
    assert (np.diff(unit(tile), axis=1) >= -LEVEL * 1.01).all()  # still a ramp from left to right


def test_shrinking_averages_fine_detail_away():
    checks = np.indices((256, 256)).sum(0)[None] % 2
    (tile,) = input_tiles(checks[None], tile_size=64)
    np.testing.assert_allclose(unit(tile), 0.5, atol=0.02)


# --- the overlay -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("colormap", ["inferno", "viridis"])
@pytest.mark.parametrize("opacity", [0.0, 0.3, 0.6, 1.0])
def test_overlay_follows_its_formula_at_native_resolution(colormap, opacity):
    image, values = picture_of(RNG.random((6, 9, 3))), RNG.random((6, 9)).astype(np.float32)
    values[0, :2] = 0, 1
    expected = slow_overlay(unit(image), values, colormap, opacity)
    shown = overlay(image, values, colormap=colormap, opacity=opacity)
    np.testing.assert_allclose(unit(shown), expected, atol=1.01 * LEVEL)  # the grey is rounded, and the pixel


@pytest.mark.parametrize("opacity", [0.0, 0.6, 1.0])
def test_a_signed_overlay_is_red_above_zero_blue_below_and_clear_at_zero(opacity):
    image, values = picture_of(np.full((1, 256, 3), 0.5)), np.linspace(0, 1, 256, dtype=np.float32)
    pixels = unit(overlay(image, values[None], colormap=SIGNED_COLORMAP, opacity=opacity, signed=True)[0])
    colours = cmap.Colormap(SIGNED_COLORMAP).lut(256)[:, :3]
    most = opacity * (2 - opacity)
    for place in (0, 255):
        np.testing.assert_allclose(pixels[place], 0.5 * (1 - most) + most * colours[place], atol=0.01)
    np.testing.assert_allclose(pixels[127:129], 0.5, atol=0.07 * opacity + LEVEL)
    if opacity:
        strength = np.abs(pixels - 0.5).max(1)
        assert (np.diff(strength[:128]) < 0.01).all()  # never an edge on the way to zero
        assert (np.diff(strength[128:]) > -0.01).all()
        assert (pixels[:120, 2] > pixels[:120, 0]).all()
        assert (pixels[136:, 0] > pixels[136:, 2]).all()


def test_a_signed_panel_is_drawn_around_zero():
    maps = np.array([[[-1.0, 0.0, 1.0]], [[0.0, 0.0, 0.5]]], np.float32)
    tiles = picture_of(np.full((2, 64, 64, 3), 0.5))
    picture = Sheet(tiles).panel(maps, signed=True)[..., :3].astype(int)
    first, second = picture[:, 66:130], picture[:, 66 + 138 : 130 + 138]
    assert first[32, 4, 2] > first[32, 4, 0] + 30  # blue
    assert abs(first[32, 32] - 128).max() < 12  # as the image
    assert first[32, 60, 0] > first[32, 60, 2] + 30  # red
    assert abs(second[32, 4] - 128).max() < 12
    assert second[32, 60, 0] > second[32, 60, 2] + 30


@settings(max_examples=50)
@given(
    hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 7), st.integers(1, 7)),
        elements=st.floats(0, 1, width=32, allow_subnormal=False),
    ),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
)
def test_overlay_interpolates_values_and_then_colours(values, zoom):
    height, width = values.shape[0] * zoom[0], values.shape[1] * zoom[1]
    wanted = interpolated(values, height, width)
    shown = overlay(np.zeros((height, width, 4), np.uint8), values, colormap="gray", opacity=1.0)
    np.testing.assert_allclose(unit(shown), np.stack([wanted] * 3, -1), atol=0.51 * LEVEL)


@pytest.mark.parametrize("size", [(200, 300), (129, 127), (128, 96), (3, 400), (1, 1)])
def test_overlay_resizes_as_pillow_does(size):
    values = RNG.random(size).astype(np.float32)
    wanted = np.asarray(Image.fromarray(values).resize((96, 128), Image.Resampling.BILINEAR))
    shown = overlay(np.zeros((128, 96, 4), np.uint8), values, colormap="gray", opacity=1.0)
    np.testing.assert_allclose(unit(shown)[..., 0], wanted, atol=0.51 * LEVEL)


def test_overlay_shows_a_map_larger_than_the_image_by_its_average():
    values = np.indices((64, 64)).sum(0).astype(np.float32) % 2
    shown = overlay(np.zeros((8, 8, 4), np.uint8), values, colormap="gray", opacity=1.0)
    np.testing.assert_allclose(unit(shown), 0.5, atol=0.02)


def test_a_weak_map_leaves_the_picture_recognisable():
    image = picture_of(RNG.random((32, 32, 3)))
    shown = unit(overlay(image, np.zeros((4, 4), np.float32))).mean(-1)
    grey = unit(image) @ [0.299, 0.587, 0.114]
    assert np.corrcoef(shown.ravel(), grey.ravel())[0, 1] > 0.999
    assert np.ptp(shown) > 0.6 * np.ptp(grey)


@pytest.mark.parametrize("brightness", [0.0, 0.5, 1.0])
def test_a_stronger_value_is_never_clearly_darker(brightness):
    ramp = np.linspace(0, 1, 256, dtype=np.float32)[None]
    luma = unit(overlay(picture_of(np.full((1, 256, 3), brightness)), ramp)[0]) @ [0.299, 0.587, 0.114]
    assert (luma - np.maximum.accumulate(luma)).min() > -0.02
    assert luma[-1] - luma[0] > 0.25


# --- the panel ---------------------------------------------------------------------------------------------------


def pieces(picture, count, height, width):
    """Cut a panel into (input, overlay) pairs by the layout, and return the rest of its pixels too."""
    columns, rest = min(count, 2), np.ones(picture.shape[:2], bool)
    pairs = []
    for i in range(count):
        top, left = i // columns * (height + 8), i % columns * (2 * width + 10)
        boxes = [np.s_[top : top + height, x : x + width] for x in (left, left + width + 2)]
        pairs.append([picture[box] for box in boxes])
        for box in boxes:
            rest[box] = False
    return pairs, picture[rest]


@settings(max_examples=40)
@given(st.data())
def test_panel_shows_each_input_beside_its_overlay(data):
    count, channels = data.draw(st.integers(1, 5)), data.draw(st.sampled_from([1, 3, 10]))
    space = data.draw(shapes)
    grid = tuple(data.draw(st.integers(1, side)) for side in space)
    scale = data.draw(st.sampled_from(sorted(SCALES)))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    images, maps = rng.normal(size=(count, channels, *space)), rng.exponential(size=(count, *grid))
    maps[rng.random(maps.shape) < 0.1] = np.nan

    tiles = input_tiles(images, tile_size=24)
    sheet = Sheet(tiles)
    sheet.panel(rng.exponential(size=(count, *grid)))  # what was drawn before is covered
    picture = sheet.panel(maps, Style(scale=scale, colormap="viridis", opacity=0.5))

    assert picture.dtype == np.uint8
    _, height, width, _ = tiles.shape
    assert picture.shape[1] == (4 * width + 12 if count > 1 else 2 * width + 2)
    pairs, rest = pieces(picture, count, height, width)
    assert (rest == rest[:1]).all()
    scaled = {
        "robust": lambda: [slow_robust(plane(m)) for m in maps],
        "image": lambda: [plane(slow_min_max(m, 0.0)) for m in maps],
        "shared": lambda: [plane(m) for m in slow_min_max(maps, 0.0)],
    }[scale]()
    for (shown, covered), tile, values in zip(pairs, tiles, scaled, strict=True):
        expected = slow_overlay(unit(tile), interpolated(values, height, width), "viridis", 0.5)
        np.testing.assert_array_equal(shown, tile)
        np.testing.assert_allclose(unit(covered), expected, atol=2 * LEVEL)  # values may round to the next colour


def plane(values):
    """What is drawn of a map: a strip, the map, the middle slice."""
    return {1: lambda a: a[None], 2: lambda a: a, 3: lambda a: a[len(a) // 2]}[values.ndim](values)


def test_a_volume_is_smoothed_and_cut_off_in_the_slice_that_is_drawn():
    maps = RNG.exponential(size=(2, 5, 20, 20)) ** 2
    maps[:, 0] *= 1e6
    greys = np.full((2, 40, 40), 128, np.uint8)
    np.testing.assert_array_equal(overlays(greys, maps), overlays(greys, maps[:, 2]))


def is_hatched(tile):
    """Whether a tile is grey, striped from edge to edge, and has words on white in its middle."""
    red, green, blue = (tile[..., channel].astype(int) for channel in range(3))
    if (red != green).any() or (red != blue).any():
        return False
    height, width = red.shape
    crossings = np.abs(np.diff(np.sign(red[2] - red[2].mean()))).astype(bool).sum()
    words = red[height // 4 : -height // 4, width // 6 : -width // 6]
    return bool(crossings >= width // 8 and (words == 255).mean() > 0.1 and (words < 60).mean() > 0.01)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("grid", [(20, 20), (7, 7), (30,), (5, 9, 9)])
def test_a_zero_map_is_hatched_and_says_so_and_no_other_is(grid, scale, signed):
    maps = np.zeros((4, *grid), np.float32)
    maps[1, ..., 0] = 1e-30
    maps[2] = np.nan
    tiles = input_tiles(RNG.random((4, 3, 64, 64)), tile_size=128)
    drawn = overlays(greys_of(tiles), maps, Style(scale=scale), signed=signed)
    assert [is_hatched(tile) for tile in drawn] == [True, False, False, True]
    assert np.corrcoef(drawn[0, :20, :, 0].ravel(), greys_of(tiles)[0, :20].ravel())[0, 1] > 0.2  # behind the stripes


@pytest.mark.parametrize("size", [(128, 128), (96, 96), (96, 24), (24, 96), (32, 32), (16, 16), (4, 16)])
def test_a_tile_of_any_size_can_be_hatched(size):
    drawn = overlays(np.full((1, *size), 100, np.uint8), np.zeros((1, 3, 3)))[0]
    assert drawn.shape == (*size, 4)
    assert len(np.unique(drawn[..., 0])) > 1


def test_panel_needs_a_map_per_tile():
    with pytest.raises(ValueError, match="`maps`: expected 2, one for each image, but got 3"):
        Sheet(input_tiles(np.zeros((2, 1, 4, 4)))).panel(np.zeros((3, 2, 2)))


def test_jpeg_decodes_to_the_panel():
    waves = np.sin(np.linspace(0, 6, 64))[None, None, :, None] * np.cos(np.linspace(0, 5, 64))
    tiles = input_tiles(np.repeat(waves, 3, 0))
    picture = Sheet(tiles).panel(RNG.random((3, 7, 7)))
    encoded = jpeg(picture)
    with Image.open(io.BytesIO(encoded)) as image:
        assert (image.format, image.mode) == ("JPEG", "RGB")
        assert np.abs(np.asarray(image, float) - picture[..., :3]).mean() < 3
    assert len(jpeg(picture, quality=30)) < len(encoded) < picture.nbytes / 10


# --- names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["inferno", "viridis", "magma_r", "matlab:jet"])
def test_known_colormaps_pass(name):
    check_colormap(name)


@pytest.mark.parametrize(("wrong", "right"), [("infrno", "inferno"), ("viridiss", "viridis"), ("Magna", "magma")])
def test_an_unknown_colormap_is_refused_with_near_misses(wrong, right):
    with pytest.raises(ValueError, match=rf"`colormap`: expected .*, but got '{wrong}'. Did you mean .*'{right}'"):
        check_colormap(wrong)


def test_a_hopeless_colormap_is_refused_with_examples():
    with pytest.raises(ValueError, match=r"got '12345678'. Try 'inferno'"):
        check_colormap("12345678")


def test_import_takes_neither_torch_nor_cmap():
    code = "import sys, normgrad_lightning.views.drawing; print({'torch', 'cmap', 'lightning'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
