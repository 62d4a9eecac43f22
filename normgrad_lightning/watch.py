"""Where the order-0 maps of an event come from: the training step itself or, where it is compiled, a rehearsal of it.

Both put hooks on the model for one step only, so that in between it can be copied, saved, scripted or exported as if
nobody watched.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from normgrad_lightning.capture import NormGrad
from normgrad_lightning.isolation import CAN_RUN_EAGERLY, own_pass
from normgrad_lightning.layers import (
    AUTO,
    Waypoint,
    all_modules,
    compiled_layers,
    match_layers,
    named_layers,
    ways_to,
)
from normgrad_lightning.passes import LossFunction, replayed


class Watch(Protocol):
    """Gets the maps of one step at a time.

    Attributes:
        rehearses: whether they come from a pass of our own.
    """

    rehearses: bool

    def is_up_to_date(self) -> bool:
        """Whether the model still is what it was chosen for; if not, choose anew."""

    @property
    def layers(self) -> list[str]:
        """The names of the layers; empty as long as `"auto"` has not been decided."""

    def begin(self, loss_fn: LossFunction, batch: Any) -> None:
        """A step of training is about to begin, with this loss of this batch."""

    def end(self) -> NormGrad | None:
        """The step is over: what was seen of it, if anything."""


class Live:
    """Watches the step itself: its maps cost nothing but the norms."""

    rehearses = False

    def __init__(self, model: nn.Module, layers: str | Sequence[str], **options: Any) -> None:
        self._model = model
        self._is_watching = False
        self._modules = all_modules(model)
        self._compiled = compiled_layers(model)
        self._ways: list[Waypoint] = []
        self._recorder = NormGrad(model, layers, **options)

    def is_up_to_date(self) -> bool:
        """Whether nothing was exchanged, added or compiled on the way to a hook; while these are unknown, anywhere."""
        if not self._ways:
            return self._modules == all_modules(self._model) and self._compiled == compiled_layers(self._model)
        return all(waypoint.is_as_it_was() for waypoint in self._ways)

    @property
    def layers(self) -> list[str]:
        """See `Watch`."""
        return self._recorder.layers

    def begin(self, loss_fn: LossFunction, batch: Any) -> None:
        """Put the hooks on."""
        self._recorder.clear()
        self._recorder.attach()
        self._is_watching = True

    def end(self) -> NormGrad | None:
        """Take them off."""
        was_watching, self._is_watching = self._is_watching, False
        self._recorder.detach()
        if was_watching and not self._ways and self._recorder.layers:
            self._ways = ways_to(self._model, self._recorder.hooked)
        return self._recorder if was_watching else None


class Rehearsal:
    """Runs the step once before training does, eagerly and without a trace: nothing can be read in compiled code."""

    rehearses = True

    def __init__(self, model: nn.Module, layers: str | Sequence[str], **options: Any) -> None:
        self._model = model
        self._wanted = layers
        self._options = options
        self._recorder: NormGrad | None = None
        self.layers: list[str] = []

    def is_up_to_date(self) -> bool:
        """It looks at the model anew in each pass."""
        return True

    def begin(self, loss_fn: LossFunction, batch: Any) -> None:
        """Run the step."""
        self._recorder = replayed(self._model, loss_fn, batch, self.layers or self._wanted, **self._options)
        self.layers = self._recorder.layers

    def end(self) -> NormGrad | None:
        """What was seen; it is given away."""
        recorder, self._recorder = self._recorder, None
        return recorder


def has_compiled_anything() -> bool:
    """Whether this process has compiled code that a rehearsal would run eagerly: functions, for example."""
    dynamo = sys.modules.get("torch._dynamo")
    return CAN_RUN_EAGERLY and dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"] > 0


def must_rehearse(model: nn.Module, layers: str | Sequence[str], target: str) -> bool:
    """Whether layers are asked for that are inside of compiled code.

    Raises:
        ValueError: a name that matches nothing.
    """
    with own_pass():
        wanted = None if layers == AUTO else match_layers(model, layers, target)
    if not CAN_RUN_EAGERLY or not compiled_layers(model):
        return False
    return wanted is None or not named_layers(model).keys() >= set(wanted)
