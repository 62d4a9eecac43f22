"""Hooks that cannot harm their host: they never raise, own nothing, and copy and pickle as nothing.

Compiled and traced code does not see them: what they compute would become part of it and change its bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import fields, is_dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle


class Owner(Protocol):
    """Whoever hears of a failure in one of its hooks."""

    def failed(self, name: str, error: Exception) -> None:
        """Take note of it: the forward or backward pass goes on."""


class Hook:
    """Calls a method of its owner with a layer's name, as long as the owner lives.

    A deep copy or a pickle of the host (EMA, checkpoints of whole modules) carries an empty hook instead.
    """

    def __init__(self, method: Callable[..., None], name: str) -> None:
        self._method = weakref.WeakMethod(method)
        self._name = name

    def __call__(self, layer: nn.Module, *args: Any) -> None:
        """Forward the call; the return value None leaves everything as it is."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        method = self._method()
        if method is None:
            return
        try:
            method(self._name, layer, *args)
        except Exception as error:
            owner: Owner = method.__self__  # type: ignore[attr-defined]
            owner.failed(self._name, error)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        """What is copied in its place: something that takes anything, does nothing, and can be loaded without us."""
        return getattr, (nullcontext(), "__exit__")


def on_forward(layer: nn.Module, hook: Hook, *, apart: bool) -> RemovableHandle:
    """Let `hook` see each call of the layer when it is over; `apart`: without anything on the layer itself."""
    if not apart:
        return layer.register_forward_hook(hook, with_kwargs=True)
    return register_module_forward_hook(_OneLayer(layer, hook))


class _OneLayer:
    """A hook on all modules that is about one of them."""

    def __init__(self, layer: nn.Module, hook: Hook) -> None:
        self._layer = weakref.ref(layer)  # it may be left behind by a recorder that nobody detached
        self._hook = hook

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if module is self._layer():
            self._hook(module, args, {}, output)  # it is not told of keywords before torch 2.5


def current_backward() -> int:
    """A number of the backward pass that is running; negative outside of any."""
    return torch._C._current_graph_task_id()


def first_tensor(nested: object) -> Tensor | None:
    """The first floating-point tensor in tuples, lists, dicts and dataclasses, depth first."""
    return next(floating_tensors(nested), None)


def floating_tensors(nested: object) -> Iterator[Tensor]:
    """The floating-point tensors in tuples, lists, dicts and dataclasses, depth first."""
    if isinstance(nested, Tensor):
        if nested.is_floating_point():
            yield nested
    elif isinstance(nested, Mapping):
        for value in nested.values():
            yield from floating_tensors(value)
    elif isinstance(nested, list | tuple):
        for value in nested:
            yield from floating_tensors(value)
    elif is_dataclass(nested) and not isinstance(nested, type):
        for field in fields(nested):
            yield from floating_tensors(getattr(nested, field.name))
