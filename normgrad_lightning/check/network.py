"""The network of a training step, recognised by what it gives: scores whose cross-entropy is training's own loss.

Whoever knows it can run it alone: the user's `training_step`, which may count, print or write files, never runs twice.
As nobody has asked for such a pass, a network is left alone where it could leave a trace: if it is given more than
images, holds iterators, or has hooks of the user's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.hooks.safe_hooks import Hook, WeakMethod, current_backward, on_forward
from normgrad_lightning.hooks.to_host import OnTheWay, from_host
from normgrad_lightning.isolated.python_state import PythonState
from normgrad_lightning.isolated.sandbox import HALF
from normgrad_lightning.layers.module_tree import compiled_layers, with_fast_path
from normgrad_lightning.layers.names import named_layers
from normgrad_lightning.layers.nested import ATOMS, floating_tensors, map_tensors, stored_parts
from normgrad_lightning.layers.own_passes import current_pass
from normgrad_lightning.maths.tensor_subclasses import no_overrides, plain

TOLERANCE, IN_HALF = 1e-3, 1e-2
"""How near the cross-entropy must be to training's loss, as a share of it, or absolutely for a loss below 1; and the
same for scores in half precision, whose loss may be rounded."""

SMOOTHINGS = (0.1, 0.05, 0.2)
"""Label smoothing that is recognised."""

_LARGE = 20_000, 2**26  # things of a module's Python state, and bytes: to keep more would take longer than a pass
_MOST_CALLS = 64  # of a step; an unrolled network may call its head without end


class NetworkCall(NamedTuple):
    """A call of a module that took images and gave scores.

    Attributes:
        module: what was called.
        args: what it was given.
        kwargs: the same by keyword.
        scores: `(N, C)`, detached.
    """

    module: nn.Module
    args: Any
    kwargs: Any
    scores: Tensor

    def at(self, rows: Tensor) -> NetworkCall:
        """Return the call with these images alone: whatever has as many rows as there are scores is cut."""
        count = len(self.scores)

        def cut(t: Tensor) -> Tensor:
            return t.detach()[rows] if t.dim() and len(t) == count else t.detach()

        args, kwargs = map_tensors(cut, (self.args, self.kwargs))
        return self._replace(args=args, kwargs=kwargs, scores=self.scores[rows])


def scores_in(output: Any, count: int) -> Tensor | None:
    """Return the scores `(N, C)` in what a module gives for `count` images, two classes or more; None if none.

    One score for each image, as binary classifiers give, becomes two: cross-entropy is then the binary one.
    """
    with no_overrides():
        for t in map(plain, floating_tensors(output)):
            if t.dim() in (1, 2) and len(t) == count:
                scores = t.reshape(count, -1)
                return torch.cat([torch.zeros_like(scores), scores], 1) if scores.shape[1] == 1 else scores
    return None


class NetworkWatch:
    """Notes the calls of a step that took images and gave scores, with forward hooks that change nothing.

    It keeps references to what the step has anyway, until `clear`. Compiled modules are left alone: a hook would be
    compiled, too.

    Args:
        model: what trains.

    Attributes:
        calls: of this step, the outermost last.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[NetworkCall] = []
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._seen, self._failed = WeakMethod(self._note), WeakMethod(self._ignore)

    def attach(self) -> None:
        """Put the hooks on."""
        if self._handles:
            return
        compiled = tuple(f"{name}." if name else "" for name in compiled_layers(self._model))
        apart = with_fast_path(self._model)
        try:
            for name, module in {"": self._model, **named_layers(self._model)}.items():
                if not f"{name}.".startswith(compiled) and module not in apart:
                    self._handles.append(on_forward(module, Hook(self._seen, self._failed, name), apart=False))
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take the hooks off; the calls stay."""
        while self._handles:
            self._handles[-1].remove()  # before it is forgotten: Ctrl-C may come here, and then this is called again
            self._handles.pop()

    def clear(self) -> None:
        """Let go of the step."""
        self.calls = []

    def _note(self, _: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if current_pass() is not None or current_backward() >= 0 or not torch.is_grad_enabled():
            return
        images = next((t for t in floating_tensors((args, kwargs)) if t.dim() >= 3), None)
        scores = None if images is None else scores_in(output, len(images))
        if scores is not None and len(self.calls) < _MOST_CALLS:
            self.calls.append(NetworkCall(module, args, kwargs, scores.detach()))

    def _ignore(self, name: str, error: Exception) -> None:
        """Ignore it: a call that cannot be understood is not the network."""


class Comparison:
    """The scores of calls, compared with training's loss where both are. Nobody waits before the result is asked for.

    Args:
        calls: of a training step, the outermost last.
        labels: the class of each image.
        loss: what training has computed for the step, without any scaling.
        beside: other tensors that arrive with the result.
    """

    def __init__(
        self, calls: Sequence[NetworkCall], labels: Sequence[int] | Tensor, loss: Tensor, beside: Sequence[Tensor] = ()
    ) -> None:
        targets = plain(labels) if isinstance(labels, Tensor) else torch.tensor(labels)
        self._calls = [
            call for call in reversed(calls) if len(call.scores) == len(targets) and _takes_images_only(call)
        ]
        fits = [_fits(call.scores, targets, plain(loss)) for call in self._calls]
        self._on_the_way = OnTheWay([targets, *fits, *beside])

    def result(self) -> tuple[NetworkCall | None, list[int], list[Tensor]]:
        """Return the outermost call that fits, if a pass of it leaves no trace; the labels; and what is beside."""
        targets, *others = self._on_the_way.arrived()
        fits, beside = others[: len(self._calls)], others[len(self._calls) :]
        call = next((call for call, fit in zip(self._calls, fits, strict=True) if fit), None)
        return call if call is not None and _leaves_no_trace(call.module) else None, targets.tolist(), beside


def _fits(scores: Tensor, labels: Tensor, loss: Tensor) -> Tensor:
    """Return whether the scores `(N, C)` have this loss as their mean cross-entropy, with or without smoothing."""
    labels, classes = from_host(labels, scores.device).long(), scores.shape[1]
    logs = scores.float().log_softmax(1)
    of_label = -logs.gather(1, labels.clamp(0, classes - 1)[:, None]).mean()
    wanted, of_all = loss.detach().float().reshape(()).to(scores.device), -logs.mean()
    smoothed = [(1 - smoothing) * of_label + smoothing * of_all for smoothing in SMOOTHINGS]
    found = torch.stack([of_label, *smoothed])
    tolerance = (IN_HALF if scores.dtype in HALF else TOLERANCE) * wanted.abs().clamp_min(1)
    return ((labels >= 0) & (labels < classes)).all() & ((found - wanted).abs() <= tolerance).any()


def _takes_images_only(call: NetworkCall) -> bool:
    """Return whether a call was given images, and beside them only numbers, text and one whole number for each image.

    Whatever else it was given (features, a memory, a generator) may change in a pass, and is not cut with the images.
    """
    with no_overrides():
        return sum(_of_argument(value, len(call.scores)) for value in (*call.args, *call.kwargs.values())) == 1


def _of_argument(value: Any, count: int) -> float:
    """Return how many tensors of images an argument holds; not a number if it holds anything unknown."""
    if isinstance(value, Tensor):
        if value.dim() >= 3 and value.is_floating_point() and len(value) == count:
            return 1
        is_label = value.dim() == 1 and not value.is_floating_point() and len(value) == count
        return 0 if is_label else math.nan
    if isinstance(value, ATOMS):
        return 0
    inside = stored_parts(value)
    return sum(_of_argument(part.value, count) for part in inside) if inside else math.nan


def _leaves_no_trace(network: nn.Module) -> bool:
    """Return whether a pass of the network can be undone: nothing unknown, no hooks of the user's, no large state."""
    state = PythonState(network, _LARGE)
    return not (state.hooks or state.iterators or state.unknown or state.is_large)


def is_large(module: nn.Module) -> bool:
    """Return whether a module holds so much that keeping its state would take longer than a pass."""
    return PythonState(module, _LARGE).is_large
