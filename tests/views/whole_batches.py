"""Maps of whole batches, for the tests of what is collected from them."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.views.pooled_batch import PooledBatch, pooled, pooled_batch
from normgrad_lightning.views.style import Style

LOOK = Style(mean=0.0, std=1.0)
PLACES = [(0.5, 0.5), (0.3, 0.7), (0.7, 0.3), (0.4, 0.4), (0.6, 0.6), (0.3, 0.3)]


def spot(size, place, strength=5.0, width=0.08):
    """An even map of ones with a bright spot; its sides are `size`, its place a part of each side."""
    axes = torch.meshgrid(*[(torch.arange(side) + 0.5) / side for side in size], indexing="ij")
    away = sum((axis - at) ** 2 for axis, at in zip(axes, place, strict=True))
    return 1.0 + strength * torch.exp(-away / (2 * width**2))


def whole_batch(
    step=0,
    labels=(0, 1, 0, 1),
    places=PLACES,
    size=(32, 32),
    grids=((32, 32), (16, 16), (4, 4)),
    strengths=None,
    channels=3,
    seed=0,
    **options,
):
    """A batch whose maps have a spot in each image, on images of noise."""
    generator = torch.Generator().manual_seed(seed)
    count = len(labels) if labels is not None else len(places)
    images = torch.rand(count, channels, *size, generator=generator)
    strengths = [5.0] * count if strengths is None else strengths
    maps = {
        f"net.layer{i}": torch.stack([spot(grid, places[n % len(places)], strengths[n]) for n in range(count)])
        for i, grid in enumerate(grids)
    }
    about = {"labels": labels, "classes": ["cat", "dog"], **options}
    return MapSet(KINDS["order0"], step, maps, images, dict.fromkeys(maps, images), list(maps), **about)


def pool(batch: MapSet, **options: Any) -> PooledBatch | None:
    """What views collect from, of a batch as a reading has it."""
    sums = {name: m.flatten(1).sum(1, dtype=torch.float64) for name, m in batch.maps.items()}
    return pooled_batch(pooled(replace(batch, sums=sums)), **options)


def as_pixels(image):
    """An image from 0 to 1 as bytes, `(H, W, C)`."""
    return (np.asarray(image) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
