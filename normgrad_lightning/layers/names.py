"""Which layers a name, a glob or a list of these means."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from normgrad_lightning.layers.layouts import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from normgrad_lightning.layers.module_tree import clean_name, is_compiled, named_modules
from normgrad_lightning.layers.own_passes import current_pass

AUTO = "auto"
WEIGHTED = (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, nn.Linear)


def check_model(model: object) -> None:
    """Raise if `model` is not a module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model`: expected a torch.nn.Module, but got {type(model).__name__!r}.")


def check_spec(spec: object) -> None:
    """Raise if `spec` cannot name layers of any model."""
    names = [spec] if isinstance(spec, str) else spec
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f'`layers`: expected "auto", a layer\'s name, a glob or a list of these, but got {spec!r}. '
            "The names are those of `model.named_modules()`."
        )


def match_layers(model: nn.Module, spec: str | Sequence[str], target: str = "output") -> list[str]:
    """Return the names of the layers that names and globs mean, in the order in which the network was built.

    With `target="weight"` a glob takes only convolutions and linear layers; naming another layer is an error.
    """
    layers = named_layers(model)
    patterns = [clean_name(pattern) for pattern in ([spec] if isinstance(spec, str) else spec)]
    aliases = {name: name for name in layers} if layers.keys() >= set(patterns) else _aliases(model, layers)
    chosen: set[str] = set()
    for pattern in patterns:
        known = [pattern] if pattern in aliases else [n for n in aliases if _fits(n.split("."), pattern.split("."))]
        matches = [aliases[name] for name in known]
        if not matches:
            raise ValueError(f"`layers`: {_no_match(pattern, layers)}")
        fitting = [name for name in matches if target != "weight" or why_no_weight(layers[name]) is None]
        if not fitting:
            raise ValueError(
                f'`layers`: `target="weight"` cannot read {pattern!r}: {why_no_weight(layers[matches[0]])}. '
                'Use `target="output"`.'
            )
        chosen.update(fitting)
    return [name for name in layers if name in chosen]


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return every module below `model` that takes hooks, by the name its author gave it (without what wrappers add).

    Nothing inside a compiled module takes hooks, except in the package's own passes, which run it eagerly. Scripted
    modules take no hooks at all. Parametrisations give weights, not features.
    """
    layers: dict[str, nn.Module] = {}
    sealed: tuple[str, ...] = ()
    for name, module in named_modules(model):
        if name.startswith(sealed):
            continue
        if isinstance(module, ParametrizationList):
            sealed += (f"{name}.",)
            continue
        scripted = isinstance(module, torch.jit.ScriptModule)
        compiled = is_compiled(module) and current_pass() is None
        if scripted or compiled:
            sealed += (f"{name}." if name else "",)
        border_is_open = not compiled or getattr(module, "_compiled_call_impl", None) is None
        by_author = clean_name(name)
        if by_author and border_is_open and not scripted:
            layers.setdefault(by_author, module)
    return layers


def _aliases(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Return the name that a layer is listed under, by each of its names: a shared layer has several."""
    goes_by = {id(layer): name for name, layer in layers.items()}
    everywhere = ((clean_name(name), module) for name, module in model.named_modules(remove_duplicate=False))
    return {name: goes_by[id(module)] for name, module in everywhere if name and id(module) in goes_by}


def why_no_weight(layer: nn.Module) -> str | None:
    """Return why there can be no map of this layer's own weight; None if there can."""
    kind = next((kind for kind in WEIGHTED if isinstance(layer, kind)), None)
    if kind is None:
        return f"{type(layer).__name__} is neither a convolution nor a linear layer"
    own = type(layer)
    changed = [
        name for name in ("forward", "_conv_forward") if getattr(own, name, None) is not getattr(kind, name, None)
    ]
    if changed:
        return f"{own.__name__} overrides `{kind.__name__}.{changed[0]}`, so the patches it reads are not known"
    return None


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Return whether the parts of a name fit the parts of a glob."""
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_fits(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])


def _no_match(pattern: str, layers: Mapping[str, nn.Module]) -> str:
    below = [name for name in layers if name.endswith(f".{pattern}")]
    near = difflib.get_close_matches(pattern, [*layers, AUTO], n=5, cutoff=0.4)
    nearest = list(dict.fromkeys(below + near))[:5]
    if "," in pattern:
        hint = "Several names are a list: ['a', 'b']; [a,b] on a command line."
    elif nearest:
        hint = f"Nearest names: {', '.join(nearest)}."
    else:
        hint = f"The first names are {', '.join(list(layers)[:5])}." if layers else "The model has no layers inside."
    return f"expected names or globs of the model's layers, but {pattern!r} matches none. {hint}"
