"""Passes of our own through a model, isolated from everything that they could disturb (see `isolation`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning.batches import copied, map_tensors
from normgrad_lightning.capture import NormGrad, Point, Reading
from normgrad_lightning.functional import grad_cam
from normgrad_lightning.isolation import Sandbox, own_pass
from normgrad_lightning.layers import AUTO, check_model, check_spec, match_layers, named_layers
from normgrad_lightning.scout import Scout

LossFunction = Callable[[nn.Module, Any], Tensor]
"""`loss_fn(model, batch)`, a scalar."""


class NothingToRead(ValueError):
    """None of the layers can be read."""


def select_layers(model: nn.Module, spec: str | Sequence[str] = AUTO, inputs: Any = None) -> list[str]:
    """The names of the layers that `spec` means.

    Args:
        model: any module.
        spec: `"auto"`, a name, a glob such as `"layer*.1"`, or a list of names and globs. `*` stays within one part of
            a name (`"layer*"` is `layer1` to `layer4`, not `layer1.0`); `**` stands for any number of parts.
        inputs: what to call the model with, to decide `"auto"`: a tensor, a tuple of arguments or a dict of keywords.

    Returns:
        Names as in `model.named_modules()`: as the network runs for `"auto"`, as it is built otherwise.

    Raises:
        ValueError: a name that matches nothing, with the nearest names, or `"auto"` without inputs.
    """
    check_model(model)
    check_spec(spec)
    if spec != AUTO:
        return match_layers(model, spec)
    if inputs is None:
        raise ValueError(
            '`inputs`: "auto" decides from what the network does with real inputs, but got None. '
            "Pass an example batch, or name the layers."
        )
    return _seen_layers(model, lambda stand_in: _call(stand_in, inputs))


def order0_maps(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    target: str = "output",
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> dict[str, Tensor]:
    """Order-0 maps of a model for a batch, in one pass that leaves no trace in the model.

    The pass asks autograd for the hook points only: weights get no gradient, and neither is a graph kept below the
    lowest hook point nor does backward go there. So frozen models work too. BatchNorm, dropout and other modules
    without children run in eval mode. Raw values scale as the loss does: a mean over N images divides them by N.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)`, a scalar.
        batch: whatever `loss_fn` takes.
        layers: see `select_layers`. `"auto"` takes one more forward pass, to decide.
        target: see `NormGrad`.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        The map `(N, *S)` of each layer, in the order of the network.
    """
    options = {"target": target, "token_grid": token_grid, "channels_last": channels_last}
    return _maps(NormGrad, model, loss_fn, batch, layers, **options)


def grad_cam_maps(
    model: nn.Module,
    score_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> dict[str, Tensor]:
    """Grad-CAM maps of a model for a batch, to be seen beside the others; in one pass that leaves no trace.

    Args:
        model: any module.
        score_fn: `score_fn(model, batch)`, what the maps speak for: the score of a class, summed over images.
        batch: whatever `score_fn` takes.
        layers: see `select_layers`. `"auto"` takes one more forward pass, to decide.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        The map `(N, *S)` of each layer, in the order of the network.
    """
    options = {"target": "output", "token_grid": token_grid, "channels_last": channels_last}
    return _maps(_GradCam, model, score_fn, batch, layers, **options)


class _GradCam(NormGrad):
    """Makes Grad-CAM maps of what it sees."""

    def _reading(self, point: Point, x: Tensor) -> Reading:
        kept = point.view(x.clone())  # layers after it may work in place
        return lambda g: grad_cam(kept, point.view(g))


def _maps(
    kind: type[NormGrad],
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str],
    *,
    target: Any,
    **options: Any,
) -> dict[str, Tensor]:
    """What a recorder of this kind makes of one pass, which asks for gradients at its layers alone."""
    check_model(model)
    check_spec(layers)
    if layers == AUTO:
        layers = auto_layers(model, loss_fn, batch, target=target, **options)
    roots: list[Tensor] = []

    def loss_and_backward(stand_in: nn.Module) -> None:
        loss = loss_fn(stand_in, copied(batch))
        check_scalar(loss)
        check_depends(loss, roots, loss_fn)
        torch.autograd.grad(loss, roots, allow_unused=True)

    with own_pass():
        names, known = match_layers(model, layers, target), named_layers(model)
        recorder = kind(model, names, target=target, **options)
        with torch.enable_grad(), graph_roots([known[name] for name in names], target, roots), recorder:
            Sandbox(model).run(loss_and_backward)
        return recorder.maps


def check_scalar(loss: object) -> None:
    """Raise if `loss` is no scalar tensor."""
    if not isinstance(loss, Tensor):
        raise ValueError(
            f"`loss_fn`: expected a scalar tensor, but got {type(loss).__name__!r}. Return the loss as a tensor."
        )
    if loss.numel() != 1:
        raise ValueError(
            f"`loss_fn`: expected a scalar tensor, but got a tensor of shape {tuple(loss.shape)}. "
            "Reduce it, for example with `.mean()`."
        )


def check_depends(loss: Tensor, on: Sequence[Tensor], loss_fn: LossFunction, what: str = "the chosen layers") -> None:
    """Raise if `loss`, which `loss_fn` gave, cannot be differentiated by these tensors."""
    if not on or not loss.requires_grad:
        raise ValueError(
            f"`{getattr(loss_fn, 'name', 'loss_fn')}`: expected a loss that depends on {what}, but it does not. "
            "Check that it is computed by the model, without `.detach()` and outside of `torch.no_grad()`."
        )


def auto_layers(model: nn.Module, loss_fn: LossFunction, batch: Any, **options: Any) -> list[str]:
    """What `"auto"` takes for a loss, from one forward pass that leaves no trace."""
    layers = _seen_layers(model, lambda stand_in: check_scalar(loss_fn(stand_in, copied(batch))), **options)
    if not layers:
        raise ValueError('`layers`: "auto" found no layer that gives features on a grid. Name the layers.')
    return layers


def trained_layers(model: nn.Module, loss_fn: LossFunction, batch: Any, **options: Any) -> list[str]:
    """What `"auto"` takes in training: of the layers that the gradient reaches, as weights may be frozen."""
    recorder = replayed(model, loss_fn, batch, AUTO, training=False, **options)
    if not recorder.layers:
        why = (
            "no layer was seen at work. Hooks see only layers that are called as `layer(x)`, not as `layer.forward(x)`."
        )
        raise NothingToRead(f"`layers`: {' '.join(recorder.new_problems()) or why}")
    return recorder.layers


def replayed(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str],
    *,
    training: bool = True,
    **options: Any,
) -> NormGrad:
    """What a recorder sees of a training step: a forward and backward pass that ask for what training asks for.

    The pass leaves no trace in the model. Compiled code runs eagerly in it, so that its inside can be read.

    Args:
        model: any module.
        loss_fn: see `order0_maps`, as for `batch`.
        batch: see there.
        layers: see `select_layers`.
        training: whether BatchNorm, dropout and the like run as in training, with the random numbers that come next.
        options: of `NormGrad`.
    """
    stand_ins = {name: p.detach().clone().requires_grad_(p.requires_grad) for name, p in model.named_parameters()}

    def loss_and_backward(stand_in: nn.Module) -> None:
        loss = loss_fn(stand_in, copied(batch))
        check_scalar(loss)
        learning = [p for p in stand_ins.values() if p.requires_grad]
        check_depends(loss, learning, loss_fn, "the model's parameters")
        torch.autograd.grad(loss, learning, allow_unused=True)

    with torch.enable_grad(), own_pass(), NormGrad(model, layers, **options) as recorder:
        Sandbox(model, training=training).run(loss_and_backward, stand_ins)
    return recorder


def _seen_layers(model: nn.Module, run: Callable[[nn.Module], Any], **options: Any) -> list[str]:
    with torch.no_grad(), own_pass(), Scout(model, **options) as scout:
        Sandbox(model).run(run)
    return scout.choose()


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


@contextmanager
def graph_roots(
    layers: Iterable[nn.Module], target: str, roots: list[Tensor], *, beside_weights: bool = False
) -> Iterator[None]:
    """Let autograd's graph begin at the lowest of these layers; its beginnings are added to `roots`.

    With `beside_weights`, which also ask for gradients, it begins only where none would come by otherwise.
    """

    def rooted(t: Tensor) -> Tensor:
        if not t.is_floating_point() or (t.requires_grad and (roots or beside_weights)):
            return t
        roots.append(t.clone() if t.requires_grad else t.detach().requires_grad_())
        return roots[-1].clone()  # not the root itself: the next layer may work in place

    def begin_at_input(_: nn.Module, args: Any, kwargs: Any) -> Any:
        return map_tensors(rooted, (args, kwargs))

    def begin_at_output(_: nn.Module, args: Any, output: Any) -> Any:
        return map_tensors(rooted, output)

    handles = [  # before whatever reads the layer
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
