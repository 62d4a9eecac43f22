"""Order-0 and Grad-CAM maps of given images, in one pass that leaves no trace in the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning.hooks.readings import Point, Reading
from normgrad_lightning.hooks.recorder import NormGrad
from normgrad_lightning.isolated.batches import copied
from normgrad_lightning.isolated.choose_layers import auto_layers
from normgrad_lightning.isolated.one_pass import (
    LAYERS,
    LossFunction,
    check_loss_fn,
    graph_roots,
    loss_and_gradients,
    with_few_copies,
)
from normgrad_lightning.isolated.sandbox import Sandbox, read_only
from normgrad_lightning.layers.names import AUTO, check_model, check_spec
from normgrad_lightning.layers.options import ReadOptions, Target
from normgrad_lightning.layers.own_passes import own_pass
from normgrad_lightning.views.map_dict import Maps


def order0_maps(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    target: Target = "output",
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> Maps:
    """Return the order-0 maps of a model for a batch, in one pass that leaves no trace in the model.

    The pass asks autograd for the hook points only: weights get no gradient, no graph is kept below the lowest hook
    point, and backward stops there. So frozen models work too. BatchNorm, dropout and other modules without children
    run in eval mode. Raw values scale as the loss does: a mean over N images divides them by N.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)`, a scalar.
        batch: whatever `loss_fn` takes.
        layers: see `select_layers`. `"auto"` takes one more forward pass, to decide.
        target: see `NormGrad`.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        The map `(N, *S)` of each layer, in the order of the network: a dict, which a notebook shows as a picture.

    Example:
        >>> import torch
        >>> from normgrad_lightning import order0_maps
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Flatten())
        >>> _ = torch.nn.init.ones_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
        >>> image = torch.tensor([[[[0.0, -1.0], [2.0, 3.0]]]])

        The layer passes the image on, and the gradient of half a sum of squares is the image again: so the map is x².

        >>> def loss_fn(model, images):
        ...     return model(images).square().sum() / 2
        >>> order0_maps(model, loss_fn, image, "0")["0"]
        tensor([[[0., 1.],
                 [4., 9.]]])
    """
    check_loss_fn(loss_fn)
    return maps_of_pass(model, loss_fn, batch, layers, "order0", ReadOptions(target, token_grid, channels_last))


def grad_cam_maps(
    model: nn.Module,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    loss_fn: LossFunction | None = None,
    score_fn: LossFunction | None = None,
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> Maps:
    """Return Grad-CAM maps of a model for a batch, to compare with the others; in one pass that leaves no trace.

    Grad-CAM shows what raises a score or lowers a loss. The two have opposite signs, so the function must be named.

    Args:
        model: any module.
        batch: whatever the function takes.
        layers: see `select_layers`. `"auto"` takes one more forward pass, to decide.
        loss_fn: `loss_fn(model, batch)`, a scalar to be *lowered*, as for the other functions; or
        score_fn: `score_fn(model, batch)`, a scalar to be *raised*: the score of a class, summed over images.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        The map `(N, *S)` of each layer, in the order of the network: a dict, which a notebook shows as a picture.

    Raises:
        ValueError: not exactly one of `loss_fn` and `score_fn`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import grad_cam_maps
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.Flatten())
        >>> _ = torch.nn.init.ones_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
        >>> image = torch.tensor([[[[0.0, -1.0], [2.0, 3.0]]]])

        Positive features raise their sum. As a loss, to be lowered, the same sum has the opposite map:

        >>> def total(model, images):
        ...     return model(images).sum()
        >>> grad_cam_maps(model, image, "0", score_fn=total)["0"]
        tensor([[[0., 0.],
                 [2., 3.]]])
        >>> grad_cam_maps(model, image, "0", loss_fn=total)["0"]
        tensor([[[0., 1.],
                 [0., 0.]]])
    """
    loss = _one_loss(batch, loss_fn, score_fn)
    options = ReadOptions(token_grid=token_grid, channels_last=channels_last)
    return maps_of_pass(model, loss, batch, layers, "grad_cam", options)


def _one_loss(batch: Any, loss_fn: LossFunction | None, score_fn: LossFunction | None) -> LossFunction:
    """Return the function to lower: the loss, or the score with its sign turned."""
    given = [name for name, function in (("loss_fn", loss_fn), ("score_fn", score_fn)) if function is not None]
    if len(given) != 1:
        positional = " The second argument is the batch." if callable(batch) and not isinstance(batch, Tensor) else ""
        raise ValueError(
            "`loss_fn`, `score_fn`: expected exactly one of them by name, but got "
            f"{' and '.join(given) or 'none'}.{positional} Pass `loss_fn=` for a loss to be lowered, `score_fn=` for a "
            "score to be raised: their maps are opposite."
        )
    if loss_fn is not None:
        check_loss_fn(loss_fn)
        return loss_fn
    check_loss_fn(score_fn, "score_fn")
    return _Lowered(score_fn)  # type: ignore[arg-type]


class _Lowered:
    """A score with its sign turned: to be lowered, like a loss."""

    name = "score_fn"

    def __init__(self, score_fn: LossFunction) -> None:
        self._score_fn = score_fn

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return -self._score_fn(model, batch)


def maps_of_pass(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str],
    kind: str,
    options: ReadOptions,
) -> Maps:
    """Return maps of a kind that can be read in one pass, which asks for gradients at the layers alone."""
    check_model(model)
    check_spec(layers)
    if layers == AUTO:
        layers = auto_layers(model, loss_fn, batch, options)

    def read(copies: bool) -> NormGrad:
        roots: list[Tensor] = []
        recorder = _CopyingRecorder(model, layers, kinds=[kind], **vars(options))

        def forward_and_backward(stand_in: nn.Module) -> None:
            with graph_roots(recorder.modules_read, options.target, roots, copies=copies), recorder:
                own_batch = copied(batch) if copies else copied(batch, read_only)
                loss_and_gradients(loss_fn, stand_in, own_batch, lambda: roots, LAYERS)

        with torch.enable_grad():
            Sandbox(model, read_only=not copies).run(forward_and_backward)
        return recorder

    with own_pass():
        recorder = with_few_copies(model, read)
        return recorder.maps


class _CopyingRecorder(NormGrad):
    """Reads Grad-CAM of copies: of a few layers that were asked for, even if later layers overwrite what they give."""

    def _reading(self, point: Point, x: Tensor) -> Reading:
        return super()._reading(point, x.clone() if "grad_cam" in self.kinds else x)
