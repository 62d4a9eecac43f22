"""Maps of whole batches, for the tests of what is collected from them."""

import numpy as np
import torch

from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.views.look import Look

LOOK = Look(mean=0.0, std=1.0)
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
    """A batch whose maps have a spot in each image, on images of noise. The shares are equal."""
    generator = torch.Generator().manual_seed(seed)
    count = len(labels) if labels is not None else len(places)
    images = torch.rand(count, channels, *size, generator=generator)
    strengths = [5.0] * count if strengths is None else strengths
    maps = {
        f"net.layer{i}": torch.stack([spot(grid, places[n % len(places)], strengths[n]) for n in range(count)])
        for i, grid in enumerate(grids)
    }
    about = {"labels": labels, "shares": [1 / count] * count, "classes": ["cat", "dog"], **options}
    return MapSet(KINDS["order0"], step, maps, images, dict.fromkeys(maps, images), list(maps), **about)


def as_pixels(image):
    """An image from 0 to 1 as bytes, `(H, W, C)`."""
    return (np.asarray(image) * 255 + 0.5).astype(np.uint8).transpose(1, 2, 0)
