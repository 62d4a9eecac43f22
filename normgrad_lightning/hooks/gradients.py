"""Hooks on tensors: a use of a layer waits for its gradient, and gives it to the recorder.

They live as long as the graph of a step, so they keep neither the recorder nor any tensor of the graph alive.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.hooks.observer import ReadCall
from normgrad_lightning.hooks.readings import Reading
from normgrad_lightning.hooks.safe_hooks import current_backward, unseen
from normgrad_lightning.maths.tensor_subclasses import plain


class LayerCall:
    """One use of a layer in a forward pass, waiting for its gradient.

    Args:
        call: the call that uses it; of this, only what is needed later is kept.
        reading: what to make of the gradient.
        take: weak reference to a method that gets this use, the number of the backward pass and the gradient.
        failed: weak reference to a method that gets the name and an exception of `take`; the backward pass continues.
    """

    def __init__(
        self,
        call: ReadCall,
        reading: Reading,
        take: Callable[[], Callable[[LayerCall, int, Tensor], None] | None],
        failed: Callable[[], Callable[[str, Exception], None] | None],
    ) -> None:
        self.name = call.name
        self.number = call.number
        self.reading = reading
        self.entry_number = 0 if call.entry is None else call.entry.number
        self.came_in = -1
        self._entry = call.entry
        self._take = take
        self._failed = failed
        self._born_in = current_backward()

    @property
    def images(self) -> Tensor | None:
        """The images that it belongs to."""
        return None if self._entry is None else self._entry.images

    @property
    def batch_size(self) -> int | None:
        """How many images entered the network with them, read or not."""
        return None if self._entry is None else self._entry.shape[0]

    def wait_at(self, point: Tensor) -> RemovableHandle:
        """Wait for the gradient of `point`."""
        handle: RemovableHandle = point.register_hook(self)  # type: ignore[no-untyped-call]
        base = point._base
        if base is not None and base.grad_fn is not None and base.numel() == point.numel():
            base.register_hook(BaseGradient(self, base, point))  # type: ignore[no-untyped-call]
        return handle

    def __call__(self, gradient: Tensor | None) -> None:
        """Give the gradient to the recorder; returning None leaves it unchanged."""
        take = self._take()
        if take is None or gradient is None or torch.compiler.is_compiling():
            return
        self.came_in = current_backward()
        try:
            # What reentrant checkpointing recomputes belongs to the backward that asked for it, not to its inner one.
            backward = self.came_in if self._born_in < 0 else self._born_in
            with unseen():
                take(self, backward, plain(gradient))
        except Exception as error:
            failed = self._failed()
            if failed is not None:
                failed(self.name, error)


class BaseGradient:
    """Gives a use the gradient of its base: a view that is changed in place later does not get one."""

    def __init__(self, use: LayerCall, base: Tensor, view: Tensor) -> None:
        self._use = use
        self._base = base.shape, base.stride()
        self._view = view.shape, view.stride(), view.storage_offset() - base.storage_offset()

    def __call__(self, gradient: Tensor) -> None:
        """Give the use its part of the gradient, if it has not got its own in this backward."""
        if self._use.came_in != current_backward():
            with unseen():
                gradient = plain(gradient)
                of_view = gradient.new_empty_strided(*self._base).copy_(gradient).as_strided(*self._view)
            self._use(of_view)


class Latest:
    """What the latest backward that reached a layer gave: a part for each use of the layer.

    If the network was called with several batches before the backward (two views, real and fake), only the parts of the
    first call are kept, with its images.
    """

    def __init__(self, backward: int, use: LayerCall) -> None:
        self.backward = backward
        self.entry_number = use.entry_number
        self.images, self.batch_size = use.images, use.batch_size
        self.parts: list[tuple[int, Any]] = []
