"""What the recorder does to one model of the zoo: which layers it takes, what their maps and grids are worth."""

from __future__ import annotations

import copy
import time
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from twice import same
from zoo.location import Corner, changed, corners, displacement, ratio, size_of_change, verdict
from zoo.member import Member

from normgrad_lightning import NormGrad
from normgrad_lightning.hooks.observer import ReadCall

Changes = dict[str, dict[Corner, Tensor]]
"""By layer and by the corner that was changed."""


@dataclass(frozen=True)
class Layer:
    """A layer that `"auto"` takes.

    Attributes:
        name: its name.
        grid: of its map.
        is_zero: whether its map is zero everywhere.
        location: how many times larger its features' change is where the picture changed than elsewhere; None:
            unknown.
        displacement: for tokens, by how many cells along each axis it is away from there.
    """

    name: str
    grid: tuple[int, ...]
    is_zero: bool
    location: float | None = None
    displacement: tuple[float, ...] = ()

    @property
    def verdict(self) -> str:
        """What the change says about the grid."""
        return "unknown" if self.location is None else verdict(self.location, self.displacement, self.grid)


@dataclass
class Sighting:
    """What was seen of a model.

    Attributes:
        name: the model's.
        size: of its images.
        layers: what `"auto"` takes.
        map_location: the same ratio for the first layer's map; None: unknown.
        problems: what the recorder says.
        same_bits: whether gradients, buffers and random numbers are those of a step without it.
        error: what failed; the model could not be built or run.
        seconds: that it took.
    """

    name: str
    size: tuple[int, ...]
    layers: list[Layer] = field(default_factory=list)
    map_location: float | None = None
    problems: list[str] = field(default_factory=list)
    same_bits: bool | None = None
    error: str = ""
    seconds: float = 0.0


class Recorder(NormGrad):
    """A recorder that also keeps each layer's features, laid out on the grid of its map."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.features: dict[str, Tensor] = {}
        self.tokens: set[str] = set()
        super().__init__(model, **options)

    def _await_gradient(self, call: ReadCall) -> None:
        super()._await_gradient(call)
        features = call.layout.view(call.point.detach())
        if call.point.dim() == 3:
            self.tokens.add(call.name)
        known = self.features.get(call.name)
        if known is None or known.shape[2:].numel() < features.shape[2:].numel():
            self.features[call.name] = features.float().clone()


def look(member: Member, *, bits: bool = True, location: bool = True, **options: Any) -> Sighting:
    """What the recorder does to a model: one step of training, then the location test in eval mode.

    Args:
        member: the model.
        bits: whether to compare the step's bits with those of a step without the recorder.
        location: whether to run the location test.
        options: of the recorder.
    """
    start = time.perf_counter()
    result = Sighting(member.name, tuple(member.size))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _look(member, result, bits, location, options)
        except Exception as error:  # the table has a line for it
            result.error = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    result.seconds = time.perf_counter() - start
    return result


def _look(member: Member, result: Sighting, bits: bool, location: bool, options: dict[str, Any]) -> None:
    model = build(member)
    images = member.images()
    plain = step(member, copy.deepcopy(model), images) if bits else None
    with Recorder(model, **options) as recorder:
        watched = step(member, model, images)
        if plain is not None:
            result.same_bits = same(plain, watched)
        maps = {name: m.clone() for name, m in recorder.latest_maps().items()}
        result.problems = recorder.new_problems(after_backward=True)
        result.layers = [Layer(name, tuple(m.shape[1:]), not bool(m.any())) for name, m in maps.items()]
        if location and maps:
            _locate(member, model, recorder, result)


def build(member: Member) -> nn.Module:
    """The model, ready to learn from its first step on: heads of zeros send nothing back."""
    torch.manual_seed(0)
    model = member.build().train()
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.requires_grad and not layer.weight.any():
            nn.init.normal_(layer.weight, std=0.02)
    return model


def step(member: Member, model: nn.Module, images: Tensor) -> list[Any]:
    """One forward and backward; returns all that it leaves behind."""
    torch.manual_seed(1)
    member.loss(model, images.clone()).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [gradients, dict(model.named_buffers()), torch.get_rng_state()]


def _locate(member: Member, model: nn.Module, recorder: Recorder, result: Sighting) -> None:
    """Change one corner of the images after the other, and see where features and maps change."""
    features, maps = changes(member, model, recorder)
    result.layers = [
        replace(
            layer,
            location=ratio(features[layer.name]),
            displacement=displacement(features[layer.name]) if layer.name in recorder.tokens else (),
        )
        if layer.name in features
        else layer
        for layer in result.layers
    ]
    first = result.layers[0].name
    if first in maps:
        result.map_location = ratio(maps[first])


def changes(member: Member, model: nn.Module, recorder: Recorder) -> tuple[Changes, Changes]:
    """The sizes `(*grid)` of the changes of each layer's features and maps, for each corner that was changed."""
    images, other = member.images(), member.images(seed=7)
    _settle_statistics(member, model, recorder, images)
    before = _read(member, model, recorder, images)
    after = {
        corner: _read(member, model, recorder, changed(images, other, corner)) for corner in corners(len(member.size))
    }
    features, maps = (
        {
            name: {corner: size_of_change(t, seen[kind][name]) for corner, seen in after.items()}
            for name, t in before[kind].items()
            if all(name in seen[kind] and seen[kind][name].shape == t.shape for seen in after.values())
        }
        for kind in (0, 1)
    )
    return features, maps


def _scaled(maps: Tensor) -> Tensor:
    """Maps `(N, 1, *grid)` with a mean of 1: how large a loss is says nothing about where."""
    axes = tuple(range(1, maps.dim()))
    return (maps / maps.mean(axes, keepdim=True).clamp_min(1e-30))[:, None]


def _settle_statistics(member: Member, model: nn.Module, recorder: Recorder, images: Tensor) -> None:
    """Give BatchNorm the statistics of these images, and leave the model in eval mode."""
    recorder.enabled = False
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.momentum = 1.0
    torch.manual_seed(2)
    with torch.no_grad():
        member.loss(model, images.clone())
    model.eval()
    recorder.enabled = True


def _read(
    member: Member, model: nn.Module, recorder: Recorder, images: Tensor
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The features of each layer, and their maps where the model has a loss in eval mode."""
    torch.manual_seed(2)
    recorder.clear()
    recorder.features.clear()
    if member.run is None:
        # Some models keep parts of the graph from one pass in eval mode to the next (LeViT's biases).
        member.loss(model, images.clone()).backward(retain_graph=True)
    else:
        member.run(model, images.clone())
    return dict(recorder.features), {name: _scaled(m) for name, m in recorder.latest_maps().items()}
