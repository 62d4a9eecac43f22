"""One look at one training step: everything that lives from the start of its batch to the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.events.training_loss import NoLoss, TrainingLoss
from normgrad_lightning.kinds import MapKind, MapSet
from normgrad_lightning.passes.one_pass import NotFinite, NothingToRead
from normgrad_lightning.passes.second_look import WithoutStatistics

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


class Source(Protocol):
    """Gets maps of a step. What belongs to one step is kept in the event, not in the source."""

    @property
    def about(self) -> str:
        """A sentence about what it reads and what that costs, for the announcement; empty if nothing."""

    def begin(self, event: Event) -> None:
        """The batch begins: run passes, or put hooks on."""

    def after_backward(self, event: Event) -> None:
        """A backward pass of training is over."""

    def stop(self, event: Event) -> None:
        """The batch is over, or was broken off: take hooks off."""

    def map_sets(self, event: Event) -> list[MapSet]:
        """What was seen, for the images that the event shows."""

    def forget(self, event: Event) -> None:
        """The event is over: keep nothing of it."""

    def conclude(self) -> None:
        """Training is over: warn of what could not be known in any of its events."""


class Event:
    """One look at one training step.

    Args:
        step: `trainer.global_step` at the start of the batch.
        sources: the training step first: it decides which images are shown, unless a pass before it had to.
        module: what trains.
        batch: what it trains on.
        loss: the loss of a batch, for passes before the step.
        with_order1: whether order-1 maps are due.
        labels: the class of each image of the batch, if known.
        classes: the names of the classes, if known.
        group: what all tags begin with.
        masks: where the object is in each image of the batch, if known.
        is_reading: whether the step is only read, for what is collected between events.

    Attributes:
        places: the places in the batch of the images that are shown, once they are chosen.
        saw_backward: whether training ran a backward pass.
        trained: whether training learned from the batch. If not, it was skipped, and the event waits for the next one.
        has_order1: whether there are order-1 maps of the batch.
        undo: the factor that undoes the scaling of the gradients that were read.
        skipped: how many sources had no maps because a gradient was not finite.
        seen: what each source keeps from the beginning to the end.
    """

    def __init__(
        self,
        step: int,
        sources: Sequence[Source],
        module: LightningModule,
        batch: Any,
        loss: TrainingLoss,
        *,
        with_order1: bool,
        labels: Sequence[int] | None = None,
        classes: Sequence[str] | None = None,
        group: str = MapSet.group,
        masks: Tensor | None = None,
        is_reading: bool = False,
    ) -> None:
        self.step = step
        self.module = module
        self.batch = batch
        self.loss = loss
        self.with_order1 = with_order1
        self.labels = labels
        self.masks = masks
        self.is_reading = is_reading
        self.places: list[int] | None = None
        self.saw_backward = False
        self.trained = False
        self.has_order1 = False
        self.undo = 1.0
        self.skipped = 0
        self.seen: dict[Source, Any] = {}
        self._sources = sources
        self._classes = classes
        self._group = group
        self._excuse: tuple[type[Exception], str] | None = None

    def begin(self) -> None:
        """The batch begins. Passes run before hooks are put on for the step itself."""
        for source in reversed(self._sources):
            source.begin(self)

    def after_backward(self) -> None:
        """A backward pass of training is over."""
        self.saw_backward = True
        for source in self._sources:
            source.after_backward(self)

    def stop(self) -> None:
        """Take all hooks off."""
        for source in self._sources:
            source.stop(self)

    def forget(self) -> None:
        """Let the sources forget the event."""
        for source in self._sources:
            source.forget(self)

    def map_sets(self, messenger: Messenger) -> list[MapSet]:
        """What all sources have seen of the step."""
        of_step, *of_passes = [source.map_sets(self) for source in self._sources]
        # If the step itself could not be read either, there was a warning about that.
        if self._excuse is not None and self.trained and (of_step or self._sources[0] not in self.seen):
            kind, sentence = self._excuse
            with messenger.guard("a pass of its own"):
                raise kind(sentence)
        return sum(of_passes, of_step)

    def labels_at(self, places: Sequence[int]) -> list[int] | None:
        """The classes of the images at these places in the batch, if known."""
        labels = self.labels
        return None if labels is None or max(places, default=0) >= len(labels) else [labels[place] for place in places]

    def map_set(
        self,
        kind: MapKind,
        maps: Mapping[str, Tensor],
        images: Tensor | None,
        images_of: Mapping[str, Tensor | None],
        layers: Sequence[str],
        variant: str,
        *,
        labels: Sequence[int] | None,
        shares: Sequence[float] | None = None,
        source: str = MapSet.source,
        masks: Tensor | None = None,
    ) -> MapSet:
        """These maps, with what is known of the event and its classes."""
        return MapSet(
            kind,
            self.step,
            maps,
            images,
            images_of,
            layers,
            variant,
            source,
            labels,
            self._classes,
            shares,
            self._group,
            masks,
        )

    @contextmanager
    def without_maps(self) -> Iterator[None]:
        """Let a pass have no maps where that is no failure: count gradients that are not finite, and note the rest."""
        try:
            yield
        except WithoutStatistics:
            raise
        except NotFinite:
            self.skipped += 1
        except (NoLoss, NothingToRead) as error:
            self.excuse(error)

    def excuse(self, error: NoLoss | NothingToRead) -> None:
        """Note why a pass gave nothing: worth a warning only if training learns from the batch.

        The sentence, not the error: a traceback would keep the tensors of the pass alive.
        """
        self._excuse = type(error), str(error)
