"""From maps to pictures a person can read at a glance.

A map is a handful of numbers on a coarse grid. What a reader of TensorBoard wants is the image the network saw and,
beside it, the same image with the map laid over it. This module does the drawing and nothing else: arrays in, arrays
out, with no knowledge of models, tensors or loggers.

The images are the same for every layer, so their tiles are made once::

    sheet = Sheet(input_tiles(images, mean=mean, std=std, tile_size=128))
    for layer, maps in maps_of_layers.items():
        picture = jpeg(sheet.panel(maps))
"""

import io
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from normgrad_lightning.views.lettering import length_of, line_height, write
from normgrad_lightning.views.resampling import Floats, resized, shrunk
from normgrad_lightning.views.scales import scale_maps, unit, wide
from normgrad_lightning.views.style import Statistic, Style, colours_of

Pixels: TypeAlias = npt.NDArray[np.uint8]
"""Red, green, blue and an unused byte, `(H, W, 4)`: the layout that encoders are fastest with."""

BACKGROUND = 224
_PALE = 90.0  # of the 128 colours on each side of a diverging map's middle
_GAP = 2  # between an input and its overlay
_PAIR_GAP = 8  # between pairs: what belongs together stands together
_SLIMMEST = 4  # a tile is at least a quarter as high as it is wide, so that a strip of audio can be seen


def plane(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return `(K, *S)` as `(K, H, W)`: one axis in S as a strip, of three the middle slice along the first."""
    if values.ndim == 2:
        return values[:, None, :]
    if values.ndim == 4:
        return values[:, values.shape[1] // 2]
    return values


def _per_channel(name: str, value: float | Sequence[float], channels: int) -> npt.NDArray[np.float32]:
    """Return `value` as `(C, 1, 1)` or, for one number, `(1, 1, 1)`."""
    array = np.asarray(value, dtype=np.float32).reshape(-1)
    if len(array) not in (1, channels):
        raise ValueError(
            f"`{name}`: expected one number or {channels}, one for each channel of the image, but got {len(array)}. "
            f"Give the `{name}` that the images were normalised with."
        )
    return array[:, None, None]


def display_image(image: npt.NDArray[Any], mean: Statistic = None, std: Statistic = None) -> Pixels:
    """Return the image a network saw as a picture, `(H, W, 4)`.

    With `mean` or `std`, the normalisation is undone, `image * std + mean` (`mean` 0 or `std` 1 if only the
    other is given), and clipped. Without, the image is stretched from its minimum to its maximum; a constant image is
    mid grey. Pixels that are not finite come out black.

    Args:
        image: `(C, *S)`. Three channels are shown as RGB, one as grey, any other number as the grey of their mean.
            One axis in S gives a strip `(1, L, 4)`, three give the middle slice along the first.
        mean: one number, or one per channel.
        std: one number, or one per channel.
    """
    values = plane(wide(image))
    if mean is None and std is None:
        picture = unit(values, constant=0.5)
    else:
        scale = _per_channel("std", 1.0 if std is None else std, len(values))
        shift = _per_channel("mean", 0.0 if mean is None else mean, len(values))
        good = np.isfinite(values)
        all_good = bool(good.all())
        picture = (values if all_good else np.where(good, values, np.zeros_like(values))) * scale
        picture += shift
        picture.clip(0.0, 1.0, out=picture)
        if not all_good:
            picture[~good] = 0.0
    if len(picture) != 3:
        picture = picture.mean(axis=0, keepdims=True).repeat(3, axis=0)
    pixels = np.zeros((*picture.shape[1:], 4), dtype=np.uint8)
    for channel, values in enumerate((picture * 255.0 + 0.5).astype(np.uint8)):
        pixels[..., channel] = values
    return pixels


def overlay(
    image: Pixels, map: Floats, *, colormap: str = Style.colormap, opacity: float = Style.opacity, signed: bool = False
) -> Pixels:
    """Return the map in colour over the grey version of the image, `(H, W, 4)`.

    With v the map's value at a pixel, in 256 steps, and grey the image's luma, in 256 steps too::

        α = opacity ** (2 - v)
        pixel = (1 - α) * grey + α * colour(v)

    The image is grey so that a red car is not taken for a strong value. It shows through where the map is weak and
    yields where it is strong; at opacity 0 there is only the image, at opacity 1 only the map.

    A signed map, whose zero is at v = 0.5, is strong at both ends and clear in the middle. With s = abs(2v - 1)::

        α = opacity * (2 - opacity) * s ** 0.75

    and the pale colours in the middle of the colour map are left out: they would draw an edge along every zero.

    Args:
        image: `(H, W, 4)`, from `display_image` or one of the `input_tiles`.
        map: `(h, w)` in [0, 1], from `scale_maps`, on a grid of any size. Its values are interpolated
            bilinearly to the size of the image, and then coloured: interpolated colours would show values that are
            not there.
        colormap: a name known to the cmap package.
        opacity: of the strongest values.
        signed: whether the map is signed; take a diverging colour map then, such as `SIGNED_COLORMAP`.
    """
    height, width = image.shape[:2]
    picture: Pixels = _painted(greys_of(image[None]), in_steps(map[None], height, width), colormap, opacity, signed)[0]
    return picture


def overlays(greys: npt.NDArray[np.uint8], maps: Floats, style: Style | None = None, *, signed: bool = False) -> Pixels:
    """Return each map in colour over a grey picture, `(N, H, W, 4)`; hatched, if it is zero everywhere.

    Args:
        greys: `(N, H, W)`, from `greys_of`.
        maps: `(N, *S)` in any units, on a grid of any size. Of three axes, the middle slice along the first is shown.
        style: colour map (unless the maps are signed), opacity and scale. On a robust scale, maps of more than 64
            cells a side are shrunk before.
        signed: as for `scale_maps`.
    """
    planes, style = plane(maps), style or Style()
    if style.scale == "robust":
        drawn = scale_maps(shrunk(wide(planes)), style.scale, signed=signed)
    else:
        drawn = plane(scale_maps(maps, style.scale, signed=signed))
    values = in_steps(drawn, *greys.shape[1:])
    painted = _painted(greys, values, style.colormap_of(signed=signed), style.opacity, signed)
    for i in np.flatnonzero(~planes.reshape(len(planes), -1).any(axis=1)):
        painted[i, ..., :3] = _hatched(greys[i])[..., None]
    return painted


def _hatched(grey: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the picture behind stripes, with words that say that nothing can be shown."""
    stripes, share = _stripes(*grey.shape)
    mixed: Floats = grey * (1.0 - share) + stripes * share + np.float32(0.5)
    return mixed.astype(np.uint8)


@lru_cache(maxsize=16)
def _stripes(height: int, width: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]:
    """Return grey levels that stand for "no map", and how much of each pixel they take."""
    levels = np.where(np.indices((height, width)).sum(0) // 5 % 2, 130, 215).astype(np.uint8)[..., None]
    share = np.full((height, width), 0.6, np.float32)
    lines, size = _words(height, width)
    down = line_height(size)
    top = (height - len(lines) * down) // 2
    for number, (text, length) in enumerate(lines):
        y, x = top + number * down, (width - length) // 2
        behind_text = np.s_[y : y + down, max(x - 3, 0) : x + length + 3]
        levels[behind_text], share[behind_text] = 255, 1.0
        write(levels, text, size, (y, x))
    return levels[..., 0], share


def _words(height: int, width: int) -> tuple[list[tuple[str, int]], int]:
    """Return the lines to write on a tile without a map, with their lengths, and the size of their letters."""
    for size in (13, 11, 10, 9):
        for lines in (["no gradient here"], ["no gradient", "here"], ["no", "gradient", "here"]):
            lengths = [length_of(line, size) for line in lines]
            if max(lengths) + 6 <= width and len(lines) * line_height(size) <= height:
                return list(zip(lines, lengths, strict=True)), size
    return [], 9


def greys_of(tiles: Pixels) -> npt.NDArray[np.uint8]:
    """Return the luma of pictures, `(N, H, W)`."""
    count, height, width, _ = tiles.shape
    below_each_other = _as_image(tiles.reshape(count * height, width, 4))
    return np.asarray(below_each_other.convert("L")).reshape(count, height, width)


def _as_image(picture: Pixels) -> Image.Image:
    """Return the picture as one of Pillow's, without a copy."""
    height, width, _ = picture.shape
    return Image.frombuffer("RGBX", (width, height), picture, "raw", "RGBX", 0, 1)


def in_steps(maps: Floats, height: int, width: int) -> npt.NDArray[np.uint8]:
    """Return maps in [0, 1] in this size, `(N, height, width)` in 256 steps, interpolated bilinearly."""
    values = resized(maps.astype(np.float32, copy=False) * np.float32(255.0), height, width)
    return (values + np.float32(0.5)).astype(np.uint8)


def _painted(
    greys: npt.NDArray[np.uint8], maps: npt.NDArray[np.uint8], colormap: str, opacity: float, signed: bool
) -> Pixels:
    """Return the maps in colour over grey pictures, `(N, H, W, 4)`; see `overlay`."""
    value_and_grey = maps.astype(np.uint16) << 8 | greys
    pixels = _paint(colormap, float(opacity), signed).take(value_and_grey)
    return pixels.view(np.uint8).reshape(*pixels.shape, 4)


@lru_cache(maxsize=8)
def _paint(colormap: str, opacity: float, signed: bool) -> npt.NDArray[np.uint32]:
    """Return the pixel, its four bytes as one number, for each of the 256 values over each of the 256 greys."""
    values, colours = np.linspace(0.0, 1.0, 256), colours_of(colormap)
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
    images: npt.NDArray[Any], *, mean: Statistic = None, std: Statistic = None, tile_size: int = Style.tile_size
) -> Pixels:
    """Return the images as pictures of one size, `(N, H, W, 4)`.

    The longer side is `tile_size` and the aspect is kept, but for strips: no side is shorter than a quarter of
    the other.

    Args:
        images: `(N, C, *S)`, as for `display_image`.
        mean: as for `display_image`.
        std: as for `display_image`.
        tile_size: pixels of the longer side.
    """
    return np.stack([tile_of(display_image(image, mean, std), tile_size) for image in images])


def tile_of(picture: Pixels, tile_size: int) -> Pixels:
    """Return the picture with a longer side of `tile_size`; a strip gets a quarter of that as its height."""
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
        tiles: `(N, H, W, 4)` from `input_tiles`, at least one.
    """

    def __init__(self, tiles: Pixels) -> None:
        count, height, width, _ = tiles.shape
        columns = min(count, 2)
        rows = -(-count // columns)
        across, down = 2 * width + _GAP + _PAIR_GAP, height + _PAIR_GAP
        shape = rows * down - _PAIR_GAP, columns * across - _PAIR_GAP, 4
        self._picture = np.full(shape, BACKGROUND, dtype=np.uint8)
        self._greys = greys_of(tiles)
        self._right_tiles = []
        for i, tile in enumerate(tiles):
            top, left = i // columns * down, i % columns * across
            self._picture[top : top + height, left : left + width] = tile
            self._right_tiles.append(self._picture[top : top + height, left + width + _GAP :][:, :width])

    def panel(self, maps: Floats, style: Style | None = None, *, signed: bool = False) -> Pixels:
        """Return the sheet with the overlays of these maps, `(height, width, 4)`; the next call draws over them.

        Args:
            maps: as for `overlays`.
            style: as for `overlays`.
            signed: as for `scale_maps`.
        """
        if len(self._right_tiles) != len(maps):
            raise ValueError(f"`maps`: expected {len(self._right_tiles)}, one for each image, but got {len(maps)}.")
        for tile, covered in zip(self._right_tiles, overlays(self._greys, maps, style, signed=signed), strict=True):
            tile[...] = covered
        return self._picture


def jpeg(picture: Pixels, quality: int = 85) -> bytes:
    """Return the picture, `(height, width, 4)`, encoded as JPEG."""
    buffer = io.BytesIO()
    _as_image(picture).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
