"""How much patches look alike: a number that was tried as a warning. Uniform classes score high, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from normgrad_lightning.views.crops import Crop

Floats = NDArray[np.float32]

_THUMBNAIL = 16
_SHIFT = 3  # pixels of a thumbnail


def thumbnails(crops: Sequence[Crop]) -> Floats:
    """Return small versions of crops, `(K, 16, 16, 3)`, to compare them with each other."""
    pixels = [torch.from_numpy(crop.pixels[..., :3].copy()).permute(2, 0, 1)[None].float() for crop in crops]
    small = torch.cat([F.interpolate(one, (_THUMBNAIL, _THUMBNAIL), mode="area") for one in pixels])
    return small.permute(0, 2, 3, 1).numpy()


def sameness(crops: Floats) -> float:
    """Return how much crops `(K, H, W, C)` look alike: 1 if all are the same, about 0.3 for crops at random places.

    The mean over all pairs of the largest correlation of the middle of the one with the other, shifted by up to three
    pixels in each direction. Colours count: all channels have one mean. NaN for fewer than two crops.
    """
    count, height, width, _ = crops.shape
    if count < 2:
        return math.nan
    inner = height - 2 * _SHIFT, width - 2 * _SHIFT
    shifts = torch.from_numpy(crops).unfold(1, inner[0], 1).unfold(2, inner[1], 1)  # K, shifts, shifts, C, h, w
    windows = _unit(shifts.reshape(count, (2 * _SHIFT + 1) ** 2, -1))
    middles = windows[:, windows.shape[1] // 2]
    best = (windows @ middles.T).amax(dim=1)  # not NumPy: the threads of its products get in the way of torch's
    both = torch.maximum(best, best.T)
    one, other = torch.triu_indices(count, count, 1)
    return float(both[one, other].mean())


def _unit(values: Tensor) -> Tensor:
    """Return values `(…, D)` with mean 0 and length 1; what is constant stays 0."""
    centred = values - values.mean(dim=-1, keepdim=True)
    length = centred.norm(dim=-1, keepdim=True)
    return torch.where(length > 1e-6, centred / length, 0.0)
