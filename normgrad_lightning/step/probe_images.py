"""The images of a probe, taken from batches that come by.

A data loader is never asked for a batch, which would change the random numbers of training.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from normgrad_lightning.check.network import NetworkCall
from normgrad_lightning.hooks.to_host import from_host
from normgrad_lightning.isolated.batches import CannotSlice, DoNotFit, batch_size, copied, images_at, joined
from normgrad_lightning.isolated.sandbox import Sandbox
from normgrad_lightning.layers.nested import map_tensors, parts
from normgrad_lightning.settings import ImageFlags, ProbeOf, Settings
from normgrad_lightning.step.context import StepContext
from normgrad_lightning.step.image_choice import ImageChoice
from normgrad_lightning.step.labels import classes_of, labels_of
from normgrad_lightning.step.messages import Messenger

BY_DEFAULT = "network"
"""Whose images a checkpoint has if they were taken by default, as the network was called with them."""

MOST_BATCHES = 8
"""Maximum validation batches to sample before training: validation data is often sorted, and a batch has one class."""

_PLAIN = (str, int, float, bool, type(None))
_PLAIN_CONTAINERS = (dict, OrderedDict, list, tuple)


class ProbeImages:
    """The images of a probe, as a small batch that the module's loss takes.

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
        """Forget the images."""
        self._left: float = 0
        self._saw_validation = False
        self._chooses_anew = self._has_chosen_anew = False
        self._of: Any = None
        self.batch: Any = None
        self.labels: list[int] | None = None

    def on(self, device: torch.device) -> Any:
        """Return the batch on a device."""
        return map_tensors(lambda t: from_host(t, device), self.batch)

    def are_of(self, probe: Any) -> bool:
        """Return whether these are the images that a value of the flag asks for."""
        if isinstance(self._of, str):
            return self._of == (BY_DEFAULT if probe is None else probe if isinstance(probe, str) else "")
        return probe is not None and probe is self._of

    @property
    def may_change(self) -> bool:
        """Whether the next batch may have images of other classes to add."""
        return self._left > 0

    def settle(self) -> None:
        """Keep to these images: there are maps of them."""
        self._left = 0

    def offer(self, of: ProbeOf, module: Any, batch: Any, settings: Settings) -> None:
        """Take images of a batch that comes by, if they are wanted of this one, and not all there yet."""
        which = settings.images
        self._saw_validation |= of == "val"
        if not isinstance(which.probe, str) or which.probe != of:
            return
        with self._messenger.guard("taking images for the probe"):
            if self._chooses_anew and not module.trainer.sanity_checking:
                self._begin_anew()
            if not self.are_of(of):
                self.take(of, module, batch, which)
            elif self.may_change:
                self.take_more(module, batch, which)

    def are_ready(self, context: StepContext) -> bool:
        """Return whether there are images to look at. From now on, these are followed."""
        probe = context.settings.images.probe
        if not isinstance(probe, str) and not self.are_of(probe):
            self.take_all(context.module, probe)
        if not self.are_of(probe):
            return False
        self._look_for_classes(context)
        self.settle()
        return True

    def _look_for_classes(self, context: StepContext) -> None:
        """Choose again in the first whole validation if these images are of one class, and training has others."""
        known = {label for label in self.labels or () if label >= 0}
        if self._of != "val" or len(known) != 1 or len(set(context.labels or ())) < 2:
            return
        if self._has_chosen_anew:
            self._messenger.warn_once(
                "NormGrad follows images of one class: validation has no other. To follow others, give a batch in "
                "code: `probe=batch`."
            )
        self._chooses_anew = not self._has_chosen_anew

    def _begin_anew(self) -> None:
        """Forget the images, and look through all batches of this validation."""
        self._of, self._chooses_anew, self._has_chosen_anew = None, False, True

    def conclude(self, settings: Settings) -> None:
        """Warn if there was no validation batch to take images of."""
        probe = settings.images.probe
        if isinstance(probe, str) and probe == "val" and not (self.are_of(probe) or self._saw_validation):
            self._messenger.warn_once(
                'NormGrad had no images to follow: `probe="val"` takes them of the first validation batch, and none '
                'came by during training. Give `trainer.fit` validation data, or set `probe="train"`.'
            )

    def take(self, of: str, module: Any, batch: Any, which: ImageFlags) -> None:
        """Copy a few images of a batch that comes by.

        Raises:
            ValueError: the batch cannot be cut.
        """
        labels = labels_of(module, batch)
        try:
            labels = labels if labels is not None and len(labels) == batch_size(batch) else None
            indices = probe_indices(batch, which, labels)
            self.batch = _on_cpu(copied(images_at(batch, indices)))
        except CannotSlice as error:
            raise ValueError(
                f'`probe="{of}"`: expected a batch that single images can be taken out of, but {error.why}. '
                "Give a batch in code, which is taken as it is: `probe=batch`."
            ) from error
        self.labels = None if labels is None else [labels[index] for index in indices]
        self._of = of
        more = math.inf if self._has_chosen_anew else MOST_BATCHES - 1
        self._left = more if of == "val" and not self._has_all_classes(module, which) else 0

    def take_of_call(self, call: NetworkCall, labels: Sequence[int], which: ImageFlags) -> None:
        """Copy a few images as the network was called with them, classes in turn; they stay where they are."""
        rows = ImageChoice().balanced(labels, min(which.num_images, len(labels)))
        cut = call.at(from_host(torch.tensor(rows), call.scores.device))
        self.batch, self.labels = copied((cut.args, cut.kwargs)), [labels[row] for row in rows]
        self._of, self._left = BY_DEFAULT, 0

    def take_more(self, module: Any, batch: Any, which: ImageFlags) -> None:
        """Copy images of another batch, if it has classes that are missing; if the two fit, and can be cut."""
        self._left -= 1
        labels, known = labels_of(module, batch), self.labels
        if labels is None or known is None:
            self.settle()
            return
        if set(labels) <= set(known) and len(known) >= which.num_images:
            return
        with suppress(CannotSlice, DoNotFit):
            if len(labels) != batch_size(batch):
                return
            indices = probe_indices(batch, which, labels)
            both = joined(self.batch, _on_cpu(copied(images_at(batch, indices))), (len(known), len(indices)))
            labels = [*known, *(labels[index] for index in indices)]
            indices = probe_indices(both, which, labels)
            self.batch, self.labels = images_at(both, indices), [labels[index] for index in indices]
            if self._has_all_classes(module, which):
                self.settle()

    def _has_all_classes(self, module: Any, which: ImageFlags) -> bool:
        """Return whether nothing is missing: an image of each class, as far as there is room, or no labels."""
        names = which.classes or classes_of(module.trainer.val_dataloaders)
        count = which.num_images if names is None else min(which.num_images, len(names))
        return self.labels is None or len(set(self.labels)) >= count

    def take_all(self, module: Any, batch: Any) -> None:
        """Copy a batch that was given in code, after all that Lightning does to a batch on its way to the module."""
        ready = Sandbox(module).run(lambda _: _transferred(module, copied(batch)))
        self.batch = _on_cpu(copied(ready))
        self.labels = labels_of(module, ready)
        self._of, self._left = batch, 0

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy carries, as for processes that have no such device."""
        return {**vars(self), "batch": _on_cpu(self.batch)}

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to follow the same images; nothing if these are given in code."""
        if not isinstance(self._of, str):
            return {}
        if not _is_plain(self.batch):
            self._messenger.warn_once(
                "NormGrad does not keep the images of the probe in checkpoints, as their batch has parts other than "
                "tensors, numbers, text, lists, tuples and dicts. A resumed run chooses other images."
            )
            return {}
        return {"probe": {"of": self._of, "batch": _on_cpu(self.batch), "labels": self.labels}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Follow the images of the checkpoint's run."""
        kept = state.get("probe")
        if kept is not None:
            self._of, self.batch, self.labels = kept["of"], kept["batch"], kept["labels"]
            self.settle()


def probe_indices(batch: Any, which: ImageFlags, labels: Sequence[int] | None) -> list[int]:
    """Return the indices of the images to follow: classes in turn where they are known, else the first."""
    count = min(batch_size(batch), which.num_images)
    return list(range(count)) if labels is None else ImageChoice().balanced(labels, count)


def _transferred(module: Any, batch: Any) -> Any:
    """Return a batch as it comes to the module from a data loader."""
    trainer = module.trainer
    batch = module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch), dataloader_idx=0)
    return trainer.strategy.batch_to_device(batch, dataloader_idx=0)


def _on_cpu(batch: Any) -> Any:
    return map_tensors(lambda t: t.detach().cpu(), batch)


def _is_plain(value: Any) -> bool:
    """Return whether a checkpoint with this can be loaded without trust in its code."""
    if isinstance(value, Tensor):
        return type(value) is Tensor and value.layout is torch.strided and not value.is_nested
    return type(value) in _PLAIN or (type(value) in _PLAIN_CONTAINERS and all(_is_plain(p.value) for p in parts(value)))
