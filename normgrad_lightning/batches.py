"""Batches of any make: tensors in tuples, lists, dicts and dataclasses, and one image out of all that.

Nothing in a batch says which of its numbers is its size, nor whether a list holds one thing for each image (a
detector's targets) or several things for all of them (images and labels). So every size is tried that the batch could
have, and a batch that makes sense in two ways, or in none, is refused.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy, deepcopy
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_ATOMS = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    PurePath,
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)


class CannotSlice(ValueError):
    """A batch that no single image can be taken out of."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"`batch`: expected tensors, tuples, dicts, dataclasses and lists of these with one part for each image, "
            f"but {why}. Set `per_image=False`, which takes the batch as it is."
        )


class Ambiguous(CannotSlice):
    """A batch that single images can be taken out of in two ways."""


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """The same tuples, lists, dicts and dataclasses anew, with `function` of each tensor."""
    if isinstance(nested, Tensor):
        return function(nested)
    return _rebuilt(nested, [map_tensors(function, part.value) for part in _parts(nested)])


def copied(batch: Any) -> Any:
    """A batch that can be written to without a trace in this one."""
    if isinstance(batch, Tensor):
        return batch.detach().clone()
    if isinstance(batch, _ATOMS):
        return batch
    parts = _parts(batch)
    return _rebuilt(batch, [copied(part.value) for part in parts]) if parts else deepcopy(batch)


def single_images(batch: Any, chosen: Sequence[int] | None = None) -> list[Any]:
    """A batch of one image for each of the chosen ones; by default, for all."""
    size = batch_size(batch)
    places = range(size) if chosen is None else chosen
    if any(not 0 <= place < size for place in places):
        raise IndexError(f"`chosen`: expected places in a batch of {size} images, but got {list(places)}.")
    return [_Cut(batch, size).image(place) for place in places]


def batch_size(batch: Any) -> int:
    """How many images a batch holds.

    Raises:
        CannotSlice: no number makes sense of all its parts, or more than one does.
    """
    problems: list[CannotSlice] = []
    fitting = []
    for size in filter(None, dict.fromkeys(_likely_sizes(batch))):
        try:
            _Cut(batch, size).image(0)
            fitting.append(size)
        except CannotSlice as problem:
            problems.append(problem)
    if len(fitting) > 1:
        raise CannotSlice(f"its size may be {' or '.join(map(str, sorted(fitting)))}")
    if not fitting:
        raise problems[0] if problems else CannotSlice("there is no tensor with a batch axis")
    return fitting[0]


def _likely_sizes(batch: Any) -> Iterator[int]:
    """Numbers that may be the batch size, the likeliest first."""
    if _is_array(batch):
        batch = [batch]
    arrays = [a for a in _arrays(batch) if a.ndim > 0]
    yield from (len(a) for a in arrays if a.ndim > 3)
    yield from (len(part.value) for part in _parts(batch) if _is_list(part.value))
    yield from (len(a) for a in arrays if a.ndim == 3)
    yield from (len(a) for a in arrays)
    if _is_list(batch) and _may_be_samples(batch):
        yield len(batch)


class _Part(NamedTuple):
    """A part of a batch, and what to call it."""

    name: str
    value: Any


class _Cut:
    """A batch as one of `size` images.

    A list of `size` things that are alike may hold one for each image. If each of them also has a part for each image,
    it may as well hold parts of all images. A list of dicts (a detector's targets) only ever holds one for each image,
    and then other lists do, too.
    """

    def __init__(self, batch: Any, size: int) -> None:
        self._batch = batch
        self._size = size
        self._has_targets = any(map(self._holds_targets, _lists(batch)))

    def image(self, index: int) -> Any:
        """A batch of the one image at `index`."""
        if _is_list(self._batch) and len(self._batch) == self._size and _may_be_samples(self._batch):
            if self._is_cut("the batch", self._batch):
                raise Ambiguous("it may be one thing for each image, or several of all images")
            return self._batch[index : index + 1]
        if _is_array(self._batch):
            return self._of_array("it", self._batch, index)
        if isinstance(self._batch, PackedSequence):
            raise CannotSlice("it is a packed sequence")
        return self._of_parts("", self._batch, index)

    def _of(self, name: str, value: Any, index: int) -> Any:
        """What a part of the batch holds of the image."""
        if _is_array(value):
            return self._of_array(f"`{name}`", value, index)
        if _is_list(value):
            return self._of_list(name, value, index)
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, PackedSequence) or (not _parts(value) and not isinstance(value, Mapping)):
            raise CannotSlice(f"`{name}` is a {type(value).__name__!r}")
        return self._of_parts(f"{name}.", value, index)

    def _of_array(self, name: str, value: Any, index: int) -> Any:
        if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
            raise CannotSlice(f"{name} is no dense tensor")
        if value.ndim == 0:
            return value
        if len(value) != self._size:
            raise CannotSlice(f"{name} has shape {tuple(value.shape)}, which does not begin with {self._size}")
        return value[index : index + 1]

    def _of_list(self, name: str, value: Any, index: int) -> Any:
        one_each = len(value) == self._size and _are_alike(value)
        if len(value) == self._size and all(map(_is_atom, value)):
            return value[index : index + 1]
        if self._holds_targets(value):
            if len(value) != self._size:
                raise CannotSlice(f"`{name}` has {len(value)} parts, not {self._size}")
            return value[index : index + 1]
        if not one_each:
            return self._of_parts(f"{name}.", value, index)
        if self._size > 1 and not (self._has_targets and _are_images(value)) and self._is_cut(name, value):
            raise Ambiguous(f"`{name}` may be one thing for each image, or {self._size} of all images")
        return value[index : index + 1]

    def _of_parts(self, prefix: str, value: Any, index: int) -> Any:
        return _rebuilt(value, [self._of(f"{prefix}{part.name}", part.value, index) for part in _parts(value)])

    def _is_cut(self, name: str, value: Any) -> bool:
        """Whether every part of a list has a part for each image."""
        if not any(map(self._has_axis, value)):
            return False
        try:
            self._of_parts(f"{name}.", value, 0)
        except Ambiguous:
            return True
        except CannotSlice:
            return False
        return True

    def _has_axis(self, value: Any) -> bool:
        """Whether something in it could be cut."""
        if _is_array(value):
            return bool(value.ndim)
        if _is_list(value) and len(value) == self._size:
            return True
        return any(self._has_axis(part.value) for part in _parts(value))

    def _holds_targets(self, value: Any) -> bool:
        """Whether it is a list of dicts or dataclasses; some images may have none."""
        items = [item for item in value if item is not None]
        return len(items) > 0 and all(isinstance(item, Mapping) or is_dataclass(item) for item in items)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_list(value: Any) -> bool:
    """Whether it is a list or a tuple whose places have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def _is_atom(value: Any) -> bool:
    return isinstance(value, _ATOMS) or (_is_array(value) and value.ndim == 0)


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether these are things of one kind, as those of several images are."""
    return len({_kind(value) for value in values if not _is_list(value) or value}) <= 1


def _kind(value: Any) -> Any:
    if _is_array(value):
        return value.ndim, value.dtype
    if _is_list(value):
        return type(value), frozenset(map(_kind, value))
    return (type(value), *value) if isinstance(value, Mapping) else type(value)


def _are_images(values: Sequence[Any]) -> bool:
    return all(isinstance(value, Tensor) and value.dim() == 3 for value in values)


def _may_be_samples(batch: Sequence[Any]) -> bool:
    """Whether a batch that is a list may be a list of images or samples: four axes have the batch among them."""
    if all(map(_is_array, batch)):
        return len(batch) > 1 and _are_images(batch)
    return _are_alike(batch) and not any(map(_is_atom, batch)) and all(a.ndim <= 3 for a in _arrays(batch))


def _arrays(nested: Any) -> Iterator[Any]:
    if _is_array(nested) and not getattr(nested, "is_nested", False):
        yield nested
    for part in _parts(nested):
        yield from _arrays(part.value)


def _lists(batch: Any) -> Iterator[Any]:
    """The lists in a batch that is no list itself, and in its parts."""
    for part in _parts(batch):
        if _is_list(part.value):
            yield part.value
        yield from _lists(part.value)


def _parts(nested: Any) -> list[_Part]:
    """What a container holds; nothing, if it is none."""
    if isinstance(nested, Mapping):
        return [_Part(str(key), value) for key, value in nested.items()]
    if isinstance(nested, list | tuple) and not isinstance(nested, torch.Size):
        return [_Part(str(place), value) for place, value in enumerate(nested)]
    if is_dataclass(nested) and not isinstance(nested, type):
        return [_Part(field.name, getattr(nested, field.name)) for field in fields(nested)]
    return []


def _rebuilt(nested: Any, values: list[Any]) -> Any:
    """A container of the same kind with other values."""
    if isinstance(nested, Mapping):
        return _mapping(nested, dict(zip(nested, values, strict=True)))
    if isinstance(nested, torch.Size):
        return nested
    if isinstance(nested, list | tuple):
        return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)
    if is_dataclass(nested) and not isinstance(nested, type):
        anew = copy(nested)  # not `replace`: what its `__post_init__` does is done already
        for field, value in zip(fields(nested), values, strict=True):
            object.__setattr__(anew, field.name, value)
        return anew
    return nested


def _mapping(nested: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(nested, dict | UserDict):
        anew = copy(nested)
        for key, value in values.items():
            anew[key] = value  # not `update`: a Counter would count
        return anew
    try:
        return type(nested)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
