"""One forward and backward pass that leaves no trace in the model: the loss, and the gradients that are asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from normgrad_lightning.hooks.observer import ReadCall
from normgrad_lightning.hooks.recorder import NormGrad
from normgrad_lightning.isolated.batches import copied
from normgrad_lightning.isolated.interrupts import failures_dropped
from normgrad_lightning.isolated.sandbox import HALF, Sandbox, read_only, widened_copy
from normgrad_lightning.layers.names import AUTO
from normgrad_lightning.layers.nested import map_tensors
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.layers.own_passes import own_pass
from normgrad_lightning.maths.tensor_subclasses import plain

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)`, a scalar."""

LAYERS, PARAMETERS = "the chosen layers", "the model's parameters"
"""What a loss must depend on."""

_T = TypeVar("_T")
_need_copies: WeakSet[nn.Module] = WeakSet()


class NothingToRead(ValueError):
    """None of the layers can be read."""


class NotFinite(ValueError):
    """A loss or a gradient that is infinite or not a number."""


def check_loss_fn(loss_fn: object, name: str = "loss_fn") -> None:
    """Raise if `loss_fn` cannot be a function of a model and a batch."""
    came = type(loss_fn).__name__
    if not callable(loss_fn) or isinstance(loss_fn, nn.modules.loss._Loss):
        raise ValueError(
            f"`{name}`: expected a function of the model and a batch, but got {came!r}. "
            "Write, for example, `lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])`."
        )


def check_scalar(loss: object, loss_fn: LossFunction) -> None:
    """Raise if `loss`, which `loss_fn` returned, is not a scalar tensor."""
    loss, name = plain(loss), name_of(loss_fn)
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`{name}`: expected a scalar tensor, but got {type(loss).__name__!r}. Return the loss as a tensor."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"`{name}`: expected a scalar tensor, but got a tensor of shape {tuple(loss.shape)}. "
            "Reduce it, for example with `.mean()`."
        )


def check_finite(loss: Tensor) -> None:
    """Raise if `loss` is infinite or not a number."""
    value = loss.item()
    if not math.isfinite(value):
        raise NotFinite(f"`loss_fn`: expected a finite loss, but got {value}.")


def does_not_depend(loss_fn: LossFunction, what: str) -> ValueError:
    """Return the error for a loss that cannot be differentiated with respect to what is asked for."""
    return ValueError(
        f"`{name_of(loss_fn)}`: expected a loss that depends on {what}, but it does not. "
        "Check that the model computes it, without `.detach()` and outside of `torch.no_grad()`."
    )


def name_of(loss_fn: LossFunction) -> str:
    """Return what the user calls it."""
    return str(getattr(loss_fn, "name", "loss_fn"))


def loss_and_gradients(
    loss_fn: LossFunction,
    model: nn.Module,
    batch: Any,
    wanted: Callable[[], list[Tensor] | list[GradientEdge]],
    what: str,
    note: Callable[[Tensor], object] = plain,
) -> list[Tensor | None]:
    """Return the gradients of the loss of a batch; None for tensors that it does not depend on.

    Args:
        loss_fn: computes the loss.
        model: its first argument.
        batch: its second argument.
        wanted: called after the forward pass, returns the tensors, or their places in the graph, to differentiate with
            respect to.
        what: what these are, for an error.
        note: called with the loss, which it may refuse.
    """
    with alone(loss_fn, model):
        loss = plain(loss_fn(model, batch))
        check_scalar(loss, loss_fn)
        note(loss.detach())
        tensors = wanted()
        if not tensors or not loss.requires_grad:
            raise does_not_depend(loss_fn, what)
        return list(torch.autograd.grad(loss, tensors, allow_unused=True))


def alone(loss_fn: LossFunction, model: nn.Module) -> AbstractContextManager[Any]:
    """Return what a loss wants to have around forward and backward, if it has a method `alone`."""
    around = getattr(loss_fn, "alone", None)
    return nullcontext() if around is None else around(model)


def widened_batch(batch: Any) -> Any:
    """Return a copy of a batch, in float32 where it is in half precision."""
    return map_tensors(widened_copy, copied(batch))


def with_few_copies(model: nn.Module, run: Callable[[bool], _T], *, exact: bool = False) -> _T:
    """Return what `run(copies)` returns; without copies, if that works.

    Without copies, a pass runs on the batch and the model's own weights, read-only, and its graph begins at the lowest
    features themselves. A model that writes to these where it must not gets an error before anything changes or is
    wrong. Then the pass runs again with copies; for this model, also from then on. A pass that must be `exact` needs
    copies of weights in half precision: wider ones.
    """
    if exact and any(p.dtype in HALF for p in model.parameters()):
        return run(True)
    if model not in _need_copies:
        with failures_dropped():
            return run(False)
    result = run(True)
    _need_copies.add(model)
    return result


def replayed(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str],
    options: ReadOptions,
    *,
    training: bool = True,
    exact: bool = False,
    **recording: Any,
) -> NormGrad:
    """Return a recorder that has seen a training step: the gradients that reach layers in training reach them here.

    Named layers are all that autograd is asked for, so weights get no gradient, and backward stops at the lowest layer.
    For `"auto"` it is asked for what training asks for. Compiled code runs eagerly, so that layers inside can be read.

    Args:
        model: any module.
        loss_fn: see `order0_maps`, as for `batch`.
        batch: see there.
        layers: see `select_layers`.
        options: how to read layers.
        training: whether BatchNorm, dropout and the like run as in training, with the random numbers that come next.
        exact: whether to compute in float32 what training computes in half precision.
        recording: other arguments of `NormGrad`.
    """
    copied_weight = widened_copy if exact else Tensor.clone

    def replay(copies: bool) -> NormGrad:
        weight = copied_weight if copies else read_only
        stand_ins = {name: weight(p.detach()).requires_grad_(p.requires_grad) for name, p in model.named_parameters()}
        learning = [p for p in stand_ins.values() if p.requires_grad]
        recorder = _EdgeRecorder(model, layers, **recording, **vars(options))

        def wanted() -> list[Tensor] | list[GradientEdge]:
            return learning if layers == AUTO else recorder.edges or learning

        def step(stand_in: nn.Module) -> None:
            with recorder:
                own_batch = widened_batch(batch) if exact else copied(batch, weight)
                loss_and_gradients(loss_fn, stand_in, own_batch, wanted, PARAMETERS)

        Sandbox(model, training=training, exact=exact).run(step, stand_ins)
        recorder.edges.clear()  # they keep the graph alive
        return recorder

    with torch.enable_grad(), own_pass():
        return with_few_copies(model, replay, exact=exact)


class _EdgeRecorder(NormGrad):
    """Also notes the places in the graph where it waits for gradients.

    Not the tensors: after an operation in place, a tensor is at another place.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.edges: list[GradientEdge] = []

    def _await_gradient(self, call: ReadCall) -> None:
        super()._await_gradient(call)
        base = call.point._base
        points = [call.point] if base is None or not base.requires_grad else [call.point, base]
        self.edges += map(get_gradient_edge, points)


@contextmanager
def graph_roots(
    layers: Iterable[nn.Module],
    target: str,
    roots: list[Tensor],
    *,
    beside_weights: bool = False,
    copies: bool = True,
) -> Iterator[None]:
    """Let autograd's graph begin at the lowest of these layers, and add its leaves to `roots`.

    With `beside_weights`, the weights require gradients too: add a leaf only where no gradient would otherwise flow.
    Without `copies`, the graph begins at the layer's own tensor. A network that still writes to it from below, which
    only works without a graph, ends in an error of autograd.
    """

    def rooted(t: Tensor) -> Tensor:
        if not t.is_floating_point() or (t.requires_grad and (roots or beside_weights)):
            return t
        if not copies and not t.requires_grad:
            roots.append(torch.zeros((), requires_grad=True))
            return _Begin.apply(t, roots[-1])  # type: ignore[no-any-return]
        roots.append(t.clone() if t.requires_grad else t.detach().requires_grad_())
        return roots[-1].clone()  # not the root itself: the next layer may work in place

    def begin_at_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(rooted, (args, kwargs))

    def begin_at_output(_: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(rooted, output)

    handles = [  # before hooks that read the layer
        layer.register_forward_pre_hook(begin_at_input, with_kwargs=True, prepend=True)
        if target == "input"
        else layer.register_forward_hook(begin_at_output, prepend=True)
        for layer in layers
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Begin(torch.autograd.Function):
    """The identity, in the same memory: the graph begins here, and `root`, which has no other meaning, is its leaf.

    The result shares the version counter of `t`, so autograd sees who writes to either of them.
    """

    @staticmethod
    def forward(ctx: Any, t: Tensor, root: Tensor) -> Tensor:
        """Return `t` as another tensor."""
        return t.detach()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> tuple[None, None]:
        """Return nothing: hooks have read the gradient, and backward ends here."""
        return None, None
