"""The Python state of a model: everything that code can change about it besides weights, and how to put it back.

A training step may count calls, append to lists, update metrics, draw from its own random generator. After one of our
passes all of this must be as it was, in place: other code may hold the same list.
"""

from __future__ import annotations

import math
import random
import sys
import threading
from argparse import Namespace
from array import array
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import _lru_cache_wrapper, lru_cache, partial
from operator import is_
from queue import Queue, SimpleQueue
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import Tensor, nn

from normgrad_lightning.layers.module_tree import all_modules
from normgrad_lightning.layers.nested import ATOMS
from normgrad_lightning.maths.tensor_subclasses import no_overrides, overrides_functions

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = (*(f"_global{name}" for name in HOOKS), "_global_forward_hooks_always_called")
_OUR_PACKAGE = __name__.partition(".")[0]
_SWAPPED = frozenset({"_parameters", "_buffers", "_flat_weights"})
_TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) - {"_parameters", "_buffers", "_modules"}
_PLAIN_CONTAINERS = frozenset({list, dict, set, tuple, frozenset, deque})
_ATOM_TYPES = frozenset(ATOMS)
_OUTSIDE = frozenset({"ctypes", "_ctypes", "multiprocessing", "weakref", "mmap", "_io", "concurrent"})
_CODE = (BuiltinFunctionType, ModuleType)
_LIGHTNING = {"pytorch_lightning", "lightning", "lightning_fabric"}
_LOGGING = {"tensorboard", "tensorboardX", "wandb", "mlflow", "comet_ml", "aim", "neptune", "clearml"}
_LIVES_BY_ITSELF = {"torch"} | _LIGHTNING | _LOGGING
_KNOWN_HOOKS = {_OUR_PACKAGE, "torch"} | _LIGHTNING
_NOT_OF_USERS = sys.stdlib_module_names | _LIVES_BY_ITSELF
_STATEFUL = (Namespace, Queue, threading.local, torch.quasirandom.SobolEngine, torch.optim.lr_scheduler.LRScheduler)
_MAPPINGS = (dict, WeakKeyDictionary, WeakValueDictionary)
_SETS = (set, WeakSet)
_BUFFERS = (bytearray, array)
_UNCHANGING = (tuple, frozenset)
_CONTAINERS = (list, deque, *_UNCHANGING, *_MAPPINGS, *_SETS, *_BUFFERS)
_FUNCTIONS = (FunctionType, MethodType, partial, staticmethod, classmethod, property, _lru_cache_wrapper)
_CONSTANT = frozenset({"__dict__", "__weakref__", "__doc__", "__annotations__", "__static_attributes__"})

_HELD_BY_CLASSES = (*_CONTAINERS, *_FUNCTIONS, Tensor, np.ndarray)

Restore = Callable[[], object]
"""Puts something back, if it is not as it was."""


class PythonState:
    """Everything that python code could change of a model, as it is now: what its modules, lists, meters, … hold.

    Attributes:
        parameters: those of the model, each once.
        buffers: the same for buffers.
        modules: all that the model holds, also those that are not registered.
        leaves: tensors that may have a gradient: parameters, and others that are held somewhere.
        hooks: the user's, on modules.
        iterators: the class names of iterators and queues: what is drawn from them cannot be put back.
        unknown: the class names of other things that may change, and cannot be put back as they were.
        is_large: whether it stopped, as there was more than `most` allows; then it can put nothing back.

    Args:
        model: any module.
        most: how many things it may hold, and how many bytes in tensors and arrays besides weights and buffers.
    """

    def __init__(self, model: nn.Module, most: tuple[float, float] = (math.inf, math.inf)) -> None:
        registered = all_modules(model)
        self.parameters = _each_once(registered, "_parameters")
        self.buffers = _each_once(registered, "_buffers")
        self.modules: list[nn.Module] = []
        self.leaves = [*self.parameters]
        self.hooks: list[Any] = _of_users_on_all_modules()
        self.iterators: list[str] = []
        self.unknown: list[str] = []
        self.is_large = False
        self._most, self._bytes = most, 0
        self._restores = [_requires_grad(parameter) for parameter in self.parameters]
        self._kept: dict[int, Any] = {}
        self._waiting: list[Any] = [model]
        self._scripted = [(m, *attribute) for m in registered if _is_scripted(m) for attribute in _tensors(m)]
        self._restores += [partial(setattr, *attribute) for attribute in self._scripted]
        self._with_stand_ins = {id(m): m for m in registered if not _is_scripted(m)}
        while self._waiting and not self.is_large:
            self._keep(self._waiting.pop())

    def _counts(self, value: Any) -> bool:
        """Count what is about to be copied; return whether it may be."""
        self._bytes += value.nbytes
        self.is_large |= self._bytes > self._most[1]
        return not self.is_large

    def swap(self, stand_ins: Mapping[int, Tensor]) -> None:
        """Give the model's modules other tensors, by the identity of their own ones, until `restore`."""
        for module in self._with_stand_ins.values():
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
            raise next((error for error in errors if not isinstance(error, Exception)), errors[0])

    def _keep(self, value: Any) -> None:
        """Remember what `value` is, and look at what it holds later."""
        kind = type(value)
        if kind in _ATOM_TYPES or id(value) in self._kept:
            return
        self._kept[id(value)] = value
        self.is_large |= len(self._kept) > self._most[0]
        if kind in _PLAIN_CONTAINERS:
            self._keep_container(value)
        elif isinstance(value, nn.Module):
            self._keep_module(value)
        elif isinstance(value, ATOMS):
            return
        elif isinstance(value, Tensor):
            self._keep_tensor(value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and self._counts(value):
                self._restores.append(_array(value, value.copy()))
            self._waiting.extend(value.ravel() if value.dtype == object else ())
        elif (generator := _generator(value)) is not None:
            self._restores.append(generator)
        elif isinstance(value, torch.optim.Optimizer):
            self._keep_groups(value)
        elif isinstance(value, _FUNCTIONS):
            self._keep_code(value)
        elif isinstance(value, _CONTAINERS):
            self._keep_container(value)
            self._keep_attributes(value)
        elif hasattr(kind, "__next__") or isinstance(value, SimpleQueue):
            self.iterators.append(kind.__name__)
        elif _is_plain(kind):  # type: ignore[arg-type]
            self._keep_class(kind)
            self._keep_attributes(value)
        elif kind is ReferenceType and (value() is None or isinstance(value(), Tensor)):
            return
        elif _may_change(kind):  # type: ignore[arg-type]
            self.unknown.append(kind.__name__)

    def _keep_groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Keep an optimizer's settings. Its state is as large as the weights, and does not change without gradients."""
        self._restores += groups_of(optimizer)

    def _keep_code(self, value: Any) -> None:
        """Keep what a function, a method or a property holds: attributes, defaults, a closure, a cache."""
        if isinstance(value, MethodType):
            self._waiting += [value.__self__, value.__func__]
        elif isinstance(value, partial):
            self._waiting += [value.func, value.args, value.keywords]
        elif isinstance(value, property):
            self._waiting += [value.fget, value.fset]
        elif isinstance(value, staticmethod | classmethod):
            self._waiting.append(value.__func__)
        elif _is_of_users(value):
            self._keep_function(value)

    def _keep_function(self, function: Any) -> None:
        self._waiting.append(vars(function))
        if isinstance(function, _lru_cache_wrapper):
            self._restores.append(_cache(function))
            self.unknown.append("lru_cache")  # what it made may have been drawn
            return
        self._waiting += [function.__defaults__, function.__kwdefaults__]
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # it may be empty
                before = cell.cell_contents
                self._restores.append(partial(setattr, cell, "cell_contents", before))
                self._waiting.append(before)

    def _keep_class(self, kind: type) -> None:
        """Keep what the user's classes hold for all of their objects."""
        for base in _classes_of_users(kind):
            if id(base) not in self._kept:
                self._kept[id(base)] = base
                before = {name: value for name, value in vars(base).items() if name not in _CONSTANT}
                self._restores.append(_class(base, before))
                self._waiting += [value for value in before.values() if isinstance(value, _HELD_BY_CLASSES)]

    def _keep_container(self, value: Any) -> None:
        base, parts = _base(type(value)), value  # type: ignore[arg-type]
        if isinstance(value, _MAPPINGS):
            parts = list(base.values(value))
            self._restores.append(_dict(value, list(base.keys(value)), parts))
        elif isinstance(value, _BUFFERS):
            parts = ()
            self._restores.append(_buffer(value, value[:]))
        elif isinstance(value, _SETS):
            parts = list(base.__iter__(value))
            self._restores.append(_set(value, set(parts)))
        else:
            parts = list(base.__iter__(value))
            if not isinstance(value, _UNCHANGING):
                self._restores.append(_list(value, parts))
        self._waiting += [part for part in parts if type(part) not in _ATOM_TYPES]

    def _keep_module(self, module: nn.Module) -> None:
        self.modules.append(module)
        attributes = vars(module)
        before = {name: value for name, value in attributes.items() if name not in _TORCH_ATTRIBUTES}
        self._restores.append(_module(attributes, before))
        self._keep_slots(module)
        hooks = [hook for kind in HOOKS if (of_kind := attributes.get(kind)) for hook in of_kind.values()]
        self.hooks += [hook for hook in hooks if _home(hook) not in _KNOWN_HOOKS]
        self._waiting += [hook for hook in hooks if _home(hook) != _OUR_PACKAGE]
        self._keep_class(type(module))
        swapped = _SWAPPED if id(module) in self._with_stand_ins else ()
        self._waiting += [v for name, v in before.items() if type(v) not in _ATOM_TYPES and name not in swapped]

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
        with no_overrides():
            if value.is_meta:
                return
            if value.layout is not torch.strided or value.is_inference():
                self.unknown.append(f"{type(value).__name__} ({value.layout})")
                return
            if not self._counts(value):
                return
            self._restores.append(_tensor(value, value.detach(), value.detach().clone()))
            if value.is_leaf:
                self._restores.append(_requires_grad(value))
                self.leaves.append(value)
        if overrides_functions(value):
            self._keep_attributes(value)


def groups_of(optimizer: torch.optim.Optimizer) -> list[Restore]:
    """Return what puts back the groups of an optimizer, and the settings and weights of each."""
    groups = optimizer.param_groups
    restores = [_list(groups, list(groups))]
    for group in groups:
        restores += [_dict(group, list(group), list(group.values())), _list(group["params"], list(group["params"]))]
    return restores


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def _each_once(modules: list[nn.Module], kind: str) -> list[Tensor]:
    """Return the parameters or the buffers of these modules."""
    # Not by the modules' own methods, which take several times longer.
    tensors = (t for module in modules for t in getattr(module, kind).values())
    return list(dict.fromkeys(t for t in tensors if t is not None))


def _requires_grad(leaf: Tensor) -> Restore:
    asks = leaf.requires_grad

    def restore() -> None:
        with no_overrides():
            if leaf.requires_grad is not asks:
                leaf.requires_grad_(asks)

    return restore


def _tensor(tensor: Tensor, memory: Tensor, before: Tensor) -> Restore:
    """Put back where a tensor keeps its values, and the values; on other devices always, for to compare is to wait."""

    def restore() -> None:
        with no_overrides():
            if tensor.data_ptr() != memory.data_ptr() or tensor.shape != before.shape:
                tensor.data = memory
            if memory.device.type != "cpu" or not torch.equal(memory, before):
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


def _dict(mapping: Any, keys: list[Any], values: list[Any]) -> Restore:
    base = _base(type(mapping))  # type: ignore[arg-type]

    def restore() -> None:
        if not (_are(list(base.keys(mapping)), keys) and all(map(is_, base.values(mapping), values))):
            base.clear(mapping)
            for key, value in zip(keys, values, strict=True):
                base.__setitem__(mapping, key, value)  # not `update`: a Counter would count

    return restore


def _list(container: Any, before: list[Any]) -> Restore:
    base = _base(type(container))  # type: ignore[arg-type]

    def restore() -> None:
        if not _are(list(base.__iter__(container)), before):
            base.clear(container)
            base.extend(container, before)

    return restore


def _buffer(container: Any, before: Any) -> Restore:
    def restore() -> None:
        if container != before:
            container[:] = before

    return restore


def _class(kind: type, before: dict[str, Any]) -> Restore:
    """Put back the attributes of a class."""

    def restore() -> None:
        now = vars(kind)
        for name in now.keys() - before.keys() - _CONSTANT:
            delattr(kind, name)
        for name, value in before.items():
            if now.get(name) is not value or name not in now:
                setattr(kind, name, value)

    return restore


def _cache(function: Any) -> Restore:
    """Empty the cache of a function if it has grown: it may hold stand-in weights, and nothing can be taken out."""
    before = function.cache_info().misses

    def restore() -> None:
        if function.cache_info().misses != before:
            function.cache_clear()

    return restore


def _set(container: Any, before: set[Any]) -> Restore:
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


def _home(code: Any) -> str:
    """Return the name of the package that code is of."""
    return str(getattr(code, "__module__", None) or type(code).__module__).partition(".")[0]


def _is_of_users(code: Any) -> bool:
    """Return whether code is the user's, or of a library that is not known to keep its own state."""
    return _home(code) not in _NOT_OF_USERS


@lru_cache(maxsize=1024)
def _classes_of_users(kind: type) -> list[type]:
    return [base for base in kind.__mro__ if _is_of_users(base)]


@lru_cache(maxsize=1024)
def _base(kind: type) -> Any:
    """Return python's own container that a class is made of: its own ways to read and write may do other things."""
    return next(base for base in kind.__mro__ if issubclass(base, _CONTAINERS) and not _is_of_users(base))


@lru_cache(maxsize=1024)
def _may_change(kind: type) -> bool:
    """Return whether objects of a class that is not kept may change in a pass: those of the user's, and memory."""
    return _is_of_users(kind) or not _OUTSIDE.isdisjoint(base.__module__.partition(".")[0] for base in kind.__mro__)


def _of_users_on_all_modules() -> list[Any]:
    """Return the user's hooks on every module of the process."""
    hooks = [hook for kind in _GLOBAL_HOOKS for hook in getattr(torch.nn.modules.module, kind, {}).values()]
    return [hook for hook in hooks if _home(hook) not in _KNOWN_HOOKS]


@lru_cache(maxsize=1024)
def _is_plain(kind: type) -> bool:
    """Return whether such objects are part of the model's state: not a Trainer, data set, logger, thread or code."""
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
    """Return where objects of this class keep what their `__slots__` name."""
    members = [member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).values()]
    return [member for member in members if isinstance(member, MemberDescriptorType) and _is_plain_or_module(kind)]


def _is_plain_or_module(kind: type) -> bool:
    return issubclass(kind, nn.Module) or _is_plain(kind)  # type: ignore[arg-type]


def _are(values: Any, others: list[Any]) -> bool:
    """Return whether both hold the very same objects in the same order."""
    return len(values) == len(others) and all(map(is_, values, others))
