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
from normgrad_lightning.hooks.to_host import OnTheWay
from normgrad_lightning.isolated.random_state import preserved_rng
from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.check import StepCheck
from normgrad_lightning.step.context import Seen, StepContext, seen_by
from normgrad_lightning.step.default_probe import DefaultProbe
from normgrad_lightning.step.image_choice import cut
from normgrad_lightning.step.labels import check_classes, classes_of, labels_on_device, listed
from normgrad_lightning.step.loss import TrainingLoss
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.network import StepNetwork
from normgrad_lightning.step.normalisation import normalisation_of
from normgrad_lightning.step.order1 import about_order1, order1_of_batch
from normgrad_lightning.step.own_methods import masks_of
from normgrad_lightning.step.plan import Due, Plan
from normgrad_lightning.step.probe import about_probe, probe_order0, probe_order1
from normgrad_lightning.step.readers import Read
from normgrad_lightning.step.sets_on_the_way import SetsOnTheWay
from normgrad_lightning.step.step_reader import StepReader
from normgrad_lightning.views.pooled_batch import pooled
from normgrad_lightning.views.style import Style
from normgrad_lightning.writers.outputs import Outputs

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


@dataclass
class OpenStep:
    """A step that is being read: what is still to be done, what passes have seen, and whether training learned of it.

    Attributes:
        context: what is known of it.
        is_last: whether it is known to be the last one.
        with_probe: whether the probe by default is to run on its weights.
        with_check: whether a piece of the check is to be done with it.
        probe: what passes on the probe have seen.
        order1: what order-1 passes have seen.
        saw_backward: whether training ran a backward pass.
    """

    context: StepContext
    is_last: bool
    with_probe: bool = False
    with_check: bool = False
    probe: Sequence[Seen] = ()
    order1: Seen | None = None
    saw_backward: bool = False


@dataclass(frozen=True)
class Sources:
    """What maps and numbers of a step come from. There are none on other ranks than 0, nor where nothing can be read.

    Attributes:
        reader: reads the step itself.
        network: its network, for the other two.
        probe: runs it on the probe, by default.
        check: does the check.
    """

    reader: StepReader
    network: StepNetwork
    probe: DefaultProbe
    check: StepCheck


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
        self._state, self._messenger, self._group = state, messenger, group
        self._plan = Plan(state.schedule, state.budget, messenger)
        self._showing = Showing(trainer, state, messenger, outputs, group, self._check_page)
        self._sources: Sources | None = None
        self._classes: Sequence[str] | None = None
        self._open: OpenStep | None = None
        self._is_skipped = False
        self._last_step = 0

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
        with self._messenger.guard("looking at the model", reraise=(ValueError,)), preserved_rng([module.device]):
            reader = StepReader(trainer, module, settings, self._messenger)
            if reader.can_read and trainer.is_global_zero:
                network = StepNetwork(trainer, module)
                probe = DefaultProbe(trainer, self._state.probe_images)
                check = StepCheck(trainer, network, self._state.check, self._messenger)
                self._sources = Sources(reader, network, probe, check)

    def find_classes(self, trainer: Trainer, module: LightningModule, settings: Settings) -> None:
        """Find out what the classes are called, and what the images were normalised with.

        Raises:
            ValueError: names that do not fit the data or the model.
        """
        self._classes = given = settings.images.classes
        with preserved_rng([module.device]):  # attributes of the user's may draw from it
            with self._messenger.guard("looking for the names of classes", reraise=(ValueError,)):
                if given is not None:
                    check_classes(given, trainer.train_dataloader, module)
                self._classes = given or classes_of(trainer.train_dataloader)
            with self._messenger.guard("looking for the normalisation of the images"):
                self._showing.normalisation = normalisation_of(trainer.train_dataloader)

    def see_validation(self, module: LightningModule, batch: Any, settings: Settings) -> None:
        """Let the probe take its images, if it wants them from validation."""
        if self._sources is not None:
            self._state.probe_images.offer("val", module, batch, settings)

    def begin_batch(
        self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int, settings: Settings
    ) -> None:
        """Begin to read the step if that is due: run passes, then put hooks on for the step itself."""
        if self._sources is None:
            return
        budget = self._state.budget
        budget.begin_step()
        self._last_step = step = trainer.global_step
        checking = self._sources.check.is_at_work
        due = self._plan.due(trainer, step, batch_idx, settings, checking=checking, reads=self._reads)
        self._is_skipped = due is None and self._showing.pending is None and budget.skips()
        if self._is_skipped:
            return
        if due is not None:
            self._messenger.on_error = settings.general.on_error
            with preserved_rng([module.device]):
                loss = TrainingLoss(trainer, module, batch_idx)
                labels, masks = self._labels(module, batch), self._masks(module, batch, settings)
            is_event, names = due.is_event, (self._classes, self._group)
            context = StepContext(step, module, batch, loss, settings, is_event, due.with_order1, labels, *names, masks)
            with self._messenger.holding(), self._messenger.guard("beginning to read a step"):
                self._begin(context, self._sources, due)
        budget.begin_training()

    def _reads(self, settings: Settings) -> bool:
        """Return whether steps that are no events are read: that costs no pass, and a view collects them."""
        return self._sources is not None and self._sources.reader.is_free and self._showing.collects(settings)

    def _begin(self, context: StepContext, sources: Sources, due: Due) -> None:
        reader = sources.reader
        reader.renew(context.settings)
        self._open = step = OpenStep(context, due.is_last)
        if context.with_order1 or (context.is_event and context.settings.images.asks_for_probe):
            self._settle_labels(step)
            step.probe = self._probe(step.context, reader.layers)
            step.order1 = self._order1(step.context, reader.layers) if context.with_order1 else None
        reader.begin(step.context)
        self._begin_passes(step, sources, with_check=due.with_check)

    def _begin_passes(self, step: OpenStep, sources: Sources, *, with_check: bool) -> None:
        """Watch the network, if the probe or the check wants it; where hooks do not fire, compiled code has guards."""
        context, fires = step.context, sources.reader.hooks_fire
        with self._messenger.guard("beginning the check"):
            step.with_check = (
                with_check and (fires or bool(context.settings.general.check)) and sources.check.is_due(context)
            )
        with self._messenger.guard("beginning the probe"):
            step.with_probe = context.is_event and fires and sources.probe.is_due(context, is_last=step.is_last)
            if fires and (step.with_probe or step.with_check):
                sources.network.watch()

    def before_backward(self, loss: Tensor) -> None:
        """Look at the loss that training is about to go back from."""
        if self._open is not None and self._sources is not None:
            self._sources.network.before_backward(loss)

    def after_backward(self) -> None:
        """Note a backward pass of training; after the first one of an event, run the probe by default."""
        step, sources = self._open, self._sources
        if step is None or sources is None:
            return
        step.saw_backward = True
        sources.reader.after_backward(step.context)
        if not (step.with_probe or step.with_check):
            return
        guard, with_probe, step.with_probe = self._messenger.guard, step.with_probe, False
        with self._state.budget.interruption():
            with guard("looking for the network"):
                sources.network.after_backward(step.context)
            with guard("running the network on the probe"):
                found = sources.network.found() if with_probe else None
                if found is not None:
                    self._settle_labels(step, found.labels)
                    seen = sources.probe.seen(step.context, found, sources.reader.layers)
                    step.probe = [*step.probe, seen] if seen.sets else step.probe

    def end_batch(self, outputs: Any = None) -> None:
        """Show what is pending, and take what was seen of this step, which is shown at the end of the next one.

        Args:
            outputs: what Lightning gives to `on_train_batch_end`.
        """
        step, sources, budget = self._open, self._sources, self._state.budget
        if sources is None or self._is_skipped:
            return
        budget.end_training()
        self._messenger.release()
        self.finish()
        budget.end_showing()
        if step is not None:
            read = self._stop(sources)
            try:
                with self._messenger.guard("reading a step"):
                    self._showing.pending = self._record(step, read, sources, outputs)
            finally:
                _forget(read, sources)
        budget.end_step(None if step is None else "event" if step.context.is_event else "reading")
        if step is not None:
            self._plan.warn_of_cost(step.context.settings)

    def end_training(self, trainer: Trainer, settings: Settings) -> None:
        """Show what is pending, warn if there was nothing to show in any step, and write what comes at the end."""
        self.finish()
        if self._sources is not None:
            self._sources.reader.conclude()
            self._state.probe_images.conclude(settings)
        self.conclude(trainer, settings)

    def conclude(self, trainer: Trainer, settings: Settings) -> None:
        """Say what the check has measured, and write what comes at the end of training, or where it breaks off."""
        self._state.budget.stop()
        if self._sources is not None:
            with self._messenger.guard("concluding the check"):
                self._sources.check.conclude(is_asked_for=bool(settings.general.check))
        self._showing.conclude(trainer, settings, self._last_step)

    def finish(self) -> None:
        """Show what is pending."""
        self._showing.finish()

    def drop(self) -> None:
        """End the step without a look at it, if one is being read."""
        self._messenger.forget()
        if self._open is not None and self._sources is not None:
            _forget(self._stop(self._sources), self._sources)

    def _check_page(self, step: int, style: Style) -> Page | None:
        return None if self._sources is None else self._sources.check.page(step, style, self._group, self._classes)

    def _labels(self, module: LightningModule, batch: Any) -> Any:
        with self._messenger.guard("finding the labels of a batch"):
            return labels_on_device(module, batch)
        return None

    def _settle_labels(self, step: OpenStep, labels: list[int] | None = None) -> None:
        """Take the labels to the host, and look whether there are names for them.

        Those of the data set are not of these labels if there are too few.
        """
        context, given = step.context, step.context.settings.images.classes
        labels = labels or listed(context.labels)
        if labels is not None and self._classes is not None and max(labels, default=0) >= len(self._classes):
            self._classes = given
            if given is not None:
                self._messenger.warn_once(
                    f"NormGrad shows classes without a name by their number: `classes` has {len(given)} names, but a "
                    f"batch has the label {max(labels)}. Give one name for each, in the order of their numbers.",
                    cause="too few names",
                )
        step.context = replace(context, labels=labels, classes=self._classes)

    def _masks(self, module: LightningModule, batch: Any, settings: Settings) -> Tensor | None:
        if settings.views.collects:
            with self._messenger.guard("finding the masks of a batch"):
                return masks_of(module, batch)
        return None

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

    def _stop(self, sources: Sources) -> Read:
        read = Read()
        with self._messenger.guard("taking the hooks off"):
            read = sources.reader.end()
            sources.network.detach()
        self._open = None  # not before: Ctrl-C may have left hooks
        return read

    def _record(self, step: OpenStep, read: Read, sources: Sources, outputs: Any) -> Record:
        """Return what was seen of a step, as copies that training does not touch."""
        guard, reader = self._messenger.guard, sources.reader
        trained = step.saw_backward or (read.recorder is not None and read.recorder.has_gradients)
        self._note(step, reader, trained=trained)
        found, timed = None, self._state.budget.piece if step.with_check else nullcontext
        if trained:
            with guard("looking for the network"), timed():
                sources.network.end(step.context, outputs)
                found = sources.network.found()
        if step.with_check or step.context.is_event:
            self._settle_labels(step, None if found is None else found.labels)
        context, live = step.context, Seen()
        with guard("reading the maps"):
            live = reader.seen(read, context, saw_backward=step.saw_backward, trained=trained)
        if step.with_check and trained:
            with guard("doing the check"), timed():
                sources.check.do(context, live.sets, found, is_last=step.is_last)
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
        sums = (
            dict(zip(first.sums, OnTheWay(list(first.sums.values())).arrived(), strict=True)) if which.by_signal else {}
        )
        return self._state.choice.indices(which, sums, count, first.labels)

    def _excuse(self, all_seen: Sequence[Seen], *, is_failure: bool) -> None:
        """Warn of passes without maps; if the step itself could not be read either, there was a warning of that."""
        for seen in reversed(all_seen):
            if seen.excuse is not None and is_failure:
                with self._messenger.guard("running an extra pass"):
                    raise seen.excuse
                return


def _forget(read: Read, sources: Sources) -> None:
    """Keep nothing of a step."""
    sources.network.drop()
    if read.recorder is not None:
        read.recorder.clear()


def _numbered(one: MapSet, layers: Sequence[str]) -> MapSet:
    """Return the set with its layers in the order that the step has shown: a layer has one number in all tags."""
    return replace(one, layers=list(dict.fromkeys([*layers, *one.layers])))
