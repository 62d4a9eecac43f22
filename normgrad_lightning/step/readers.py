"""Two ways to read a training step: by hooks on the step itself or, where it runs compiled code, in a replay of it.

Hooks are on the model for one step only: in between it can be copied, saved, scripted or exported as if there were no
callback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import nn

from normgrad_lightning.hooks.recorder import NormGrad
from normgrad_lightning.isolated.interrupts import memory_explained
from normgrad_lightning.isolated.one_pass import replayed
from normgrad_lightning.layers.module_tree import Waypoint, all_modules, compiled_layers, is_compiled, ways_to
from normgrad_lightning.layers.names import AUTO, match_layers, named_layers
from normgrad_lightning.layers.own_passes import own_pass
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.context import StepContext
from normgrad_lightning.step.loss import NoLoss, check_training_loss

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Read(NamedTuple):
    """What a reader has seen of a step.

    Attributes:
        recorder: holds the maps until the next step is read; None if nothing was seen.
        undo: the factor that undoes how the loss of a replay was scaled; None: the step was training's own.
        excuse: why nothing was seen, if that is a failure only when training learns from the batch.
    """

    recorder: NormGrad | None = None
    undo: float | None = None
    excuse: ValueError | None = None


class Reader(Protocol):
    """Reads one step at a time.

    Attributes:
        doing: what it does when a step begins, for a warning.
        price: what it costs, for the announcement; empty if next to nothing.
        reads_compiled_code: whether layers inside of compiled code can be read.
    """

    doing: str
    price: str = ""
    reads_compiled_code: bool = False

    def is_up_to_date(self) -> bool:
        """Return whether this reader still fits the model: one that looks at the model in each step always does."""
        return True

    @property
    def layers(self) -> list[str]:
        """The names of the layers; empty as long as `"auto"` has not been decided."""

    def begin(self, context: StepContext) -> None:
        """Prepare for the step, which is about to begin."""

    def end(self) -> Read:
        """Return what was seen of the step, which is over."""

    def problems(self) -> list[str]:
        """Return what stands in the way of maps, as far as it is known and new."""
        return []


class LiveReader(Reader):
    """Reads the step itself: its maps cost nothing but norms."""

    doing = "putting the hooks on"

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self._model = model
        self._is_reading = False
        self._modules = all_modules(model)
        self._compiled = compiled_layers(model)
        self._ways: list[Waypoint] = []
        self._recorder = NormGrad(model, settings.general.layers, **_recording(settings), **vars(settings.read))

    def is_up_to_date(self) -> bool:
        """Return whether nothing was exchanged, added or compiled on the way to a hook; while unknown, anywhere."""
        if not self._ways:
            return self._modules == all_modules(self._model) and self._compiled == compiled_layers(self._model)
        return all(waypoint.is_as_it_was() for waypoint in self._ways)

    @property
    def layers(self) -> list[str]:
        """See `Reader`."""
        return self._recorder.layers

    def begin(self, context: StepContext) -> None:
        """Put the hooks on."""
        self._recorder.clear()
        kinds = context.settings.general.kinds
        self._recorder.read_kinds(kinds if context.is_event else kinds[:1])  # views collect order 0 alone
        self._recorder.attach()
        self._is_reading = True

    def end(self) -> Read:
        """Take the hooks off."""
        was_reading, self._is_reading = self._is_reading, False
        self._recorder.detach()
        if was_reading and not self._ways and self._recorder.layers:
            self._ways = ways_to(self._model, self._recorder.hooked)
        return Read(self._recorder if was_reading else None)

    def problems(self) -> list[str]:
        """See `Reader`."""
        return self._recorder.new_problems()


class ReplayReader(Reader):
    """Runs the step once before training does, eagerly and without a trace: hooks cannot read compiled code."""

    doing = "replaying the training step"
    price = ", in an extra pass for each event, as the model is compiled"
    reads_compiled_code = True

    def __init__(self, trainer: Trainer, model: Any, settings: Settings) -> None:
        check_training_loss(trainer, model, "`layers`: maps of layers inside of compiled code")
        self._model = model
        self._settings = settings
        self._read = Read()
        self._layers: list[str] = []

    @property
    def layers(self) -> list[str]:
        """See `Reader`."""
        return self._layers

    def begin(self, context: StepContext) -> None:
        """Run the step."""
        context.loss.check(context.module, context.batch)
        settings, layers = self._settings, self._layers or self._settings.general.layers
        remedy = "To do without maps of compiled code, set `enabled=False`."
        try:
            with memory_explained(remedy):
                recorder = replayed(
                    self._model, context.loss, context.batch, layers, settings.read, **_recording(settings)
                )
        except NoLoss as error:
            self._read = Read(excuse=NoLoss(str(error)))
        else:
            self._read = Read(recorder, 1.0 / context.loss.scale)
            self._layers = recorder.layers

    def end(self) -> Read:
        """Return what was seen, and keep nothing of it."""
        read, self._read = self._read, Read()
        return read


def _recording(settings: Settings) -> dict[str, Any]:
    """Return what to record, as arguments of `NormGrad`."""
    return {"num_images": settings.read_first, "kinds": settings.general.kinds}


class CannotRead(ValueError):
    """A module that there is no way to read."""


def choose_reader(trainer: Trainer, module: Any, settings: Settings) -> tuple[Reader, str]:
    """Return a reader of the step itself where it can be read, else a replay; and a hint for warnings.

    Raises:
        ValueError: a name that matches nothing.
        CannotRead: a module that is compiled as a whole.
    """
    hint = ""
    layers = settings.general.layers
    if _must_replay(module, layers, settings.read.target):
        try:
            return ReplayReader(trainer, module, settings), ""
        except ValueError as error:
            if layers != AUTO:
                raise
            hint = f" {error}"
    if is_compiled(module):
        raise CannotRead(f"NormGrad cannot read this module: it is compiled as a whole.{hint}")
    return LiveReader(module, settings), hint


def has_compiled_anything() -> bool:
    """Return whether this process has compiled code that a replay would run eagerly: functions, for example."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo is not None and dynamo.utils.counters["stats"]["unique_graphs"] > 0


def _must_replay(model: nn.Module, layers: str | Sequence[str], target: str) -> bool:
    """Return whether layers are asked for that are inside of compiled code.

    Raises:
        ValueError: a name that matches nothing.
    """
    with own_pass():
        wanted = None if layers == AUTO else match_layers(model, layers, target)
    if not compiled_layers(model):
        return False
    return wanted is None or not named_layers(model).keys() >= set(wanted)
