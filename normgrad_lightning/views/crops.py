"""Crops: parts of images around their strongest places, with what it takes to show the whole image beside them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from normgrad_lightning.tensorboard_tab.event import coarse
from normgrad_lightning.views.drawing import Pixels, display_image, plane, tile_of
from normgrad_lightning.views.resampling import Floats
from normgrad_lightning.views.scales import finite_range
from normgrad_lightning.views.style import Style

SIDE = 0.36
"""Of a crop, as a share of the image's shorter side."""

_LARGEST, _WHOLE = 96, 160  # pixels of the longer side of a crop, and of its whole image
_EMPTY: Pixels = np.zeros((0, 0, 4), np.uint8)


class Box(NamedTuple):
    """A part of an image: its first pixel and its length along each axis."""

    starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(eq=False)
class Crop:
    """A part of an image around its strongest place. It takes at most 125 kB.

    Attributes:
        ratio: how much the place stands out.
        image: a number that tells images apart.
        step: at which it was read.
        box: where it is, in pixels of the image.
        size: `*S`, the sides of the image that the box is in.
        map: the image's map as it is, divided by its mean, `(h, w)` on a coarse grid.
        layers: the same of some layers, in the order of the network.
        pixels: the crop as the network saw it, `(H, W, 4)`, in its own resolution unless that is too large.
        whole: the whole image in the same colours, with at most 160 pixels a side.
    """

    ratio: float
    image: float
    step: int
    box: Box
    size: tuple[int, ...] = ()
    map: npt.NDArray[np.float16] = field(default_factory=lambda: np.zeros((0, 0), np.float16))
    layers: Mapping[str, npt.NDArray[np.float16]] = field(default_factory=dict)
    pixels: Pixels = field(default_factory=lambda: _EMPTY)
    whole: Pixels = field(default_factory=lambda: _EMPTY)


def box_around(place: Sequence[float], size: Sequence[int]) -> Box:
    """Return the crop around a place, shifted where it would reach over an edge."""
    lengths = _lengths(tuple(size))
    starts = [
        min(max(round(share * pixels - length / 2), 0), pixels - length)
        for share, pixels, length in zip(place, size, lengths, strict=True)
    ]
    return Box(tuple(starts), lengths)


@lru_cache(maxsize=8)
def _lengths(size: tuple[int, ...]) -> tuple[int, ...]:
    """Return the pixels of a crop along each axis: of a volume, a single slice."""
    sides = list(size)[-2:]
    side = min(max(round(SIDE * min(sides)), 8), min(sides))
    return (1,) * (len(size) - len(sides)) + (side,) * len(sides)


class ImageCutter:
    """The images of a batch `(N, C, *S)`, to cut parts out of. What all of them are asked for is computed once."""

    def __init__(self, images: Tensor, style: Style) -> None:
        self._images, self._style = images, style
        self._wholes: dict[tuple[int, ...], Pixels] = {}
        self._fingerprints: dict[int, float] = {}
        self.size = images.shape[2:]

    def fingerprint(self, number: int) -> float:
        """Return a number by which an image is recognised: the sum of every third of its values."""
        if number not in self._fingerprints:
            first, last = (number, number + 1) if self._images.is_cpu else (0, len(self._images))  # one wait for all
            some = self._images[first:last].flatten(1)[:, ::3].contiguous()  # much faster to go through
            sums = some.sum(1, dtype=torch.float64).tolist()
            if not all(map(math.isfinite, sums)):
                sums = some.double().nan_to_num(0.0, 0.0, 0.0).sum(1).tolist()
            self._fingerprints |= zip(range(first, last), sums, strict=True)
        return self._fingerprints[number]

    def cut(self, crops: Mapping[int, Crop]) -> None:
        """Give these crops of images their pixels, and those of their whole images."""
        numbers = list(crops)
        on_cpu = self._images.device.type == "cpu"
        images = [self._images[number] for number in numbers] if on_cpu else self._images[numbers].cpu()
        for number, image in zip(numbers, images, strict=True):
            box = crops[number].box
            depth = box.starts[:-2]  # of a volume, the slice with the peak
            key = (number, *depth)
            values = image[(slice(None), *depth)].float().numpy()
            colours = self._colours(values)
            where = tuple(
                slice(start, start + length) for start, length in zip(box.starts[-2:], box.lengths[-2:], strict=True)
            )
            if key not in self._wholes:
                self._wholes[key] = display_image(coarse(plane(values), _WHOLE), *colours)
            crops[number].whole = whole = self._wholes[key]
            is_as_large = whole.shape[:2] == values.shape[1:]
            part = whole[where] if is_as_large else display_image(values[(slice(None), *where)], *colours)
            crops[number].pixels = shrunk_picture(part, _LARGEST)

    def _colours(self, values: Floats) -> tuple[Any, Any]:
        """Return mean and standard deviation to undo: the given ones, or those that stretch a whole image."""
        if self._style.mean is not None or self._style.std is not None:
            return self._style.mean, self._style.std
        low, high, _ = finite_range(values)
        std = 1.0 / max(high - low, 1e-12)
        return -low * std, std


def fingerprints(images: Tensor) -> list[float]:
    """Return a number for each image `(N, C, *S)`: that of its crops."""
    return list(map(ImageCutter(images, Style()).fingerprint, range(len(images))))


def shrunk_picture(pixels: Pixels, longest: int) -> Pixels:
    """Return a copy of the picture, smaller if it is large."""
    return tile_of(pixels.copy(), min(max(pixels.shape[:2]), longest))
