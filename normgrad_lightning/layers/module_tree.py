"""The modules of a model: all of them, the paths to some of them, and which ones run compiled code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from normgrad_lightning.layers.own_passes import current_pass

_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_NO_FUNCTIONS = frozenset({bool, int, float, str, type(None), tuple, list, dict, OrderedDict, set, torch.Size})


def all_modules(model: nn.Module) -> list[nn.Module]:
    """Return the same modules as `model.modules()`, in another order and several times faster."""
    found: dict[int, nn.Module] = {}  # a class may say that two of its modules are equal
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            waiting += module._modules.values()  # type: ignore[arg-type]
    return list(found.values())


def named_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the same as `model.named_modules()`, but each module once, also if its class calls it equal to another."""
    seen = set[int]()
    waiting: list[tuple[str, nn.Module | None]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module is not None and id(module) not in seen:
            seen.add(id(module))
            yield name, module
            below = f"{name}." if name else ""
            waiting += [(f"{below}{child}", inner) for child, inner in reversed(list(module._modules.items()))]


@dataclass(frozen=True)
class Waypoint:
    """A module on a path from the model to others: its children then, and whether it was compiled."""

    module: nn.Module
    children: list[nn.Module | None]
    compiled: bool

    @classmethod
    def of(cls, module: nn.Module) -> Waypoint:
        """Return a waypoint for the module as it is now."""
        return cls(module, list(module._modules.values()), is_compiled(module))

    def is_as_it_was(self) -> bool:
        """Return whether neither has changed since."""
        return list(self.module._modules.values()) == self.children and is_compiled(self.module) is self.compiled


def ways_to(model: nn.Module, modules: Iterable[nn.Module]) -> list[Waypoint]:
    """Return all modules on the paths from `model` to these, both ends included, each once."""
    held_by = {id(child): parent for parent in all_modules(model) for child in parent._modules.values()}
    seen: dict[int, Waypoint] = {}
    for module in modules:
        here: nn.Module | None = module
        while here is not None and id(here) not in seen:
            seen[id(here)] = Waypoint.of(here)
            here = held_by.get(id(here))
    return list(seen.values())


def compiled_layers(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules that run compiled code; the name of the model itself is empty."""
    names: list[str] = []
    for name, module in named_modules(model):
        if not any(name.startswith(f"{outer}." if outer else "") for outer in names) and is_compiled(module):
            names.append(name)
    return [clean_name(name) for name in names]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of this module or of one of its methods, such as Lightning's steps, runs compiled code."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    in_place = getattr(module, "_compiled_call_impl", None) is not None
    values = vars(module).values()
    own = not _NO_FUNCTIONS.issuperset(map(type, values)) and any(map(_is_compiled_function, values))
    return _is_compile_wrapper(module) or in_place or own or _has_compiled_methods(type(module))  # type: ignore[arg-type]


def _is_compiled_function(value: object) -> bool:
    if isinstance(value, nn.Module) or not callable(value) or getattr(value, "_torchdynamo_disable", False):
        return False
    return hasattr(value, "_torchdynamo_orig_callable")


@lru_cache(maxsize=1024)
def _has_compiled_methods(kind: type) -> bool:
    """Return whether the class has methods under `@torch.compile`."""
    return any(_is_compiled_function(member) for base in kind.__mro__ for member in vars(base).values())


def _is_compile_wrapper(module: nn.Module) -> bool:
    """Return whether it is the result of `torch.compile(module)`, whose own hooks run outside of the compiled code."""
    return "_orig_mod" in module._modules


def with_fast_path(model: nn.Module) -> set[nn.Module]:
    """Return torch's own encoder layers, and all modules inside of them.

    In eval mode they run faster code, with other bits, unless there are hooks on them or inside. In the package's own
    passes they never do, so there the set is empty.
    """
    if current_pass() is not None:
        return set()
    forward = nn.TransformerEncoderLayer.forward
    encoders = [m for m in all_modules(model) if getattr(type(m), "forward", None) is forward]
    return {m for encoder in encoders for m in encoder.modules()}


def clean_name(name: str) -> str:
    """Return a module's name without the wrappers' parts."""
    name += "."
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.strip(".")
