"""From maps to pictures a person can read at a glance.

A map is a handful of numbers on a coarse grid. What a reader of TensorBoard wants is the image the network saw and,
beside it, the same image with the map laid over it. This module does the drawing and nothing else: arrays in, arrays
out, with no knowledge of models, tensors or loggers.

The inputs are the same for every layer, so they are prepared once::

    sheet = Sheet(input_tiles(images, mean=mean, std=std, tile_size=128))
    for layer, maps in maps_of_layers.items():
        picture = jpeg(sheet.panel(maps))
"""

import difflib
import io
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from normgrad_lightning.checks import check_choice

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Picture: TypeAlias = npt.NDArray[np.uint8]
"""Pixels of red, green, blue and a byte that says nothing, ``(H, W, 4)``, as encoders like them."""
Statistic: TypeAlias = float | Sequence[float] | None

SCALES = {
    "image": "each map from its own minimum to its own maximum",
    "shared": "all maps from their common minimum to their common maximum",
}

SIGNED_COLORMAP = "matplotlib:coolwarm"
"""For signed maps: red above zero, blue below."""

_BACKGROUND = 224
_PALE = 90.0  # of the 128 colours on each side of a diverging map's middle
_GAP = 2  # between an input and its overlay
_PAIR_GAP = 8  # between pairs: what belongs together stands together
_SLIMMEST = 4  # a tile is at least a quarter as high as it is wide, so that a strip of audio can be seen


class Panel(NamedTuple):
    """A picture for the logs, encoded.

    Attributes:
        tag: What it is called: by its layer's name, until whoever logs it says more.
        jpeg: The picture.
        height: Its pixels.
        width: Its pixels.
    """

    tag: str
    jpeg: bytes
    height: int
    width: int


def check_colormap(name: str) -> None:
    """Raise a ValueError that suggests near misses if ``name`` is not a colour map of the cmap package."""
    if not isinstance(name, str):
        raise ValueError(f"`colormap`: expected the name of a colour map in the cmap package, but got {name!r}.")
    _lut(name)


@lru_cache(maxsize=8)
def _lut(name: str) -> npt.NDArray[np.float32]:
    """Return the 256 colours of a map, ``(256, 3)`` in [0, 1]."""
    import cmap

    try:
        colours = cmap.Colormap(name).lut(256)
    except (ValueError, TypeError) as error:
        known = sorted({key.rpartition(":")[2] for key in cmap.Catalog()})
        near = difflib.get_close_matches(str(name).lower(), known)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "Try 'inferno' or 'viridis'."
        raise ValueError(
            f"`colormap`: expected the name of a colour map in the cmap package, but got {name!r}. {hint}"
        ) from error
    return np.ascontiguousarray(colours[:, :3], dtype=np.float32)


def _wide(values: npt.NDArray[Any]) -> Floats:
    """Return the values as float32, or as float64 where they need it."""
    values = np.asarray(values)
    return values.astype(np.result_type(values, np.float32), copy=False)


def _range(values: Floats) -> tuple[float, float, bool]:
    """Return the minimum and maximum of the finite values, (0, 0) if there are none, and whether all are finite."""
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if math.isfinite(low) and math.isfinite(high):
        return low, high, True
    finite = values[np.isfinite(values)]
    return (float(finite.min()), float(finite.max()), False) if finite.size else (0.0, 0.0, False)


def _unit(values: Floats, *, constant: float) -> Floats:
    """Return the values brought to [0, 1] by min–max: ``constant`` without a range, 0 where a value is not finite."""
    low, high, are_finite = _range(values)
    if high - low > 1e38:
        values = values.astype(np.float64)  # the differences overflow float32
    unit = (values - low) / (high - low) if low < high else np.full_like(values, constant)
    return unit if are_finite else np.where(np.isfinite(values), unit, np.zeros_like(unit))


def scale_maps(maps: Floats, scale: str = "image", *, signed: bool = False) -> npt.NDArray[np.float32]:
    """Return the maps brought to [0, 1], ``(N, *S)`` as given: by min–max, or signed with zero at 0.5.

    Args:
        maps: ``(N, *S)``, of any range. Values that are not finite are ignored and come out as 0 (signed: as 0.5).
        scale: ``"image"`` for each map on its own, ``"shared"`` for one range over all of them, which makes their
            strengths comparable. Without a range (a constant map; signed: a zero map) the result is 0 (signed: 0.5).
        signed: Keep zero in the middle: the largest value, of either sign, comes out as 0 or 1.
    """
    check_choice("scale", scale, SCALES)
    maps = _wide(maps)
    groups = [maps] if scale == "shared" else maps
    scaled = [_centred(group) if signed else _unit(group, constant=0.0) for group in groups]
    return np.asarray(scaled, dtype=np.float32).reshape(maps.shape)


def _centred(values: Floats) -> Floats:
    """Return the values divided by the largest of them, whatever its sign, and brought from [-1, 1] to [0, 1]."""
    low, high, are_finite = _range(values)
    largest = max(-low, high)
    values = values if are_finite else np.where(np.isfinite(values), values, np.zeros_like(values))
    return values / largest / 2 + 0.5 if largest > 0 else np.full_like(values, 0.5)


def _plane(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``(K, *S)`` as ``(K, H, W)``: one axis in S as a strip, of three the middle slice along the first."""
    if values.ndim == 2:
        return values[:, None, :]
    if values.ndim == 4:
        return values[:, values.shape[1] // 2]
    return values


def _per_channel(name: str, value: float | Sequence[float], channels: int) -> npt.NDArray[np.float32]:
    """Return ``value`` as ``(C, 1, 1)`` or, for one number, ``(1, 1, 1)``."""
    array = np.asarray(value, dtype=np.float32).reshape(-1)
    if len(array) not in (1, channels):
        raise ValueError(
            f"`{name}`: expected one number or {channels}, one for each channel of the image, but got {len(array)}. "
            f"Give the `{name}` that the images were normalised with."
        )
    return array[:, None, None]


def display_image(image: npt.NDArray[Any], mean: Statistic = None, std: Statistic = None) -> Picture:
    """Return the image a network saw as a picture, ``(H, W, 4)``.

    With ``mean`` or ``std``, the normalisation is undone, ``image * std + mean`` (``mean`` 0 or ``std`` 1 if only the
    other is given), and clipped. Without, the image is stretched from its minimum to its maximum; a constant image is
    mid grey. Pixels that are not finite come out black.

    Args:
        image: ``(C, *S)``. Three channels are shown as RGB, one as grey, any other number as the grey of their mean.
            One axis in S gives a strip ``(1, L, 4)``, three give the middle slice along the first.
        mean: One number, or one per channel.
        std: One number, or one per channel.
    """
    values = _plane(_wide(image))
    if mean is None and std is None:
        picture = _unit(values, constant=0.5)
    else:
        scale = _per_channel("std", 1.0 if std is None else std, len(values))
        shift = _per_channel("mean", 0.0 if mean is None else mean, len(values))
        good = np.isfinite(values)
        picture = (np.where(good, values, np.zeros_like(values)) * scale + shift).clip(0.0, 1.0) * good
    if len(picture) != 3:
        picture = picture.mean(axis=0, keepdims=True).repeat(3, axis=0)
    pixels = np.zeros((*picture.shape[1:], 4), dtype=np.uint8)
    for channel, values in enumerate((picture * 255.0 + 0.5).astype(np.uint8)):
        pixels[..., channel] = values
    return pixels


def overlay(
    image: Picture, map: Floats, *, colormap: str = "inferno", opacity: float = 0.6, signed: bool = False
) -> Picture:
    """Return the map in colour over the grey version of the image, ``(H, W, 4)``.

    With v the map's value at a pixel, in 256 steps, and grey the image's luma, in 256 steps too::

        α = opacity ** (2 - v)
        pixel = (1 - α) * grey + α * colour(v)

    The image is grey so that a red car is not taken for a strong value. It shows through where the map is weak and
    yields where it is strong; at opacity 0 there is only the image, at opacity 1 only the map.

    A signed map, whose zero is at v = 0.5, is strong at both ends and clear in the middle. With s = abs(2v - 1)::

        α = opacity * (2 - opacity) * s ** 0.75

    and the pale colours in the middle of the colour map are left out: they would draw an edge along every zero.

    Args:
        image: ``(H, W, 4)``, from ``display_image`` or one of the ``input_tiles``.
        map: ``(h, w)`` in [0, 1], from ``scale_maps``, on a grid of any size. Its values are interpolated
            bilinearly to the size of the image, and then coloured: interpolated colours would show values that are
            not there.
        colormap: A name known to the cmap package.
        opacity: Of the strongest values.
        signed: Whether the map is signed; take a diverging colour map then, such as ``SIGNED_COLORMAP``.
    """
    height, width = image.shape[:2]
    picture: Picture = _painted(_greys(image[None]), _resized(map[None], height, width), colormap, opacity, signed)[0]
    return picture


def _greys(tiles: Picture) -> npt.NDArray[np.uint8]:
    """Return the luma of pictures, ``(N, H, W)``."""
    count, height, width, _ = tiles.shape
    below_each_other = _as_image(tiles.reshape(count * height, width, 4))
    return np.asarray(below_each_other.convert("L")).reshape(count, height, width)


def _as_image(picture: Picture) -> Image.Image:
    """Return the picture as one of Pillow's, without a copy."""
    height, width, _ = picture.shape
    return Image.frombuffer("RGBX", (width, height), picture, "raw", "RGBX", 0, 1)


def _resized(maps: Floats, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return maps in [0, 1] in this size, ``(N, height, width)`` in 256 steps, interpolated bilinearly.

    Not by Pillow, which takes one map at a time, nor by a matrix product, whose threads would get in training's way.
    """
    values = _resized_axis(maps.astype(np.float32, copy=False) * np.float32(255.0), 2, width)
    return (_resized_axis(values, 1, height) + np.float32(0.5)).astype(np.uint8)


def _resized_axis(values: Floats, axis: int, wanted: int) -> Floats:
    taps = _taps(values.shape[axis], wanted)
    parts = [values.take(places, axis) * (weights if axis == 2 else weights[:, None]) for places, weights in taps]
    total: Floats = sum(parts[1:], parts[0])
    return total


@lru_cache(maxsize=64)
def _taps(size: int, wanted: int) -> list[tuple[npt.NDArray[np.intp], npt.NDArray[np.float32]]]:
    """Return what to add up for an axis of another size: places of the old one, and their weights.

    Where it grows these are the two neighbours of each new place; where it shrinks, all places that fall into it.
    """
    step = size / wanted
    reach = max(step, 1.0)
    centres = (np.arange(wanted) + 0.5) * step - 0.5
    first = np.ceil(centres - reach)
    places = first[:, None] + np.arange(math.ceil(2.0 * reach))
    weights = np.maximum(1.0 - np.abs(places - centres[:, None]) / reach, 0.0) * ((places >= 0) & (places < size))
    weights /= weights.sum(axis=1, keepdims=True)
    inside = places.clip(0, size - 1).astype(np.intp)
    return [(inside[:, tap], weights[:, tap].astype(np.float32)) for tap in range(places.shape[1])]


def _painted(
    greys: npt.NDArray[np.uint8], maps: npt.NDArray[np.uint8], colormap: str, opacity: float, signed: bool
) -> Picture:
    """Return the maps in colour over grey pictures, ``(N, H, W, 4)``; see ``overlay``."""
    value_and_grey = maps.astype(np.uint16) << 8 | greys
    pixels = _paint(colormap, float(opacity), signed).take(value_and_grey)
    return pixels.view(np.uint8).reshape(*pixels.shape, 4)


@lru_cache(maxsize=8)
def _paint(colormap: str, opacity: float, signed: bool) -> npt.NDArray[np.uint32]:
    """Return the pixel, its four bytes as one number, for each of the 256 values over each of the 256 greys."""
    values, colours = np.linspace(0.0, 1.0, 256), _lut(colormap)
    if signed:
        signs, strength = np.sign(values - 0.5), np.abs(2.0 * values - 1.0)
        colours = colours[np.rint(127.5 + signs * (_PALE + (127.5 - _PALE) * strength)).astype(int)]
        alpha = opacity * (2.0 - opacity) * strength**0.75
    else:
        alpha = opacity ** (2.0 - values)
    alpha, greys = alpha[:, None, None], np.arange(256)[None, :, None]
    pixels = np.zeros((256, 256, 4), dtype=np.uint8)
    pixels[..., :3] = (1.0 - alpha) * greys + alpha * 255.0 * colours[:, None, :] + 0.5
    return pixels.view(np.uint32).reshape(-1)


def input_tiles(
    images: npt.NDArray[Any], *, mean: Statistic = None, std: Statistic = None, tile_size: int = 128
) -> Picture:
    """Return the images as pictures of one size, ``(N, H, W, 4)``.

    The longer side is ``tile_size`` and the aspect is kept, but for strips: no side is shorter than a quarter of
    the other.

    Args:
        images: ``(N, C, *S)``, as for ``display_image``.
        mean: As for ``display_image``.
        std: As for ``display_image``.
        tile_size: Pixels of the longer side.
    """
    return np.stack([_tile(display_image(image, mean, std), tile_size) for image in images])


def _tile(picture: Picture, tile_size: int) -> Picture:
    height, width = (max(side, max(picture.shape[:2]) / _SLIMMEST) for side in picture.shape[:2])
    zoom = tile_size / max(height, width)
    size = max(1, round(width * zoom)), max(1, round(height * zoom))
    if size == picture.shape[1::-1]:
        return picture
    how = Image.Resampling.HAMMING if zoom < 1.0 else Image.Resampling.BICUBIC  # as sharp, and faster
    return np.asarray(_as_image(picture).resize(size, how, reducing_gap=2.0))


class Sheet:
    """All inputs on one sheet, each with room for its overlay at its right, to be drawn on again and again.

    Two such pairs stand in a row, in reading order: four tiles of 128 pixels are still legible in a card of
    TensorBoard, which is 350 wide.

    Args:
        tiles: ``(N, H, W, 4)`` from ``input_tiles``, at least one.
    """

    def __init__(self, tiles: Picture) -> None:
        count, height, width, _ = tiles.shape
        columns = min(count, 2)
        rows = -(-count // columns)
        across, down = 2 * width + _GAP + _PAIR_GAP, height + _PAIR_GAP
        shape = rows * down - _PAIR_GAP, columns * across - _PAIR_GAP, 4
        self._picture = np.full(shape, _BACKGROUND, dtype=np.uint8)
        self._greys = _greys(tiles)
        self._places = []
        for i, tile in enumerate(tiles):
            top, left = i // columns * down, i % columns * across
            self._picture[top : top + height, left : left + width] = tile
            self._places.append(self._picture[top : top + height, left + width + _GAP :][:, :width])

    def panel(
        self,
        maps: Floats,
        *,
        colormap: str = "inferno",
        opacity: float = 0.6,
        scale: str = "image",
        signed: bool = False,
    ) -> Picture:
        """Return the sheet with the overlays of these maps, ``(height, width, 4)``; the next call draws over them.

        Args:
            maps: ``(N, *S)`` in any units, on a grid of any size. Of three axes, the middle slice along the first is
                shown.
            colormap: As for ``overlay``.
            opacity: As for ``overlay``.
            scale: As for ``scale_maps``.
            signed: As for ``scale_maps``.
        """
        if len(self._places) != len(maps):
            raise ValueError(f"`maps`: expected {len(self._places)}, one for each image, but got {len(maps)}.")
        planes = _plane(scale_maps(maps, scale, signed=signed))
        steps = _resized(planes, *self._greys.shape[1:])
        painted = _painted(self._greys, steps, colormap, opacity, signed)
        for place, covered in zip(self._places, painted, strict=True):
            place[...] = covered
        return self._picture


def jpeg(picture: Picture, quality: int = 85) -> bytes:
    """Return the picture, ``(height, width, 4)``, encoded as JPEG."""
    buffer = io.BytesIO()
    _as_image(picture).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
