"""Maps of a trained model for given images, of every kind."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgrad_lightning.isolated.choose_layers import auto_layers, trained_layers
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.one_pass import LossFunction
from normgrad_lightning.isolated.order1 import run_passes
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.maps import EPSILON

Batch = tuple[Tensor, Tensor]
KindMaps = dict[str, dict[str, npt.NDArray[np.float32]]]

ABOUT_SCORE = "grad_cam"
"""The kind that is about the label's score; all others are about the loss."""


def maps_of(module: nn.Module, batch: Batch, layers: Sequence[str], kinds: Sequence[str]) -> KindMaps:
    """Return the map `(1, *S)` of each kind and each layer, for a batch of one image and its label."""
    maps: KindMaps = {}
    passes = {
        loss_of(module): [kind for kind in kinds if kind != ABOUT_SCORE],
        _negative_score: [kind for kind in kinds if kind == ABOUT_SCORE],
    }
    for loss, wanted in passes.items():
        if wanted:
            result = run_passes(module, loss, [batch], layers, wanted, InnerStep(EPSILON), ReadOptions())
            maps |= {kind: {name: m.numpy() for name, m in of.items()} for kind, of in result.maps.items()}
            for problem in result.problems:
                warnings.warn(problem, stacklevel=1)
    return {kind: maps[kind] for kind in kinds}


def auto_layers_of(module: nn.Module, batch: Batch) -> list[str]:
    """Return the layers that `"auto"` takes; as in training, or of all layers if the model is frozen."""
    try:
        return trained_layers(module, loss_of(module), batch, ReadOptions())
    except ValueError:
        return auto_layers(module, loss_of(module), batch, ReadOptions())


def labels_for(module: nn.Module, images: Tensor, given: Sequence[int] | None) -> tuple[Tensor, list[str]]:
    """Return the label of each image, as given or else as the module guesses, and the same in words."""
    if given is None:
        with torch.no_grad():
            shares, labels = _scores(module, images).softmax(1).max(1)
        return labels, [f"{i} (the model's own guess, {share:.0%})" for i, share in zip(labels, shares, strict=True)]
    if len(given) not in (1, len(images)):
        raise ValueError(f"`--label`: expected one, or {len(images)} for as many images, but got {len(given)}.")
    if not hasattr(module, "normgrad_loss"):
        with torch.no_grad():
            count = _scores(module, images[:1]).shape[1]
        if not 0 <= min(given) <= max(given) < count:
            raise ValueError(f"`--label`: expected numbers of classes, from 0 to {count - 1}, but got {list(given)}.")
    labels = torch.tensor(given).expand(len(images)).clone()
    return labels, [str(label) for label in labels.tolist()]


def loss_of(module: nn.Module) -> LossFunction:
    """Return the module's `normgrad_loss`, or else the cross-entropy of its scores and the label."""
    if hasattr(module, "normgrad_loss"):
        return lambda stand_in, batch: stand_in.normgrad_loss(batch)  # type: ignore[operator]
    return lambda stand_in, batch: F.cross_entropy(_scores(stand_in, batch[0]), batch[1])


def _scores(module: nn.Module, images: Tensor) -> Tensor:
    """Return the scores of a classifier, `(N, classes)`."""
    try:
        scores = module(images)
    except NotImplementedError as error:
        raise ValueError(
            f"`--module`: {type(module).__name__} has no `forward(self, images)`. Write one that gives a score for "
            "each class, (N, classes)."
        ) from error
    if not isinstance(scores, Tensor) or scores.dim() != 2:
        came = f"shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else repr(type(scores).__name__)
        raise ValueError(
            f"`--module`: expected one that gives a score for each class, (N, classes), but it gives {came}. For "
            "another loss, define `normgrad_loss(self, batch)`, leave `grad_cam` out of `--maps`, and give `--label`."
        )
    return scores


def _negative_score(module: nn.Module, batch: Batch) -> Tensor:
    """Return minus the score of the label: to be lowered, like a loss."""
    return -_scores(module, batch[0]).gather(1, batch[1][:, None]).sum()
