"""How much of the training signal of a batch comes from each of its images."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def signal(sums: Mapping[str, Tensor], count: int) -> Tensor:
    """Return the part of the training signal that comes from each image: its share of each layer's maps, averaged.

    It adds up to 1 over the batch. Layers whose maps are zero everywhere do not count.

    Args:
        sums: the sum of each map `(N,)`, by layer, on the CPU.
        count: of images.
    """
    shares = [of_images[:count] / of_images[:count].sum() for of_images in sums.values() if of_images[:count].sum() > 0]
    return torch.stack(shares).mean(0) if shares else torch.zeros(count)
