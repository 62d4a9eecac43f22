"""What a pass of our own could disturb, and how each of these is kept out of its way. All of it is here.

- Weights: a pass runs on stand-ins (aliases, or copies where it may write to them), so the weights, their `.grad` and
  hooks on them, such as those of DDP, stay untouched.
- Buffers (BatchNorm's statistics, counters, queues): a pass runs on clones.
- Python attributes of the model, of its modules and of what these hold (counters, lists, dicts, metrics, meters,
  arrays, tensors that are no buffers, networks hidden in lists): put back after each pass, in place, so that whoever
  else holds the same list sees the same.
- Train and eval mode: modules without children (BatchNorm, dropout and the like) run in eval mode, and get their own
  mode back.
- Random numbers: torch (CPU and the model's GPUs), numpy and python, and generators that the model holds, continue as
  if nothing had been drawn. So all passes of an event see the same random numbers, too.
- Compiled code: a pass runs eagerly, so that nothing is compiled for it.

Nobody can take back what a pass does outside of all this: files, prints, globals, other processes.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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


class Sandbox:
    """Runs functions of a model that leave no trace in it.

    Args:
        model: any module. What it is now is what it will be after each run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._state = _PythonState(model)

    def run(self, function: Callable[[nn.Module], Any], parameters: Mapping[str, Tensor] | None = None) -> Any:
        """`function(model)`, with these tensors in place of the parameters; by default, with detached aliases."""
        if parameters is None:
            parameters = {name: p.detach() for name, p in self._model.named_parameters()}
        buffers = {name: b.clone() for name, b in self._model.named_buffers()}
        tensors = {f"model.{name}": t for name, t in {**parameters, **buffers}.items()}
        try:
            with _leaves_in_eval(self._state.modules), _preserved_rng(self._model), _eager(), _no_autocast_cache():
                return torch.func.functional_call(_Applied(self._model, function), tensors, ())
        finally:
            self._state.restore()


class _Applied(nn.Module):
    """`function` of a model as a module of its own: what `functional_call` needs to swap the model's tensors."""

    def __init__(self, model: nn.Module, function: Callable[[nn.Module], Any]) -> None:
        super().__init__()
        self.model = model
        self.function = function

    def forward(self) -> Any:
        for module in self.model.modules():
            if isinstance(module, nn.RNNBase):  # they keep their weights in a list, too
                vars(module)["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
        return self.function(self.model)


@contextmanager
def _leaves_in_eval(modules: list[nn.Module]) -> Iterator[None]:
    """Modules without children in eval mode inside; the mode each one had, after.

    The others keep theirs: a detector gives a loss in train mode only. Attention has a child, but drops out by itself.
    """
    modes = [(module, module.training) for module in modules]
    try:
        for module in modules:
            if not module._modules or isinstance(module, nn.MultiheadAttention):
                module.training = False
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def _preserved_rng(model: nn.Module) -> Iterator[None]:
    """The random state of torch, numpy and python is the same after as before."""
    gpus = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _eager() -> AbstractContextManager[None]:
    """Compiled modules run as they were written; before torch 2.6, as they are."""
    set_stance = getattr(torch.compiler, "set_stance", None)
    return nullcontext() if set_stance is None else set_stance("force_eager")


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast's half-precision copies of weights would outlive the stand-ins they were made of."""
    enabled = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, talking to other processes is an error: they would not answer, and all would hang."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything but collectives pass."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError(f"it calls {func} in a pass that runs on one process alone")
        return func(*args, **(kwargs or {}))


_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_ATOMS = (str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_CODE = (FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric"}
_LOGGING = {"tensorboard", "tensorboardX", "wandb", "mlflow", "comet_ml", "aim", "neptune", "clearml"}
_LIVES_BY_ITSELF = {"torch"} | _LIGHTNING | _LOGGING


class _PythonState:
    """Everything that python code could change of a model, as it is now: what its modules, lists, meters, … hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self._restores: list[Callable[[], object]] = []
        registered = [*model.parameters(), *model.buffers()]
        self._kept: dict[int, Any] = {id(t): t for t in registered}  # these have stand-ins
        self._grads = [(p, p.grad) for p in model.parameters()]
        self._keep(model)

    def restore(self) -> None:
        """Put everything back that is not as it was."""
        for restore in self._restores:
            restore()
        for parameter, grad in self._grads:
            if parameter.grad is not grad:
                parameter.grad = grad

    def _keep(self, value: Any) -> None:
        """Remember what `value` is and holds."""
        if isinstance(value, _ATOMS) or id(value) in self._kept:
            return
        self._kept[id(value)] = value
        if isinstance(value, nn.Module):
            self._keep_module(value)
        elif isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            self._keep_array(value)
        elif isinstance(value, dict):
            self._keep_dict(value)
        elif isinstance(value, list | deque):
            self._keep_list(value)
        elif isinstance(value, set):
            self._keep_set(value)
        elif isinstance(value, tuple | frozenset):
            self._keep_all(value)
        elif not self._keep_generator(value) and _is_plain(type(value)):  # type: ignore[arg-type]
            self._keep_object(value)

    def _keep_all(self, values: Any) -> None:
        for value in values:
            self._keep(value)

    def _keep_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        attributes = vars(module)
        before = {name: value for name, value in attributes.items() if name not in _TORCH_ATTRIBUTES}

        def restore() -> None:
            for name in attributes.keys() - before.keys() - _TORCH_ATTRIBUTES:
                del attributes[name]
            attributes.update(before)

        self._restores.append(restore)
        self._keep_all(before.values())

    def _keep_object(self, value: Any) -> None:
        if hasattr(value, "__dict__"):
            self._keep_dict(vars(value))
        for name in (name for base in type(value).__mro__ for name in _slots(base)):
            if hasattr(value, name):
                before = getattr(value, name)
                self._restores.append(partial(object.__setattr__, value, name, before))
                self._keep(before)

    def _keep_dict(self, value: dict[Any, Any]) -> None:
        keys, values = list(value), list(value.values())

        def restore() -> None:
            if not (_are(value, keys) and _are(value.values(), values)):
                value.clear()
                for key, kept in zip(keys, values, strict=True):
                    value[key] = kept  # not `update`: a Counter would count

        self._restores.append(restore)
        self._keep_all(values)

    def _keep_list(self, value: list[Any] | deque[Any]) -> None:
        before = list(value)

        def restore() -> None:
            if not _are(value, before):
                value.clear()
                value.extend(before)

        self._restores.append(restore)
        self._keep_all(before)

    def _keep_set(self, value: set[Any]) -> None:
        before = set(value)

        def restore() -> None:
            if value != before:
                value.clear()
                value.update(before)

        self._restores.append(restore)

    def _keep_tensor(self, value: Tensor) -> None:
        if value.layout is not torch.strided or value.is_meta or value.is_inference():
            return
        alias = value.detach()
        before = alias.clone()

        def restore() -> None:
            if not torch.equal(alias, before):
                alias.data.copy_(before)

        self._restores.append(restore)

    def _keep_array(self, value: Any) -> None:
        before = value.copy()

        def restore() -> None:
            if value.flags.writeable:
                value[...] = before

        self._restores.append(restore)

    def _keep_generator(self, value: Any) -> bool:
        """Keep a random generator; False if it is none."""
        if isinstance(value, torch.Generator):
            state = value.get_state()
            self._restores.append(lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            python_state = value.getstate()
            self._restores.append(lambda: value.setstate(python_state))
        elif isinstance(value, np.random.RandomState):
            numpy_state = value.get_state()
            self._restores.append(lambda: value.set_state(numpy_state))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            bit_state = bits.state
            self._restores.append(lambda: setattr(bits, "state", bit_state))
        else:
            return False
        return True


@lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    """Whether objects of this class are part of the model's state: no Trainer, data set, logger, thread or code."""
    if issubclass(kind, _CODE):
        return False
    homes = [base.__module__.partition(".")[0] for base in kind.__mro__]
    if homes[0] in sys.stdlib_module_names and kind is not SimpleNamespace:
        return False
    return not _LIVES_BY_ITSELF.intersection(homes)


def _slots(kind: type) -> list[str]:
    slots = kind.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    return [name for name in names if not name.startswith("__")]


def _are(values: Any, others: list[Any]) -> bool:
    """Whether both hold the very same objects in the same order."""
    return len(values) == len(others) and all(map(is_, values, others))
