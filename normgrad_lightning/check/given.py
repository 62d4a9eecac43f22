"""The check for a finished model and given images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from normgrad_lightning.check.passes import loss_pool
from normgrad_lightning.check.results import ClassCheck
from normgrad_lightning.check.rounds import Check
from normgrad_lightning.isolated.one_pass import LossFunction, check_loss_fn
from normgrad_lightning.layers.names import AUTO, check_model, check_spec
from normgrad_lightning.layers.options import ReadOptions


def check_maps(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    labels: Sequence[int] | None = None,
    classes: Sequence[str] | None = None,
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> dict[str, ClassCheck]:
    """Test what maps show: cover the strongest place of each class's images, paste it into others, compare the losses.

    The loss of each image alone is asked, in passes that leave no trace in the model: a forward and a backward pass for
    its map, then about ten forward passes. At most 24 images of a class are taken.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)`, a scalar that a single image has, too.
        batch: whatever `loss_fn` takes, of which single images can be taken.
        layers: see `select_layers`.
        labels: the class of each image. None: all images are one class, and nothing is pasted.
        classes: the names of the classes, by number.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        What each class rests on, by name. A class with fewer than eight images is left out.

    Raises:
        ValueError: no single images can be taken of the batch, or they do not enter the network as they are.

    Example:
        >>> import torch
        >>> import torch.nn.functional as F
        >>> from normgrad_lightning import check_maps
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.AdaptiveMaxPool2d(1), torch.nn.Flatten())
        >>> _ = torch.nn.init.constant_(model[0].weight, 9.0), torch.nn.init.constant_(model[0].bias, -4.0)
        >>> images, labels = torch.arange(1600).reshape(16, 1, 10, 10) / 1e6, torch.arange(16) % 2
        >>> images[labels == 1, :, 2, 7] = 1  # class 1 has one bright pixel
        >>> def loss_fn(model, batch):
        ...     return F.binary_cross_entropy_with_logits(model(batch[0])[:, 0], batch[1].float())
        >>> found = check_maps(model, loss_fn, (images, labels), "0", labels=labels.tolist(), classes=["dark", "light"])
        >>> light = found["light"]
        >>> print(f"covered {light.covered:.2f}, elsewhere {light.covered_control:.2f}")
        covered 4.01, elsewhere 0.01
        >>> print(f"pasted {light.pasted:.2f}, another part {light.pasted_control:.2f}")
        pasted 5.01, another part 0.02
    """
    check_model(model)
    check_loss_fn(loss_fn)
    check_spec(layers)
    options = ReadOptions("output", token_grid, channels_last)
    pool = loss_pool(model, loss_fn, batch, None if labels is None else list(labels), layers, options=options)
    check = Check()
    check.names = dict(enumerate(classes or ()))
    while check.advance(pool, 0):
        pass
    return {one.name: one for one in check.results().values()}
