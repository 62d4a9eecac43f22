"""Hooks that cannot harm their host: they never raise, own nothing, and copy and pickle as nothing.

They do nothing while code is compiled or traced: what they compute would become part of it and change its bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.maths.tensor_subclasses import no_overrides

Method = Callable[..., Any]
"""A bound method; a hook refers to it weakly."""


class WeakMethod:
    """A weak reference to a bound method. Copied with the method's object, it refers to the copy."""

    def __init__(self, method: Method) -> None:
        self._object = weakref.ref(method.__self__)  # type: ignore[attr-defined]
        self._name = method.__name__

    def __call__(self) -> Method | None:
        """Return the method, if its object is alive."""
        owner = self._object()
        return None if owner is None else getattr(owner, self._name)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakMethod:
        owner = self._object()
        return WeakMethod(getattr(memo.get(id(owner), owner), self._name))


class Hook:
    """Calls a method with a layer's name, as long as the method's object is alive.

    A deep copy or a pickle of the host (EMA, checkpoints of whole modules) carries an empty hook instead.

    Args:
        method: weak reference to a method that gets the name and what torch gives to a hook.
        failed: weak reference to a method that gets the name and an exception of the other; the forward pass continues.
        name: the layer's.
    """

    def __init__(
        self,
        method: Callable[[], Callable[..., None] | None],
        failed: Callable[[], Callable[[str, Exception], None] | None],
        name: str,
    ) -> None:
        self._method = method
        self._failed = failed
        self._name = name

    def __call__(self, layer: nn.Module, *args: Any) -> None:
        """Pass the call on; returning None changes neither inputs nor outputs of the layer."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            return
        method = self._method()
        if method is None:
            return
        try:
            with unseen(), no_overrides():
                method(self._name, layer, *args)
        except Exception as error:
            failed = self._failed()
            if failed is not None:
                failed(self._name, error)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[object, str]]:
        """Return what copies have instead: a callable that does nothing, takes anything and needs no package."""
        return getattr, (nullcontext(), "__exit__")


def on_forward(layer: nn.Module, hook: Hook, *, apart: bool) -> RemovableHandle:
    """Call `hook` after each call of the layer; `apart`: without anything registered on the layer itself."""
    if not apart:
        return layer.register_forward_hook(hook, with_kwargs=True)
    return register_module_forward_hook(_OneLayer(layer, hook), with_kwargs=True)


def unseen() -> AbstractContextManager[Any]:
    """Hide operations from the user's modes: selective checkpointing would count them as the model's."""
    if torch._C._len_torch_function_stack():
        return _without_any_modes()
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext()


@contextmanager
def _without_any_modes() -> Iterator[None]:
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


class _OneLayer:
    """A hook on all modules that acts on one of them."""

    def __init__(self, layer: nn.Module, hook: Hook) -> None:
        self._layer = weakref.ref(layer)  # a recorder that is never detached must not keep it alive
        self._hook = hook

    def __call__(self, module: nn.Module, *called: Any) -> None:
        if module is self._layer():
            self._hook(module, *called)


def current_backward() -> int:
    """Return the number of the backward pass that is running; negative outside of any."""
    return torch._C._current_graph_task_id()


class ModuleHooks:
    """The hooks that are on a model's modules: those that watch a module's calls, and those that read it.

    What is put on is taken off again, whatever happens in between.

    Args:
        modules: by name.
        apart: modules that nothing may be registered on: they would run other code.
    """

    def __init__(self, modules: Mapping[str, nn.Module], apart: Container[nn.Module]) -> None:
        self._modules = modules
        self._apart = apart
        self._watching: dict[str, list[RemovableHandle]] = {}
        self._reading: dict[str, RemovableHandle] = {}

    def __bool__(self) -> bool:
        """Return whether there are any."""
        return bool(self._watching or self._reading)

    def is_reading(self, name: str) -> bool:
        """Return whether there is a hook that reads this layer."""
        return name in self._reading

    def watch(self, names: Iterable[str], enter: Method, leave: Method, failed: Method) -> None:
        """Call `enter` before and `leave` after each call of these modules."""
        weak_enter, weak_leave, weak_failed = WeakMethod(enter), WeakMethod(leave), WeakMethod(failed)
        for name in names:
            module, handles = self._modules[name], self._watching.setdefault(name, [])
            apart = module in self._apart
            if not apart:
                # Before all other hooks: those that read the layer need to know the images.
                hook = Hook(weak_enter, weak_failed, name)
                handles.append(module.register_forward_pre_hook(hook, with_kwargs=True, prepend=True))
            handles.append(on_forward(module, Hook(weak_leave, weak_failed, name), apart=apart))

    def read(self, names: Iterable[str], method: Method, failed: Method, *, before: bool) -> None:
        """Call `method` before or after each call of these modules."""
        weak_method, weak_failed = WeakMethod(method), WeakMethod(failed)
        for name in names:
            module, hook = self._modules[name], Hook(weak_method, weak_failed, name)
            if before and module not in self._apart:
                self._reading[name] = module.register_forward_pre_hook(hook, with_kwargs=True)
            else:
                self._reading[name] = on_forward(module, hook, apart=module in self._apart)

    def keep(self, watching: Container[str], reading: Container[str]) -> None:
        """Take all hooks off but those on these modules."""
        for name in [name for name in self._watching if name not in watching]:
            self._remove_watching(name)
            del self._watching[name]  # not before: Ctrl-C may come in between
        for name in [name for name in self._reading if name not in reading]:
            self._reading[name].remove()
            del self._reading[name]

    def silence_inside(self, name: str, but: Container[str]) -> None:
        """Take off what watches the modules inside this one; `keep` still knows of them."""
        prefix = f"{name}." if name else ""
        for inner in self._watching:
            if inner.startswith(prefix) and inner not in but:
                self._remove_watching(inner)

    def _remove_watching(self, name: str) -> None:
        for handle in self._watching[name]:
            handle.remove()
