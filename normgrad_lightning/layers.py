"""Which modules to look at: exact names, globs, lists of these, and `"auto"`.

`"auto"` cannot be decided from the modules alone: a layer's resolution is known once an image has gone through. A
`Scout` watches one forward pass and finds the layers on a grid, and the image itself; `choose` picks among them.
"""

from __future__ import annotations

import difflib
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.hooks import Hook, current_backward, first_tensor, floating_tensors
from normgrad_lightning.isolation import current_pass, own_pass, run_isolated
from normgrad_lightning.tokens import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS, Layout, infer_layout, patch_grid

AUTO = "auto"
MAX_AUTO_LAYERS = 5
TARGETS = {
    "output": "the identity trick at a module's output",
    "input": "the identity trick at a module's input",
    "weight": "the own weight of a convolution or a linear layer",
}
WEIGHTED = (*CONVOLUTIONS, *TRANSPOSED_CONVOLUTIONS, nn.Linear)
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
_PLAIN_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def select_layers(model: nn.Module, spec: str | Sequence[str] = AUTO, inputs: Any = None) -> list[str]:
    """The names of the layers that `spec` means.

    Args:
        model: any module.
        spec: `"auto"`, a name, a glob such as `"layer*.1"`, or a list of names and globs. `*` stays within one part of
            a name (`"layer*"` is `layer1` to `layer4`, not `layer1.0`); `**` stands for any number of parts.
        inputs: what to call the model with, to decide `"auto"`: a tensor, a tuple of arguments or a dict of keywords.

    Returns:
        Names as in `model.named_modules()`: as the network runs for `"auto"`, as it is built otherwise.

    Raises:
        ValueError: a name that matches nothing, with the nearest names, or `"auto"` without inputs.
    """
    check_spec(spec)
    if spec != AUTO:
        return match_layers(model, spec)
    if inputs is None:
        raise ValueError(
            '`inputs`: "auto" decides from what the network does with real inputs, but got None. '
            "Pass an example batch, or name the layers."
        )
    with torch.no_grad(), own_pass(), Scout(model) as scout:
        run_isolated(model, lambda stand_in: _call(stand_in, inputs))
    return scout.choose()


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
    for pattern in [spec] if isinstance(spec, str) else spec:
        known = [pattern] if pattern in aliases else [n for n in aliases if _fits(n.split("."), pattern.split("."))]
        matches = [aliases[name] for name in known]
        if not matches:
            raise ValueError(f"`layers`: {_no_match(pattern, layers)}")
        fitting = [name for name in matches if target != "weight" or why_no_weight(layers[name]) is None]
        if not fitting:
            raise ValueError(
                f'`layers`: `target="weight"` cannot read {pattern!r}: {why_no_weight(layers[matches[0]])}.'
            )
        chosen.update(fitting)
    return [name for name in layers if name in chosen]


def named_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Every module below `model` that takes hooks, by the name its author gave it (without what wrappers add).

    Compiled modules are shown from outside only: a hook inside would be compiled into them and change their bits.
    Scripted modules take no hooks at all.
    """
    layers: dict[str, nn.Module] = {}
    sealed: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(sealed):
            continue
        closed = is_compiled(module) or isinstance(module, torch.jit.ScriptModule)
        if closed:
            sealed += (f"{name}." if name else "",)
        if clean_name(name) and (not closed or _is_compile_wrapper(module)):
            layers.setdefault(clean_name(name), module)
    return layers


def is_compiled(module: nn.Module) -> bool:
    """Whether a call of this module, or Lightning's of its steps, runs compiled code."""
    in_place = getattr(module, "_compiled_call_impl", None) or getattr(module, "_compiler_ctx", None)
    return _is_compile_wrapper(module) or in_place is not None


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
        return (
            f"{own.__name__} overrides `{kind.__name__}.{changed[0]}`, so the patches it reads are not known. "
            'Use `target="output"`'
        )
    return None


@dataclass(frozen=True)
class Sighting:
    """A layer seen at work. Layers that hand on one tensor unchanged have the same `tensor` number."""

    name: str
    layer: nn.Module
    layout: Layout
    tensor: int


class Entry:
    """Images that entered a network, and what of them tells the layout of its features.

    Args:
        number: counts the entries.
        t: what the network, or the part of it that was called, was given.
        layer: what it was given to.
        num_images: how many to keep.
    """

    def __init__(self, number: int, t: Tensor, layer: nn.Module, num_images: int | None) -> None:
        self.number = number
        self.wants_gradient = t.requires_grad
        self.take(t, layer, num_images)

    def take(self, t: Tensor, layer: nn.Module, num_images: int | None) -> None:
        """Take `t`, given to `layer`, for the images: the nearer to the weights, the better."""
        self.shape = t.shape
        self.images = t.detach()[:num_images]
        self.patch_grid = patch_grid(layer, t.shape)
        self.is_sure = _convolves(layer, t)


class Scout:
    """Watches forward passes: where images enter, and which layers give features on which grid.

    Images enter where a network is called from outside of any other: `training_step` may call several, or one several
    times. The image is what the first convolution inside reads (what the network saw, after every augmentation), or
    else what the network was given.

    Args:
        model: the model to watch.
        target: whether a layer's output or its input is the point to look at.
        num_images: how many images of a batch to keep; None: all.
        token_grid: see `infer_layout`.
        channels_last: see `infer_layout`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        target: str = "output",
        num_images: int | None = None,
        token_grid: Sequence[int] | None = None,
        channels_last: bool | None = None,
    ) -> None:
        self.enabled = True
        self.searching = True
        self.entry: Entry | None = None
        self.has_seen_image = False
        self.sightings: list[Sighting] = []
        self.failures: dict[str, Exception] = {}
        self._target = target
        self._num_images = num_images
        self._token_grid = token_grid
        self._channels_last = channels_last
        self._layers = {"": model, **named_layers(model)}
        self._mixes_batch_and_tokens = any(getattr(m, "batch_first", True) is False for m in model.modules())
        self._pass = current_pass()
        self._doors: set[str] = set()
        self._open: list[str] = []
        self._called: set[str] = set()
        self._awaits_images = True
        self._entries = 0
        self._sighted_in: dict[str, int] = {}
        self._last_tensor: tuple[Callable[[], Tensor | None], int] = (lambda: None, -1)
        self._tensors = 0
        self._handles: list[RemovableHandle] = []
        self._stale = False

    def __enter__(self) -> Scout:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Put hooks on every layer while searching; after that, only where images were seen to enter."""
        for name, layer in self._layers.items():
            if self.searching or name in self._doors:
                see_input, see_output = Hook(self._see_input, name), Hook(self._see_output, name)
                # First of all hooks: whoever reads the layer needs to know the image.
                self._handles.append(layer.register_forward_pre_hook(see_input, with_kwargs=True, prepend=True))
                self._handles.append(layer.register_forward_hook(see_output, with_kwargs=True))

    def detach(self) -> None:
        """Take the hooks off again."""
        while self._handles:
            self._handles.pop().remove()

    def settle(self) -> None:
        """End the search once it has seen images: keep watching only where they enter."""
        if self.searching and self.has_seen_image:
            self.searching = False
            self.sightings.clear()
            if self._handles:
                self.detach()
                self.attach()

    def end_step(self) -> None:
        """A gradient has come: whatever is called next belongs to another step."""
        self._stale = True

    def clear(self) -> None:
        """Forget the steps before, and what was seen in them."""
        self._begin_step()
        self.sightings.clear()
        self._sighted_in.clear()

    def renew(self) -> bool:
        """Begin a new step if it is time to; False if what is called now counts for nothing.

        Switched off, nothing counts; nor do passes of ours while training is watched, nor what checkpointing repeats
        during a backward pass.
        """
        if not self.enabled or current_pass() is not self._pass or current_backward() >= 0:
            return False
        if self._stale:
            self._begin_step()
        return True

    def _begin_step(self) -> None:
        self._stale = False
        self.entry = None
        self._open.clear()
        self._called.clear()
        self._awaits_images = True

    def failed(self, name: str, error: Exception) -> None:
        """Take note of an error in a hook."""
        self.failures.setdefault(name, error)

    def layout(self, layer: nn.Module, t: Tensor) -> Layout:
        """How to read `t`, a tensor of this layer, as features on a grid."""
        if self._mixes_batch_and_tokens and t.dim() == 3 and t.shape[0] == t.shape[1]:
            raise ValueError(
                f"its shape {tuple(t.shape)} does not tell tokens from images, as the model has parts with "
                "`batch_first=False`. Use another batch size"
            )
        return infer_layout(
            t.shape,
            None if self.entry is None else self.entry.shape,
            layer,
            patch_grid=None if self.entry is None else self.entry.patch_grid,
            token_grid=self._token_grid,
            channels_last=self._channels_last,
            of_input=self._target == "input",
        )

    def point(self, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """The tensor to look at in a layer's call, input or output: of several, the first that can be on a grid."""
        candidates = list(floating_tensors((args, kwargs) if self._target == "input" else output))
        return next((t for t in candidates if t.dim() >= 3), candidates[0] if candidates else None)

    def choose(self, reached: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The layers for `"auto"` among the sightings that `reached` accepts (for weights, among those with one)."""
        readable = [s for s in self.sightings if self._target != "weight" or why_no_weight(s.layer) is None]
        return choose([s for s in readable if reached(s.name)])

    def _see_input(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.renew():
            return
        t = first_tensor((args, kwargs))
        if not self._open:
            self._awaits_images |= name in self._called or t is None or not t.requires_grad
            self._called.add(name)
            self._doors.add(name)
        self._open.append(name)
        if t is not None and t.dim() >= 3 and math.prod(t.shape[2:]) > 1:
            self._consider(name, layer, t)

    def _consider(self, name: str, layer: nn.Module, t: Tensor) -> None:
        """Take `t` for images that enter, if that is what it is."""
        entry = self.entry
        if self._awaits_images and (t.dim() >= 4 or _convolves(layer, t)) and self._may_follow(entry, t):
            self._awaits_images = False
            self._entries += 1
            self.entry = Entry(self._entries, t, layer, self._num_images)
        elif (
            entry is not None and not entry.is_sure and _convolves(layer, t) and entry.wants_gradient >= t.requires_grad
        ):
            entry.take(t, layer, self._num_images)
        else:
            return
        self.has_seen_image = True
        self._doors.add(name)

    def _may_follow(self, entry: Entry | None, t: Tensor) -> bool:
        """Features that a frozen part hands on are no new images: these have the channels of those before."""
        return entry is None or (t.dim() == len(entry.shape) and t.shape[1] == entry.shape[1])

    def _see_output(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.renew():
            return
        if name in self._open:
            del self._open[self._open.index(name) :]
        if self.searching:
            self._sight(name, layer, first_tensor((args, kwargs)) if self._target == "input" else output)

    def _sight(self, name: str, layer: nn.Module, t: Any) -> None:
        if not isinstance(t, Tensor) or self._sighted_in.setdefault(name, self._entries) != self._entries:
            return
        try:
            layout = self.layout(layer, t)
        except ValueError:
            return
        seen, version = self._last_tensor
        if seen() is not t or version != t._version:
            self._tensors += 1
            self._last_tensor = (weakref.ref(t), t._version)
        self.sightings.append(Sighting(name, layer, layout, self._tensors))


def choose(sightings: Sequence[Sighting]) -> list[str]:
    """The last layer of each resolution, five at the most; evenly spaced blocks where there is just one resolution.

    Args:
        sightings: what was seen, in the order in which the network runs.
    """
    grids: dict[str, set[tuple[int, ...]]] = defaultdict(set)
    for s in sightings:
        grids[s.name].add(s.layout.grid)
    usable = [s for s in sightings if len(grids[s.name]) == 1 and math.prod(s.layout.grid) > 1 and _learns(s)]
    ends: dict[tuple[int, ...], Sighting] = {}
    for s in usable:
        rival = ends.get(s.layout.grid)
        if rival is None or _detours(s, grids) <= _detours(rival, grids):
            ends.pop(s.layout.grid, None)
            ends[s.layout.grid] = s
    if len(ends) == 1:
        return _evenly_spaced(_blocks(usable))
    last = list(ends.values())[-MAX_AUTO_LAYERS:]
    return [_representative(end, last, usable) for end in last]


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


def _convolves(layer: nn.Module, t: Tensor) -> bool:
    return isinstance(layer, CONVOLUTIONS) and t.dim() == len(layer.kernel_size) + 2


def _has_weights(layer: nn.Module) -> bool:
    return next(layer.parameters(), None) is not None


def _representative(end: Sighting, ends: Sequence[Sighting], usable: Sequence[Sighting]) -> str:
    """The best name for the tensor at `end`: the outermost block that gives it, else the innermost layer.

    A block that holds another of the chosen places is the network rather than a layer of it.
    """
    names = [s.name for s in usable if s.tensor == end.tensor]
    blocks = [s.name for s in usable if s.tensor == end.tensor and _is_block(s.layer)]
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


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


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
    hint = f"Nearest names: {', '.join(nearest)}." if nearest else f"Names begin with {', '.join(list(layers)[:5])}."
    return f"expected names or globs of the model's layers, but {pattern!r} matches none. {hint}"
