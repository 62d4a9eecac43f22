"""The network of a training step, watched while the step runs: for passes of the network alone, which nobody asked for.

The probe by default and the check run it. Where one process cannot, or no network is recognised, they do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrad_lightning.check.network import Comparison, NetworkCall, NetworkWatch
from normgrad_lightning.isolated.batchnorm_warmup import BatchNorm, counts_of_updates, warming_up
from normgrad_lightning.step.context import StepContext
from normgrad_lightning.step.loss import is_sharded

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_TRIES = 5
"""Steps in a row in which no network was recognised, before nobody looks for one any more."""


class Found(NamedTuple):
    """What a step has shown.

    Attributes:
        call: of the network; None if none was recognised.
        labels: the class of each image.
        young: the BatchNorm layers of the module that have hardly any statistics, and how often these were updated.
    """

    call: NetworkCall | None
    labels: list[int]
    young: Mapping[BatchNorm, int]


class StepNetwork:
    """Watches steps, one at a time. Only who asks what was `found` waits for the device, once.

    Args:
        trainer: runs the training.
        module: what trains.

    Attributes:
        obstacle: why one process alone cannot run the network; None if it can.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._module = module
        self._watch = NetworkWatch(module)
        self._tries = _TRIES
        self.obstacle = _obstacle(trainer, module)
        self._is_open = False
        self._loss: Tensor | None = None
        self._comparison: Comparison | None = None
        self._found: Found | None = None

    @property
    def may_be_found(self) -> bool:
        """Whether it is worth looking for."""
        return self._tries > 0 and self.obstacle is None

    def watch(self) -> None:
        """Watch the step that is about to begin."""
        if self.may_be_found:
            self._is_open = True
            self._watch.attach()

    def before_backward(self, loss: Tensor) -> None:
        """Note the loss, which may be scaled."""
        if self._is_open:
            self._loss = loss.detach()

    def after_backward(self, context: StepContext) -> None:
        """Compare the scores with the loss of the first backward pass; with manual optimisation there may be others."""
        if self._is_open and self._loss is not None and context.module.automatic_optimization:
            self._compare(context, self._loss * context.loss.undo(context.module))

    def end(self, context: StepContext, outputs: Any) -> None:
        """Compare them with what the step has returned, if there was nothing else to compare with.

        Args:
            context: of the step, which is over.
            outputs: what Lightning gives to `on_train_batch_end`.
        """
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if self._is_open and isinstance(loss, Tensor):
            self._compare(context, loss)

    def _compare(self, context: StepContext, loss: Tensor) -> None:
        calls = self._watch.calls
        self.drop()
        if context.labels is None or loss.numel() != 1 or torch.is_complex(loss):
            self._tries -= 1
        else:
            self._comparison = Comparison(calls, context.labels, loss, counts_of_updates(self._module))

    def found(self) -> Found | None:
        """Return what the step has shown; None if there was nothing to compare."""
        if self._comparison is not None:
            call, labels, counts = self._comparison.result()
            self._comparison = None
            self._tries = self._tries - 1 if call is None else _TRIES
            self._found = Found(call, labels, warming_up(self._module, counts))
        return self._found

    def detach(self) -> None:
        """Take the hooks off."""
        self._watch.detach()

    def drop(self) -> None:
        """Take the hooks off, and let go of the step."""
        self.detach()
        self._watch.clear()
        self._is_open, self._loss, self._comparison, self._found = False, None, None, None


def _obstacle(trainer: Trainer, module: LightningModule) -> str | None:
    if is_sharded(trainer):
        return f"{type(trainer.strategy).__name__} spreads the weights over several processes"
    if trainer.world_size > 1 and any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()):
        return "the statistics of SyncBatchNorm are shared by all processes"
    return None
