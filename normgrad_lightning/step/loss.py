"""The loss that a LightningModule trains with, as a function of the module and a batch, computed in silence.

`training_step` is written to run once for each batch: it logs, prints and asks its Trainer for things. In an extra pass
it runs with a `log` that goes nowhere and a Trainer without loggers. The sandbox undoes what it does to the module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgrad_lightning.isolated.python_state import PythonState
from normgrad_lightning.isolated.repeatable import check_repeatable
from normgrad_lightning.isolated.sandbox import HALF
from normgrad_lightning.maths.tensor_subclasses import plain
from normgrad_lightning.step.quiet import LossAlone

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

METHOD = "normgrad_loss"
_SHARDED = ("FSDP", "DeepSpeed", "ModelParallel", "XLA")
_BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_EXPECTED = 'expected a scalar tensor, or a dict with one under "loss"'
_WRITE = f"Write a method `{METHOD}(self, batch)` that returns the loss."


class NoLoss(ValueError):
    """A step that returns None, as one does to skip a batch."""


def check_training_loss(trainer: Trainer, module: LightningModule, who: str) -> None:
    """Raise if extra passes cannot compute the module's loss; `who` needs them."""
    name, own = type(module).__name__, getattr(module, METHOD, None)
    if own is not None and not callable(own):
        raise ValueError(f"`{METHOD}`: expected a method `{METHOD}(self, batch)` of {name}, but got {own!r}.")
    if own is None and not module.automatic_optimization:
        raise ValueError(
            f"{who} need the loss of a batch, and with manual optimisation `training_step` gives none. "
            f"Add a method to {name} that computes it and does nothing else:\n\n"
            f"    def {METHOD}(self, batch):\n"
            "        images, labels = batch\n"
            "        return F.cross_entropy(self(images), labels)\n"
        )
    if "dataloader_iter" in inspect.signature(module.training_step).parameters:
        raise ValueError(
            f"{who} need a batch, but `training_step` of {name} takes its own from a `dataloader_iter`. "
            "Let it take a batch, or do without these maps."
        )
    if is_sharded(trainer):
        raise ValueError(
            f"{who} need all weights in one process, but {type(trainer.strategy).__name__} spreads them over several. "
            "Do without these maps: order-0 maps of layers that are not compiled need no extra pass."
        )


def is_sharded(trainer: Trainer) -> bool:
    """Return whether the weights are spread over several processes, so that none can run a pass alone."""
    strategies = [base.__name__ for base in type(trainer.strategy).__mro__]
    return any(kind in name for kind in _SHARDED for name in strategies)


class TrainingLoss(LossAlone):
    """`loss(module, batch)`: `normgrad_loss(batch)` if the module has it, else what `training_step` returns.

    Args:
        trainer: whose precision the loss is computed in.
        module: whose loss it is.
        batch_idx: for `training_step`.

    Attributes:
        name: what to call it in a message.
    """

    def __init__(self, trainer: Trainer, module: LightningModule, batch_idx: int) -> None:
        self.name = METHOD if hasattr(module, METHOD) else "training_step"
        super().__init__(trainer)
        self._batch_idx = batch_idx
        self._widened = False

    def in_float32(self) -> TrainingLoss:
        """Return the same loss for passes of our own: where training uses half precision, they use float32.

        What they compare differs by less than half precision can tell. In float32, gradients need no scale.
        """
        loss = copy(self)
        loss._widened = str(self._trainer.precision).startswith(("16", "bf16"))
        loss.scale = 1.0
        return loss

    @cached_property
    def scale(self) -> float:
        """What the loss is multiplied by, as a GradScaler does, so that half-precision gradients do not vanish."""
        return 1.0 if self._scaler is None else float(self._scaler.get_scale())

    def undo(self, module: LightningModule) -> float | Tensor:
        """Return the factor that undoes what Lightning has done to the loss of training's latest backward pass.

        It divides by the number of accumulated batches, and a GradScaler multiplies. Call it right after the backward
        pass, before the scale changes. The scale stays on the device: to ask for the number would be to wait for it.
        """
        accumulated = float(self._trainer.accumulate_grad_batches) if module.automatic_optimization else 1.0
        if self._scaler is None:
            return accumulated
        return accumulated / self._scaler.scale(torch.ones((), device=module.device))  # type: ignore[no-any-return]

    @property
    def _scaler(self) -> Any:
        return getattr(self._trainer.precision_plugin, "scaler", None)

    def check(self, module: LightningModule, batch: Any) -> None:
        """Raise if a step cannot be run, or could not be undone; the first time, try it on images of this batch."""
        check_training_loss(self._trainer, module, "`training_step`: maps that take an extra pass")
        iterators = PythonState(module).iterators if self.name != METHOD else []
        if iterators:
            raise ValueError(
                f"`training_step`: expected a step that can be run again, but the module holds an iterator or a queue "
                f"({', '.join(iterators)}), and what a step draws from it cannot be put back. "
                f"Write a method `{METHOD}(self, batch)` that returns the loss and draws nothing."
            )
        check_repeatable(module, self.in_float32(), batch)

    def _of(self, module: Any, batch: Any) -> Tensor:
        """Return the loss of the batch, times `scale`."""
        with self._precision(module):
            if self.name == METHOD:
                output = module.normgrad_loss(batch)
            else:
                output = self._call_step(module.training_step, batch)
        return self._loss_in(output) * self.scale

    def _precision(self, module: Any) -> AbstractContextManager[Any]:
        """Return what training runs in; or float32, if that is asked for and the weights are in float32 now."""
        widened = self._widened and not any(p.dtype in HALF for p in module.parameters())
        return _in_float32(module) if widened else self._trainer.precision_plugin.train_step_context()

    def _call_step(self, step: Callable[..., Any], batch: Any) -> Any:
        """Call it as Lightning does: the index is optional, and may have any name as the second argument."""
        parameters = inspect.signature(step).parameters
        if "batch_idx" in parameters:
            return step(batch, batch_idx=self._batch_idx)
        kinds = [p.kind for p in parameters.values()]
        takes_index = inspect.Parameter.VAR_POSITIONAL in kinds or sum(kind in _BY_PLACE for kind in kinds) > 1
        return step(batch, self._batch_idx) if takes_index else step(batch)

    def _loss_in(self, output: Any) -> Tensor:
        loss = plain(output.get("loss") if isinstance(output, Mapping) else output)
        if loss is None:
            raise NoLoss(f"`{self.name}`: {_EXPECTED}, but got {_described(output)}. {_WRITE}")
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            came = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else _described(output)
            raise ValueError(f"`{self.name}`: {_EXPECTED}, but got {came}. {_WRITE}")
        return loss


def _described(output: Any) -> str:
    return f"a dict with {sorted(map(str, output))}" if isinstance(output, Mapping) else repr(output)


@contextmanager
def _in_float32(module: Any) -> Iterator[None]:
    """Switch autocast off, and let the module report float32 as its dtype."""
    before = module._dtype
    try:
        module._dtype = torch.float32
        with torch.autocast(module.device.type, enabled=False):
            yield
    finally:
        module._dtype = before
