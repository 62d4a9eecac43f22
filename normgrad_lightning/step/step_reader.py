"""Maps that are read from the training step: order 0, and what is read beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor

from normgrad_lightning.hooks.recorder import NormGrad
from normgrad_lightning.layers.names import AUTO
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.context import Seen, StepContext
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.readers import (
    CannotRead,
    Read,
    Reader,
    ReplayReader,
    choose_reader,
    has_compiled_anything,
)

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class StepReader:
    """Reads training steps, with another reader if the model or the flags ask for one.

    Args:
        trainer: runs the training.
        module: what trains.
        settings: all flags.
        messenger: for warnings.

    Attributes:
        hooks_fire: False once hooks were seen to do nothing, as inside of compiled functions.

    Raises:
        ValueError: layers that the model does not have, or that cannot be read.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, settings: Settings, messenger: Messenger) -> None:
        self._trainer, self._module, self._messenger = trainer, module, messenger
        self.hooks_fire = True
        self._with_maps: list[str] = []
        self._skipped_all: bool | None = None  # None as long as no step was read
        self._hint = ""
        self._undo: float | Tensor = 1.0
        self._reader: Reader | None = None
        self._choose(settings)

    @property
    def can_read(self) -> bool:
        """Whether there is a way to read this module; if not, there was a warning."""
        return self._reader is not None

    @property
    def layers(self) -> list[str]:
        """The names of the layers; empty as long as `"auto"` has not been decided."""
        return [] if self._reader is None else self._reader.layers

    @property
    def is_free(self) -> bool:
        """Whether reading a step takes no extra pass."""
        return self._reader is not None and not self._reader.price

    def about(self, settings: Settings) -> str:
        """Return a sentence on what is read and what that costs; empty if nothing."""
        layers = self._with_maps or self.layers
        if self._reader is None or not layers:
            return ""
        chosen_by = " (auto)" if settings.general.layers == AUTO else ""
        return f"NormGrad reads {', '.join(layers)}{chosen_by} {settings.schedule.steps}{self._reader.price}."

    def renew(self, settings: Settings) -> None:
        """Look at the model again if it has other modules since, or compiled ones, or if flags ask for other maps."""
        with self._messenger.guard("looking at the model"):
            is_the_same = self._chosen_for.recording == settings.recording
            if self._reader is not None and not (is_the_same and self._reader.is_up_to_date()):
                self._choose(settings)

    def begin(self, context: StepContext) -> None:
        """Put hooks on, or replay the step."""
        self._undo = 1.0
        if self._reader is not None:
            with self._messenger.guard(self._reader.doing):
                self._reader.begin(context)

    def after_backward(self, context: StepContext) -> None:
        """Note how the gradients of training are scaled."""
        with self._messenger.guard("reading the loss scale"):
            self._undo = context.loss.undo(context.module)

    def end(self) -> Read:
        """Take the hooks off, and return what they have seen."""
        return Read() if self._reader is None else self._reader.end()

    def note(self, *, trained: bool) -> None:
        """Note whether training learned from a batch that was read."""
        self._skipped_all = self._skipped_all is not False and not trained

    def seen(self, read: Read, context: StepContext, *, saw_backward: bool, trained: bool) -> Seen:
        """Return a set for each kind that was read, of the whole batch, where training has it."""
        recorder = read.recorder
        if recorder is None:
            return Seen(excuse=read.excuse)
        if any(len(m) == 0 for m in recorder.latest_maps(recorder.kinds[0]).values()):
            self._messenger.warn_once("NormGrad has no maps of a step whose batch is empty.")
            return Seen()
        undo = self._undo if read.undo is None else read.undo
        sets = [_map_set(recorder, kind, undo, context) for kind in recorder.kinds]
        if not recorder.has_run and saw_backward:
            self._replay_instead()
        self._with_maps = list(sets[0].maps)
        if trained or recorder.layers:  # "auto" decides at the first batch that is not skipped
            for problem in recorder.new_problems(after_backward=recorder.has_run and saw_backward):
                self._messenger.problem(problem + self._hint)
        return Seen([one for one in sets if one.maps])

    def conclude(self) -> None:
        """Warn if no step that was read has trained on its batch."""
        if not self._skipped_all or self._reader is None:
            return
        with self._messenger.guard("looking at the model"):
            problems = self._reader.problems() or [
                "NormGrad has no maps to show: it saw no backward pass in the steps that it read."
            ]
            for problem in problems:
                self._messenger.problem(problem + self._hint)

    def _choose(self, settings: Settings) -> None:
        self._chosen_for = settings
        try:
            self._reader, self._hint = choose_reader(self._trainer, self._module, settings)
        except CannotRead as error:
            self._messenger.problem(str(error))

    def _replay_instead(self) -> None:
        """Replay the next steps: layers that no hook saw may be in compiled functions, which a replay runs eagerly."""
        self.hooks_fire = False
        if self._reader is not None and not self._reader.reads_compiled_code and has_compiled_anything():
            with suppress(ValueError):
                self._reader = ReplayReader(self._trainer, self._module, self._chosen_for)
                return
        self._messenger.problem(
            "NormGrad's hooks never fired. Hooks see only layers that are called as `layer(x)`, not as "
            "`layer.forward(x)`, and that are part of the model when training starts."
        )


def _map_set(recorder: NormGrad, kind: str, undo: float | Tensor, context: StepContext) -> MapSet:
    """Return the maps of a kind, without the scaling of the loss."""
    factor = undo if KINDS[kind].scales_with_loss else 1.0
    maps = {layer: _times(m, factor) for layer, m in recorder.latest_maps(kind).items()}
    return context.map_set(
        KINDS[kind],
        maps,
        {layer: recorder.images_of(layer) for layer in maps},
        recorder.layers,
        recorder.images,
        labels=_labels_of(context, recorder, maps),
        masks=context.masks,
        sums={layer: m.flatten(1).sum(1) for layer, m in maps.items()},
        largest={layer: m.amax() for layer, m in maps.items()},
    )


def _times(m: Tensor, factor: float | Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return m * factor.to(m.device)
    return m if factor == 1 else m * factor


def _labels_of(context: StepContext, recorder: NormGrad, maps: Mapping[str, Tensor]) -> Sequence[int] | None:
    """Return the labels of the images that were read; None if they belong to other images, or to views of each."""
    labels, read = context.labels, min(map(len, maps.values()), default=0)
    entered = recorder.batch_size or read
    if labels is None or len(labels) != (entered if len(maps) and entered >= read else read):
        return None
    return labels[:read]
