"""Which calls of a network count, and which step each of them belongs to."""

from __future__ import annotations

from torch import Tensor

from normgrad_lightning.hooks.image_inputs import ImageInputs
from normgrad_lightning.hooks.recomputation import Recomputation
from normgrad_lightning.hooks.safe_hooks import current_backward
from normgrad_lightning.layers.own_passes import current_pass


class Steps:
    """Counts steps: one begins with the first call after a gradient of the step before has been read.

    Calls do not count while disabled, in another pass than the one this was made in, or in a backward pass, where
    checkpointing repeats calls.

    Args:
        images: finds the images of each step.

    Attributes:
        enabled: whether calls count.
        images: see above.
    """

    def __init__(self, images: ImageInputs) -> None:
        self.enabled = True
        self.images = images
        self._pass = current_pass()
        self._number = 0
        self._is_over = False
        self._recomputation = Recomputation()

    @property
    def is_own_pass(self) -> bool:
        """Whether the calls that count are those of a pass of this package."""
        return self._pass is not None

    def begin(self) -> None:
        """Begin a step, and forget the images of the one before."""
        self._number += 1
        self._is_over = False
        self.images.begin_step()

    def end(self) -> None:
        """End the step: the next call that counts belongs to another one."""
        self._is_over = True

    def counts(self) -> bool:
        """Return whether a call counts; begin a step if the one before is over."""
        if not self._is_watched() or current_backward() >= 0:
            return False
        if self._is_over:
            self.begin()
        return True

    def counts_in_backward(self, name: str, point: Tensor | None) -> bool:
        """Return whether a call in a backward pass counts: gradients will go through the graph that it builds."""
        return self._is_watched() and current_backward() >= 0 and self._recomputation.builds_graph(name, point)

    def note_without_graph(self, name: str) -> None:
        """Note that the layer ran without a graph: a checkpoint may run it again in the backward pass."""
        self._recomputation.note_without_graph(name, self._number)

    def note_read(self, name: str, point: Tensor) -> None:
        """Note that this tensor of the layer is read."""
        self._recomputation.note_read(name, point)

    def _is_watched(self) -> bool:
        return self.enabled and current_pass() is self._pass
