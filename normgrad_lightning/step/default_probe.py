"""The probe by default: where the network is recognised, it runs alone on a few images of the first event's batch.

That is right after training's backward pass and before the optimizer's step, on the weights of the step:
`training_step` never runs twice for it. Elsewhere there is no probe by default, and no word of that.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normgrad_lightning.check.network import NetworkCall, NetworkWatch, is_large, recognised, scores_in
from normgrad_lightning.hooks.to_host import from_host
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.interrupts import memory_explained
from normgrad_lightning.isolated.one_pass import NothingToRead
from normgrad_lightning.isolated.order1 import run_passes
from normgrad_lightning.isolated.retry import WholeBatch
from normgrad_lightning.isolated.sandbox import NoCollectives, TalksToOthers
from normgrad_lightning.layers.nested import map_tensors
from normgrad_lightning.step.context import Seen, StepContext
from normgrad_lightning.step.loss import is_sharded
from normgrad_lightning.step.order1 import pass_sets
from normgrad_lightning.step.probe_images import ProbeImages
from normgrad_lightning.step.quiet import silenced
from normgrad_lightning.step.schedule import EARLY

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_TRIES = 3
"""Events in a row in which no network was recognised, before it stops looking for one."""


class DefaultProbe:
    """Watches the step of an event, and runs its network on the probe.

    It has no more frames than the default schedule has events, however many the user asks for.

    Args:
        trainer: runs the training.
        module: what trains.
        images: of the probe.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, images: ProbeImages) -> None:
        self._trainer = weakref.ref(trainer)
        self._watch = NetworkWatch(module)
        self._images = images
        self._loss: Tensor | None = None
        self._last: int | None = None
        shares = any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
        cannot = is_sharded(trainer) or (shares and trainer.world_size > 1) or not module.automatic_optimization
        self._tries = 0 if cannot else _TRIES

    @property
    def is_watching(self) -> bool:
        """Whether the step has a frame to come."""
        return self._watch.is_attached

    def begin(self, context: StepContext, *, is_last: bool) -> None:
        """Watch the step, if a frame is due."""
        if context.settings.images.probe is None and self._tries and (is_last or self._is_due(context.step)):
            self._watch.attach()

    def before_backward(self, loss: Tensor) -> None:
        """Take a look at the loss, which may be scaled."""
        if self.is_watching:
            self._loss = loss.detach()

    def after_backward(self, context: StepContext, layers: Sequence[str]) -> Seen:
        """Return order-0 maps of the probe, and Grad-CAM where it is on; nothing where no network is recognised.

        Args:
            context: the step, whose gradients are there and whose weights have not moved.
            layers: what is read of it.
        """
        calls, loss, trainer = self._watch.calls, self._loss, self._trainer()
        self.drop()
        if loss is None or trainer is None or not layers:
            return Seen()
        call = None
        if context.labels is not None and loss.numel() == 1:
            call = recognised(calls, context.labels, loss * context.loss.undo(context.module))
        if call is None or context.labels is None:
            self._tries -= 1
            return Seen()
        if is_large(context.module):
            self._tries = 0
            return Seen()
        self._last = context.step
        if not self._images.are_of(None):
            self._images.take_of_call(call, context.labels, context.settings.images)
        try:
            seen = self._seen(trainer, context, call, layers)
        except ValueError:  # layers outside of the network, or values that are not finite
            self._tries -= 1
            return Seen()
        except TalksToOthers:  # nobody has asked for this probe
            self._tries = 0
            return Seen()
        except Exception:
            self._tries = 0
            raise
        self._tries = _TRIES
        return seen

    def drop(self) -> None:
        """Take the hooks off, and let go of the step."""
        self._watch.detach()
        self._watch.clear()
        self._loss = None

    def _is_due(self, step: int) -> bool:
        return self._last is None or _frames_by(step) > _frames_by(self._last)

    def _seen(self, trainer: Trainer, context: StepContext, call: NetworkCall, layers: Sequence[str]) -> Seen:
        settings = context.settings
        batch = map_tensors(
            lambda t: from_host(t, call.scores.device), (*self._images.batch, torch.tensor(self._images.labels))
        )
        loss = _CrossEntropy(call.module, trainer)
        with memory_explained("To follow no images, set `probe=False`."):
            result = run_passes(
                context.module,
                loss,
                [batch],
                layers,
                settings.general.kinds,
                InnerStep(),
                settings.read,
                whole=WholeBatch(batch, None, steady=True),
            )
        return Seen(pass_sets(context, result, layers, labels=self._images.labels, source="probe"))


class _CrossEntropy:
    """The loss of a network alone, in silence, in this process and in float32."""

    name = "the network's cross-entropy"

    def __init__(self, network: nn.Module, trainer: Trainer) -> None:
        self._network, self._trainer = network, trainer

    @contextmanager
    def alone(self, module: Any) -> Iterator[None]:
        """See `TrainingLoss.alone`."""
        collectives: AbstractContextManager[Any] = NoCollectives() if self._trainer.world_size > 1 else nullcontext()
        with silenced(module, self._trainer), collectives:
            yield

    def __call__(self, _: nn.Module, batch: Any) -> Tensor:
        """Return the loss of a batch: what the network is called with, and the labels."""
        args, kwargs, labels = batch
        with torch.autocast(labels.device.type, enabled=False):
            scores = scores_in(self._network(*args, **kwargs), len(labels))
        if scores is None:
            raise NothingToRead("The network gives no scores in eval mode.")
        return F.cross_entropy(scores, labels)


def _frames_by(step: int) -> int:
    """Return how many frames are due by a step, at most."""
    return sum(early <= step for early in EARLY) + step // 1000
