"""Calls that activation checkpointing repeats in a backward pass.

Reentrant checkpointing runs layers without a graph, and calls them again in the backward pass to build one, which
gradients then go through. Other repeated calls build a graph beside the first one, and do not count.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor
from torch.utils.weak import WeakIdRef


class Recomputation:
    """Knows which layers ran without a graph, and which tensors are read already."""

    def __init__(self) -> None:
        self._step = 0
        self._without_graph: set[str] = set()
        # References without callbacks: a callback would run in the backward pass, where Python drops a Ctrl-C.
        self._read: defaultdict[str, list[WeakIdRef]] = defaultdict(list)

    def note_without_graph(self, name: str, step: int) -> None:
        """Note that the layer ran without a graph in this step; forget the layers of earlier steps."""
        if self._step != step:
            self._step = step
            self._without_graph.clear()
        self._without_graph.add(name)

    def note_read(self, name: str, point: Tensor) -> None:
        """Note that this tensor of the layer is read: a checkpoint may hand it on in both of its calls."""
        self._read[name] = [ref for ref in self._read[name] if ref() is not None] + [WeakIdRef(point)]

    def builds_graph(self, name: str, point: Tensor | None) -> bool:
        """Return whether a call of the layer in a backward pass builds the graph that gradients will go through."""
        return name in self._without_graph and (point is None or all(ref() is not point for ref in self._read[name]))
