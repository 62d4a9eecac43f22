"""What a pass of our own could disturb, and how each of these is kept out of its way. All of it is here.

- Weights: a pass runs on copies, so the weights and hooks on them, such as those of DDP, stay untouched. Their `.grad`
  is taken off meanwhile: an optimizer that a pass reaches has nothing to step with.
- Buffers (BatchNorm's statistics, counters, queues): a pass runs on clones.
- Python attributes of the model, of its modules and of what these hold (counters, lists, dicts, metrics, meters,
  arrays, tensors that are no buffers, networks hidden in lists): put back after each pass, in place, so that whoever
  else holds the same list sees the same.
- Train and eval mode: modules without children (BatchNorm, dropout and the like) run in eval mode, and get their own
  mode back.
- Random numbers: torch (CPU and the model's GPUs), numpy and python, and generators that the model holds, continue as
  if nothing had been drawn. So all passes of an event see the same random numbers, too.
- Hooks on modules: those that come or go in a pass are gone or back.
- Compiled code: a pass runs eagerly, so that nothing is compiled for it. Attention's fast path, which skips hooks, and
  autocast's cache of weights are off. Reentrant checkpoints, which no pass could differentiate, are not reentrant.

Nobody can take back what a pass does outside of all this: files, prints, globals, other processes, data modules; nor
what it draws from an iterator that the model holds.
"""

from __future__ import annotations

import random
import sys
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import lru_cache, partial
from operator import is_
from queue import Queue
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode

CAN_RUN_EAGERLY = hasattr(torch.compiler, "set_stance")
"""Whether compiled modules can be run as they were written: from torch 2.6 on."""

_passes: list[object] = []


def current_pass() -> object:
    """Names the pass of ours that is running, if any: recorders read only what runs in the pass they were made in."""
    return _passes[-1] if _passes else None


def runs_eagerly() -> bool:
    """Whether compiled modules run as they were written, as they do in passes of ours."""
    return CAN_RUN_EAGERLY and bool(_passes)


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
        training: whether it runs as in training; else modules without children run in eval mode.
        widened: whether half-precision weights and buffers run in float32.
    """

    def __init__(self, model: nn.Module, *, training: bool = False, widened: bool = False) -> None:
        self._model = model
        self._training = training
        self._copy = widened_copy if widened else Tensor.clone
        self._parameters = dict(model.named_parameters())
        self._buffers = list(model.buffers())
        self._gpus = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
        self._state = _PythonState(model)

    def run(self, function: Callable[[nn.Module], Any], parameters: Mapping[str, Tensor] | None = None) -> Any:
        """`function(model)`, with these tensors in place of the parameters; by default, with copies."""
        given = parameters or {}
        stand_ins = {
            id(p): given[name] if name in given else self._copy(p.detach()) for name, p in self._parameters.items()
        }
        stand_ins |= {id(b): self._copy(b) for b in self._buffers}
        try:
            with (
                _modes_kept(self._state.modules, leaves_in_eval=not self._training),
                _grads_aside(self._state.leaves),
                _hooks_kept(self._state.modules),
                _preserved_rng(self._gpus),
                _eager(),
                _no_attention_fast_path(),
                _no_autocast_cache(),
                _no_reentrant_checkpoints(),
            ):
                self._state.swap(stand_ins)
                return function(self._model)
        finally:
            self._state.restore()


def widened_copy(t: Tensor) -> Tensor:
    """A copy of `t`, in float32 if it is in half precision."""
    return t.float() if t.dtype in HALF else t.clone()


def held_iterators(model: nn.Module) -> list[str]:
    """The kinds of iterators that a model holds: what is drawn from them cannot be put back."""
    return _PythonState(model).iterators


@contextmanager
def _modes_kept(modules: list[nn.Module], *, leaves_in_eval: bool) -> Iterator[None]:
    """The mode each module had, after; inside, modules without children are in eval mode if that is asked for.

    The others keep theirs: a detector gives a loss in train mode only. Attention has a child, but drops out by itself,
    and a BatchNorm may have been given some.
    """
    leaves = [m for m in modules if leaves_in_eval and (not m._modules or isinstance(m, _ACTS_BY_ITSELF))]
    modes = [(module, module.training) for module in modules]
    try:
        for module in leaves:
            _set_mode(module, False)
        yield
    finally:
        for module, training in modes:
            if module.training is not training:
                _set_mode(module, training)


def _set_mode(module: nn.Module, training: bool) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        module.training = training
    elif "training" in vars(module):  # it may be a property
        vars(module)["training"] = training  # what a module does with every attribute that is set takes its time


@contextmanager
def _grads_aside(leaves: list[Tensor]) -> Iterator[None]:
    """No gradients inside, so that an optimizer has nothing to step with or to zero; those there were, after."""
    grads = [(leaf, leaf.grad) for leaf in leaves]
    try:
        for leaf, _ in grads:
            leaf.grad = None
        yield
    finally:
        for leaf, grad in grads:
            leaf.grad = grad


@contextmanager
def _hooks_kept(modules: list[nn.Module]) -> Iterator[None]:
    """Hooks that come or go inside are gone or back, after."""
    hooks = [vars(module).get(kind) for module in modules for kind in (*_HOOKS, *_FLAGS_OF_HOOKS)]
    before = [(of_module, dict(of_module)) for of_module in hooks if of_module is not None]
    try:
        yield
    finally:
        for of_module, known in before:
            if of_module.keys() != known.keys():
                of_module.clear()
                of_module.update(known)


@contextmanager
def _preserved_rng(gpus: list[int]) -> Iterator[None]:
    """The random state of torch, numpy and python is the same after as before."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=gpus):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


def _eager() -> AbstractContextManager[None]:
    """Compiled modules run as they were written; before torch 2.6, as they are compiled."""
    if not CAN_RUN_EAGERLY or "torch._dynamo" not in sys.modules:  # it takes a second to load, and nothing is compiled
        return nullcontext()
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def _no_attention_fast_path() -> Iterator[None]:
    """Where nothing asks for a gradient, torch's transformer layers do not call their parts, nor hooks on these."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _no_autocast_cache() -> Iterator[None]:
    """Autocast's half-precision copies of weights would outlive the stand-ins they were made of."""
    enabled = torch.is_autocast_cache_enabled()
    try:
        torch.set_autocast_cache_enabled(False)
        yield
    finally:
        torch.set_autocast_cache_enabled(enabled)


@contextmanager
def _no_reentrant_checkpoints() -> Iterator[None]:
    """Checkpoints with `use_reentrant=True` refuse `autograd.grad`; inside, all are made without."""
    reentrant = checkpoint.CheckpointFunction
    try:
        checkpoint.CheckpointFunction = _NotReentrant  # type: ignore[assignment, misc]
        yield
    finally:
        checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]


class _NotReentrant:
    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


class NoCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, talking to other processes is an error: they would not answer, and all would hang."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let everything but collectives pass."""
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional"):
            raise RuntimeError(
                f"it calls {func} in a pass that runs on one process alone, so the others would not answer. "
                "Write a method `normgrad_loss(self, batch)` that returns the loss without that."
            )
        return func(*args, **(kwargs or {}))


HALF = (torch.float16, torch.bfloat16)
_ACTS_BY_ITSELF = (nn.MultiheadAttention, nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_FLAGS_OF_HOOKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_ATOMS = (str, bytes, bool, int, float, complex, type(None), type, torch.dtype, torch.device, torch.Size)
_CODE = (BuiltinFunctionType, ModuleType)
_LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric"}
_LOGGING = {"tensorboard", "tensorboardX", "wandb", "mlflow", "comet_ml", "aim", "neptune", "clearml"}
_LIVES_BY_ITSELF = {"torch"} | _LIGHTNING | _LOGGING
_NOT_OF_USERS = sys.stdlib_module_names | _LIVES_BY_ITSELF
_STATEFUL = (Namespace, Queue, torch.quasirandom.SobolEngine, torch.optim.lr_scheduler.LRScheduler)
_CONTAINERS = (list, dict, set, deque, bytearray, Tensor, np.ndarray)

Restore = Callable[[], object]
"""Puts something back, if it is not as it was."""


class _PythonState:
    """Everything that python code could change of a model, as it is now: what its modules, lists, meters, … hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.iterators: list[str] = []
        self.leaves: list[Tensor] = list(model.parameters())
        self._restores: list[Restore] = [_requires_grad(parameter) for parameter in self.leaves]
        self._kept: dict[int, Any] = {}
        self._waiting: list[Any] = [model]
        scripted = [m for m in model.modules() if isinstance(m, torch.jit.ScriptModule)]
        self._scripted = [(m, name, t) for m in scripted for name, t in _tensors(m)]
        self._restores += [partial(setattr, *place) for place in self._scripted]
        self._registered = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._with_stand_ins = set(map(id, self._registered))
        while self._waiting:
            self._keep(self._waiting.pop())

    def swap(self, stand_ins: Mapping[int, Tensor]) -> None:
        """Give the model's modules other tensors, by the identity of their own ones, until `restore`."""
        for module in self._registered:
            for kind in ("_parameters", "_buffers"):
                vars(module)[kind] = {name: stand_ins.get(id(t), t) for name, t in vars(module)[kind].items()}
            if isinstance(module, nn.RNNBase):  # they keep their weights in a list, too
                vars(module)["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
        for module, name, t in self._scripted:
            setattr(module, name, stand_ins[id(t)])

    def restore(self) -> None:
        """Put everything back that is not as it was, also if some of it cannot be."""
        errors: list[BaseException] = []
        for restore in self._restores:
            try:
                restore()
            except BaseException as error:  # Ctrl-C must wait, too: half of the model would have a pass's weights
                errors.append(error)
        if errors:
            raise errors[0]

    def _keep(self, value: Any) -> None:
        """Remember what `value` is, and look at what it holds later."""
        if isinstance(value, _ATOMS) or id(value) in self._kept:
            return
        self._kept[id(value)] = value
        if isinstance(value, nn.Module):
            self._keep_module(value)
        elif isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._restores.append(_array(value, value.copy()))
            self._waiting.extend(value.ravel() if value.dtype == object else ())
        elif (generator := _generator(value)) is not None:
            self._restores.append(generator)
        elif isinstance(value, torch.optim.Optimizer):
            self._keep_groups(value)
        elif isinstance(value, FunctionType | MethodType | partial):
            self._keep_code(value)
        elif isinstance(value, dict | list | deque | set | tuple | frozenset | bytearray):
            self._keep_container(value)
            self._keep_attributes(value)
        elif hasattr(type(value), "__next__"):
            self.iterators.append(type(value).__name__)
        elif _is_plain(type(value)):  # type: ignore[arg-type]
            self._keep_attributes(value)

    def _keep_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer's settings. Its state is as large as the weights; without gradients it does not change."""
        self._restores.append(_list(optimizer.param_groups, list(optimizer.param_groups)))
        self._restores += [_dict(group, list(group), list(group.values())) for group in optimizer.param_groups]

    def _keep_code(self, value: Any) -> None:
        """What a bound method, a partial function or a closure holds."""
        if isinstance(value, MethodType):
            self._waiting.append(value.__self__)
        elif isinstance(value, partial):
            self._waiting += [value.func, value.args, value.keywords]
        else:
            for cell in value.__closure__ or ():
                with suppress(ValueError):  # it may be empty
                    before = cell.cell_contents
                    self._restores.append(partial(setattr, cell, "cell_contents", before))
                    self._waiting.append(before)

    def _keep_container(self, value: Any) -> None:
        if isinstance(value, dict):
            self._restores.append(_dict(value, list(value), list(value.values())))
            self._waiting.extend(value.values())
            return
        if isinstance(value, set):
            self._restores.append(_set(value, set(value)))
        elif not isinstance(value, tuple | frozenset):
            self._restores.append(_list(value, list(value)))
        self._waiting.extend(() if isinstance(value, bytearray) else value)

    def _keep_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        attributes = vars(module)
        before = {name: value for name, value in attributes.items() if name not in _TORCH_ATTRIBUTES}
        self._restores.append(_module(attributes, before))
        self._keep_slots(module)
        hooks = [hook for kind in _HOOKS for hook in (attributes.get(kind) or {}).values()]
        self._waiting += [hook for hook in hooks if not _is_ours(hook)]
        self._waiting += _class_attributes(type(module))  # type: ignore[arg-type]
        swapped = {"_parameters", "_buffers", "_flat_weights"} if id(module) in self._with_stand_ins else ()
        self._waiting.extend(value for name, value in before.items() if name not in swapped)

    def _keep_attributes(self, value: Any) -> None:
        with suppress(TypeError):  # it may have none
            self._waiting.append(vars(value))
        self._keep_slots(value)

    def _keep_slots(self, value: Any) -> None:
        for slot in _slots(type(value)):  # type: ignore[arg-type]
            try:
                before = slot.__get__(value)
            except AttributeError:
                self._restores.append(_empty_slot(slot, value))
            else:
                self._restores.append(partial(slot.__set__, value, before))
                self._waiting.append(before)

    def _keep_tensor(self, value: Tensor) -> None:
        if value.layout is not torch.strided or value.is_meta or value.is_inference():
            return
        self._restores.append(_tensor(value, value.detach(), value.detach().clone()))
        if value.is_leaf:
            self._restores.append(_requires_grad(value))
            self.leaves.append(value)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _requires_grad(leaf: Tensor) -> Restore:
    asks = leaf.requires_grad

    def restore() -> None:
        if leaf.requires_grad is not asks:
            leaf.requires_grad_(asks)

    return restore


def _tensor(tensor: Tensor, memory: Tensor, before: Tensor) -> Restore:
    """Put back where a tensor keeps its values, and the values."""

    def restore() -> None:
        if tensor.data_ptr() != memory.data_ptr() or tensor.shape != before.shape:
            tensor.data = memory
        if not torch.equal(memory, before):
            memory.data.copy_(before)

    return restore


def _array(array: Any, before: Any) -> Restore:
    def restore() -> None:
        same = array.dtype != object and np.array_equal(array, before)
        if not same and array.flags.writeable:
            array[...] = before

    return restore


def _module(attributes: dict[str, Any], before: dict[str, Any]) -> Restore:
    """Put back the attributes of a module, but for those that torch keeps there for itself."""

    def restore() -> None:
        for name in attributes.keys() - before.keys() - _TORCH_ATTRIBUTES:
            del attributes[name]
        attributes.update(before)

    return restore


def _dict(mapping: dict[Any, Any], keys: list[Any], values: list[Any]) -> Restore:
    def restore() -> None:
        if not (_are(mapping, keys) and _are(mapping.values(), values)):
            mapping.clear()
            for key, value in zip(keys, values, strict=True):
                mapping[key] = value  # not `update`: a Counter would count

    return restore


def _list(container: Any, before: list[Any]) -> Restore:
    def restore() -> None:
        if not _are(container, before):
            container.clear()
            container.extend(before)

    return restore


def _set(container: set[Any], before: set[Any]) -> Restore:
    def restore() -> None:
        if container != before:
            container.clear()
            container.update(before)

    return restore


def _empty_slot(slot: Any, value: Any) -> Restore:
    def restore() -> None:
        with suppress(AttributeError):
            slot.__delete__(value)

    return restore


def _generator(value: Any) -> Restore | None:
    """Put back the state of a random generator; None if it is none, or has no state."""
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, np.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        return partial(value.setstate, value.getstate())
    if isinstance(value, np.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    return None


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", type(hook).__module__)).startswith(f"{__package__}.")


@lru_cache(maxsize=1024)
def _class_attributes(kind: type) -> list[Any]:
    """The containers, tensors and arrays that a user's class holds for all of its objects."""
    own = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in _NOT_OF_USERS]
    return [value for base in own for value in vars(base).values() if isinstance(value, _CONTAINERS)]


@lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    """Whether objects of this class are part of the model's state: no Trainer, data set, logger, thread or code."""
    if issubclass(kind, _CODE):
        return False
    if issubclass(kind, _STATEFUL):
        return True
    homes = [base.__module__.partition(".")[0] for base in kind.__mro__]
    if homes[0] in sys.stdlib_module_names - {"collections"} and kind is not SimpleNamespace:
        return False
    return not _LIVES_BY_ITSELF.intersection(homes)


@lru_cache(maxsize=1024)
def _slots(kind: type) -> list[Any]:
    """Where objects of this class keep what their `__slots__` name."""
    members = [member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).values()]
    return [member for member in members if isinstance(member, MemberDescriptorType) and _is_plain_or_module(kind)]


def _is_plain_or_module(kind: type) -> bool:
    return issubclass(kind, nn.Module) or _is_plain(kind)  # type: ignore[arg-type]


def _are(values: Any, others: list[Any]) -> bool:
    """Whether both hold the very same objects in the same order."""
    return len(values) == len(others) and all(map(is_, values, others))
