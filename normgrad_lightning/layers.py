"""Which modules to look at: exact names, globs, lists of these, and what `"auto"` takes of layers seen at work."""

from __future__ import annotations

import difflib
import math
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from normgrad_lightning.isolation import current_pass, runs_eagerly
from normgrad_lightning.tokens import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, Layout

AUTO = "auto"
MAX_AUTO_LAYERS = 5
TARGETS = {
    "output": "the identity trick at a module's output",
    "input": "the identity trick at a module's input",
    "weight": "the own weight of a convolution or a linear layer",
}
WEIGHTED = (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, nn.Linear)
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_NO_FUNCTIONS = frozenset({bool, int, float, str, type(None), tuple, list, dict, OrderedDict, set, torch.Size})
_PLAIN_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def check_model(model: object) -> None:
    """Raise if `model` is no module."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"`model`: expected a torch.nn.Module, but got {type(model).__name__!r}.")


def check_spec(spec: object) -> None:
    """Raise if `spec` cannot name layers at all."""
    names = [spec] if isinstance(spec, str) else spec
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f'`layers`: expected "auto", a layer\'s name, a glob or a list of these, but got {spec!r}. '
            "The names are those of `model.named_modules()`."
        )


def match_layers(model: nn.Module, spec: str | Sequence[str], target: str = "output") -> list[str]:
    """The layers that names and globs mean, in the order in which the network was built.

    With `target="weight"` a glob takes just the convolutions and linear layers it matches; naming another is an error.
    """
    layers = named_layers(model)
    aliases = _aliases(model, layers)
    chosen: set[str] = set()
    for pattern in map(clean_name, [spec] if isinstance(spec, str) else spec):
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
    """Every module below `model` that takes hooks, by the name its author gave it (without what wrappers add).

    Compiled modules are shown from outside only, as hooks are not seen by compiled code; but whole in a pass of ours,
    which runs them eagerly. Scripted modules take no hooks at all. Parametrisations give weights, not features.
    """
    layers: dict[str, nn.Module] = {}
    sealed: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(sealed):
            continue
        if isinstance(module, ParametrizationList):
            sealed += (f"{name}.",)
            continue
        scripted = isinstance(module, torch.jit.ScriptModule)
        compiled = is_compiled(module) and not runs_eagerly()
        if scripted or compiled:
            sealed += (f"{name}." if name else "",)
        border_is_open = not compiled or getattr(module, "_compiled_call_impl", None) is None
        if clean_name(name) and border_is_open and not scripted:
            layers.setdefault(clean_name(name), module)
    return layers


def with_fast_path(model: nn.Module) -> set[nn.Module]:
    """Torch's own encoder layers, and all that is in them.

    In eval mode they run faster code, with other bits, unless there are hooks on them or in them. In passes of ours
    they never do.
    """
    if current_pass() is not None:
        return set()
    forward = nn.TransformerEncoderLayer.forward
    encoders = [m for m in all_modules(model) if getattr(type(m), "forward", None) is forward]
    return {m for encoder in encoders for m in encoder.modules()}


def all_modules(model: nn.Module) -> list[nn.Module]:
    """The same modules as `model.modules()`, in another order and several times faster."""
    found: dict[nn.Module, None] = {}
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module is not None and module not in found:
            found[module] = None
            waiting += module._modules.values()  # type: ignore[arg-type]
    return list(found)


@dataclass(frozen=True)
class Waypoint:
    """A module on the way to others: what it holds, and whether it is compiled."""

    module: nn.Module
    children: list[nn.Module | None]
    compiled: bool

    @classmethod
    def of(cls, module: nn.Module) -> Waypoint:
        """As it is now."""
        return cls(module, list(module._modules.values()), is_compiled(module))

    def is_as_it_was(self) -> bool:
        """Whether nothing of this has changed since."""
        return list(self.module._modules.values()) == self.children and is_compiled(self.module) is self.compiled


def ways_to(model: nn.Module, modules: Iterable[nn.Module]) -> list[Waypoint]:
    """All modules on the ways from `model` to these, with both ends, each once."""
    held_by = {child: parent for parent in all_modules(model) for child in parent._modules.values()}
    seen: dict[nn.Module, Waypoint] = {}
    for module in modules:
        here: nn.Module | None = module
        while here is not None and here not in seen:
            seen[here] = Waypoint.of(here)
            here = held_by.get(here)
    return list(seen.values())


def compiled_layers(model: nn.Module) -> list[str]:
    """The names of the outermost modules that run compiled code; the model's own is empty."""
    names: list[str] = []
    for name, module in model.named_modules():
        if not any(name.startswith(f"{outer}." if outer else "") for outer in names) and is_compiled(module):
            names.append(name)
    return [clean_name(name) for name in names]


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of this module or of one of its methods, such as Lightning's steps, runs compiled code."""
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
    """Whether the class has methods under `@torch.compile`."""
    return any(_is_compiled_function(member) for base in kind.__mro__ for member in vars(base).values())


def _is_compile_wrapper(module: nn.Module) -> bool:
    """Whether it is what `torch.compile(module)` gives, whose own hooks run outside of the compiled code."""
    return "_orig_mod" in module._modules


def _aliases(model: nn.Module, layers: Mapping[str, nn.Module]) -> dict[str, str]:
    """Every name that a layer has (a shared one has several), and the one it goes by."""
    goes_by = {id(layer): name for name, layer in layers.items()}
    everywhere = ((clean_name(name), module) for name, module in model.named_modules(remove_duplicate=False))
    return {name: goes_by[id(module)] for name, module in everywhere if name and id(module) in goes_by}


def clean_name(name: str) -> str:
    """A module's name without the wrappers' parts."""
    name += "."
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name.strip(".")


def why_no_weight(layer: nn.Module) -> str | None:
    """Why the map of this layer's own weight cannot be known; None if it can."""
    kind = next((kind for kind in WEIGHTED if isinstance(layer, kind)), None)
    if kind is None:
        return f"{type(layer).__name__} is no convolution and no linear layer"
    own = type(layer)
    changed = [
        name for name in ("forward", "_conv_forward") if getattr(own, name, None) is not getattr(kind, name, None)
    ]
    if changed:
        return f"{own.__name__} overrides `{kind.__name__}.{changed[0]}`, so the patches it reads are not known"
    return None


@dataclass(frozen=True)
class Sighting:
    """A layer seen at work. Layers that hand on one tensor unchanged have the same `tensor` number."""

    name: str
    layer: nn.Module
    layout: Layout
    tensor: int


def choose(sightings: Sequence[Sighting]) -> list[str]:
    """The last layer of each resolution, five at the most; evenly spaced blocks where there is just one resolution.

    Args:
        sightings: what was seen, in the order in which the network runs.
    """
    grids: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for s in sightings:
        grids[s.name].add(s.layout.grid)
    usable = [s for s in sightings if len(grids[s.name]) == 1 and math.prod(s.layout.grid) > 1 and _learns(s)]
    usable = _without_windows(usable)
    ends: dict[tuple[int, ...], Sighting] = {}
    for s in usable:
        rival = ends.get(s.layout.grid)
        if rival is None or _detours(s, grids) <= _detours(rival, grids):
            ends.pop(s.layout.grid, None)
            ends[s.layout.grid] = s
    if len(ends) == 1:
        return _evenly_spaced(_blocks(usable))
    last = list(ends.values())[-MAX_AUTO_LAYERS:]
    return list(dict.fromkeys(_representative(end, last, usable) for end in last))


def _without_windows(sightings: Sequence[Sighting]) -> list[Sighting]:
    """The sightings without those whose axes only look like a grid: attention's windows, and what they hold.

    The cells of a grid that was seen before are cut into windows, so there are as many of them. And a layer without
    weights tells nothing of its axes: some layer with weights must be on the same grid.
    """
    with_weights = {s.layout.grid for s in sightings if _has_weights(s.layer)}
    first: dict[int, tuple[int, ...]] = {}
    for s in sightings:
        if s.layout.grid in with_weights:
            first.setdefault(math.prod(s.layout.grid), s.layout.grid)
    return [s for s in sightings if first.get(math.prod(s.layout.grid)) == s.layout.grid]


def _detours(s: Sighting, grids: Mapping[str, set[tuple[int, ...]]]) -> int:
    """How many of the blocks around a layer end on another grid: it is the inside of a step to the next resolution."""
    parts = s.name.split(".")
    around = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    return sum(s.layout.grid not in grids[name] for name in around if name in grids)


def _learns(s: Sighting) -> bool:
    """Whether a layer computes features: it has weights or is an activation, and is more than a list of layers."""
    if s.name == "" or type(s.layer) in _PLAIN_CONTAINERS:
        return False
    return _has_weights(s.layer) or type(s.layer).__module__ == nn.ReLU.__module__


def _has_weights(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None


def _representative(end: Sighting, ends: Sequence[Sighting], usable: Sequence[Sighting]) -> str:
    """The best name for the tensor at `end`: the outermost block that gives it, else the innermost layer.

    A block that holds another of the chosen places is the network rather than a layer of it.
    """
    same = [s for s in usable if s.tensor == end.tensor and s.layout.grid == end.layout.grid]
    names = [s.name for s in same]
    blocks = [s.name for s in same if _is_block(s.layer)]
    others = [other.name for other in ends if other is not end]
    narrow = [name for name in blocks if not any(other.startswith(f"{name}.") for other in others)]
    return narrow[-1] if narrow else names[0]


def _is_block(layer: nn.Module) -> bool:
    return _has_weights(layer) and next(layer.children(), None) is not None


def _blocks(usable: Sequence[Sighting]) -> list[str]:
    """The largest family of sibling blocks of one class, in running order; without one, all layers with weights."""
    families: dict[tuple[str, type], dict[str, Sighting]] = defaultdict(dict)
    for s in usable:
        if _is_block(s.layer):
            families[s.name.rpartition(".")[0], type(s.layer)][s.name] = s
    family = max(families.values(), key=len, default={})
    if len(family) < 2:
        return list(dict.fromkeys(s.name for s in usable if _has_weights(s.layer) and not _is_block(s.layer)))
    names = list(family)
    # With a class token, the head reads that token alone: the patch tokens of the last block get no gradient.
    return names[:-1] if family[names[-1]].layout.prefix else names


def _evenly_spaced(names: Sequence[str]) -> list[str]:
    """At most five names, the first and the last among them."""
    count = min(MAX_AUTO_LAYERS, len(names))
    steps = max(count - 1, 1)
    return [names[round(i * (len(names) - 1) / steps)] for i in range(count)]


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether the parts of a name fit the parts of a glob."""
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
