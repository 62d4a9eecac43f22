"""Autograd's graph of a forward pass: where in the network a tensor stands.

A tensor that everything learned goes through is a *cut* of the graph: nothing goes around it. What blocks and stages
give are cuts. The insides of residual branches and of attention, pooled pyramids and position tables are not, as
another tensor goes around them. The graph is only read, once, while the forward pass that made it holds it anyway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from torch import Tensor

Value = tuple[Any, int]
"""A tensor as the graph knows it: the node that made it, and which of the node's outputs it is."""

_VIEWS = ("View", "ReshapeAlias", "UnsafeView")
_POOLS = ("Max", "Amax", "Mean", "Sum")
_PICKS_BY_INDEX = ("Gather", "Index", "MaskedSelect", "MaskedScatter", "Scatter", "Take")
_ATTENDS = ("Bmm", "ScaledDotProduct")
_AXES_OF_BLOCKS = 6
_AXES_OF_TOKENS = 3
_TOKENS = (1, 2**64 - 2)
"""The axis of tokens, as autograd notes it: -2 is a large number."""


@dataclass(frozen=True)
class GraphPosition:
    """Where in the network a tensor stands.

    Attributes:
        bypass: how many other features go around it: made before it, and used after it by the network.
        is_cut: whether nothing goes around it, not even a class token, a pooled vector or the loss of another head.
        comes_from_images: whether it is computed from the images.
        keeps_order: whether it may have the images' order: on some way from the images to it, nothing is picked by
            an index, as a random subset of patches is, nothing is sorted into blocks, cells of distant rows are not
            pooled, no other tokens are put behind the patches, and nothing is only looked up by other tokens, such as
            words or queries.
        feeds_weights: whether any weights come after it. If not, it is what the network predicts.
    """

    bypass: int
    is_cut: bool
    comes_from_images: bool
    keeps_order: bool
    feeds_weights: bool


class Graph:
    """The graph below some tensors.

    Args:
        outputs: what the network gives.
        sources: the first features of the images; none: all features count as coming from the images, in order.
    """

    def __init__(self, outputs: Iterable[Tensor], sources: Iterable[Value]) -> None:
        roots = [value_of(t) for t in outputs if t.grad_fn is not None]
        self._inputs = _inputs_below(roots)
        self._nodes = sorted(self._inputs, key=_made)
        self._index_of = {node: index for index, node in enumerate(self._nodes)}
        begin = {node for node, _ in sources if node in self._inputs}
        self._from_images = self._reached_from(begin) if begin else set(self._nodes)
        self._in_order = self._reached_in_order(begin) if begin else set(self._nodes)
        self._feeding = self._with_weights_after()
        self._last_use = self._last_uses(roots)
        self._features = self._count_alive(self._is_feature)
        self._values = self._count_alive(lambda value: True)

    def position_of(self, value: Value) -> GraphPosition | None:
        """Return where the tensor stands; None if the outputs do not depend on it."""
        node, _ = value
        index = self._index_of.get(node)
        if index is None:
            return None
        goes_on = self._goes_on(value)
        return GraphPosition(
            bypass=self._features[index] - (goes_on and self._is_feature(value)),
            is_cut=self._values[index] == goes_on,
            comes_from_images=node in self._from_images,
            keeps_order=node in self._in_order,
            feeds_weights=node in self._feeding,
        )

    def _reached_from(self, begin: set[Any]) -> set[Any]:
        reached = set(begin)
        for node in self._nodes:
            if any(source in reached for source, _ in self._inputs[node]):
                reached.add(node)
        return reached

    def _reached_in_order(self, begin: set[Any]) -> set[Any]:
        reached = set(begin)
        for node in self._nodes:
            name = node.name()
            # A product of attention has the order of its first factor.
            sources = node.next_functions[:1] if name.startswith(_ATTENDS) else self._inputs[node]
            if any(source in reached for source, _ in sources) and not (
                _reorders(node, name) or _folds(node, name) or self._puts_others_behind(node, name)
            ):
                reached.add(node)
        return reached

    def _puts_others_behind(self, node: Any, name: str) -> bool:
        """Return whether a node makes one row of tokens whose last ones are not of the images."""
        if not name.startswith("Cat") or len(node._input_metadata[0].shape) != _AXES_OF_TOKENS:
            return False
        return node._saved_dim in _TOKENS and node.next_functions[-1][0] not in self._from_images

    def _with_weights_after(self) -> set[Any]:
        """Return the nodes whose values are used together with weights, at once or later."""
        feeding: set[Any] = set()
        for node in reversed(self._nodes):
            if node in feeding or _has_weights(node) or self._has_computed_weights(node):
                feeding.update(source for source, _ in self._inputs[node])
        return feeding

    def _has_computed_weights(self, node: Any) -> bool:
        """Return whether a node uses what is computed from parameters alone, as transposed or normalised weights."""
        sources = [value for value in self._inputs[node] if value[0] not in self._from_images]
        return node in self._from_images and any(prod(_shape(value)) > 1 for value in sources)

    def _last_uses(self, roots: Iterable[Value]) -> dict[Value, int]:
        """Return the index of the last node that uses each value; what nothing else uses is used at the end."""
        uses: dict[Value, int] = {}
        for index, node in enumerate(self._nodes):
            for value in self._inputs[node]:
                uses[value] = index
        for root in roots:
            uses.setdefault(root, len(self._nodes))
        return uses

    def _count_alive(self, counts: Callable[[Value], bool]) -> list[int]:
        """Return for each node how many values are alive: made by it or before it, and used after it."""
        changes: Counter[int] = Counter()
        for value, last in self._last_use.items():
            if self._goes_on(value) and counts(value):
                changes[self._index_of[value[0]]] += 1
                changes[last] -= 1
        return list(accumulate(changes[index] for index in range(len(self._nodes))))

    def _is_feature(self, value: Value) -> bool:
        """Return whether a value has several locations, and is not just what the network gives."""
        return _is_spatial(value) and self._last_use.get(value) != len(self._nodes)

    def _goes_on(self, value: Value) -> bool:
        """Return whether a value comes from the images and is used again."""
        return value in self._last_use and value[0] in self._from_images


def value_of(t: Tensor) -> Value:
    """Return the tensor as the graph knows it."""
    return t.grad_fn, t.output_nr


def _inputs_below(roots: Iterable[Value]) -> dict[Any, list[Value]]:
    """Return all nodes below, each with the values that it is computed from."""
    inputs: dict[Any, list[Value]] = {}
    waiting = [node for node, _ in roots]
    while waiting:
        node = waiting.pop()
        if node in inputs:
            continue
        inputs[node] = [value for value in node.next_functions if value[0] is not None and not _is_leaf(value[0])]
        waiting.extend(source for source, _ in inputs[node])
    return inputs


def _is_leaf(node: Any) -> bool:
    return hasattr(node, "variable")


def _has_weights(node: Any) -> bool:
    """Return whether a node uses parameters; a single number, such as a temperature, only scales."""
    leaves = (source for source, _ in node.next_functions if source is not None and _is_leaf(source))
    return any(leaf.variable.numel() > 1 for leaf in leaves)


def _made(node: Any) -> int:
    """Return a number that grows in the order in which the forward pass made the nodes."""
    return int(node._sequence_nr())


def _is_spatial(value: Value) -> bool:
    """Return whether a value has several locations: not a class token, a pooled vector or the weights of channels."""
    return sum(int(size) > 1 for size in _shape(value)[1:]) > 1


def _shape(value: Value) -> tuple[int, ...]:
    node, nr = value
    return tuple(node._input_metadata[nr].shape)


def _folds(node: Any, name: str) -> bool:
    """Return whether a node pools tokens over an axis that a view has just split off: distant rows fall together."""
    split, nr = node.next_functions[0] if name.startswith(_POOLS) else (None, 0)
    if split is None or not split.name().startswith(_VIEWS) or _is_leaf(split.next_functions[0][0]):
        return False
    before, between, after = _shape(split.next_functions[0]), _shape((split, nr)), _shape((node, 0))
    if (len(before), len(between)) != (_AXES_OF_TOKENS, _AXES_OF_TOKENS + 1):
        return False
    images, parts, tokens, channels = between
    return before == (images, parts * tokens, channels) and after == (images, tokens, channels)


def _reorders(node: Any, name: str) -> bool:
    if name.startswith("Permute"):
        return len(node._saved_dims) >= _AXES_OF_BLOCKS
    return name.startswith(_PICKS_BY_INDEX)
