"""Whether a loss can be computed again: some of what it changes may be out of our reach, as a global variable is."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from normgrad_lightning.isolated.batches import CannotSlice, batch_size, images_at
from normgrad_lightning.isolated.interrupts import failures_dropped
from normgrad_lightning.isolated.one_pass import LossFunction, alone, name_of, widened_batch
from normgrad_lightning.isolated.sandbox import Sandbox
from normgrad_lightning.layers.own_passes import own_pass

TOLERANCE = 1e-3
"""The part of a loss by which it may differ: on a GPU, sums may be added up in another order each time."""

_problems: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


class NotRepeatable(ValueError):
    """A loss that depends on something that it changes, and that cannot be put back."""


def check_repeatable(model: nn.Module, loss_fn: LossFunction, batch: Any) -> None:
    """Raise `NotRepeatable` if two images have another loss when it is computed again; each model is tried once."""
    if model not in _problems:
        _problems[model] = ""
        with suppress(Exception), failures_dropped():  # the passes say why; of memory, one image needs less
            _problems[model] = _problem(model, loss_fn, _two_images(batch))
    if _problems[model]:
        raise NotRepeatable(_problems[model])


def _problem(model: nn.Module, loss_fn: LossFunction, batch: Any) -> str:
    def loss(stand_in: nn.Module) -> float:
        with alone(loss_fn, stand_in):
            return float(loss_fn(stand_in, widened_batch(batch)))

    sandbox = Sandbox(model, exact=True)
    with torch.enable_grad(), own_pass():
        first, second = sandbox.run(loss), sandbox.run(loss)
    if math.isclose(first, second, rel_tol=TOLERANCE) or (math.isnan(first) and math.isnan(second)):
        return ""
    return (
        f"`{name_of(loss_fn)}`: expected a loss that can be computed again, but for the same images it was {first:.6g} "
        f"and then {second:.6g}. It depends on something that it changes and that cannot be put back, such as a global "
        "variable. Write a method `normgrad_loss(self, batch)` that returns the loss and changes nothing."
    )


def _two_images(batch: Any) -> Any:
    try:
        return images_at(batch, range(min(2, batch_size(batch))))
    except CannotSlice:
        return batch
