"""One `fit`: which of its steps are looked at, and what becomes of what is seen there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from normgrad_lightning.events.event import Event, Source
from normgrad_lightning.events.labels import check_classes, classes_of, labels_of
from normgrad_lightning.events.masks import masks_of
from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.events.order1_passes import Order1Passes
from normgrad_lightning.events.probe import ProbePasses
from normgrad_lightning.events.schedule import is_last_step
from normgrad_lightning.events.settings import Settings
from normgrad_lightning.events.training_loss import TrainingLoss
from normgrad_lightning.events.training_step import TrainingStep
from normgrad_lightning.kinds import MapSet
from normgrad_lightning.memory import Memory
from normgrad_lightning.report import Report

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class _Last(NamedTuple):
    """A batch that is over. It is given up when the next one begins."""

    batch: Any
    batch_idx: int


class Run:
    """One `fit`. On other ranks than 0 it has no sources, and does nothing.

    Args:
        settings: returns the flags as they are now.
        memory: what lasts from event to event.
        messenger: for warnings.
        report: takes what is seen to the loggers.
        group: what all tags begin with.
        keep: is called with the maps of each event, and with how many sources had none for lack of finite gradients.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        memory: Memory,
        messenger: Messenger,
        report: Report,
        group: str,
        keep: Callable[[Sequence[MapSet], int], None],
    ) -> None:
        self._current_settings = settings
        self._memory = memory
        self._messenger = messenger
        self._report = report
        self._group = group
        self._keep = keep
        self._sources: list[Source] = []
        self._training_step: TrainingStep | None = None
        self._probe: ProbePasses | None = None
        self._classes: Sequence[str] | None = None
        self._event: Event | None = None
        self._step = 0
        self._saw_backward = False
        self._last: _Last | None = None

    @property
    def _settings(self) -> Settings:
        return self._current_settings()

    def find_sources(self, trainer: Trainer, module: LightningModule) -> None:
        """Check on every rank that the layers exist; read them on rank 0.

        Raises:
            ValueError: layers that the model does not have, or that cannot be read.
        """
        with self._messenger.guard("looking at the model", reraise=(ValueError,)):
            settings, messenger = self._current_settings, self._messenger
            step = TrainingStep(trainer, module, settings, self._memory.choice, messenger)
            if step.can_be_read and trainer.is_global_zero:
                order1 = Order1Passes(settings, self._memory.choice, messenger, step)
                self._probe = ProbePasses(settings, self._memory.probe_images, messenger, step)
                self._training_step = step
                self._sources = [step, order1, self._probe]

    def find_classes(self, trainer: Trainer, module: LightningModule) -> None:
        """Find out what the classes are called.

        Raises:
            ValueError: names that do not fit the data or the model.
        """
        given = self._settings.which.classes
        with self._messenger.guard("looking for the names of classes", reraise=(ValueError,)):
            if given is not None:
                check_classes(given, trainer.train_dataloader, module)
            self._classes = given or classes_of(trainer.train_dataloader)

    def see_validation(self, module: LightningModule, batch: Any) -> None:
        """Let the probe take its images, if it wants them from validation."""
        if self._probe is not None:
            self._probe.see("val", module, batch)

    def begin_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin an event if one is due."""
        if self._training_step is None:
            return
        self._step, self._last, self._saw_backward = trainer.global_step, None, False
        is_last, when, schedule = is_last_step(trainer, batch_idx), self._settings.when, self._memory.schedule
        if schedule.is_due(self._step, when, is_last=is_last):
            with_order1 = schedule.order1_is_due(self._step, when, is_last=is_last)
            self._begin_event(trainer, module, batch, batch_idx, with_order1=with_order1)
        elif self._collects and self._training_step.is_free and schedule.reading_is_due(self._step, when):
            self._begin_event(trainer, module, batch, batch_idx, is_reading=True)

    def after_backward(self) -> None:
        """Let the event know of training's backward pass."""
        self._saw_backward = True
        if self._event is not None:
            self._event.after_backward()

    def end_batch(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        """End the event: take its maps, draw them, and write them."""
        may_have_trained = self._saw_backward or not module.automatic_optimization
        if self._sources and may_have_trained:
            self._last = _Last(batch, batch_idx)
        self._end_event(trainer)

    def end_training(self, trainer: Trainer, module: LightningModule) -> None:
        """Show the last step, warn if there was nothing to look at in any, and write the film."""
        with self._messenger.guard("looking at the last step"):
            self._look_back(trainer, module)
        for source in self._sources:
            source.conclude()
        self.finish_report(trainer)

    def finish_report(self, trainer: Trainer) -> None:
        """Write what there is of the film."""
        self._report.finish(trainer, self._settings.look)

    def drop_event(self) -> None:
        """End the event without a look at it, if there is one."""
        if self._event is not None:
            with self._ended(self._event):
                pass

    @property
    def _collects(self) -> bool:
        return self._report.wants_batches(self._settings.draw)

    def _begin_event(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        *,
        with_order1: bool = False,
        is_reading: bool = False,
    ) -> None:
        self._messenger.on_error = self._settings.what.on_error
        labels = masks = None
        with self._messenger.guard("finding the labels of a batch"):
            labels = labels_of(module, batch)
        if self._settings.draw.collects:
            with self._messenger.guard("finding the masks of a batch"):
                masks = masks_of(module, batch)
        with self._messenger.guard("beginning an event"):
            self._event = Event(
                trainer.global_step,
                self._sources[:1] if is_reading else self._sources,
                module,
                batch,
                TrainingLoss(trainer, module, batch_idx),
                with_order1=with_order1,
                labels=labels,
                classes=self._classes,
                group=self._group,
                masks=masks,
                is_reading=is_reading,
            )
            self._event.begin()

    def _end_event(self, trainer: Trainer) -> None:
        if self._event is None:
            return
        with self._ended(self._event) as event:
            self._memory.schedule.note(event)
            with self._messenger.guard("collecting from a batch"):
                self._collect(event)
            if not event.is_reading:
                with self._messenger.guard("reading the maps"):
                    self._show(trainer, event)

    @contextmanager
    def _ended(self, event: Event) -> Iterator[Event]:
        """The event without hooks; after this, nothing of it is left."""
        try:
            with self._messenger.guard("ending an event"):
                event.stop()
            self._event = None  # not before: Ctrl-C may have left hooks
            yield event
        finally:
            event.forget()

    def _collect(self, event: Event) -> None:
        """Give the maps of the whole batch to the views that collect them."""
        batch = self._training_step.whole_batch(event) if self._collects and self._training_step is not None else None
        if batch is not None:
            self._report.collect(batch, self._settings.look, self._settings.draw)

    def _show(self, trainer: Trainer, event: Event) -> None:
        """Keep the maps of an event, draw its page, and give that to every writer."""
        map_sets = event.map_sets(self._messenger)
        self._keep(map_sets, event.skipped)
        if event.skipped:
            self._messenger.warn_once(
                "NormGrad skips steps whose gradients are not finite (as after an fp16 overflow); "
                "`callback.skipped` counts them."
            )
        if map_sets:
            about = [source.about for source in self._sources]
            self._report.show(trainer, map_sets, self._settings.look, self._settings.draw, about)

    def _look_back(self, trainer: Trainer, module: LightningModule) -> None:
        """Show the last step in a pass of its own if it was no event: training has ended without notice."""
        last, self._last = self._last, None
        step, when, schedule = self._training_step, self._settings.when, self._memory.schedule
        if last is None or schedule.last_event is None or not schedule.is_due(self._step, when, is_last=True):
            return
        if step is not None and step.look_back():
            self._begin_event(trainer, module, *last, with_order1=when.order1_every_n_steps is not None)
            self._end_event(trainer)
