"""Batches of any make: tensors in tuples, lists, dicts and dataclasses, and some images out of all that.

Nothing in a batch says which of its numbers is its size, nor whether a list holds one thing for each image (a
detector's targets) or several things for all of them (images and labels). So every size is tried that the batch could
have, and a batch that makes sense in two ways, or in none, is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import is_dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from normgrad_lightning.layers.nested import ATOMS, parts, rebuilt
from normgrad_lightning.maths.tensor_subclasses import no_overrides, of_type, overrides_functions

Take = Callable[[Any], Any]
"""Gives some rows of an array or a list."""

FIRST: Take = itemgetter(slice(1))


class CannotSlice(ValueError):
    """A batch that no single image can be taken out of.

    Attributes:
        why: what stands in the way.
    """

    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"`batch`: expected tensors, tuples, dicts, dataclasses and lists of these with one part for each image, "
            f"but {why}. Set `per_image=False`, which takes the batch as it is."
        )


class DoNotFit(Exception):
    """Two batches that cannot be one."""


class Ambiguous(CannotSlice):
    """A batch that single images can be taken out of in two ways."""


def copied(batch: Any, copy: Callable[[Tensor], Tensor] = Tensor.clone) -> Any:
    """Return a batch that can be written to without a trace in this one; with these copies of its plain tensors."""
    if isinstance(batch, Tensor):
        return _copied_tensor(batch) if overrides_functions(batch) else copy(batch.detach())
    if isinstance(batch, ATOMS):
        return batch
    inside = parts(batch)
    return rebuilt(batch, [copied(part.value, copy) for part in inside]) if inside else deepcopy(batch)


def _copied_tensor(t: Tensor) -> Tensor:
    """Return a copy of a subclass's tensor: of its type, with copies of its attributes, such as MONAI's `meta`."""
    with no_overrides():
        values = t.detach().clone()
    return of_type(values, t, {name: copied(value) for name, value in vars(t).items()})


def single_images(batch: Any, chosen: Sequence[int] | None = None) -> list[Any]:
    """Return a batch of one image for each of the chosen ones; by default, for all."""
    size = batch_size(batch)
    indices = range(size) if chosen is None else chosen
    if any(not 0 <= index < size for index in indices):
        raise IndexError(f"`chosen`: expected indices in a batch of {size} images, but got {list(indices)}.")
    with no_overrides():
        return [_Cut(batch, size).images(itemgetter(slice(index, index + 1))) for index in indices]


def images_at(batch: Any, indices: Sequence[int]) -> Any:
    """Return a batch of the images with these indices, in this order."""
    size, chosen = batch_size(batch), list(indices)

    def rows(value: Any) -> Any:
        return type(value)(value[index] for index in chosen) if _is_list(value) else value[chosen]

    with no_overrides():
        return _Cut(batch, size).images(rows)


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


def batch_size(batch: Any) -> int:
    """Return how many images a batch holds.

    Raises:
        CannotSlice: no number makes sense of all its parts, or more than one does.
    """
    problems: list[CannotSlice] = []
    fitting = []
    with no_overrides():
        for size in filter(None, dict.fromkeys(_likely_sizes(batch))):
            try:
                _Cut(batch, size).images(FIRST)
                fitting.append(size)
            except CannotSlice as problem:
                problems.append(problem)
    if len(fitting) > 1:
        raise CannotSlice(f"its size may be {' or '.join(map(str, sorted(fitting)))}")
    if not fitting:
        raise problems[0] if problems else CannotSlice("there is no tensor with a batch axis")
    return fitting[0]


def _likely_sizes(batch: Any) -> Iterator[int]:
    """Yield numbers that may be the batch size, the likeliest first."""
    if _is_array(batch):
        batch = [batch]
    arrays = [a for a in _arrays(batch) if a.ndim > 0]
    yield from (len(a) for a in arrays if a.ndim > 3)
    yield from (len(part.value) for part in parts(batch) if _is_list(part.value))
    yield from (len(a) for a in arrays if a.ndim == 3)
    yield from (len(a) for a in arrays)
    if _is_list(batch) and _may_be_samples(batch):
        yield len(batch)


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

    def images(self, take: Take) -> Any:
        """Return a batch of some of the images: `take` gives these of an array or a list that has one part for each."""
        if _is_list(self._batch) and len(self._batch) == self._size and _may_be_samples(self._batch):
            if self._is_cut("the batch", self._batch):
                raise Ambiguous("it may be one thing for each image, or several of all images")
            return take(self._batch)
        if _is_array(self._batch):
            return self._of_array("it", self._batch, take)
        if isinstance(self._batch, PackedSequence):
            raise CannotSlice("it is a packed sequence")
        return self._of_parts("", self._batch, take)

    def _of(self, name: str, value: Any, take: Take) -> Any:
        """Return what a part of the batch holds of the images."""
        if _is_array(value):
            return self._of_array(f"`{name}`", value, take)
        if _is_list(value):
            return self._of_list(name, value, take)
        if isinstance(value, ATOMS):
            return value
        if isinstance(value, PackedSequence) or (not parts(value) and not isinstance(value, Mapping)):
            raise CannotSlice(f"`{name}` is a {type(value).__name__!r}")
        return self._of_parts(f"{name}.", value, take)

    def _of_array(self, name: str, value: Any, take: Take) -> Any:
        if isinstance(value, Tensor) and (value.is_nested or value.layout is not torch.strided):
            raise CannotSlice(f"{name} is not a dense tensor")
        if value.ndim == 0:
            return value
        if len(value) != self._size:
            raise CannotSlice(f"{name} has shape {tuple(value.shape)}, which does not begin with {self._size}")
        return _rows(value, take)

    def _of_list(self, name: str, value: Any, take: Take) -> Any:
        one_each = len(value) == self._size and _are_alike(value)
        if len(value) == self._size and all(map(_is_atom, value)):
            return take(value)
        if self._holds_targets(value):
            if len(value) != self._size:
                raise CannotSlice(f"`{name}` has {len(value)} parts, not {self._size}")
            return take(value)
        if not one_each:
            return self._of_parts(f"{name}.", value, take)
        if self._size > 1 and not (self._has_targets and _are_images(value)) and self._is_cut(name, value):
            raise Ambiguous(f"`{name}` may be one thing for each image, or {self._size} of all images")
        return take(value)

    def _of_parts(self, prefix: str, value: Any, take: Take) -> Any:
        return rebuilt(value, [self._of(f"{prefix}{part.name}", part.value, take) for part in parts(value)])

    def _is_cut(self, name: str, value: Any) -> bool:
        """Return whether every part of a list has a part for each image."""
        if not any(map(self._has_axis, value)):
            return False
        try:
            self._of_parts(f"{name}.", value, FIRST)
        except Ambiguous:
            return True
        except CannotSlice:
            return False
        return True

    def _has_axis(self, value: Any) -> bool:
        """Return whether something in it could be cut."""
        if _is_array(value):
            return bool(value.ndim)
        if _is_list(value) and len(value) == self._size:
            return True
        return any(self._has_axis(part.value) for part in parts(value))

    def _holds_targets(self, value: Any) -> bool:
        """Return whether it is a list of dicts or dataclasses; some images may have none."""
        items = [item for item in value if item is not None]
        return len(items) > 0 and all(isinstance(item, Mapping) or is_dataclass(item) for item in items)


def _rows(value: Any, take: Take) -> Any:
    """Return the rows of some images. A subclass cuts its own attributes, if its slices are of its type."""
    if not isinstance(value, Tensor) or not overrides_functions(value):
        return take(value)
    with suppress(Exception), torch._C._EnableTorchFunction():
        rows = take(value)
        if type(rows) is type(value):
            return rows
    return of_type(take(value), value)


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def _is_list(value: Any) -> bool:
    """Return whether it is a list or a tuple whose parts have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields") and not isinstance(value, torch.Size)


def _is_atom(value: Any) -> bool:
    return isinstance(value, ATOMS) or (_is_array(value) and value.ndim == 0)


def _are_alike(values: Sequence[Any]) -> bool:
    """Return whether these are things of one kind, as those of several images are."""
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
    """Return whether a batch that is a list may be a list of images or samples: four axes have the batch among them."""
    if all(map(_is_array, batch)):
        return len(batch) > 1 and _are_images(batch)
    return _are_alike(batch) and not any(map(_is_atom, batch)) and all(a.ndim <= 3 for a in _arrays(batch))


def _arrays(nested: Any) -> Iterator[Any]:
    if _is_array(nested) and not getattr(nested, "is_nested", False):
        yield nested
    for part in parts(nested):
        yield from _arrays(part.value)


def _lists(batch: Any) -> Iterator[Any]:
    """Yield the lists in a batch that is not a list itself, and in its parts."""
    for part in parts(batch):
        if _is_list(part.value):
            yield part.value
        yield from _lists(part.value)


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
