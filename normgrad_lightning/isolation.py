"""What a pass of our own could disturb in the user's model, and how each of these is kept out of its way.

- Weights and their `.grad`: the pass runs on detached stand-ins, so `.grad` and hooks on parameters stay untouched.
- Buffers (BatchNorm's statistics, counters): the pass runs on clones.
- Train and eval mode: every module is put into eval mode and back into the mode of its own.
- Random numbers: torch (CPU and the model's GPUs), numpy and python continue as if nothing had been drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_passes: list[object] = []


def current_pass() -> object:
    """Names the pass of ours that is running, if any: recorders read only what runs in the pass they were made in."""
    return _passes[-1] if _passes else None


@contextmanager
def own_pass() -> Iterator[None]:
    """What runs inside is a pass of ours, and not training."""
    _passes.append(object())
    try:
        yield
    finally:
        _passes.pop()


def run_isolated(model: nn.Module, function: Callable[[nn.Module], Any]) -> Any:
    """`function(model)`, in eval mode, with stand-ins for weights and buffers and with its own random numbers.

    The stand-ins ask for no gradient: autograd starts where a hook makes it start.
    """
    with eval_mode(model), preserved_rng(model):
        return torch.func.functional_call(_Applied(model, function), stand_ins(model), ())


def stand_ins(model: nn.Module) -> dict[str, Tensor]:
    """Detached parameters and cloned buffers, under the names they have inside `_Applied`."""
    parameters = {f"model.{name}": p.detach() for name, p in model.named_parameters(remove_duplicate=False)}
    buffers = {f"model.{name}": b.clone() for name, b in model.named_buffers(remove_duplicate=False)}
    return {**parameters, **buffers}


class _Applied(nn.Module):
    """`function` of a model as a module of its own: what `functional_call` needs to swap the model's tensors."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self) -> Any:
        return self.function(self.model)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode inside; the mode each one had, after."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def preserved_rng(model: nn.Module) -> Iterator[None]:
    """The random state of torch, numpy and python is the same after as before."""
    gpus = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
