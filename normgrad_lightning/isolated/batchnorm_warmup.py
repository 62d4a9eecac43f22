"""BatchNorm layers that have hardly any statistics yet, and the statistics of a batch in their place.

Passes run BatchNorm in eval mode, as a single image has no statistics: it normalises with the running mean and
variance. In the first steps of training these are still near to where they start, at 0 and 1. Then BatchNorm normalises
nothing, and the features of a deep network grow from block to block: the loss may be 1e7, or not finite. Training uses
the statistics of its batch instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STILL_YOUNG = 0.01
"""How much of running statistics may be what they started with."""


def layers_warming_up(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the BatchNorm layers whose running statistics are still to more than 1 % what they started with."""
    layers = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    return [layer for layer in layers if layer.running_mean is not None and _share_of_start(layer) > STILL_YOUNG]


def updates(layer: nn.modules.batchnorm._BatchNorm) -> int:
    """Return how often its running statistics have been updated."""
    return int(layer.num_batches_tracked or 0)


def collected(
    model: nn.Module, run: Callable[[Callable[[nn.Module], Any]], Any], forward: Callable[[nn.Module], Any]
) -> dict[int, Tensor]:
    """Return the statistics of one forward pass for these layers of a model, by the identity of the buffers.

    Args:
        model: any module.
        run: runs a function of the model without a trace.
        forward: the pass.
    """
    layers = layers_warming_up(model)
    names = ("running_mean", "running_var")
    buffers = {(layer, name): id(getattr(layer, name)) for layer in layers for name in names}

    def collect(stand_in: nn.Module) -> dict[int, Tensor]:
        for layer in layers:
            layer.num_batches_tracked.zero_()  # type: ignore[union-attr]
            layer.momentum = None  # a plain mean over the calls of this pass
            vars(layer)["training"] = True
        with torch.no_grad():
            forward(stand_in)
        return {key: getattr(layer, name).clone() for (layer, name), key in buffers.items()}

    statistics: dict[int, Tensor] = run(collect)
    return statistics


def _share_of_start(layer: nn.modules.batchnorm._BatchNorm) -> float:
    """Return how much of the running statistics is what they started with."""
    count = updates(layer)
    if layer.momentum is None:  # a plain mean
        return float(count == 0)
    share: float = (1 - layer.momentum) ** count
    return share
