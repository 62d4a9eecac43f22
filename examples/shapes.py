"""Pictures to learn from, drawn rather than downloaded: an object of a known shape, or two, on a textured background.

Shape alone gives the class away: colour, size, position and rotation are drawn at random for every picture, and
so is the texture of the background. The mask of the object is known, so one can measure how much of a map lies on it.

Everything comes from one seed. Pictures are drawn in three steps that can be combined otherwise:
`draw_background`, `draw_masks` (where an object is) and `paint` (put it there).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

Array = NDArray[np.float32]

CHUNK = 256  # pictures drawn at once: large enough for numpy, small enough for the cache


# Signed distances, about: negative inside. `u`, `v` are coordinates around the object's centre, in units of its radius.


def _disc(u: Array, v: Array) -> Array:
    return np.hypot(u, v) - 0.85


def _ring(u: Array, v: Array) -> Array:
    return np.abs(np.hypot(u, v) - 0.74) - 0.24


def _square(u: Array, v: Array) -> Array:
    return np.maximum(np.abs(u), np.abs(v)) - 0.75


def _triangle(u: Array, v: Array) -> Array:
    return np.maximum(np.abs(u) * 0.866 + v * 0.5, -v) - 0.55


def _cross(u: Array, v: Array) -> Array:
    long, short = np.maximum(np.abs(u), np.abs(v)), np.minimum(np.abs(u), np.abs(v))
    return np.maximum(long - 0.95, short - 0.28)


def _star(u: Array, v: Array) -> Array:
    # Fold the plane into one tenth of it (half a point of the star); the edge there is one straight line.
    angle = np.abs((np.arctan2(u, v) + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    x, y = np.hypot(u, v) * np.cos(angle), np.hypot(u, v) * np.sin(angle)
    tip, notch = np.array([1.1, 0.0]), 0.46 * np.array([np.cos(np.pi / 5), np.sin(np.pi / 5)])
    edge = (notch - tip) / np.linalg.norm(notch - tip)
    return ((x - tip[0]) * edge[1] - (y - tip[1]) * edge[0]).astype(np.float32)


SHAPES: dict[str, Callable[[Array, Array], Array]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "triangle": _triangle,
    "cross": _cross,
    "star": _star,
}
CLASSES = tuple(SHAPES)


class Pictures(NamedTuple):
    """Pictures `(N, 3, S, S)` in uint8, labels `(N,)` in int64, and object masks `(N, S, S)` in [0, 1]."""

    images: Tensor
    labels: Tensor
    masks: Tensor


def make_pictures(n: int, seed: int, size: int = 64) -> Pictures:
    """Return `n` pictures of one object each; the same `seed` gives the same pictures."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(n) % len(CLASSES))
    images = np.empty((n, 3, size, size), np.uint8)
    masks = np.empty((n, size, size), np.float32)
    for start in range(0, n, CHUNK):
        part = slice(start, min(start + CHUNK, n))
        background = draw_background(part.stop - start, size, rng)
        masks[part] = draw_masks(labels[part], size, rng)
        images[part] = to_uint8(paint(background, masks[part], rng))
    return Pictures(torch.from_numpy(images), torch.from_numpy(labels), torch.from_numpy(masks))


class Pairs(NamedTuple):
    """Pictures of two objects: images `(N, 3, S, S)` in uint8, labels `(N, 2)` in int64, and masks `(N, 2, S, S)`."""

    images: Tensor
    labels: Tensor
    masks: Tensor


def make_pairs(n: int, seed: int, size: int = 64) -> Pairs:
    """Return `n` pictures of two objects of different classes that do not touch."""
    rng = np.random.default_rng(seed)
    first = rng.permutation(np.arange(n) % len(CLASSES))
    labels = np.stack([first, (first + rng.integers(1, len(CLASSES), n)) % len(CLASSES)], axis=1)
    masks = np.stack([draw_masks(of_one, size, rng) for of_one in labels.T], axis=1)
    while (touching := (masks[:, 0] * masks[:, 1]).any(axis=(1, 2))).any():
        again = [draw_masks(of_one, size, rng) for of_one in labels[touching].T]
        masks[touching] = np.stack(again, axis=1)
    images = draw_background(n, size, rng)
    for mask in (masks[:, 0], masks[:, 1]):
        images = paint(images, mask, rng)
    return Pairs(torch.from_numpy(to_uint8(images)), torch.from_numpy(labels), torch.from_numpy(masks))


def draw_masks(labels: NDArray[np.int64], size: int, rng: np.random.Generator) -> Array:
    """Return where an object of each label is, `(n, S, S)`: position, size and rotation are random."""
    n = len(labels)
    radius = rng.uniform(0.2, 0.32, (n, 1, 1)) * size
    centre = size / 2 + rng.uniform(-1, 1, (2, n, 1, 1)) * (size / 2 - radius)
    angle = rng.uniform(0, 2 * np.pi, (n, 1, 1))
    y, x = np.mgrid[:size, :size] + 0.5
    dy, dx = (y - centre[0]) / radius, (x - centre[1]) / radius
    u = (dx * np.cos(angle) + dy * np.sin(angle)).astype(np.float32)
    v = (dy * np.cos(angle) - dx * np.sin(angle)).astype(np.float32)
    masks = np.empty((n, size, size), np.float32)
    for label, name in enumerate(CLASSES):
        chosen = labels == label
        distance = SHAPES[name](u[chosen], v[chosen]) * radius[chosen]
        masks[chosen] = np.clip(0.5 - distance, 0, 1)  # an edge one pixel wide
    return masks


def draw_background(n: int, size: int, rng: np.random.Generator) -> Array:
    """Return textures `(n, 3, S, S)` in [0, 1]: two colours that run into each other, two gratings, and grain."""
    one = rng.uniform(0.2, 0.8, (n, 3, 1, 1)).astype(np.float32)
    other = one + rng.uniform(-0.25, 0.25, (n, 3, 1, 1)).astype(np.float32)
    mix = np.clip(0.5 + 0.5 * _smooth_noise(n, size, rng), 0, 1)
    strength = rng.uniform(0.02, 0.08, (2, n, 1, 1, 1)).astype(np.float32)
    gratings = strength[0] * _grating(n, size, rng) + strength[1] * _grating(n, size, rng)
    return np.clip(one + (other - one) * mix + gratings + _grain(n, size, rng), 0, 1)


def paint(images: Array, masks: Array, rng: np.random.Generator) -> Array:
    """Return `images` with an object where `masks` are, of a colour that stands out from what it covers."""
    weight = masks[:, None]
    covered = (images * weight).sum((2, 3)) / weight.sum((2, 3))
    colour = _distant_colour(covered, rng)[:, :, None, None]
    n, _, size, _ = images.shape
    texture = 0.05 * _grating(n, size, rng) + _grain(n, size, rng)
    return images + weight * (np.clip(colour + texture, 0, 1) - images)


def to_uint8(images: Array) -> NDArray[np.uint8]:
    """Return images in [0, 1] as bytes."""
    return (images * 255 + 0.5).astype(np.uint8)


def _smooth_noise(n: int, size: int, rng: np.random.Generator, cells: int = 6) -> Array:
    """Return noise `(n, 1, S, S)` that varies over a `cells` × `cells` grid, with unit variance on it."""
    coarse = torch.from_numpy(rng.standard_normal((n, 1, cells, cells), np.float32))
    return torch.nn.functional.interpolate(coarse, (size, size), mode="bicubic").numpy()


def _grating(n: int, size: int, rng: np.random.Generator) -> Array:
    """Return waves `(n, 1, S, S)` in [-1, 1] of random direction and phase, 4 to 16 of them across the picture."""
    direction, phase = rng.uniform(0, 2 * np.pi, (2, n, 1, 1, 1)).astype(np.float32)
    frequency = (2 * np.pi / size * rng.uniform(4, 16, (n, 1, 1, 1))).astype(np.float32)
    y, x = np.mgrid[:size, :size].astype(np.float32)
    return np.sin((x * np.cos(direction) + y * np.sin(direction)) * frequency + phase)


def _grain(n: int, size: int, rng: np.random.Generator) -> Array:
    """Return pixel noise `(n, 1, S, S)`, the same in the three colours."""
    return 0.04 * rng.standard_normal((n, 1, size, size), np.float32)


def _distant_colour(avoid: Array, rng: np.random.Generator, candidates: int = 4) -> Array:
    """Return for each row of `avoid` `(n, 3)` the candidate colour furthest from it."""
    colours = rng.uniform(0.05, 0.95, (len(avoid), candidates, 3)).astype(np.float32)
    furthest = np.linalg.norm(colours - avoid[:, None], axis=-1).argmax(1)
    return colours[np.arange(len(avoid)), furthest]


class ShapesDataset(Dataset[tuple[Tensor, Tensor]]):
    """`n` pictures and their labels, the pictures normalised to about [-1, 1]; masks are kept in `pictures`."""

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)
    classes = CLASSES

    def __init__(self, n: int, seed: int, size: int = 64) -> None:
        self.pictures = make_pictures(n, seed, size)

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.pictures.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return picture `(3, S, S)` and label."""
        return normalise(self.pictures.images[index]), self.pictures.labels[index]


def normalise(images: Tensor) -> Tensor:
    """Return uint8 images as floats with the mean and standard deviation that `ShapesDataset` states."""
    return images.float() / 127.5 - 1
