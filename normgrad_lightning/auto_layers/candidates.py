"""The layers seen at work: what each of them gives, and where in the network it stands."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from normgrad_lightning.auto_layers.graph import Graph, GraphPosition, Value, value_of
from normgrad_lightning.layers.layouts import Layout

_MAX_SOURCES = 4
"""Batches of images in a step, as views or real and generated ones, whose first features are known."""


@dataclass(frozen=True)
class CandidateLayer:
    """A layer seen at work.

    Attributes:
        name: the layer's.
        layer: the layer.
        layout: how to read its tensor as channels on a grid.
        image_grid: the size of the images; None if none were recognised.
        weighted: how many layers with their own weights it is made of.
        returns: whether it gives as many locations as it was given: what is inside may have left the grid in between.
        channels: how many numbers it gives for each location.
        tensor: a number for the tensor; layers that pass it on unchanged share it.
        position: where in the network the tensor stands; None if autograd's graph does not show it.
        is_dead_end: whether the graph shows that what the network gives does not depend on it.
    """

    name: str
    layer: nn.Module
    layout: Layout
    image_grid: tuple[int, ...] | None
    weighted: int
    returns: bool
    channels: int
    tensor: int
    position: GraphPosition | None = None
    is_dead_end: bool = False

    @property
    def bypass(self) -> int:
        """How many features go around it; if the graph does not show it, none are known."""
        return 0 if self.position is None else self.position.bypass

    @property
    def is_out_of_order(self) -> bool:
        """Whether its tokens are not in the order of the image's rows."""
        position = self.position
        if position is None or not self.layout.is_guessed or not position.comes_from_images:
            return False
        return not position.keeps_order


class CandidateLayers:
    """The layers seen at work, in the order in which the network runs."""

    def __init__(self) -> None:
        self._seen: list[CandidateLayer] = []
        self._entries: dict[str, int] = {}
        self._sources: dict[int, Value | None] = {}
        self._waiting: list[tuple[CandidateLayer, Value | None]] = []
        self._last_tensor: tuple[Callable[[], Tensor | None], int] = (lambda: None, -1)
        self._tensors = 0

    def __iter__(self) -> Iterator[CandidateLayer]:
        return iter(self._seen)

    def __len__(self) -> int:
        return len(self._seen)

    def clear(self) -> None:
        """Forget them."""
        self._seen.clear()
        self._entries.clear()
        self.let_go()

    def wants(self, name: str, entry: int) -> bool:
        """Return whether to add a layer: only for the first images that it is seen with, as others may be crops."""
        return self._entries.get(name, entry) == entry

    def note_source(self, entry: int, t: Tensor, *, is_sure: bool) -> None:
        """Note features of the images of this number: those known for sure begin the graph, or else the first ones."""
        if is_sure or entry not in self._sources:
            self._sources[entry] = None if t.grad_fn is None else value_of(t)
        while len(self._sources) > _MAX_SOURCES:
            del self._sources[min(self._sources)]

    def add(self, entry: int, t: Tensor, name: str, layer: nn.Module, layout: Layout, **seen: Any) -> None:
        """Note that a layer gives `t` for the images of this number.

        Args:
            entry: the number.
            t: the tensor.
            name: see `CandidateLayer`.
            layer: see there.
            layout: see there.
            seen: other attributes of the candidate.
        """
        self._entries[name] = entry
        last, version = self._last_tensor
        now = 0 if t.is_inference() else t._version
        if last() is not t or version != now:
            self._tensors += 1
            self._last_tensor = (weakref.ref(t), now)
        weighted = sum(has_own_weights(part) for path, part in layer.named_modules() if "parametrizations" not in path)
        channels = t.shape[-1 if layout.channels_last else 1]
        candidate = CandidateLayer(
            name, layer, layout, weighted=weighted, channels=channels, tensor=self._tensors, **seen
        )
        self._waiting.append((candidate, None if t.grad_fn is None else value_of(t)))

    def locate(self, outputs: Iterable[Tensor], *, has_weights: bool) -> None:
        """Find where the layers added since the last call stand, in the graph of what a network gives.

        Called before the network returns: its graph must not be held for longer than that. Of the graph, only the
        first nodes are held on, as a step may call one part of a network after the other.

        Args:
            outputs: what it gives.
            has_weights: whether it has weights; if so, what networks before it gave was no prediction.
        """
        if has_weights:
            self._seen = [_no_prediction(candidate) for candidate in self._seen]
        graph = Graph(outputs, self.first_features())
        for candidate, value in self._waiting:
            position = None if value is None else graph.position_of(value)
            is_dead_end = position is None and value is not None
            self._seen.append(replace(candidate, position=position, is_dead_end=is_dead_end))
        self._waiting.clear()

    def let_go(self) -> None:
        """Hold nothing of a graph any more."""
        self._waiting.clear()
        self._sources.clear()

    def first_features(self) -> list[Value]:
        """Return the first features of the images; none if some have no graph, as in a frozen network."""
        values = list(self._sources.values())
        return [] if None in values else [value for value in values if value is not None]


def has_weights(layer: nn.Module) -> bool:
    """Return whether a layer, or any layer inside it, has weights."""
    return next(layer.parameters(), None) is not None


def has_own_weights(layer: nn.Module) -> bool:
    """Return whether a layer itself has weights; those of a weight norm are the layer's own."""
    return next(layer.parameters(recurse=False), None) is not None or "parametrizations" in layer._modules


def _no_prediction(candidate: CandidateLayer) -> CandidateLayer:
    position = candidate.position
    return candidate if position is None else replace(candidate, position=replace(position, feeds_weights=True))
