"""What the hyperparameters in a Lightning checkpoint say of the images and classes that a model was trained on.

Those of the module count first, then those of the data module. Only plain names are read, at the top: `mean`, `std`,
`classes`, `class_names`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from torch import Tensor

_PLACES = ("datamodule_hyper_parameters", "hyper_parameters")


def class_names(contents: Mapping[str, Any]) -> list[str] | None:
    """The names of the classes, if they are there."""
    saved = _saved(contents)
    for name in ("class_names", "classes"):
        values = _listed(saved.get(name))
        if len(values) > 1 and all(isinstance(value, str) for value in values):
            return values
    return None


def normalisation(contents: Mapping[str, Any], channels: int) -> dict[str, list[float]]:
    """The mean and std that images were normalised with, those of them that are there and fit the channels.

    They count for pixels from 0 to 1. A mean above 1 belongs to pixels from 0 to 255, and so does its std: these are
    divided by 255.
    """
    saved = _saved(contents)
    found = {name: _numbers(saved.get(name), channels) for name in ("mean", "std")}
    if min(found["std"], default=1.0) <= 0:
        found["std"] = []
    whole = 255.0 if max(found["mean"], default=0.0) > 1 else 1.0
    return {name: [value / whole for value in values] for name, values in found.items() if values}


def unfit_normalisation(contents: Mapping[str, Any], channels: int) -> dict[str, Any]:
    """What is saved as mean or std and cannot be one for these channels."""
    saved, fit = _saved(contents), normalisation(contents, channels)
    return {name: saved[name] for name in ("mean", "std") if saved.get(name) is not None and name not in fit}


def class_path(contents: Mapping[str, Any]) -> str | None:
    """The class of the module as LightningCLI saves it, and Hydra's users do: `package.module:Name`."""
    values = _mapping(contents.get("hyper_parameters"))
    for name in ("_class_path", "_target_"):
        module, _, of_class = str(values.get(name) or "").rpartition(".")
        if module:
            return f"{module}:{of_class}"
    return None


def _saved(contents: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for place in _PLACES for name, value in _mapping(contents.get(place)).items()}


def _mapping(saved: Any) -> dict[str, Any]:
    """Hyperparameters as a dict: they may also be a namespace or a config of OmegaConf."""
    return dict(saved if isinstance(saved, Mapping) else getattr(saved, "__dict__", {}))


def _listed(value: Any) -> list[Any]:
    """A value as a list: of one, if it is a single one."""
    value = value.tolist() if isinstance(value, Tensor) else value
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return list(value) if is_list else [value]


def _numbers(value: Any, channels: int) -> list[float]:
    """Finite numbers, one or as many as channels; else none."""
    values = _listed(value)
    are_numbers = all(isinstance(v, Real) and not isinstance(v, bool) and math.isfinite(v) for v in values)
    return [float(v) for v in values] if are_numbers and len(values) in (1, channels) else []
