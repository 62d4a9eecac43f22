"""Which calls of a network count, and which step each of them belongs to."""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor
from torch.utils.weak import WeakIdRef

from normgrad_lightning.hooks.image_inputs import ImageInputs
from normgrad_lightning.hooks.safe_hooks import current_backward
from normgrad_lightning.layers.own_passes import current_pass


class Steps:
    """Counts steps: one begins with the first call after a gradient of the step before has been read.

    Calls do not count while disabled or in another pass than the one this was made in. In a backward pass, activation
    checkpointing repeats calls: these count only if gradients will go through the graph that they build. Reentrant
    checkpointing runs layers without a graph first; other repeated calls build a graph beside the first one.

    Args:
        images: finds the images of each step.

    Attributes:
        enabled: whether calls count.
        is_own_pass: whether the calls that count are those of a pass of this package.
    """

    def __init__(self, images: ImageInputs) -> None:
        self.enabled = True
        self._images = images
        self._pass = current_pass()
        self.is_own_pass = self._pass is not None
        self._is_over = False
        self._without_graph = self._earlier = set[str]()
        # References without callbacks: a callback would run in the backward pass, where Python drops a Ctrl-C.
        self._read: defaultdict[str, list[WeakIdRef]] = defaultdict(list)

    def begin(self) -> None:
        """Begin a step, and forget the images of the one before."""
        self._is_over = False
        self._earlier = self._without_graph
        self._images.begin_step()

    def end(self) -> None:
        """End the step: the next call that counts belongs to another one."""
        self._is_over = True

    def counts(self) -> bool:
        """Return whether a call outside of a backward pass counts; begin a step if the one before is over."""
        if not self._is_watched() or current_backward() >= 0:
            return False
        if self._is_over:
            self.begin()
        return True

    def counts_in_backward(self, name: str, point: Tensor | None) -> bool:
        """Return whether a call in a backward pass counts: gradients will go through the graph that it builds."""
        if not self._is_watched() or current_backward() < 0 or name not in self._without_graph:
            return False
        return point is None or all(ref() is not point for ref in self._read[name])

    def note_without_graph(self, name: str) -> None:
        """Note that the layer ran without a graph: a checkpoint may run it again in the backward pass."""
        if self._without_graph is self._earlier:
            self._without_graph = set()
        self._without_graph.add(name)

    def note_read(self, name: str, point: Tensor) -> None:
        """Note that this tensor of the layer is read: a checkpoint may hand it on in both of its calls."""
        self._read[name] = [ref for ref in self._read[name] if ref() is not None] + [WeakIdRef(point)]

    def _is_watched(self) -> bool:
        return self.enabled and current_pass() is self._pass
