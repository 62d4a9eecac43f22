"""Two ways to read a training step: by hooks on the step itself or, where it runs compiled code, in a rehearsal of it.

Hooks are on the model for one step only: in between it can be copied, saved, scripted or exported as if there were no
callback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from normgrad_lightning.events.event import Event
from normgrad_lightning.events.settings import Settings
from normgrad_lightning.events.training_loss import NoLoss
from normgrad_lightning.passes.one_pass import replayed
from normgrad_lightning.recording.layer_names import AUTO, match_layers, named_layers
from normgrad_lightning.recording.module_tree import Waypoint, all_modules, compiled_layers, ways_to
from normgrad_lightning.recording.own_passes import CAN_RUN_EAGERLY, own_pass
from normgrad_lightning.recording.recorder import NormGrad


class Watch(Protocol):
    """Reads one step at a time.

    Attributes:
        doing: what it does when an event begins, for a warning.
        price: what it costs, for the announcement; empty if next to nothing.
        reads_compiled_code: whether layers inside of compiled code can be read.
    """

    doing: str
    price: str
    reads_compiled_code: bool

    def is_up_to_date(self) -> bool:
        """Whether the model is still the one that this watch was chosen for."""

    @property
    def layers(self) -> list[str]:
        """The names of the layers; empty as long as `"auto"` has not been decided."""

    def begin(self, event: Event) -> None:
        """The step is about to begin."""

    def after_backward(self, event: Event) -> None:
        """A backward pass of training is over."""

    def end(self) -> NormGrad | None:
        """The step is over: what was seen of it, if anything."""

    def problems(self) -> list[str]:
        """What stands in the way of maps, as far as it is known and new."""


class Live:
    """Watches the step itself: its maps cost nothing but norms."""

    doing = "attaching the hooks"
    price = ""
    reads_compiled_code = False

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model = model
        self._is_watching = False
        self._modules = all_modules(model)
        self._compiled = compiled_layers(model)
        self._ways: list[Waypoint] = []
        self._recorder = NormGrad(model, settings.what.layers, **_recording(settings), **vars(settings.read))

    def is_up_to_date(self) -> bool:
        """Whether nothing was exchanged, added or compiled on the way to a hook; while these are unknown, anywhere."""
        if not self._ways:
            return self._modules == all_modules(self._model) and self._compiled == compiled_layers(self._model)
        return all(waypoint.is_as_it_was() for waypoint in self._ways)

    @property
    def layers(self) -> list[str]:
        """See `Watch`."""
        return self._recorder.layers

    def begin(self, event: Event) -> None:
        """Put the hooks on."""
        self._recorder.clear()
        self._recorder.attach()
        self._is_watching = True

    def after_backward(self, event: Event) -> None:
        """Note how this backward's gradients are scaled."""
        event.undo = event.loss.undo(event.module)

    def end(self) -> NormGrad | None:
        """Take them off."""
        was_watching, self._is_watching = self._is_watching, False
        self._recorder.detach()
        if was_watching and not self._ways and self._recorder.layers:
            self._ways = ways_to(self._model, self._recorder.hooked)
        return self._recorder if was_watching else None

    def problems(self) -> list[str]:
        """See `Watch`."""
        return self._recorder.new_problems()


class Rehearsal:
    """Runs the step once before training does, eagerly and without a trace: hooks cannot read compiled code."""

    doing = "a rehearsal of the training step"
    price = ", in a pass of its own for each event, as the model is compiled"
    reads_compiled_code = True

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._recorder: NormGrad | None = None
        self.layers: list[str] = []

    def is_up_to_date(self) -> bool:
        """It looks at the model anew in each pass."""
        return True

    def begin(self, event: Event) -> None:
        """Run the step."""
        event.loss.check(event.module)
        event.undo = 1.0 / event.loss.scale
        settings, layers = self._settings, self.layers or self._settings.what.layers
        try:
            self._recorder = replayed(
                self._model, event.loss, event.batch, layers, settings.read, **_recording(settings)
            )
        except NoLoss as error:
            event.excuse(error)
        else:
            self.layers = self._recorder.layers

    def after_backward(self, event: Event) -> None:
        """Nothing: the gradients are those of the rehearsal."""

    def end(self) -> NormGrad | None:
        """What was seen; it is given away."""
        recorder, self._recorder = self._recorder, None
        return recorder

    def problems(self) -> list[str]:
        """None: there was a warning of each."""
        return []


def _recording(settings: Settings) -> dict[str, Any]:
    """What to record, as arguments of `NormGrad`."""
    return {"num_images": settings.read_first, "kinds": settings.what.kinds}


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
