"""BatchNorm layers that have hardly any statistics yet, and the statistics of a batch in their place.

Passes run BatchNorm in eval mode, as a single image has no statistics: it normalises with the running mean and
variance. In the first steps of training these are still near to where they start, at 0 and 1. Then BatchNorm normalises
nothing, and the features of a deep network grow from block to block: the loss may be 1e7, or not finite. Training uses
the statistics of its batch instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning.hooks.to_host import OnTheWay

BatchNorm = nn.modules.batchnorm._BatchNorm

STILL_YOUNG = 0.01
"""How much of running statistics may be what they started with."""


def layers_warming_up(model: nn.Module) -> dict[BatchNorm, int]:
    """Return the BatchNorm layers whose running statistics are still to more than 1 % what they started with.

    With each of them comes how often its statistics have been updated.
    """
    return warming_up(model, OnTheWay(counts_of_updates(model)).arrived())


def counts_of_updates(model: nn.Module) -> list[Tensor]:
    """Return how often the statistics of each BatchNorm layer have been updated, where that is counted."""
    counts = (m.num_batches_tracked for m in _with_statistics(model))
    return [torch.zeros(()) if count is None else count for count in counts]


def warming_up(model: nn.Module, counts: Sequence[Tensor]) -> dict[BatchNorm, int]:
    """Return the same as `layers_warming_up`, of counts that are known."""
    updates = {layer: int(count) for layer, count in zip(_with_statistics(model), counts, strict=True)}
    return {layer: count for layer, count in updates.items() if _share_of_start(layer, count) > STILL_YOUNG}


def _with_statistics(model: nn.Module) -> list[BatchNorm]:
    return [m for m in model.modules() if isinstance(m, BatchNorm) and m.running_mean is not None]


def collected(
    layers: Iterable[BatchNorm],
    run: Callable[[Callable[[nn.Module], Any]], Any],
    forward: Callable[[nn.Module], Any],
) -> dict[int, Tensor]:
    """Return the statistics of one forward pass for these layers of a model, by the identity of the buffers.

    Where they are not finite, the layer's own stay.

    Args:
        layers: the young ones.
        run: runs a function of the model without a trace.
        forward: the pass.
    """
    names = ("running_mean", "running_var")
    buffers = {(layer, name): getattr(layer, name) for layer in layers for name in names}

    def collect(stand_in: nn.Module) -> dict[int, Tensor]:
        for layer in layers:
            layer.momentum = 1.0
            layer.register_forward_pre_hook(_MeanOverCalls())
            vars(layer)["training"] = True
        with torch.no_grad():
            forward(stand_in)
        found = {key: getattr(*key) for key in buffers}
        return {id(buffers[key]): t.where(t.isfinite(), buffers[key].to(t.dtype)) for key, t in found.items()}

    statistics: dict[int, Tensor] = run(collect)
    return statistics


class _MeanOverCalls:
    """Lets a layer's statistics be the plain mean over its calls. Torch's own way to do so waits for the device."""

    def __init__(self) -> None:
        self._calls = 0

    def __call__(self, layer: BatchNorm, _: Any) -> None:
        self._calls += 1
        layer.momentum = 1 / self._calls


def _share_of_start(layer: BatchNorm, updates: int) -> float:
    """Return how much of the running statistics is what they started with."""
    if layer.momentum is None:  # a plain mean
        return float(updates == 0)
    share: float = (1 - layer.momentum) ** updates
    return share
