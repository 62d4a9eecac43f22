"""What images were normalised with, found in the transforms of the training data, to show them in true colours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias

from torch import nn

from normgrad_lightning.step.labels import datasets_of

Normalisation: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation, one number for each channel."""

_TRANSFORMS = ("transform", "transforms")
_DEEPEST = 8  # transforms inside of transforms; one that holds itself would never end
_CONFIGS = ("data_config", "default_cfg", "pretrained_cfg")  # timm's


def normalisation_of(loaders: Any) -> Normalisation | None:
    """Return mean and standard deviation that the images of the data sets were normalised with.

    They are those of a `Normalize` of torchvision (v1, v2) or albumentations, also inside of `Compose` and the like, or
    of a data set's timm config.

    Args:
        loaders: the training data loaders, in any collection.

    Returns:
        None if nothing was found, or if it is not the same everywhere: the images may be of several kinds then.
    """
    found = set(chain.from_iterable(map(_of_dataset, datasets_of(loaders))))
    return found.pop() if len(found) == 1 else None


def _of_dataset(dataset: Any) -> Iterator[Normalisation]:
    for name in _TRANSFORMS:
        yield from _of_transform(getattr(dataset, name, None), _DEEPEST)
    for name in _CONFIGS:
        config = getattr(dataset, name, None)
        if isinstance(config, Mapping):
            yield from _pair(config.get("mean"), config.get("std"))


def _of_transform(transform: Any, depth: int) -> Iterator[Normalisation]:
    """Yield what is found in a transform and in those that it is made of."""
    if transform is None or depth == 0:
        return
    if type(transform).__name__ == "Normalize":
        if getattr(transform, "normalization", "standard") == "standard":  # albumentations has others
            yield from _pair(getattr(transform, "mean", None), getattr(transform, "std", None))
        return
    several = transform if isinstance(transform, list | tuple | nn.Sequential) else getattr(transform, "transforms", ())
    inner = several if isinstance(several, list | tuple | nn.Sequential | nn.ModuleList) else [several]
    for one in (*inner, getattr(transform, "transform", None)):
        yield from _of_transform(one, depth - 1)


def _pair(mean: Any, std: Any) -> Iterator[Normalisation]:
    """Yield both, if they are numbers that can be undone."""
    try:
        pair = _numbers(mean), _numbers(std)
    except (TypeError, ValueError):
        return
    if len({len(pair[0]), len(pair[1])}) == 1 and all(one > 0 for one in pair[1]):
        yield pair


def _numbers(values: Any) -> tuple[float, ...]:
    if isinstance(values, int | float):
        return (float(values),)
    return tuple(float(one) for one in values)
