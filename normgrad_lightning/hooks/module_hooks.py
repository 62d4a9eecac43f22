"""The life of hooks on modules: what is put on is taken off again, whatever happens in between."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.hooks.safe_hooks import Hook, WeakMethod, on_forward

Method = Callable[..., Any]
"""A bound method; a hook refers to it weakly."""


class ModuleHooks:
    """The hooks that are on a model's modules: those that watch a module's calls, and those that read it.

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
