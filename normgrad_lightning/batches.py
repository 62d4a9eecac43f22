"""Batches of any make: tensors in tuples, lists, dicts and dataclasses, and one image out of all that.

Nothing in a batch says which of its numbers is its size, nor whether a list holds one thing for each image (a
detector's targets) or several things for all of them (images and labels). So the size is the first one that makes sense
of all of it, and what makes sense in two ways, or in none, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_ATOMS = (str, bytes, bool, int, float, complex, type(None), torch.dtype, torch.device)


class CannotSlice(ValueError):
    """A batch that no single image can be taken out of."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"`batch`: expected tensors, tuples, dicts, dataclasses and lists of these with one part for each image, "
            f"but {why}. Set `per_image=False`, which takes the batch as it is."
        )


class _Part(NamedTuple):
    """A part of a batch, and what to call it."""

    name: str
    value: Any


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """The same tuples, lists, dicts and dataclasses anew, with `function` of each tensor."""
    if isinstance(nested, Tensor):
        return function(nested)
    return _rebuilt(nested, [map_tensors(function, part.value) for part in _parts(nested)])


def copied(batch: Any) -> Any:
    """A batch that can be written to without a trace in this one."""
    return map_tensors(lambda t: t.detach().clone(), batch)


def single_images(batch: Any, chosen: Sequence[int] | None = None) -> list[Any]:
    """A batch of one image for each of the chosen ones; by default, for all."""
    size = batch_size(batch)
    return [_taken(batch, index, size, "the batch", top=True) for index in (range(size) if chosen is None else chosen)]


def batch_size(batch: Any) -> int:
    """How many images a batch holds: the first number that makes sense of all its parts.

    Raises:
        CannotSlice: there is no such number.
    """
    problem: CannotSlice | None = None
    for size in filter(None, dict.fromkeys(_likely_sizes(batch))):
        try:
            _taken(batch, 0, size, "the batch", top=True)
        except CannotSlice as error:
            problem = problem or error
        else:
            return size
    raise problem or CannotSlice("there is no tensor with a batch axis")


def _likely_sizes(batch: Any) -> Iterator[int]:
    """Numbers that may be the batch size, the likeliest first."""
    tensors = [t for t in _tensors(batch) if t.dim() > 0]
    yield from (len(t) for t in tensors if t.dim() > 3)
    yield from (len(part.value) for part in _parts(batch) if isinstance(part.value, list | tuple) and part.value)
    yield from (len(t) for t in tensors if t.dim() == 3)
    yield from (len(t) for t in tensors)


def _tensors(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        yield nested
    for part in _parts(nested):
        yield from _tensors(part.value)


def _taken(value: Any, index: int, size: int, name: str, top: bool = False) -> Any:
    """What `value`, a part of a batch of `size` images, holds of the image at `index`, as a batch of one."""
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim and len(value) != size:
            raise CannotSlice(f"{name} has shape {tuple(value.shape)}, which does not begin with {size}")
        return value[index : index + 1] if value.ndim else value
    if isinstance(value, list | tuple) and not top and len(value) == size and not hasattr(value, "_fields"):
        if size > 1 and all(isinstance(item, Tensor) and item.dim() and len(item) == size for item in value):
            raise CannotSlice(f"{name} may be one tensor for each image, or {size} tensors of all images")
        return value[index : index + 1]
    parts = _parts(value)
    if not parts and not isinstance(value, (*_ATOMS, list, tuple, Mapping)):
        raise CannotSlice(f"{name} is a {type(value).__name__!r}")
    prefix = "" if top else f"{name}."
    return _rebuilt(value, [_taken(part.value, index, size, f"`{prefix}{part.name}`", False) for part in parts])


def _parts(nested: Any) -> list[_Part]:
    """What a container holds; nothing, if it is none."""
    if isinstance(nested, Mapping):
        return [_Part(str(key), value) for key, value in nested.items()]
    if isinstance(nested, list | tuple):
        return [_Part(str(place), value) for place, value in enumerate(nested)]
    if is_dataclass(nested) and not isinstance(nested, type):
        return [_Part(field.name, getattr(nested, field.name)) for field in fields(nested)]
    return []


def _rebuilt(nested: Any, values: list[Any]) -> Any:
    """A container of the same kind with other values."""
    if isinstance(nested, Mapping):
        anew = copy(nested)
        for key, value in zip(nested, values, strict=True):
            anew[key] = value  # type: ignore[index]
        return anew
    if isinstance(nested, list | tuple):
        return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)
    if is_dataclass(nested) and not isinstance(nested, type):
        return _with_fields(nested, values)
    return nested


def _with_fields(nested: Any, values: list[Any]) -> Any:
    names = [field.name for field in fields(nested)]
    if all(field.init for field in fields(nested)):
        return replace(nested, **dict(zip(names, values, strict=True)))
    anew = copy(nested)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(anew, name, value)
    return anew
