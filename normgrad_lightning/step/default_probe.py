"""The probe by default: where the network is recognised, it runs alone on a few images of the first event's batch.

That is right after training's backward pass and before the optimizer's step, on the weights of the step:
`training_step` never runs twice for it. Elsewhere there is no probe by default, and no word of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normgrad_lightning.check.network import NetworkCall, is_large
from normgrad_lightning.check.passes import scores_alone
from normgrad_lightning.hooks.to_host import from_host
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.interrupts import NotEnoughMemory, memory_explained
from normgrad_lightning.isolated.order1 import run_passes
from normgrad_lightning.isolated.retry import WholeBatch
from normgrad_lightning.step.context import Seen, StepContext
from normgrad_lightning.step.network import Found
from normgrad_lightning.step.order1 import pass_sets
from normgrad_lightning.step.probe_images import ProbeImages
from normgrad_lightning.step.quiet import LossAlone
from normgrad_lightning.step.schedule import EARLY

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_TRIES = 3
"""Frames in a row that could not be made, before there are no others."""


class DefaultProbe:
    """Runs the network of an event on the probe.

    It has no more frames than the default schedule has events, however many the user asks for.

    Args:
        trainer: runs the training.
        images: of the probe.
    """

    def __init__(self, trainer: Trainer, images: ProbeImages) -> None:
        self._trainer = weakref.ref(trainer)
        self._images = images
        self._last: int | None = None
        self._tries = _TRIES

    def is_due(self, context: StepContext, *, is_last: bool) -> bool:
        """Return whether the event has a frame."""
        is_new = self._last is None or _frames_by(context.step) > _frames_by(self._last)
        wanted = context.settings.images.probe is None and context.module.automatic_optimization
        return wanted and self._tries > 0 and (is_last or is_new)

    def seen(self, context: StepContext, found: Found, layers: Sequence[str]) -> Seen:
        """Return order-0 maps of the probe, and Grad-CAM where it is on; nothing where no network was recognised.

        Args:
            context: the step, whose gradients are there and whose weights have not moved.
            found: its network.
            layers: what is read of it.
        """
        trainer = self._trainer()
        if trainer is None or found.call is None or not layers:
            return Seen()
        tries, self._tries = self._tries, 0  # whatever fails for other reasons than these would fail again
        if is_large(context.module):
            return Seen()
        self._last = context.step
        try:
            seen = self._maps(trainer, context, found, found.call, layers)
        except ValueError:  # layers outside of the network, values that are not finite, a network that cannot run alone
            self._tries = tries - 1
            return Seen()
        except NotEnoughMemory:
            raise
        except RuntimeError:  # a collective, or no way back through the network: nobody has asked for this probe
            return Seen()
        self._tries = _TRIES
        return seen

    def _maps(
        self, trainer: Trainer, context: StepContext, found: Found, call: NetworkCall, layers: Sequence[str]
    ) -> Seen:
        images, settings, device = self._images, context.settings, call.scores.device
        if not images.are_of(None):
            images.take_of_call(call, found.labels, settings.images)
        batch = images.on(device), from_host(torch.tensor(images.labels), device)
        with memory_explained("To follow no images, set `probe=False`."):
            result = run_passes(
                context.module,
                _CrossEntropy(call.module, trainer),
                [batch],
                layers,
                settings.general.kinds,
                InnerStep(),
                settings.read,
                whole=WholeBatch(batch, None, steady=True, young=found.young),
            )
        return Seen(pass_sets(context, result, layers, labels=images.labels, source="probe"))


class _CrossEntropy(LossAlone):
    """The loss of a network alone, in float32."""

    name = "the network's cross-entropy"

    def __init__(self, network: nn.Module, trainer: Trainer) -> None:
        super().__init__(trainer)
        self._network = network

    def _of(self, _: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch: what the network is called with, and the labels."""
        (args, kwargs), labels = batch
        with torch.autocast(labels.device.type, enabled=False):
            return F.cross_entropy(scores_alone(self._network, args, kwargs, len(labels)), labels)


def _frames_by(step: int) -> int:
    """Return how many frames are due by a step, at most."""
    return sum(early <= step for early in EARLY) + step // 1000
