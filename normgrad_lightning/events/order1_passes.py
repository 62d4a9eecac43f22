"""Order-1 maps of an event, from passes on the weights that its own step will use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from normgrad_lightning.events.event import Event
from normgrad_lightning.events.images import ImageChoice, picked, rows
from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.events.settings import Settings, every
from normgrad_lightning.events.training_step import TrainingStep
from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.passes.batches import batch_size, single_images
from normgrad_lightning.passes.choose_layers import trained_layers
from normgrad_lightning.passes.interrupts import failures_dropped
from normgrad_lightning.passes.one_pass import NothingToRead
from normgrad_lightning.passes.order0 import maps_of_pass
from normgrad_lightning.passes.order1 import Order1Maps, run_passes
from normgrad_lightning.passes.second_look import Whole
from normgrad_lightning.recording.layer_names import AUTO


class Order1Passes:
    """Source of the order-1 maps.

    Args:
        settings: returns the flags as they are now.
        choice: chooses the images to show.
        messenger: for warnings.
        training_step: knows what `"auto"` has taken.
    """

    def __init__(
        self, settings: Callable[[], Settings], choice: ImageChoice, messenger: Messenger, training_step: TrainingStep
    ) -> None:
        self._current_settings = settings
        self._choice = choice
        self._messenger = messenger
        self._training_step = training_step

    @property
    def _settings(self) -> Settings:
        return self._current_settings()

    @property
    def about(self) -> str:
        """See `Source`."""
        steps, flags = self._settings.when.order1_every_n_steps, self._settings.order1
        if steps is None:
            return ""
        whose = "an inner step for each image" if flags.per_image else "one inner step for the whole batch"
        return f"Order-1 maps ({', '.join(flags.order1_maps)}) come {every(steps)}, with {whose}."

    def begin(self, event: Event) -> None:
        """Run the passes, if they are due."""
        if not event.with_order1:
            return
        on_what = " on single images" if self._settings.order1.per_image else ""
        with self._messenger.guard(f"the order-1 passes{on_what}"), event.without_maps():
            event.loss.check(event.module)
            event.seen[self] = self._result(event)
            event.has_order1 = True

    def after_backward(self, event: Event) -> None:
        """Nothing: the passes are over."""

    def stop(self, event: Event) -> None:
        """Nothing: no hooks are left."""

    def map_sets(self, event: Event) -> list[MapSet]:
        """A set for each kind, for the images that are shown of this batch."""
        result: Order1Maps | None = event.seen.get(self)
        if result is None:
            return []
        flags = self._settings.order1
        in_batch = list(range(self._settings.which.num_images)) if event.places is None else event.places
        places = None if flags.per_image else in_batch
        images, labels = picked(result.images, places), event.labels_at(in_batch)
        layers = list(dict.fromkeys([*self._training_step.layers, *result.layers]))  # a layer keeps its number
        sets = []
        for name, maps_of in result.maps.items():
            kind = KINDS[name]
            scale = event.loss.scale if kind.scales_with_loss else 1.0
            maps = {layer: rows(m, places) / scale for layer, m in maps_of.items()}
            variant = self._settings.variant + ("" if flags.per_image else "_batch")
            images_of = dict.fromkeys(maps, images)
            sets.append(event.map_set(kind, maps, images, images_of, layers, variant, labels=labels))
        self._warn_of_zeros(sets)
        return sets

    def forget(self, event: Event) -> None:
        """Nothing: the maps are the event's."""

    def conclude(self) -> None:
        """Nothing: each event warns of its own."""

    def _result(self, event: Event) -> Order1Maps:
        self._training_step.renew()
        settings, per_image = self._settings, self._settings.order1.per_image
        module, loss, options = event.module, event.loss, settings.read
        layers = self._training_step.layers if settings.what.layers == AUTO else settings.what.layers
        if not layers:
            layers = self._auto_layers(event)
        if per_image:
            event.places = self._places(event, layers)
        result = run_passes(
            module,
            loss,
            single_images(event.batch, event.places) if per_image else [event.batch],
            layers,
            settings.order1.order1_maps,
            replace(settings.order1, epsilon=settings.order1.epsilon / loss.scale),
            options,
            num_images=None if per_image else settings.which.read_first,
            whole=Whole(event.batch, event.places if per_image else None, explains_errors=True),
        )
        maps = {kind: {layer: m.cpu() for layer, m in maps_of.items()} for kind, maps_of in result.maps.items()}
        return result._replace(maps=maps)

    def _auto_layers(self, event: Event) -> list[str]:
        """What `"auto"` takes: an image is enough to see that, unless the loss needs the batch."""
        module, loss, options = event.module, event.loss, self._settings.read
        if self._settings.order1.per_image:
            image = single_images(event.batch, [0])[0]
            with failures_dropped(but=(NothingToRead,)):  # a second look says why
                return trained_layers(module, loss, image, options)
        return trained_layers(module, loss, event.batch, options)

    def _places(self, event: Event, layers: str | Sequence[str]) -> list[int]:
        """The images to show, before training has seen the batch."""
        maps: dict[str, Any] = {}
        if self._settings.which.by_signal:
            maps = maps_of_pass(event.module, event.loss, event.batch, layers, "order0", self._settings.read)
        return self._choice.places(self._settings.which, maps, batch_size(event.batch), event.labels)

    def _warn_of_zeros(self, sets: Sequence[MapSet]) -> None:
        """Warn if the inner step lowered the loss of an image to nothing."""
        lowered = [m for one in sets if one.kind.step < 0 for m in one.maps.values()]
        if any(not m.flatten(1).any(1).all() for m in lowered):
            self._messenger.warn_once(
                "NormGrad: order-1 maps of some images are zero. The inner step has fitted these images, or the model "
                "had learned them before. If this continues, a smaller `epsilon` shows more."
            )
