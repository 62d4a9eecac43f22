"""One `fit`: which of its steps are read, and what is seen of them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normgrad_lightning.fit.showing import Record, Showing
from normgrad_lightning.fit.state import RunState
from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.settings import ScheduleFlags, Settings
from normgrad_lightning.step.budget import EVENT, READING, Intervals
from normgrad_lightning.step.check import StepCheck
from normgrad_lightning.step.context import Seen, StepContext, seen_by
from normgrad_lightning.step.default_probe import DefaultProbe
from normgrad_lightning.step.image_choice import cut
from normgrad_lightning.step.labels import check_classes, classes_of, labels_of, labels_on_device
from normgrad_lightning.step.live import StepReader
from normgrad_lightning.step.loss import TrainingLoss
from normgrad_lightning.step.masks import masks_of
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.normalisation import normalisation_of
from normgrad_lightning.step.order1 import about_order1, order1_of_batch
from normgrad_lightning.step.probe import about_probe, probe_order0, probe_order1
from normgrad_lightning.step.reader import Read
from normgrad_lightning.step.schedule import is_last_step
from normgrad_lightning.step.sets_on_the_way import SetsOnTheWay
from normgrad_lightning.views.pooled_batch import pooled
from normgrad_lightning.views.style import Style
from normgrad_lightning.writers.outputs import Outputs

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_LONG_ENOUGH = 30.0
_TOO_MUCH = 0.1
"""Seconds of training, and the part of it, from which on the user is warned of the cost."""


@dataclass
class OpenStep:
    """A step that is being read: what passes have seen, and whether training ran a backward pass."""

    context: StepContext
    is_last: bool
    probe: Sequence[Seen] = ()
    order1: Seen | None = None
    saw_backward: bool = False


class Session:
    """One `fit`. On other ranks than 0 it reads nothing.

    Args:
        trainer: runs it.
        state: what outlives it.
        messenger: for warnings.
        outputs: where pages go.
        group: what all tags begin with.
    """

    def __init__(self, trainer: Trainer, state: RunState, messenger: Messenger, outputs: Outputs, group: str) -> None:
        self._trainer = weakref.ref(trainer)
        self._state = state
        self._messenger = messenger
        self._showing = Showing(trainer, state, messenger, outputs, group, self._check_page)
        self._group = group
        self._reader: StepReader | None = None
        self._classes: Sequence[str] | None = None
        self._open: OpenStep | None = None
        self._check: StepCheck | None = None
        self._probe_by_default: DefaultProbe | None = None
        self._last_step = 0
        self._between: Intervals | None = None

    def is_of(self, trainer: Trainer) -> bool:
        """Return whether this is the session of a Trainer."""
        return self._trainer() is trainer

    @property
    def is_running(self) -> bool:
        """Whether its Trainer is in the middle of a run."""
        trainer = self._trainer()
        return trainer is not None and trainer.state.status.value == "running"

    def find_layers(self, trainer: Trainer, module: LightningModule, settings: Settings) -> None:
        """Check on every rank that the layers exist; read them on rank 0.

        Raises:
            ValueError: layers that the model does not have, or that cannot be read.
        """
        with self._messenger.guard("looking at the model", reraise=(ValueError,)):
            reader = StepReader(trainer, module, settings, self._messenger)
            if reader.can_read and trainer.is_global_zero:
                self._reader = reader
                self._check = StepCheck(trainer, module, self._state.check, self._messenger)
                self._probe_by_default = DefaultProbe(trainer, module, self._state.probe_images)

    def find_classes(self, trainer: Trainer, module: LightningModule, settings: Settings) -> None:
        """Find out what the classes are called, and what the images were normalised with.

        Raises:
            ValueError: names that do not fit the data or the model.
        """
        given = settings.images.classes
        with self._messenger.guard("looking for the names of classes", reraise=(ValueError,)):
            if given is not None:
                check_classes(given, trainer.train_dataloader, module)
            self._classes = given or classes_of(trainer.train_dataloader)
        with self._messenger.guard("looking for the normalisation of the images"):
            self._showing.normalisation = normalisation_of(trainer.train_dataloader)

    def see_validation(self, module: LightningModule, batch: Any, settings: Settings) -> None:
        """Let the probe take its images, if it wants them from validation."""
        if self._reader is not None:
            self._state.probe_images.offer("val", module, batch, settings)

    def begin_batch(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, settings: Settings
    ) -> None:
        """Begin to read the step if that is due: run passes, then put hooks on for the step itself."""
        if self._reader is None:
            return
        self._state.budget.begin_step()
        self._last_step = step = trainer.global_step
        when, schedule = settings.schedule, self._state.schedule
        between = self._intervals(trainer, settings)
        is_last = is_last_step(trainer, batch_idx)
        is_event = schedule.is_due(step, when, between.events, is_last=is_last)
        if is_event or (schedule.reading_is_due(step, between.readings) and self._may_read(settings, self._reader)):
            with_order1 = is_event and schedule.order1_is_due(step, when, is_last=is_last)
            self._messenger.on_error = settings.general.on_error
            labels = self._labels(module, batch, is_event=is_event)
            if is_event and labels is not None:
                self._check_names(labels, settings)
            context = StepContext(
                step,
                module,
                batch,
                TrainingLoss(trainer, module, batch_idx),
                settings,
                is_event,
                with_order1,
                labels,
                self._classes,
                self._group,
                self._masks(module, batch, settings),
            )
            with self._messenger.holding(), self._messenger.guard("beginning to read a step"):
                self._begin(context, self._reader, is_last=is_last)
                if is_event or schedule.reading_is_due(step, between.pieces):
                    self._begin_check(context, self._reader)
        self._state.budget.begin_training()

    def _may_read(self, settings: Settings, reader: StepReader) -> bool:
        return reader.is_free and self._showing.collects(settings)

    def _intervals(self, trainer: Trainer, settings: Settings) -> Intervals:
        """Return the steps between readings and so on: those that the user has set, else what time allows."""
        when, budget = settings.schedule, self._state.budget
        checking = self._check is not None and self._check.is_at_work
        between = budget.intervals(when.budget, when.every_n_steps, checking=checking)
        if when.read_every_n_steps is not None:
            between = Intervals(when.read_every_n_steps, between.events, when.read_every_n_steps)
        if between != self._between and budget.is_settled:
            self._between = between
            self._announce_intervals(trainer, when, between)
        return between

    def _announce_intervals(self, trainer: Trainer, when: ScheduleFlags, between: Intervals) -> None:
        """Say once that the budget makes readings or events rarer."""
        readings, events, _ = between
        wanted = when.read_every_n_steps or READING, when.every_n_steps or EVENT
        if when.budget is not None and (readings, events) != wanted:
            later = " and, after the first 500 steps," if when.every_n_steps is None else " and"
            share = f"{100 * when.budget:g} % of the training time (`budget={when.budget:g}`)"
            self._messenger.announce(
                trainer,
                f"NormGrad plans for {share}: it reads every {readings} steps{later} shows maps every {events}.",
                cause="budget",
            )

    def before_backward(self, loss: Tensor) -> None:
        """Look at the loss that training is about to go back from."""
        if self._open is not None and self._probe_by_default is not None:
            self._probe_by_default.before_backward(loss)

    def after_backward(self) -> None:
        """Note a backward pass of training; after the first one of an event, run the probe by default."""
        step, reader = self._open, self._reader
        if step is None or reader is None:
            return
        step.saw_backward = True
        reader.after_backward(step.context)
        if self._probe_by_default is not None and self._probe_by_default.is_watching:
            with self._messenger.guard("running the network on the probe"), self._state.budget.interruption():
                seen = self._probe_by_default.after_backward(step.context, reader.layers)
                step.probe = [*step.probe, seen] if seen.sets else step.probe

    def end_batch(self, outputs: Any = None) -> None:
        """Show what is pending, and take what was seen of this step, which is shown at the end of the next one.

        Args:
            outputs: what Lightning gives to `on_train_batch_end`.
        """
        step, reader, budget = self._open, self._reader, self._state.budget
        if reader is None:
            return
        budget.end_training()
        self._messenger.release()
        self.finish()
        budget.end_showing()
        if step is not None:
            read = self._stop(reader)
            try:
                with self._messenger.guard("reading a step"):
                    self._showing.pending = self._record(step, read, reader, outputs)
            finally:
                _forget(read)
        budget.end_step(None if step is None else "event" if step.context.is_event else "reading")
        if step is not None:
            self._warn_of_cost(step.context.settings)

    def _warn_of_cost(self, settings: Settings) -> None:
        """Warn if what the user has asked for takes a tenth of the time or more."""
        budget, is_asked_for = self._state.budget, settings.images.asks_for_probe or settings.general.check
        if not is_asked_for and settings.schedule == ScheduleFlags():
            return
        if budget.seconds > _LONG_ENOUGH and budget.share > _TOO_MUCH:
            self._messenger.warn_once(
                f"NormGrad takes {100 * budget.share:.0f} % of the training time, as its flags ask for. A larger "
                "`every_n_steps`, `read_every_n_steps` or `order1_every_n_steps`, fewer `num_images`, `probe=False` or "
                "`check=False` make it cheaper.",
                cause="cost",
            )

    def end_training(self, trainer: Trainer, settings: Settings) -> None:
        """Show what is pending, warn if there was nothing to show in any step, and write what comes at the end."""
        self.finish()
        if self._reader is not None:
            self._reader.conclude()
            self._state.probe_images.conclude(settings)
        self.conclude(trainer, settings)

    def conclude(self, trainer: Trainer, settings: Settings) -> None:
        """Say what the check has measured, and write what comes at the end of training, or where it breaks off."""
        self._state.budget.stop()
        if self._check is not None:
            with self._messenger.guard("concluding the check"):
                self._check.conclude()
        self._showing.conclude(trainer, settings, self._last_step)

    def finish(self) -> None:
        """Show what is pending."""
        self._showing.finish()

    def drop(self) -> None:
        """End the step without a look at it, if one is being read."""
        self._messenger.forget()
        if self._check is not None:
            self._check.drop()
        if self._open is not None and self._reader is not None:
            _forget(self._stop(self._reader))

    def _check_page(self, step: int, style: Style) -> Page | None:
        return None if self._check is None else self._check.page(step, style, self._group, self._classes)

    def _labels(self, module: LightningModule, batch: Any, *, is_event: bool) -> Sequence[int] | None:
        """Return the labels; those of a step that is only read are not needed before its maps are."""
        with self._messenger.guard("finding the labels of a batch"):
            return labels_of(module, batch) if is_event else labels_on_device(module, batch)
        return None

    def _check_names(self, labels: Sequence[int], settings: Settings) -> None:
        """Warn if there are too few names for these labels; those of the data set are then not of these labels."""
        given, largest = settings.images.classes, max(labels, default=0)
        if self._classes is None or largest < len(self._classes):
            return
        if given is None:
            self._classes = None
            return
        self._messenger.warn_once(
            f"NormGrad shows classes without a name by their number: `classes` has {len(given)} names, but a batch has "
            f"the label {largest}. Give one name for each, in the order of their numbers.",
            cause="too few names",
        )

    def _masks(self, module: LightningModule, batch: Any, settings: Settings) -> Tensor | None:
        if settings.views.collects:
            with self._messenger.guard("finding the masks of a batch"):
                return masks_of(module, batch)
        return None

    def _begin(self, context: StepContext, reader: StepReader, *, is_last: bool) -> None:
        reader.renew(context.settings)
        self._open = step = OpenStep(context, is_last=is_last)
        if context.is_event:
            step.probe = self._probe(context, reader.layers)
            step.order1 = self._order1(context, reader.layers) if context.with_order1 else None
        reader.begin(context)
        if self._probe_by_default is not None and context.is_event and reader.hooks_fire:
            with self._messenger.guard("beginning the probe"):
                self._probe_by_default.begin(context, is_last=is_last)

    def _begin_check(self, context: StepContext, reader: StepReader) -> None:
        """Let the check watch the step; where hooks do not fire, only if it was asked for: compiled code has guards."""
        if self._check is not None and (reader.hooks_fire or context.settings.general.check):
            with self._messenger.guard("beginning the check"):
                self._check.begin(context)

    def _probe(self, context: StepContext, layers: Sequence[str]) -> list[Seen]:
        """Run the passes on the probe, if there is one."""
        images = self._state.probe_images
        if not context.settings.images.asks_for_probe:
            return []
        images.offer("train", context.module, context.batch, context.settings)
        doing = "running a pass on the probe (its batch must be one that the training loss takes)"
        order0 = self._seen(doing, partial(probe_order0, context, layers, images))
        if order0 is None or not order0.sets or not context.with_order1:
            return [] if order0 is None else [order0]
        same = list(order0.sets[0].maps)
        order1 = self._seen("running the order-1 passes on the probe", partial(probe_order1, context, same, images))
        return [order0] if order1 is None else [order0, order1]

    def _order1(self, context: StepContext, layers: Sequence[str]) -> Seen | None:
        on_what = " on single images" if context.settings.order1.per_image else ""
        passes = partial(order1_of_batch, context, layers, self._state.choice, self._messenger)
        return self._seen(f"running the order-1 passes{on_what}", passes)

    def _seen(self, doing: str, passes: Callable[[], Seen]) -> Seen | None:
        """Return what passes have seen; None, and a warning, if they have failed."""
        with self._messenger.guard(doing):
            return seen_by(passes)
        return None

    def _stop(self, reader: StepReader) -> Read:
        read = Read()
        with self._messenger.guard("taking the hooks off"):
            read = reader.end()
            if self._probe_by_default is not None:
                self._probe_by_default.drop()
        self._open = None  # not before: Ctrl-C may have left hooks
        return read

    def _record(self, step: OpenStep, read: Read, reader: StepReader, outputs: Any) -> Record:
        """Return what was seen of a step, as copies that training does not touch."""
        context, guard = step.context, self._messenger.guard
        trained = step.saw_backward or (read.recorder is not None and read.recorder.has_gradients)
        self._note(step, reader, trained=trained)
        live = Seen()
        with guard("reading the maps"):
            live = reader.seen(read, context, saw_backward=step.saw_backward, trained=trained)
        if self._check is not None:
            with guard("doing the check"), self._state.budget.piece() if self._check.is_watching else nullcontext():
                self._check.end(context, live.sets, outputs, trained=trained, is_last=step.is_last)
        batch = list[MapSet]()
        if trained and live.sets and self._showing.collects(context.settings):
            with guard("collecting from a batch"):
                batch = [pooled(live.sets[0])]
        record = Record(context.step, context.settings, context.is_event, batch=SetsOnTheWay(batch))
        if not context.is_event:
            return record
        was_read = trained and (bool(live.sets) or read.recorder is None)
        return self._with_maps(record, step, live, reader, trained=trained, was_read=was_read)

    def _note(self, step: OpenStep, reader: StepReader, *, trained: bool) -> None:
        """Note how the step went, for when the next event comes."""
        reader.note(trained=trained)
        has_order1 = step.order1 is not None and bool(step.order1.sets)
        self._state.schedule.note(step.context, trained=trained, has_order1=has_order1)

    def _with_maps(
        self, record: Record, step: OpenStep, live: Seen, reader: StepReader, *, trained: bool, was_read: bool
    ) -> Record:
        """Return the record of an event with its maps. Without training, the probe has none either."""
        settings, sets = record.settings, list[MapSet]()
        about = [reader.about(settings), about_order1(settings), about_probe(settings)]
        of_passes = [one for one in (step.order1, *(step.probe if trained else ())) if one is not None]
        skipped = sum(one.skipped for one in (*of_passes, *(() if trained else step.probe)))
        self._excuse([live, *of_passes], is_failure=was_read)
        with self._messenger.guard("reading the maps"):
            sets = [_numbered(one, reader.layers) for one in self._shown(step.context, live, step.order1, of_passes)]
        return replace(record, sets=SetsOnTheWay(sets), skipped=skipped, about=about)

    def _shown(self, context: StepContext, live: Seen, order1: Seen | None, of_passes: Sequence[Seen]) -> list[MapSet]:
        """Return the sets of the images that are shown: those that a pass before has chosen, or are chosen now."""
        indices = None if order1 is None or not order1.is_of_single_images else order1.indices
        if indices is None:
            indices = self._chosen(context, live.sets)
        sets = [cut(one, indices) for one in live.sets]
        for seen in of_passes:
            is_whole_batch = seen is order1 and seen.indices is None
            sets += [cut(one, indices) if is_whole_batch else one for one in seen.sets]
        return sets

    def _chosen(self, context: StepContext, live: Sequence[MapSet]) -> Sequence[int]:
        """Choose the images to show of a batch."""
        which = context.settings.images
        if not live:
            return range(which.num_images)
        first = live[0]
        count = min(len(t) for t in (*first.maps.values(), *first.images_of.values()) if t is not None)
        sums = {layer: of_images.cpu() for layer, of_images in first.sums.items()} if which.by_signal else {}
        return self._state.choice.indices(which, sums, count, first.labels)

    def _excuse(self, all_seen: Sequence[Seen], *, is_failure: bool) -> None:
        """Warn of passes without maps; if the step itself could not be read either, there was a warning of that."""
        for seen in reversed(all_seen):
            if seen.excuse is not None and is_failure:
                with self._messenger.guard("running an extra pass"):
                    raise seen.excuse
                return


def _forget(read: Read) -> None:
    """Keep nothing of a step."""
    if read.recorder is not None:
        read.recorder.clear()


def _numbered(one: MapSet, layers: Sequence[str]) -> MapSet:
    """Return the set with its layers in the order that the step has shown: a layer has one number in all tags."""
    return replace(one, layers=list(dict.fromkeys([*layers, *one.layers])))
