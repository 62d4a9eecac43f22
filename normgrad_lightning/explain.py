"""Maps of a trained model for given images: of order 0 and 1, adversarial, contrast, and Grad-CAM beside them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgrad_lightning.layers import AUTO
from normgrad_lightning.order1 import KINDS as ORDER1_KINDS
from normgrad_lightning.order1 import Settings, run_passes
from normgrad_lightning.passes import (
    LossFunction,
    NothingToRead,
    auto_layers,
    grad_cam_maps,
    order0_maps,
    replayed,
    trained_layers,
)

KINDS = ("order0", *ORDER1_KINDS, "grad_cam")

Maps = dict[str, dict[str, Tensor]]
"""The maps `(N, *S)` of each kind and each layer."""


def predicted(module: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The class that the module names for each image, and how sure it is, from 0 to 1."""
    with torch.no_grad():
        sure, labels = _scores(module, images).softmax(1).max(1)
    return labels, sure


def explain(
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    layers: str | Sequence[str],
    kinds: Sequence[str],
    *,
    epsilon: float = 5e-3,
    progress: Callable[[int], None] = lambda done: None,
) -> Maps:
    """The maps of these kinds for each image, one image after the other: none depends on those beside it.

    Args:
        module: a classifier, or a module with a `normgrad_loss(batch)`.
        images: `(N, C, H, W)`.
        labels: `(N,)`.
        layers: see `select_layers`; `"auto"` decides by the first image.
        kinds: of `KINDS`.
        epsilon: size of order 1's inner step.
        progress: is told how many images are done.
    """
    batches = [(images[i : i + 1], labels[i : i + 1]) for i in range(len(images))]
    loss = _normgrad_loss if hasattr(module, "normgrad_loss") else _cross_entropy
    chosen = _readable(module, loss, batches[0], layers)
    results = list[Maps]()
    for batch in batches:
        progress(len(results))
        results.append(_of_one(module, loss, batch, chosen, kinds, Settings(epsilon)))
    return {
        kind: {name: torch.cat([maps[kind][name] for maps in results]) for name in results[0][kind]} for kind in kinds
    }


def _readable(module: nn.Module, loss: LossFunction, batch: Any, layers: str | Sequence[str]) -> list[str]:
    """The names of the layers, of those that can be read for this image; the others are warned of."""
    if layers == AUTO:
        try:
            return trained_layers(module, loss, batch)
        except ValueError:  # all of it may be frozen
            return auto_layers(module, loss, batch)
    recorder = replayed(module, loss, batch, layers, training=False)
    names, problems = list(recorder.latest_maps()), recorder.new_problems(after_backward=True)
    if not names:
        raise NothingToRead(f"`--layers`: {' '.join(problems)}")
    for problem in problems:
        warnings.warn(problem, stacklevel=3)
    return names


def _of_one(
    module: nn.Module,
    loss: LossFunction,
    batch: tuple[Tensor, Tensor],
    layers: str | Sequence[str],
    kinds: Sequence[str],
    settings: Settings,
) -> Maps:
    maps: Maps = {}
    order1 = [kind for kind in kinds if kind in ORDER1_KINDS]
    if "order0" in kinds:
        maps["order0"] = order0_maps(module, loss, batch, layers)
    if order1:
        maps.update(run_passes(module, loss, [batch], layers, order1, settings).maps)
    if "grad_cam" in kinds:
        maps["grad_cam"] = grad_cam_maps(module, _score, batch, layers)
    return maps


def _normgrad_loss(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.normgrad_loss(batch)
    return loss


def _cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = _scores(module, batch[0])
    _check_labels(scores, batch[1])
    return F.cross_entropy(scores, batch[1])


def _score(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The score of the label, before a softmax."""
    scores = _scores(module, batch[0])
    _check_labels(scores, batch[1])
    return scores.gather(1, batch[1][:, None]).sum()


def _scores(module: nn.Module, images: Tensor) -> Tensor:
    scores = module(images)
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        came = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(type(scores).__name__)
        raise ValueError(
            f"`--module`: expected one that gives a score for each class, (N, classes), but it gives {came}. For "
            "another loss, define `normgrad_loss(self, batch)`, leave `grad_cam` out of `--maps`, and give `--label`."
        )
    return scores


def _check_labels(scores: Tensor, labels: Tensor) -> None:
    if not 0 <= int(labels) < scores.shape[1]:
        raise ValueError(
            f"`--label`: expected a number from 0 to {scores.shape[1] - 1}, as the model knows {scores.shape[1]} "
            f"classes, but got {int(labels)}."
        )
