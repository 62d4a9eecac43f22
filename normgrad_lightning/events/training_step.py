"""Source of the maps that are read from the training step: order 0, and what is read beside it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from torch import Tensor

from normgrad_lightning.events.event import Event
from normgrad_lightning.events.images import ImageChoice, picked, rows, signal
from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.events.settings import Settings, every
from normgrad_lightning.events.training_loss import check_training_loss
from normgrad_lightning.events.watch import Live, Rehearsal, Watch, has_compiled_anything, must_rehearse
from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.recording.layer_names import AUTO
from normgrad_lightning.recording.module_tree import compiled_layers, is_compiled
from normgrad_lightning.recording.own_passes import CAN_RUN_EAGERLY
from normgrad_lightning.recording.recorder import NormGrad

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class TrainingStep:
    """Source of the maps that are read from the training step.

    Args:
        trainer: runs the training.
        module: what trains.
        settings: returns the flags as they are now.
        choice: chooses the images to show.
        messenger: for warnings.

    Raises:
        ValueError: layers that the model does not have, or that cannot be read.
    """

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        settings: Callable[[], Settings],
        choice: ImageChoice,
        messenger: Messenger,
    ) -> None:
        self._trainer = trainer
        self._module = module
        self._current_settings = settings
        self._choice = choice
        self._messenger = messenger
        self._hint = ""
        self._with_maps: list[str] = []
        self._skipped_all: bool | None = None  # as long as there was no event
        self._watch = self._chosen_watch()

    @property
    def _settings(self) -> Settings:
        return self._current_settings()

    @property
    def can_be_read(self) -> bool:
        """Whether there is a way to read this module; if not, there was a warning."""
        return self._watch is not None

    @property
    def layers(self) -> list[str]:
        """The names of the layers; empty as long as `"auto"` has not been decided."""
        return [] if self._watch is None else self._watch.layers

    @property
    def is_free(self) -> bool:
        """Whether reading a step takes no pass of its own."""
        return self._watch is not None and not self._watch.price

    @property
    def about(self) -> str:
        """See `Source`."""
        layers = self._with_maps or self.layers
        if self._watch is None or not layers:
            return ""
        chosen_by = " (auto)" if self._settings.what.layers == AUTO else ""
        steps = every(self._settings.when.every_n_steps)
        return f"NormGrad reads {', '.join(layers)}{chosen_by} {steps}{self._watch.price}."

    def begin(self, event: Event) -> None:
        """Put hooks on, or rehearse the step."""
        self.renew()
        if self._watch is not None:
            with self._messenger.guard(self._watch.doing):
                self._watch.begin(event)

    def renew(self) -> None:
        """Look at the model anew if it has other modules since, or compiled ones, or if flags ask for other maps."""
        with self._messenger.guard("looking at the model"):
            is_the_same = self._watched_with.recording == self._settings.recording
            if self._watch is not None and not (is_the_same and self._watch.is_up_to_date()):
                self._watch = self._chosen_watch() or self._watch

    def after_backward(self, event: Event) -> None:
        """Note how the gradients are scaled."""
        if self._watch is not None:
            with self._messenger.guard("reading the loss scale"):
                self._watch.after_backward(event)

    def stop(self, event: Event) -> None:
        """Take the hooks off."""
        recorder = None if self._watch is None else self._watch.end()
        event.trained = event.saw_backward or (recorder is not None and recorder.has_gradients)
        if recorder is not None:
            event.seen[self] = recorder
        self._skipped_all = self._skipped_all is not False and not event.trained

    def map_sets(self, event: Event) -> list[MapSet]:
        """A set for each kind that is read, for the images that are shown of this batch."""
        recorder: NormGrad | None = event.seen.get(self)
        if recorder is None:
            return []
        maps_of = {kind: _on_cpu(recorder, kind, event) for kind in recorder.kinds}
        if not recorder.has_run and event.saw_backward:
            self._rehearse_instead()
        totals = {(kind, layer): float(m.sum()) for kind, maps in maps_of.items() for layer, m in maps.items()}
        self._with_maps = list(maps_of["order0"])
        zeros = [layer for layer in maps_of["order0"] if totals["order0", layer] == 0]
        self._warn_of_problems(recorder, event, zeros)
        if not all(math.isfinite(total) or maps_of[k][layer].isfinite().all() for (k, layer), total in totals.items()):
            event.skipped += 1
            return []
        return self._shown(recorder, event, maps_of) if totals else []

    def whole_batch(self, event: Event) -> MapSet | None:
        """Order-0 maps of all images of the batch, where training has them; None if the step was not read."""
        recorder: NormGrad | None = event.seen.get(self)
        maps = {} if recorder is None or not event.trained else recorder.latest_maps()
        if recorder is None or not maps:
            return None
        count = min(map(len, maps.values()))
        self._check_labels(event, count)
        return event.map_set(
            KINDS["order0"],
            maps if event.undo == 1 else {layer: m * event.undo for layer, m in maps.items()},
            recorder.images,
            {layer: recorder.images_of(layer) for layer in maps},
            recorder.layers,
            self._watched_with.variant,
            labels=event.labels,
            shares=signal(maps, count).tolist(),
            masks=event.masks,
        )

    def _check_labels(self, event: Event, count: int) -> None:
        """Do without labels if they belong to other images, or to several views of each."""
        if event.labels is not None and self._watched_with.read_first is None and len(event.labels) != count:
            event.labels = None

    def forget(self, event: Event) -> None:
        """Let the recorder forget the step."""
        if self in event.seen:
            event.seen[self].clear()

    def conclude(self) -> None:
        """Warn if no step that was looked at has trained on its batch."""
        if not self._skipped_all or self._watch is None:
            return
        with self._messenger.guard("looking at the model"):
            problems = self._watch.problems() or [
                "NormGrad has no maps to show: it saw no backward pass in the steps that it looked at."
            ]
            for problem in problems:
                self._messenger.problem(problem + self._hint)

    def _shown(self, recorder: NormGrad, event: Event, maps_of: Mapping[str, Mapping[str, Tensor]]) -> list[MapSet]:
        """The sets of the images that are shown: those that a pass before has chosen, or are chosen now."""
        order0 = maps_of["order0"]
        images_of = {layer: recorder.images_of(layer) for layer in order0}
        count = min(map(len, [*order0.values(), *(i for i in images_of.values() if i is not None)]))
        self._check_labels(event, count)
        if event.places is None:
            event.places = self._choice.places(self._settings.which, order0, count, event.labels)
        places = [place for place in event.places if place < count]
        shares = None if self._watched_with.read_first is not None else signal(order0, count)[places].tolist()
        distinct = {id(images): images for images in [recorder.images, *images_of.values()]}
        copies = {key: picked(images, places) for key, images in distinct.items()}
        return [
            event.map_set(
                KINDS[kind],
                {layer: rows(m, places) for layer, m in maps.items()},
                copies[id(recorder.images)],
                {layer: copies[id(images_of[layer])] for layer in maps},
                recorder.layers,
                self._watched_with.variant,
                labels=event.labels_at(places),
                shares=shares,
            )
            for kind, maps in maps_of.items()
        ]

    def _chosen_watch(self) -> Watch | None:
        """The step itself where it can be read, else a rehearsal; None, and a warning, if there is no way."""
        module, layers, self._hint = self._module, self._settings.what.layers, ""
        self._watched_with = self._settings
        if must_rehearse(module, layers, self._settings.read.target):
            try:
                return self._rehearsal()
            except ValueError as error:
                if layers != AUTO:
                    raise
                self._hint = f" {error}"
        elif not CAN_RUN_EAGERLY and compiled_layers(module):
            self._hint = " Before torch 2.6, layers inside of compiled code cannot be read."
        if is_compiled(module):
            self._messenger.problem(f"NormGrad cannot read this module: it is compiled as a whole.{self._hint}")
            return None
        return Live(module, self._settings)

    def _rehearsal(self) -> Rehearsal:
        check_training_loss(self._trainer, self._module, "`layers`: maps of layers inside of compiled code")
        return Rehearsal(self._module, self._settings)

    def look_back(self) -> bool:
        """From now on read steps that are over, in a rehearsal; False if there is no loss for that."""
        try:
            rehearsal = self._rehearsal()
        except ValueError:
            return False
        rehearsal.layers = self.layers
        self._watch = rehearsal
        return True

    def _rehearse_instead(self) -> None:
        """No layer was seen at work: they may be in compiled functions, which a rehearsal runs eagerly."""
        if self._watch is not None and not self._watch.reads_compiled_code and has_compiled_anything():
            with suppress(ValueError):
                self._watch = self._rehearsal()
                return
        self._messenger.problem(
            "NormGrad saw no layer at work. Hooks see only layers that are called as `layer(x)`, not as "
            "`layer.forward(x)`, and that are part of the model when training starts."
        )

    def _warn_of_problems(self, recorder: NormGrad, event: Event, zeros: Sequence[str]) -> None:
        """Warn once of each layer that cannot be read, or that has nothing to show."""
        if not event.trained and not recorder.layers:  # "auto" decides at the first batch that is not skipped
            return
        for problem in recorder.new_problems(after_backward=recorder.has_run and event.saw_backward):
            self._messenger.problem(problem + self._hint)
        for name in zeros:
            self._messenger.warn_once(
                f"NormGrad: the map of {name!r} is zero everywhere: no gradient reaches its locations. At the first "
                "step this happens if the head's weights start at zero. If it continues, the head reads only a class "
                "token: choose an earlier layer."
            )


def _on_cpu(recorder: NormGrad, kind: str, event: Event) -> dict[str, Tensor]:
    """The maps of a kind, without the scaling of the loss."""
    factor = event.undo if KINDS[kind].scales_with_loss else 1.0
    maps = {layer: m.cpu() for layer, m in recorder.latest_maps(kind).items()}
    return maps if factor == 1 else {layer: m * factor for layer, m in maps.items()}
