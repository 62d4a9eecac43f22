"""Source of the maps of a probe: a few images that are followed through training, in passes that leave no trace.

Images of the training batch are others at each event. A probe shows what changes in the network, not in the images. It
never asks a data loader for a batch, which would change the random numbers of training: it copies images of a batch
that comes by. In the first steps of training, BatchNorm takes the statistics of the probe, as its own are hardly more
than what they start with (see `young_statistics`): with these, a deep network's features may grow without limit.
A `training_step` that augments images at random draws the same numbers at each event.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normgrad_lightning.events.event import Event
from normgrad_lightning.events.images import ImageChoice
from normgrad_lightning.events.labels import classes_of, labels_of
from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.events.settings import ProbeOf, Settings, Which
from normgrad_lightning.events.training_loss import TrainingLoss
from normgrad_lightning.events.training_step import TrainingStep
from normgrad_lightning.kinds import KINDS, MapSet
from normgrad_lightning.passes.batches import CannotSlice, batch_size, copied, images_at, single_images
from normgrad_lightning.passes.choose_layers import trained_layers
from normgrad_lightning.passes.inner_step import InnerStep
from normgrad_lightning.passes.order1 import Order1Maps, run_passes
from normgrad_lightning.passes.sandbox import Sandbox
from normgrad_lightning.passes.second_look import Whole
from normgrad_lightning.recording.layer_names import AUTO
from normgrad_lightning.recording.nested import map_tensors, parts, rebuilt

MOST_BATCHES = 8
"""Of validation, that images are taken of: its data is often sorted, and a batch then has one class."""

_WHOSE = {"train": "the first training batch", "val": "the first validation batch or batches"}
_SEED = 0
_PLAIN = (str, int, float, bool, type(None))
_PLAIN_CONTAINERS = (dict, OrderedDict, list, tuple)


class ProbeImages:
    """The images of a probe, as a small batch on the CPU that the module's loss takes.

    Args:
        messenger: for warnings.

    Attributes:
        batch: the batch; None as long as none was taken.
        labels: the class of each image, where it is known.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.forget()

    def forget(self) -> None:
        """Have no images."""
        self._left = 0
        self._of: Any = None
        self.batch: Any = None
        self.labels: list[int] | None = None

    def are_of(self, probe: Any) -> bool:
        """Whether these are the images that a value of the flag asks for."""
        if isinstance(self._of, str):
            return isinstance(probe, str) and probe == self._of
        return probe is not None and probe is self._of

    @property
    def may_change(self) -> bool:
        """Whether the next batch may have images of other classes to add."""
        return self._left > 0

    def settle(self) -> None:
        """Stay with these images: there are maps of them."""
        self._left = 0

    def take(self, of: str, module: Any, batch: Any, which: Which) -> None:
        """Copy a few images of a batch that comes by.

        Raises:
            ValueError: the batch cannot be cut.
        """
        labels = labels_of(module, batch)
        try:
            labels = labels if labels is not None and len(labels) == batch_size(batch) else None
            places = probe_places(batch, which, labels)
            self.batch = _on_cpu(copied(images_at(batch, places)))
        except CannotSlice as error:
            raise ValueError(
                f'`probe="{of}"`: expected a batch that single images can be taken out of, but {error.why}. '
                "Give a batch in code, which is taken as it is: `probe=batch`."
            ) from error
        self.labels = None if labels is None else [labels[place] for place in places]
        self._of = of
        self._left = MOST_BATCHES - 1 if of == "val" and not self._has_all_classes(module, which) else 0

    def take_more(self, module: Any, batch: Any, which: Which) -> None:
        """Copy images of another batch, if it has classes that are missing; if the two fit, and can be cut."""
        self._left -= 1
        labels, known = labels_of(module, batch), self.labels
        if labels is None or known is None:
            self.settle()
            return
        with suppress(CannotSlice, DoNotFit):
            if len(labels) != batch_size(batch):
                return
            places = probe_places(batch, which, labels)
            both = joined(self.batch, _on_cpu(copied(images_at(batch, places))), (len(known), len(places)))
            labels = [*known, *(labels[place] for place in places)]
            places = probe_places(both, which, labels)
            self.batch, self.labels = images_at(both, places), [labels[place] for place in places]
            if self._has_all_classes(module, which):
                self.settle()

    def _has_all_classes(self, module: Any, which: Which) -> bool:
        """Whether there is nothing to look for: an image of each class, as far as there is room, or no labels."""
        names = which.classes or classes_of(module.trainer.val_dataloaders)
        count = which.num_images if names is None else min(which.num_images, len(names))
        return self.labels is None or len(set(self.labels)) >= count

    def take_all(self, module: Any, batch: Any) -> None:
        """Copy a batch that was given in code, after all that Lightning does to a batch on its way to the module."""
        ready = Sandbox(module).run(lambda _: _transferred(module, copied(batch)))
        self.batch = _on_cpu(copied(ready))
        self.labels = labels_of(module, ready)
        self._of, self._left = batch, 0

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to follow the same images; nothing if these are given in code."""
        if not isinstance(self._of, str):
            return {}
        if not _is_plain(self.batch):
            self._messenger.warn_once(
                "NormGrad does not keep the images of the probe in checkpoints, as their batch has parts other than "
                "tensors, numbers, text, lists, tuples and dicts. A resumed run chooses images anew."
            )
            return {}
        return {"probe": {"of": self._of, "batch": self.batch, "labels": self.labels}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Follow the images of the checkpoint's run."""
        kept = state.get("probe")
        if kept is not None:
            self._of, self.batch, self.labels = kept["of"], kept["batch"], kept["labels"]
            self.settle()


def probe_places(batch: Any, which: Which, labels: Sequence[int] | None) -> list[int]:
    """The places of the images to follow: classes in turn where they are known, else the first."""
    count = min(batch_size(batch), which.num_images)
    return list(range(count)) if labels is None else ImageChoice().balanced(labels, count)


class DoNotFit(Exception):
    """Two batches that cannot be one."""


def joined(one: Any, other: Any, sizes: tuple[int, int]) -> Any:
    """A batch of the images of two.

    Args:
        one: a batch.
        other: another one, made in the same way.
        sizes: how many images they have.

    Raises:
        DoNotFit: they cannot be one batch, as images of two sizes.
        CannotSlice: what comes out is no batch.
    """
    both = _joined(one, other, sizes)
    if batch_size(both) != sum(sizes):
        raise DoNotFit
    return both


def _joined(one: Any, other: Any, sizes: tuple[int, int]) -> Any:
    if type(one) is not type(other) or (isinstance(one, Tensor) and type(one) is not Tensor):
        raise DoNotFit
    if isinstance(one, Tensor):
        if one.dim() == 0:
            return one
        if (len(one), len(other)) != sizes or one.shape[1:] != other.shape[1:] or one.dtype != other.dtype:
            raise DoNotFit
        return torch.cat([one, other])
    if type(one) in (list, tuple) and (len(one), len(other)) == sizes and not _holds_tensors_of_all(one, sizes[0]):
        return type(one)([*one, *other])
    inside, others = parts(one), parts(other)
    if [part.name for part in inside] != [part.name for part in others]:
        raise DoNotFit
    return rebuilt(one, [_joined(a.value, b.value, sizes) for a, b in zip(inside, others, strict=True)])


def _holds_tensors_of_all(values: Sequence[Any], size: int) -> bool:
    """Whether a list holds things of all images, as images and labels, and not one for each."""
    return any(isinstance(value, Tensor) and value.dim() and len(value) == size for value in values)


class ProbePasses:
    """Source of the maps of a probe.

    Args:
        settings: returns the flags as they are now.
        images: the images; they outlive a `fit`.
        messenger: for warnings.
        training_step: knows what `"auto"` has taken.
    """

    def __init__(
        self, settings: Callable[[], Settings], images: ProbeImages, messenger: Messenger, training_step: TrainingStep
    ) -> None:
        self._current_settings = settings
        self._images = images
        self._messenger = messenger
        self._training_step = training_step
        self._saw_validation = False

    @property
    def _settings(self) -> Settings:
        return self._current_settings()

    @property
    def about(self) -> str:
        """See `Source`."""
        probe = self._settings.which.probe
        if probe is None:
            return ""
        whose = _WHOSE[probe] if isinstance(probe, str) else "the batch given in code"
        return f"A probe, images of {whose}, takes passes of its own at each event."

    def see(self, of: ProbeOf, module: Any, batch: Any) -> None:
        """Take images of a batch that comes by, if they are wanted of this one, and not all there yet."""
        which, images = self._settings.which, self._images
        self._saw_validation |= of == "val"
        if not isinstance(which.probe, str) or which.probe != of:
            return
        with self._messenger.guard("taking images for the probe"):
            if not images.are_of(of):
                images.take(of, module, batch, which)
            elif images.may_change:
                images.take_more(module, batch, which)

    def begin(self, event: Event) -> None:
        """Run the passes, once there are images."""
        probe = self._settings.which.probe
        if probe is None:
            return
        self.see("train", event.module, event.batch)
        doing = "a pass on the probe (its batch must be one that the training loss takes)"
        with self._messenger.guard(doing), event.without_maps():
            event.loss.check(event.module)
            if not isinstance(probe, str) and not self._images.are_of(probe):
                self._images.take_all(event.module, probe)
            if self._images.are_of(probe):
                self._settle(event)
                event.seen[self] = [self._order0(event)]
        if self in event.seen and event.with_order1:
            with self._messenger.guard("the order-1 passes on the probe"), event.without_maps():
                event.seen[self].append(self._order1(event))

    def _settle(self, event: Event) -> None:
        """Stay with the images from now on; warn if they are of one class, and training has others."""
        if not self._images.may_change:
            return
        self._images.settle()
        known = {label for label in self._images.labels or () if label >= 0}
        if len(known) == 1 < len(set(event.labels or ())):
            self._messenger.warn_once(
                "NormGrad follows images of one class: the validation batches that came by before had no other. Let "
                "Lightning look at more of them, `Trainer(num_sanity_val_steps=8)`, or give a batch, `probe=batch`."
            )

    def after_backward(self, event: Event) -> None:
        """Nothing: the passes are over."""

    def stop(self, event: Event) -> None:
        """Nothing: no hooks are left."""

    def map_sets(self, event: Event) -> list[MapSet]:
        """A set for each kind; none if training skipped the batch: then the event waits for the next one."""
        results: list[Order1Maps] = event.seen.get(self, []) if event.trained else []
        sets = []
        for result in results:
            images = None if result.images is None else result.images.to("cpu", copy=True)
            layers = list(dict.fromkeys([*self._training_step.layers, *result.layers]))  # a layer keeps its number
            for name, maps_of in result.maps.items():
                kind = KINDS[name]
                scale = event.loss.scale if kind.scales_with_loss else 1.0
                maps = {layer: m / scale for layer, m in maps_of.items()}
                of_batch = kind.needs_passes and not self._settings.order1.per_image
                variant = self._settings.variant + ("_batch" if of_batch else "")
                images_of, labels = dict.fromkeys(maps, images), self._images.labels
                sets.append(
                    event.map_set(kind, maps, images, images_of, layers, variant, labels=labels, source="probe")
                )
        return sets

    def forget(self, event: Event) -> None:
        """Nothing: the maps are the event's."""

    def conclude(self) -> None:
        """Warn if there was no validation batch to take images of."""
        probe = self._settings.which.probe
        if isinstance(probe, str) and probe == "val" and not (self._images.are_of(probe) or self._saw_validation):
            self._messenger.warn_once(
                'NormGrad had no images to follow: `probe="val"` takes them of the first validation batch, and none '
                'came by during training. Give `trainer.fit` validation data, or set `probe="train"`.'
            )

    def _order0(self, event: Event) -> Order1Maps:
        """Order-0 maps of all images, and Grad-CAM where it is on, in one pass."""
        batch, kinds = self._batch(event), self._settings.what.kinds
        return self._run(
            event, self._layers(event, batch), [batch], kinds, InnerStep(), Whole(batch, None, steady=True)
        )

    def _order1(self, event: Event) -> Order1Maps:
        """Order-1 maps of all images, as those of the training batch are made."""
        batch, flags = self._batch(event), self._settings.order1
        batches = single_images(batch) if flags.per_image else [batch]
        places = range(len(batches)) if flags.per_image else None
        whole = Whole(batch, places, explains_errors=True, steady=True)
        step = replace(flags, epsilon=flags.epsilon / event.loss.scale)
        layers = event.seen[self][0].layers
        return self._run(event, layers, batches, list(flags.order1_maps), step, whole)

    def _run(
        self,
        event: Event,
        layers: str | Sequence[str],
        batches: Sequence[Any],
        kinds: Sequence[str],
        step: InnerStep,
        whole: Whole,
    ) -> Order1Maps:
        loss, options = _SameNumbers(event.loss), self._settings.read
        result = run_passes(event.module, loss, batches, layers, kinds, step, options, whole=whole)
        maps = {kind: {layer: m.cpu() for layer, m in maps_of.items()} for kind, maps_of in result.maps.items()}
        return result._replace(maps=maps)

    def _batch(self, event: Event) -> Any:
        """The images on the module's device."""
        return map_tensors(lambda t: t.to(event.module.device), self._images.batch)

    def _layers(self, event: Event, batch: Any) -> str | Sequence[str]:
        """The layers to read; in the first event, what `"auto"` takes for the probe."""
        self._training_step.renew()
        settings = self._settings
        if settings.what.layers != AUTO:
            return settings.what.layers
        return self._training_step.layers or trained_layers(event.module, event.loss, batch, settings.read)


class _SameNumbers:
    """A loss that draws the same random numbers each time: an image that it augments must stay the same.

    It is called in passes that put the random state back.
    """

    def __init__(self, loss: TrainingLoss) -> None:
        self._loss = loss
        self.name = loss.name

    def __call__(self, module: Any, batch: Any) -> Tensor:
        """The loss of the batch."""
        random.seed(_SEED)
        torch.default_generator.manual_seed(_SEED)
        if module.device.type == "cuda":
            with torch.cuda.device(module.device):
                torch.cuda.manual_seed(_SEED)
        return self._loss(module, batch)


def _transferred(module: Any, batch: Any) -> Any:
    """A batch as it comes to the module from a data loader."""
    trainer = module.trainer
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _on_cpu(batch: Any) -> Any:
    return map_tensors(lambda t: t.detach().cpu(), batch)


def _is_plain(value: Any) -> bool:
    """Whether a checkpoint with this can be loaded without trust in its code."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and not value.is_nested
    return type(value) in _PLAIN or (type(value) in _PLAIN_CONTAINERS and all(_is_plain(p.value) for p in parts(value)))
