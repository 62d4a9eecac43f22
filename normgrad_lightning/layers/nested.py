"""Tensors nested in tuples, lists, dicts and dataclasses, as in batches and in what layers take and give."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import fields, is_dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from normgrad_lightning.maths.tensor_subclasses import no_overrides, of_type, overrides_functions

ATOMS = (
    str,
    bytes,
    bool,
    int,
    float,
    complex,
    type(None),
    type,
    PurePath,
    np.generic,
    torch.dtype,
    torch.device,
    torch.Size,
)
"""Values that hold nothing, and never change."""

_STORE = (dict, UserDict)


class Part(NamedTuple):
    """A part of a container: its key, index or field, and its value."""

    name: str
    value: Any


def parts(nested: Any) -> list[Part]:
    """Return the parts of a container; none for anything else."""
    if isinstance(nested, Mapping) and not isinstance(nested, _STORE):
        return [Part(str(key), value) for key, value in nested.items()]
    return stored_parts(nested)


def stored_parts(nested: Any) -> list[Part]:
    """Return the parts of a container that just stores them; none for mappings that may make them when they are read.

    Nothing of the user's runs: not even a list's or a dict's own way to give what it stores.
    """
    if isinstance(nested, _STORE):
        return [Part(str(key), value) for key, value in dict.items(_store(nested))]
    if isinstance(nested, list | tuple) and not isinstance(nested, torch.Size):
        return [Part(str(index), value) for index, value in enumerate(_values(nested))]
    if is_dataclass(nested) and not isinstance(nested, type):
        return [Part(field.name, getattr(nested, field.name)) for field in fields(nested)]
    return []


def _store(nested: Any) -> Any:
    return vars(nested).get("data", {}) if isinstance(nested, UserDict) else nested


def _values(nested: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    return list.__iter__(nested) if isinstance(nested, list) else tuple.__iter__(nested)


def rebuilt(nested: Any, values: list[Any]) -> Any:
    """Return a container of the same kind with other values, one for each of its `parts`; anything else unchanged."""
    if isinstance(nested, Mapping):
        keys = dict.keys(_store(nested)) if isinstance(nested, _STORE) else nested
        return _rebuilt_mapping(nested, dict(zip(keys, values, strict=True)))
    if isinstance(nested, torch.Size):
        return nested
    if isinstance(nested, list | tuple):
        return type(nested)(*values) if hasattr(nested, "_fields") else type(nested)(values)
    if is_dataclass(nested) and not isinstance(nested, type):
        result = copy(nested)  # not `replace`, which would run `__post_init__` again
        for field, value in zip(fields(nested), values, strict=True):
            object.__setattr__(result, field.name, value)
        return result
    return nested


def map_tensors(function: Callable[[Tensor], Any], nested: Any) -> Any:
    """Return a copy of the containers, with `function` of each tensor inside; tensors of a subclass keep their type."""
    if isinstance(nested, Tensor):
        return _of_its_type(function, nested) if overrides_functions(nested) else function(nested)
    return rebuilt(nested, [map_tensors(function, part.value) for part in parts(nested)])


def _of_its_type(function: Callable[[Tensor], Any], t: Tensor) -> Any:
    with no_overrides():
        result = function(t)
    return of_type(result, t) if isinstance(result, Tensor) and type(result) is not type(t) else result


def first_tensor(nested: object) -> Tensor | None:
    """Return the first floating-point tensor inside, depth first."""
    return next(floating_tensors(nested), None)


def floating_tensors(nested: object) -> Iterator[Tensor]:
    """Yield the floating-point tensors inside, depth first."""
    # Not through `stored_parts`: this runs in every hook, and lists of parts take time.
    if isinstance(nested, Tensor):
        if nested.is_floating_point():
            yield nested
    elif isinstance(nested, _STORE):
        for value in dict.values(_store(nested)):
            yield from floating_tensors(value)
    elif isinstance(nested, list | tuple):
        for value in _values(nested):
            yield from floating_tensors(value)
    elif is_dataclass(nested) and not isinstance(nested, type):
        for field in fields(nested):
            yield from floating_tensors(getattr(nested, field.name))


def _rebuilt_mapping(nested: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    if isinstance(nested, _STORE):
        result = copy(nested)
        for key, value in values.items():
            result[key] = value  # not `update`: a Counter would count
        return result
    try:
        return type(nested)(values)  # type: ignore[call-arg]
    except TypeError:
        return values
