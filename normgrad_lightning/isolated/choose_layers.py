"""Which layers a specification means, found by a pass that leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning.hooks.recorder import NormGrad
from normgrad_lightning.isolated.batches import copied
from normgrad_lightning.isolated.one_pass import LossFunction, NothingToRead, check_scalar, replayed
from normgrad_lightning.isolated.sandbox import Sandbox
from normgrad_lightning.layers.names import AUTO, check_model, check_spec, match_layers
from normgrad_lightning.layers.nested import floating_tensors
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.layers.own_passes import own_pass
from normgrad_lightning.maths.tensor_subclasses import plain


def select_layers(model: nn.Module, spec: str | Sequence[str] = AUTO, inputs: Any = None) -> list[str]:
    """Return the names of the layers that `spec` means.

    Args:
        model: any module.
        spec: `"auto"`, a name, a glob such as `"layer*.1"`, or a list of names and globs. `*` stays within one part of
            a name (`"layer*"` is `layer1` to `layer4`, not `layer1.0`); `**` stands for any number of parts.
        inputs: what to call the model with, to decide `"auto"`: a tensor, a tuple of arguments or a dict of keywords.

    Returns:
        Names as in `model.named_modules()`: in the order in which the network runs for `"auto"`, else in the order in
        which it is built.

    Raises:
        ValueError: a name that matches nothing, with the nearest names, or `"auto"` without inputs.

    Example:
        >>> import torch
        >>> from normgrad_lightning import select_layers
        >>> conv = torch.nn.Conv2d
        >>> model = torch.nn.Sequential(conv(3, 4, 3, 2), torch.nn.ReLU(), conv(4, 4, 3, 2), torch.nn.ReLU())

        Automatically, the last layer of each resolution; or by name:

        >>> select_layers(model, "auto", torch.rand(2, 3, 32, 32))
        ['1', '3']
        >>> select_layers(model, ["0", "2"])
        ['0', '2']
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
    return _seen_layers(model, lambda stand_in: total(_call(stand_in, inputs)), ReadOptions())


def auto_layers(model: nn.Module, loss_fn: LossFunction, batch: Any, options: ReadOptions) -> list[str]:
    """Return what `"auto"` takes for a loss, whatever is frozen."""

    def run(stand_in: nn.Module) -> Tensor:
        loss: Tensor = plain(loss_fn(stand_in, copied(batch)))
        check_scalar(loss, loss_fn)
        return loss

    layers = _seen_layers(model, run, options)
    if not layers:
        raise ValueError('`layers`: "auto" found no layer that gives features on a grid. Name the layers.')
    return layers


def trained_layers(model: nn.Module, loss_fn: LossFunction, batch: Any, options: ReadOptions) -> list[str]:
    """Return what `"auto"` takes in training: only layers that the gradient reaches, as weights may be frozen."""
    recorder = replayed(model, loss_fn, batch, AUTO, options, training=False)
    if not recorder.layers:
        why = (
            "no layer was seen at work. Hooks see only layers that are called as `layer(x)`, not as `layer.forward(x)`."
        )
        raise NothingToRead(f"`layers`: {' '.join(recorder.new_problems()) or why}")
    return recorder.layers


def total(output: Any) -> Tensor:
    """Return a number that depends on all that a model gives, each value with its own weight.

    The plain sum of normalised features would depend on nothing.
    """
    tensors = [t.float().flatten() for t in floating_tensors(output)]
    return sum(((t * torch.arange(len(t), device=t.device).cos()).sum() for t in tensors), torch.zeros(()))


def _seen_layers(model: nn.Module, run: Callable[[nn.Module], Tensor], options: ReadOptions) -> list[str]:
    """Return what `"auto"` takes if all weights get a gradient; by the forward pass alone, if none can."""
    stand_ins = {name: _trainable(p) for name, p in model.named_parameters()}
    weights = [p for p in stand_ins.values() if p.requires_grad]

    def step(stand_in: nn.Module) -> NormGrad:
        with NormGrad(model, **vars(options)) as recorder:
            loss = run(stand_in)
            if loss.requires_grad and weights:
                torch.autograd.grad(loss, weights, allow_unused=True)
        return recorder

    with torch.enable_grad(), own_pass():
        recorder: NormGrad = Sandbox(model).run(step, stand_ins)
    return recorder.layers or recorder.candidates()


def _trainable(p: Tensor) -> Tensor:
    return p.detach().clone().requires_grad_(p.is_floating_point() or p.is_complex())


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)
