"""One batch of the images of two: a probe takes images of several batches, as validation data is often sorted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from normgrad_lightning.isolated.batches import batch_size
from normgrad_lightning.layers.nested import parts, rebuilt


class DoNotFit(Exception):
    """Two batches that cannot be one."""


def joined(one: Any, other: Any, sizes: tuple[int, int]) -> Any:
    """Return a batch of the images of two.

    Args:
        one: a batch.
        other: another one, made in the same way.
        sizes: how many images they have.

    Raises:
        DoNotFit: they cannot be one batch, as images of two sizes.
        CannotSlice: the result is not a batch.
    """
    both = _joined(one, other, sizes)
    if batch_size(both) != sum(sizes):
        raise DoNotFit
    return both


def _joined(one: Any, other: Any, sizes: tuple[int, int]) -> Any:
    if type(one) is not type(other) or (isinstance(one, Tensor) and type(one) is not Tensor):
        raise DoNotFit
    if isinstance(one, Tensor):
        if one.dim() == 0:
            return one
        if (len(one), len(other)) != sizes or one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise DoNotFit
        return torch.cat([one, other])
    if type(one) in (list, tuple) and (len(one), len(other)) == sizes and not _holds_tensors_of_all(one, sizes[0]):
        return type(one)([*one, *other])
    inside, others = parts(one), parts(other)
    if [part.name for part in inside] != [part.name for part in others]:
        raise DoNotFit
    return rebuilt(one, [_joined(a.value, b.value, sizes) for a, b in zip(inside, others, strict=True)])


def _holds_tensors_of_all(values: Sequence[Any], size: int) -> bool:
    """Return whether a list holds things of all images, as images and labels, and not one for each."""
    return any(isinstance(value, Tensor) and value.dim() and len(value) == size for value in values)
