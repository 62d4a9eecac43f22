"""Random small networks: training keeps its bits under the recorder, and every map is that of a slow oracle.

Nobody lists by hand all the ways in which convolutions, in-place operations, shared layers, checkpoints, attention and
frozen parts can meet. Here they are drawn. A description of a network is a tuple of small dataclasses, so that what
Hypothesis prints of a failure can be read, and pasted into `Example` again.

The oracle shares nothing with the package: a copy of the network in the same state is run with a tap at each layer that
keeps its input, its output and their gradients, and explicit outer products are made of them.
"""

from __future__ import annotations

import copy
import math
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twice import Lit, Moment, assert_same, at, hooks_on, random_state, same, set_random_state, train

from normgrad_lightning import NormGrad, NormGradCallback

CLASSES = 5
STEPS = 2
TARGETS = ("output", "input", "weight")
WEIGHTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
TOLERANCE = {torch.float64: (1e-10, 1e-14), torch.float32: (1e-4, 1e-6)}
"""How far a map may be from the oracle's: as a share of it in the L2 norm, and where there is nothing but rounding."""
ACTIVATIONS = {"ReLU": True, "LeakyReLU": True, "SiLU": True, "Hardswish": True, "GELU": False, "Softplus": False}
"""Which can work in place."""

examples = settings(
    derandomize=True,
    max_examples=50,
    database=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    report_multiple_bugs=False,
    suppress_health_check=list(HealthCheck),
)
few_examples = settings(examples, max_examples=12)
many_examples = settings(examples, max_examples=2000)


# ---------------------------------------------------------------- descriptions, and the modules they describe


@dataclass(frozen=True)
class Conv:
    out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...] | int = 1
    padding: tuple[int, ...] | str = "valid"
    dilation: tuple[int, ...] | int = 1
    groups: int = 1
    bias: bool = True
    mode: str = "zeros"
    normed: str = ""

    def build(self, channels: int, axes: int) -> nn.Module:
        options = {"dilation": self.dilation, "groups": self.groups, "bias": self.bias, "padding_mode": self.mode}
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        conv = kind(channels, self.out, self.kernel, self.stride, self.padding, **options)
        return getattr(parametrizations, self.normed)(conv) if self.normed else conv


@dataclass(frozen=True)
class Transposed:
    out: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    more: tuple[int, ...]
    groups: int = 1
    bias: bool = True

    def build(self, channels: int, axes: int) -> nn.Module:
        kind = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        return kind(channels, self.out, self.kernel, self.stride, self.padding, self.more, self.groups, self.bias)


@dataclass(frozen=True)
class Pool:
    kind: str
    size: int

    def build(self, channels: int, axes: int) -> nn.Module:
        return getattr(nn, f"{self.kind}Pool{axes}d")(self.size)


@dataclass(frozen=True)
class Norm:
    kind: str

    def build(self, channels: int, axes: int) -> nn.Module:
        if self.kind in ("Group", "Layer"):  # a LayerNorm of images is a GroupNorm with one group
            return nn.GroupNorm(1 if self.kind == "Layer" else 2, channels)
        return getattr(nn, f"{self.kind}Norm{axes}d")(channels, affine=True)


@dataclass(frozen=True)
class Act:
    kind: str
    inplace: bool = False

    def build(self, channels: int, axes: int) -> nn.Module:
        return getattr(nn, self.kind)(**({"inplace": True} if self.inplace else {}))


@dataclass(frozen=True)
class Dropout:
    p: float
    inplace: bool = False

    def build(self, channels: int, axes: int) -> nn.Module:
        return nn.Dropout(self.p, self.inplace)


@dataclass(frozen=True)
class Attention:
    kind: str
    heads: int = 1
    dropout: float = 0.0

    def build(self, channels: int, axes: int) -> nn.Module:
        if self.kind == "multihead":
            return OnTokens(SelfAttention(nn.MultiheadAttention(channels, self.heads, self.dropout, batch_first=True)))
        return OnTokens(nn.TransformerEncoderLayer(channels, self.heads, 61, self.dropout, batch_first=True))


@dataclass(frozen=True)
class Block:
    """A body that is used in one of the ways of `BLOCKS`."""

    kind: str
    body: tuple[Any, ...]

    def build(self, channels: int, axes: int) -> nn.Module:
        body = sequence(self.body, channels, axes)
        return BLOCKS[self.kind](body)


@dataclass(frozen=True)
class Example:
    """A network, its images and how it is looked at."""

    size: tuple[int, ...]
    layers: tuple[Any, ...]
    channels: int = 2
    batch: int = 2
    frozen: int = 0
    head: str = "flat"
    dtype: torch.dtype = torch.float64
    channels_last: bool = False
    num_images: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def build(self) -> Network:
        torch.manual_seed(0)
        network = Network(self)
        for block in list(network.blocks)[: self.frozen]:
            block.requires_grad_(False)
        network = network.to(self.dtype)
        return network.to(memory_format=self.memory_format) if self.channels_last else network

    @property
    def memory_format(self) -> torch.memory_format:
        return torch.channels_last if len(self.size) == 2 else torch.channels_last_3d

    def data(self, count: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(count, self.channels, *self.size, generator=generator, dtype=self.dtype)
        labels = torch.randint(CLASSES, (count,), generator=generator)
        return (images.to(memory_format=self.memory_format) if self.channels_last else images), labels


class OnTokens(nn.Module):
    """Runs a module on the locations of a grid as a sequence of tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        self.grid = tuple(x.shape[2:])
        return self.inner(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, self.grid)


class SelfAttention(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, t: Tensor) -> Tensor:
        return self.attention(t, t, t)[0]


class Residual(nn.Module):
    def __init__(self, body: nn.Module, inplace: bool) -> None:
        super().__init__()
        self.body, self.inplace = body, inplace

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x)
        if self.inplace:
            out += x
            return out
        return out + x


class Twice(nn.Module):
    def __init__(self, body: nn.Module, between: nn.Module) -> None:
        super().__init__()
        self.body, self.between = body, between

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.between(self.body(x)))


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        every_other = x[(..., *[slice(None, None, 2)] * (x.dim() - 2))]
        return every_other.contiguous()  # random masks depend on strides, which copies of the taps would not keep


class Giver(nn.Module):
    """Gives more than its features: as a tuple or a dict."""

    def __init__(self, body: nn.Module, kind: type) -> None:
        super().__init__()
        self.body, self.kind = body, kind

    def forward(self, x: Tensor) -> Any:
        features = self.body(x)
        if self.kind is dict:
            return {"images": torch.tensor(len(x)), "features": features, "mean": features.mean()}
        return features, 2 * features


class Taker(nn.Module):
    def __init__(self, body: nn.Module, kind: type) -> None:
        super().__init__()
        self.giver = Giver(body, kind)

    def forward(self, x: Tensor) -> Tensor:
        given = self.giver(x)
        if isinstance(given, dict):
            return given["features"] * (1 + given["mean"])
        return given[0]


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.body, self.reentrant = body, reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant)


BLOCKS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "sequence": lambda body: body,
    "residual": lambda body: Residual(body, inplace=False),
    "residual in place": lambda body: Residual(body, inplace=True),
    "twice": lambda body: Twice(body, nn.Identity()),
    "twice, then coarser": lambda body: Twice(body, Halved()),
    "tuple": lambda body: Taker(body, tuple),
    "dict": lambda body: Taker(body, dict),
    "checkpoint": lambda body: Checkpointed(body, reentrant=False),
    "reentrant checkpoint": lambda body: Checkpointed(body, reentrant=True),
}


class Network(nn.Module):
    def __init__(self, example: Example) -> None:
        super().__init__()
        axes = len(example.size)
        self.blocks = sequence(example.layers, example.channels, axes)
        features = copy.deepcopy(self.blocks).eval()(torch.zeros(1, example.channels, *example.size))
        self.flatten = example.head == "flat"
        self.head = nn.Linear(features[0].numel() if self.flatten else features.shape[1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(x)
        return self.head(x.flatten(1) if self.flatten else x.flatten(2).mean(2))


def sequence(layers: tuple[Any, ...], channels: int, axes: int) -> nn.Sequential:
    built = []
    for layer in layers:
        built.append(layer.build(channels, axes))
        channels = width(layer, channels)
    return nn.Sequential(*built)


def width(layer: Any, channels: int) -> int:
    """How many channels a layer gives."""
    return layer.out if isinstance(layer, Conv | Transposed) else channels


def leaves(layers: tuple[Any, ...]) -> Iterator[Any]:
    """The layers inside of all blocks."""
    for layer in layers:
        yield from leaves(layer.body) if isinstance(layer, Block) else (layer,)


def drops_out(layers: tuple[Any, ...]) -> bool:
    return any(getattr(leaf, "p", 0.0) or getattr(leaf, "dropout", 0.0) for leaf in leaves(layers))


def shares_tensors(layers: tuple[Any, ...]) -> bool:
    """Whether the first layer of a residual body hands on its very input: the shortcut sees what becomes of it."""
    blocks = [layer for layer in layers if isinstance(layer, Block)]
    first = [next(leaves(block.body)) for block in blocks if "residual" in block.kind]
    hands_on = any(getattr(leaf, "inplace", False) or getattr(leaf, "p", None) == 0.0 for leaf in first)
    return hands_on or any(shares_tensors(block.body) for block in blocks)


# ---------------------------------------------------------------- drawing


@dataclass
class Shape:
    """Where the strategy is in the network."""

    channels: int
    size: tuple[int, ...]
    batch: int
    token_grids: set[tuple[int, ...]] = field(default_factory=set)


def per_axis(draw: st.DrawFn, shape: Shape, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in shape.size)


def divisors(*numbers: int) -> st.SearchStrategy[int]:
    return st.sampled_from([d for d in range(1, min(numbers) + 1) if not any(n % d for n in numbers)])


@st.composite
def kept_convs(draw: st.DrawFn, shape: Shape) -> Conv:
    """Convolutions that keep the shape."""
    kernel = per_axis(draw, shape, 1, 3)
    dilation = draw(st.integers(1, 2))
    fits = all(dilation * (k - 1) < (size + 1) // 2 for k, size in zip(kernel, shape.size, strict=True))
    modes = ["zeros", "reflect", "replicate", "circular"] if fits else ["zeros"]
    return Conv(
        shape.channels,
        kernel,
        padding="same",
        dilation=dilation,
        groups=draw(divisors(shape.channels)),
        bias=draw(st.booleans()),
        mode=draw(st.sampled_from(modes)),
        normed=draw(st.sampled_from(["", "", "weight_norm", "spectral_norm"])),
    )


@st.composite
def convs(draw: st.DrawFn, shape: Shape) -> Conv:
    out = draw(st.sampled_from([4, 2, 3, 6]))
    padding = per_axis(draw, shape, 0, 2)
    small = any(p >= size for p, size in zip(padding, shape.size, strict=True))
    conv = Conv(
        out,
        per_axis(draw, shape, 1, 3),
        per_axis(draw, shape, 1, 2),
        padding,
        per_axis(draw, shape, 1, 2),
        draw(divisors(shape.channels, out)),
        draw(st.booleans()),
        "zeros" if small else draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        draw(st.sampled_from(["", "", "weight_norm", "spectral_norm"])),
    )
    padded = [size + 2 * p for size, p in zip(shape.size, padding, strict=True)]
    spans = [d * (k - 1) for k, d in zip(conv.kernel, conv.dilation, strict=True)]
    assume(all(s > span for s, span in zip(padded, spans, strict=True)))
    shape.size = tuple((s - span - 1) // step + 1 for s, span, step in zip(padded, spans, conv.stride, strict=True))
    shape.channels = out
    return conv


@st.composite
def transposed(draw: st.DrawFn, shape: Shape) -> Transposed:
    out = draw(st.sampled_from([4, 2, 3]))
    kernel, stride = per_axis(draw, shape, 1, 3), per_axis(draw, shape, 1, 2)
    padding = tuple(draw(st.integers(0, (k - 1) // 2)) for k in kernel)
    more = tuple(draw(st.integers(0, s - 1)) for s in stride)
    size = [
        (n - 1) * s - 2 * p + k + m for n, s, p, k, m in zip(shape.size, stride, padding, kernel, more, strict=True)
    ]
    assume(math.prod(size) <= 150)
    groups = draw(divisors(shape.channels, out))
    shape.size, shape.channels = tuple(size), out
    return Transposed(out, kernel, stride, padding, more, groups, draw(st.booleans()))


@st.composite
def pools(draw: st.DrawFn, shape: Shape) -> Pool:
    kind = draw(st.sampled_from(["Max", "Avg", "AdaptiveAvg", "AdaptiveMax"]))
    if "Adaptive" in kind:
        size = draw(st.integers(1, max(shape.size)))
        shape.size = (size,) * len(shape.size)
    else:
        size = draw(st.integers(1, min(2, *shape.size) if len(shape.size) > 1 else min(2, shape.size[0])))
        shape.size = tuple(s // size for s in shape.size)
    return Pool(kind, size)


@st.composite
def norms(draw: st.DrawFn, shape: Shape) -> Norm:
    locations = math.prod(shape.size)
    kinds = ["Layer"] if locations * shape.channels > 1 else []
    kinds += ["Batch"] if locations * shape.batch > 1 else []
    kinds += ["Instance"] if locations > 1 else []
    kinds += ["Group"] if shape.channels % 2 == 0 and locations * shape.channels > 2 else []
    assume(kinds)
    return Norm(draw(st.sampled_from(kinds)))


@st.composite
def acts(draw: st.DrawFn, shape: Shape) -> Act:
    kind = draw(st.sampled_from(list(ACTIVATIONS)))
    return Act(kind, ACTIVATIONS[kind] and draw(st.booleans()))


@st.composite
def dropouts(draw: st.DrawFn, shape: Shape) -> Dropout:
    return Dropout(draw(st.sampled_from([0.3, 0.0])), draw(st.booleans()))


@st.composite
def attentions(draw: st.DrawFn, shape: Shape) -> Attention:
    kind = draw(st.sampled_from(["multihead", "encoder"]))
    # With as many channels as columns, nothing tells whether the LayerNorm inside is over the one or the other.
    assume(shape.channels not in (shape.size[-1], (shape.size[-1] + 1) // 2))
    shape.token_grids.add(shape.size)
    return Attention(kind, draw(divisors(shape.channels)), draw(st.sampled_from([0.0, 0.3])))


KEEPING = (kept_convs, norms, acts, acts, dropouts, attentions)
CHANGING = (convs, convs, transposed, pools)
DEPTH = 2
"""How deep blocks are in blocks."""


@st.composite
def blocks(draw: st.DrawFn, shape: Shape, depth: int) -> Block:
    kind = draw(st.sampled_from([kind for kind in BLOCKS if depth == DEPTH or "coarser" not in kind]))
    body = draw(bodies(shape, depth - 1, 3, KEEPING))
    if kind == "twice, then coarser":
        shape.size = tuple((size + 1) // 2 for size in shape.size)
        if any(isinstance(leaf, Attention) for leaf in leaves(body)):
            shape.token_grids.add(shape.size)
        assume(math.prod(shape.size) > 2)
    return Block(kind, body)


@st.composite
def bodies(draw: st.DrawFn, shape: Shape, depth: int, most: int, kinds: tuple[Any, ...]) -> tuple[Any, ...]:
    layers: list[Any] = []
    for _ in range(draw(st.integers(1, most))):
        if depth and draw(st.integers(0, 2)) == 2:
            layers.append(draw(blocks(shape, depth)))
        else:
            layers.append(draw(draw(st.sampled_from(kinds))(shape)))
    return tuple(layers)


@st.composite
def networks(draw: st.DrawFn) -> Example:
    axes = draw(st.sampled_from([2, 2, 1, 3]))
    low, high = {1: (5, 12), 2: (4, 9), 3: (3, 4)}[axes]
    size = tuple(draw(st.integers(low, high)) for _ in range(axes))
    channels, batch = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    shape = Shape(channels, size, batch)
    stem = draw(convs(shape)) if draw(st.integers(0, 3)) else draw(kept_convs(shape))
    layers = (stem, *draw(bodies(shape, DEPTH, 5, KEEPING + CHANGING)))
    return Example(
        size,
        layers,
        channels,
        batch,
        frozen=draw(st.integers(0, len(layers))) if draw(st.integers(0, 3)) == 3 else 0,
        head=draw(st.sampled_from(["flat", "mean"])),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        # A dropout's mask follows the strides, and a tap's copy may have others where an axis has one cell.
        channels_last=axes > 1 and not drops_out(layers) and draw(st.booleans()),
        num_images=draw(st.sampled_from([None, None, 1, 2])),
        options=draw(hints(size, stem, shape.token_grids)),
    )


@st.composite
def hints(draw: st.DrawFn, size: tuple[int, ...], stem: Conv, token_grids: set[tuple[int, ...]]) -> dict[str, Any]:
    """What the user says of layouts: the grid of tokens if it cannot be inferred, and other things at will."""
    if not token_grids:
        return draw(st.sampled_from([{}, {"channels_last": False}]))
    cuts_patches = stem.kernel == stem.stride and not any(stem.padding)
    if len(size) == 1 or (not cuts_patches and all(is_made_of_patches(size, grid) for grid in token_grids)):
        return {}
    assume(len(token_grids) == 1)
    return {"token_grid": next(iter(token_grids))}


def is_made_of_patches(size: tuple[int, ...], grid: tuple[int, ...]) -> bool:
    """Whether a grid is that of square patches that cover the image."""
    patches = {pixels / cells for pixels, cells in zip(size, grid, strict=True)}
    return len(patches) == 1 and patches.pop() % 1 == 0 and math.prod(grid) > 1


# ---------------------------------------------------------------- the oracle


@dataclass
class Call:
    """What a tap saw of one call of a layer."""

    entered: Tensor
    grid: tuple[int, ...] | None
    x_in: Tensor
    x_out: Tensor | None = None
    g_in: Tensor | None = None
    g_out: Tensor | None = None
    asks: tuple[bool, bool] = (False, False)
    views: frozenset[str] = frozenset()
    has_graph: bool = field(default_factory=torch.is_grad_enabled)
    again: bool = field(default_factory=lambda: torch._C._current_graph_task_id() >= 0)

    def take_input(self, gradient: Tensor) -> None:
        self.g_in = gradient.clone()

    def take_output(self, gradient: Tensor) -> None:
        self.g_out = gradient.clone()

    def repeats(self, other: Call) -> bool:
        """Whether checkpointing has called the layer again with a tensor that it was called with before."""
        known, given = other.entered, self.entered
        same_place = known.grad_fn is given.grad_fn and known.output_nr == given.output_nr
        return self.again and other.has_graph and (known is given if known.grad_fn is None else same_place)


def features_of(output: Any) -> Tensor:
    """The features in what any of the modules here gives."""
    if isinstance(output, dict):
        return output["features"]
    return output[0] if isinstance(output, tuple) else output


def with_features(output: Any, features: Tensor) -> Any:
    if isinstance(output, dict):
        return {**output, "features": features}
    return (features, *output[1:]) if isinstance(output, tuple) else features


class Taps:
    """Sees every call of every layer of a network: values before anything works in place on them, and gradients.

    Args:
        network: a copy of its own.
        copies: whether layers hand on copies, so that what is kept cannot depend on how autograd treats tensors that
            were changed in place.
    """

    def __init__(self, network: nn.Module, copies: bool) -> None:
        self.calls: dict[str, list[Call]] = {}
        self.layers = {name: layer for name, layer in network.named_modules() if name}
        self._copies = copies
        holders = {name: layer for name, layer in self.layers.items() if isinstance(layer, OnTokens)}
        for name, layer in self.layers.items():
            self.calls[name] = []
            if "parametrizations" not in name:
                holder = next((holders[outer] for outer in holders if name.startswith(f"{outer}.")), None)
                self._tap(layer, self.calls[name], holder)

    def _tap(self, layer: nn.Module, calls: list[Call], tokens_of: OnTokens | None) -> None:
        def before(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            call = Call(args[0], tokens_of.grid if tokens_of else None, args[0].detach().clone())
            call.asks = (args[0].requires_grad, False)
            if args[0].requires_grad and not any(call.repeats(other) for other in calls):
                args[0].register_hook(call.take_input)
            calls.append(call)

        def after(_: nn.Module, args: Any, output: Any) -> Any:
            features, call = features_of(output), calls[-1]
            call.x_out, call.asks = features.detach().clone(), (call.asks[0], features.requires_grad)
            if features.requires_grad:
                features.register_hook(call.take_output)
            return with_features(output, features.clone()) if self._copies else output

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)


def channels_first(t: Tensor, grid: tuple[int, ...] | None) -> Tensor:
    """(N, C, *S) of features, or of tokens on a known grid."""
    return t if grid is None else t.movedim(-1, 1).unflatten(2, grid)


def map_of(call: Call, layer: nn.Module, target: str) -> Tensor:
    """The map of one call, from explicit outer products."""
    if target == "output":
        return reference.normgrad(channels_first(call.x_out, call.grid), channels_first(call.g_out, call.grid))
    if target == "input":
        return reference.normgrad(channels_first(call.x_in, call.grid), channels_first(call.g_in, call.grid))
    products, on_grid = reference.layer_products(layer, "weight", call.x_in.double(), call.g_out.double())
    m = on_grid(reference.frobenius(products))
    return m if call.grid is None else m.unflatten(1, call.grid)


def reached(calls: list[Call], target: str) -> list[Call]:
    """The calls that a gradient came back to: in the forward pass or, if that had no graph, when it was repeated."""
    in_graph = [call for call in calls if call.has_graph]
    first = [call for call in in_graph if not call.again]
    return [call for call in first or in_graph if (call.g_in if target == "input" else call.g_out) is not None]


def expected(taps: Taps, name: str, target: str) -> Tensor | None:
    """The map of a layer: the sum over its calls, of those on the finest grid; None if no gradient came."""
    maps = [map_of(call, taps.layers[name], target) for call in reached(taps.calls[name], target)]
    if not maps:
        return None
    finest = max(maps, key=Tensor.numel).shape
    return torch.stack([m for m in maps if m.shape == finest]).sum(0)


def tapped(network: nn.Module, example: Example, images: Tensor, labels: Tensor) -> Taps:
    """What a step of this network does, seen by taps."""
    views = names_of_views(copy.deepcopy(network), images)
    taps = Taps(network, copies=not shares_tensors(example.layers))
    F.cross_entropy(network(images.clone()), labels).backward()
    for name, calls in taps.calls.items():
        for call in calls:
            call.views = frozenset(end for end in ("input", "output") if (name, end) in views)
    return taps


def names_of_views(network: nn.Module, images: Tensor) -> set[tuple[str, str]]:
    """The layers whose input or output is a view of another tensor."""
    views: set[tuple[str, str]] = set()
    for name, layer in network.named_modules():
        if name and "parametrizations" not in name:

            def see(_: nn.Module, args: Any, output: Any, name: str = name) -> None:
                ends = {"input": args[0], "output": features_of(output)}
                views.update((name, end) for end, t in ends.items() if t._is_view())

            layer.register_forward_hook(see)
    with torch.random.fork_rng():
        network(images.clone())
    return views


# ---------------------------------------------------------------- why a layer may have no map


def shapes(calls: list[Call], target: str) -> list[torch.Size]:
    seen = [call.x_in if target == "input" else call.x_out for call in calls]
    return [x.shape for x in seen if x is not None]  # a repeated call may stop before its end


REASONS: dict[str, Callable[[Example, list[Call], str], bool]] = {
    "the forward pass does not call it": lambda e, calls, target: not calls,
    "the loss does not depend on it": lambda e, calls, target: is_not_reached(calls, target),
    "it gets no gradient": lambda e, calls, target: not any(c.asks[target != "input"] for c in calls),
    "has no spatial axis": lambda e, calls, target: all(len(s) < 3 for s in shapes(calls, target)),
    "does not begin with the batch size": lambda e, calls, target: all(s[0] != e.batch for s in shapes(calls, target)),
}
"""What a refusal says, and whether that is so."""


def is_not_reached(calls: list[Call], target: str) -> bool:
    waits = any(call.asks[target != "input"] or not call.has_graph for call in calls)
    return waits and not reached(calls, target)


def assert_true_reason(sentence: str, example: Example, taps: Taps, target: str) -> str:
    """Raise unless what is said of a layer is so; returns the layer's name."""
    found = re.match(r"NormGrad cannot read the layer '(.+?)': (.+)", sentence)
    assert found, sentence
    name, reason = found.groups()
    if "parametrizations" in name:
        return name
    holds = [is_so(example, taps.calls[name], target) for words, is_so in REASONS.items() if words in reason]
    assert holds == [True], f"target={target!r}: {sentence}"
    return name


# ---------------------------------------------------------------- training


@dataclass
class Trained:
    """A short training, and all that it may be told apart by."""

    traces: list[Any] = field(default_factory=list)
    moments: list[tuple[nn.Module, list[Any]]] = field(default_factory=list)
    maps: list[dict[str, Tensor]] = field(default_factory=list)
    told: list[str] = field(default_factory=list)


def trained(example: Example, watch: Mapping[str, Any] | None = None) -> Trained:
    """Train from scratch for two steps, with a recorder of these options or, without one, keeping each step's start."""
    network, result = example.build(), Trained()
    optimizer = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9)
    recorder = None if watch is None else NormGrad(network, num_images=example.num_images, **watch)
    if recorder is not None:
        recorder.attach()
    torch.manual_seed(2)
    for images, labels in batches(example):
        if recorder is None:
            result.moments.append((copy.deepcopy(network), random_state()))
        optimizer.zero_grad()
        loss = F.cross_entropy(network(images.clone()), labels)
        loss.backward()
        result.traces.append([loss.detach(), [p.grad for p in network.parameters()]])
        result.traces[-1] = copy.deepcopy(result.traces[-1])
        optimizer.step()
        if recorder is not None:
            result.maps.append(recorder.latest_maps())
            result.told += recorder.new_problems()
    if recorder is not None:
        recorder.detach()
    result.traces += [dict(network.state_dict()), optimizer.state_dict(), random_state()]
    result.traces.append([hooks_on(layer) for layer in network.modules()])
    return result


def batches(example: Example) -> list[tuple[Tensor, Tensor]]:
    images, labels = example.data(STEPS * example.batch)
    return list(zip(images.split(example.batch), labels.split(example.batch), strict=True))


def plainly_trained(example: Example) -> Trained:
    """Without a recorder; networks that PyTorch itself cannot differentiate are drawn anew."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # reentrant checkpoints of frozen parts
            return trained(example)
    except RuntimeError as error:
        assume(not re.search("modified by an inplace operation|modified inplace|a leaf Variable", str(error)))
        raise


def is_lost_to_the_oracle(calls: list[Call], target: str) -> bool:
    """Whether a tap is on a view, as InstanceNorm gives: its own hook never runs if that is changed in place."""
    return any(("input" if target == "input" else "output") in call.views for call in calls)


def check_map(example: Example, taps: Taps, name: str, target: str, found: Tensor) -> None:
    """Raise unless a map is the oracle's."""
    what = f"target={target!r}, {name}"
    assert "parametrizations" not in name, f"{what}: a weight, read as features"
    wanted = expected(taps, name, target)
    if len(reached(taps.calls[name], target)) != 1 and is_lost_to_the_oracle(taps.calls[name], target):
        return
    assert wanted is not None, f"{what}: a map without a gradient"
    if is_ambiguous(example, taps, name, target):
        return
    wanted = wanted[: example.num_images]
    assert found.shape == wanted.shape, f"{what}: {tuple(found.shape)}, but the oracle has {tuple(wanted.shape)}"
    distance = float((found.double() - wanted).norm())
    relative, absolute = TOLERANCE[example.dtype]
    assert distance <= relative * wanted.norm() + absolute, f"{what}: {distance} away from {wanted.norm()}"


def is_ambiguous(example: Example, taps: Taps, name: str, target: str) -> bool:
    """Whether neither weights nor the user tell which axis holds channels, and proportions say it is the last."""
    layer, calls = taps.layers[name], taps.calls[name]
    if "channels_last" in example.options or isinstance(layer, WEIGHTED):
        return False
    if any(call.grid is not None for call in calls):
        return len(example.size) == 1 and next(layer.parameters(), None) is None
    return any(
        len(shape) > 2 and distortion(shape[1:-1], example.size) < 0.25 and distortion(shape[2:], example.size) > 0.15
        for shape in shapes(calls, target)
    )


def has_doubtful_layers(example: Example, taps: Taps, target: str) -> bool:
    """Whether auto may take a layer whose axes it can only guess."""
    return any(is_ambiguous(example, taps, name, target) for name in taps.layers)


def distortion(grid: tuple[int, ...], size: tuple[int, ...]) -> float:
    ratios = [math.log(cells / pixels) for cells, pixels in zip(grid, size, strict=True)]
    return max(ratios) - min(ratios)


def check_maps(example: Example, watched: Trained, oracle: list[Taps], target: str) -> None:
    """Each map is the oracle's; a layer without one is named, with a true reason."""
    refused = {assert_true_reason(sentence, example, oracle[0], target) for sentence in watched.told}
    names = [n for n, layer in oracle[0].layers.items() if target != "weight" or isinstance(layer, WEIGHTED)]
    names = [n for n in names if "parametrizations" not in n]
    for maps, taps in zip(watched.maps, oracle, strict=True):
        left_out = set(names) - set(maps) - refused
        # As long as no gradient has come anywhere, nobody knows what the forward pass or the loss leaves out.
        assert not left_out or not maps, f"target={target!r}: neither read nor refused: {left_out}"
        assert not set(maps) & refused, f"target={target!r}: read and refused"
        for name, m in maps.items():
            check_map(example, taps, name, target, m)


def check_auto(example: Example, watched: Trained, oracle: list[Taps]) -> None:
    """Auto gives at most five maps, each the oracle's, or says in a sentence why there is none."""
    if not watched.maps[0]:
        assert len(watched.told) == 1
        assert watched.told[0].startswith("NormGrad found no layer to read: ")
        return
    assert not watched.told
    for maps, taps in zip(watched.maps, oracle, strict=True):
        assert 1 <= len(maps) <= 5
        for name, m in maps.items():
            assert m[0].numel() > 1
            check_map(example, taps, name, "output", m)


def check(example: Example) -> None:
    plain = plainly_trained(example)
    oracle = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (network, state), batch in zip(plain.moments, batches(example), strict=True):
            set_random_state(state)
            oracle.append(tapped(network, example, *batch))
        for target in TARGETS:
            watched = trained(example, {"layers": "**", "target": target, **example.options})
            assert same(plain.traces, watched.traces), f"target={target!r} changes training"
            check_maps(example, watched, oracle, target)
        if not has_doubtful_layers(example, oracle[0], "output"):
            watched = trained(example, {"layers": "auto", **example.options})
            assert same(plain.traces, watched.traces), "layers='auto' changes training"
            check_auto(example, watched, oracle)


# ---------------------------------------------------------------- the same in Lightning


FLAGS = st.fixed_dictionaries(
    {
        "layers": st.sampled_from(["auto", "net.blocks.*"]),
        "target": st.sampled_from(["output", "input"]),
        "order1_every_n_steps": st.sampled_from([None, STEPS]),
        "images": st.sampled_from(["first", "random"]),
    }
)


def check_fit(example: Example, flags: Mapping[str, Any]) -> None:
    """Fit without and with the callback: the same bits, and the first images' maps are the oracle's."""
    plainly_trained(example)

    def make() -> Lit:
        return Lit(example.build)

    def loader() -> DataLoader:
        return DataLoader(TensorDataset(*example.data(STEPS * example.batch)), example.batch, shuffle=True)

    options = {"data": loader, "logger": False, "precision": "64-true" if example.dtype == torch.float64 else "32-true"}
    callback = NormGradCallback(every_n_steps=1, num_images=example.num_images or 8, **flags, **example.options)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = train(make, folder, **options)
        oracle = {step: fit_oracle(moment, make, example) for step, moment in plain.moments.items()}
        assume(flags["layers"] != "auto" or not has_doubtful_layers(example, oracle[0], flags["target"]))
        watched = train(make, folder, callback, **options)
        assert_same(plain, watched)
        failures = [told for told in watched.warned if "failed" in told and "found no layer to read" not in told]
        assert not failures, failures
    assert watched.history.maps or watched.warned
    if flags["images"] == "first":
        for step, maps in watched.history.maps.items():
            for name, m in maps.items():
                check_map(example, oracle[step], name.removeprefix("net."), flags["target"], m)


def fit_oracle(moment: Moment, make: Callable[[], Lit], example: Example) -> Taps:
    module = at(moment, make)
    set_random_state(moment.random)
    return tapped(module.net, example, *moment.batch)


# ---------------------------------------------------------------- the tests


@examples
@given(networks())
@example(Example((6, 9), (Conv(2, (1, 1)), Block("twice, then coarser", (Conv(2, (3, 3), padding="same"),)))))
def test_any_network_has_its_maps_and_trains_to_the_same_bits(example):
    check(example)


@few_examples
@given(networks(), FLAGS)
def test_any_network_fits_to_the_same_bits_and_has_its_maps(example, flags):
    check_fit(example, flags)


@pytest.mark.slow
@many_examples
@given(networks())
def test_many_networks_have_their_maps_and_train_to_the_same_bits(example):
    check(example)


@pytest.mark.slow
@settings(many_examples, max_examples=200)
@given(networks(), FLAGS)
def test_many_networks_fit_to_the_same_bits_and_have_their_maps(example, flags):
    check_fit(example, flags)
