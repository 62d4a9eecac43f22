"""Maps of a trained model for given images, of every kind."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgrad_lightning.kinds import KINDS
from normgrad_lightning.passes.choose_layers import auto_layers, trained_layers
from normgrad_lightning.passes.inner_step import InnerStep
from normgrad_lightning.passes.one_pass import LossFunction, NothingToRead, replayed
from normgrad_lightning.passes.order0 import maps_of_pass
from normgrad_lightning.passes.order1 import run_passes
from normgrad_lightning.recording.layer_names import AUTO
from normgrad_lightning.recording.options import ReadOptions

KindMaps = dict[str, dict[str, Tensor]]
"""The maps `(N, *S)` of each kind and each layer."""


def predicted(module: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """The class that the module names for each image, and how sure it is, from 0 to 1."""
    with torch.no_grad():
        sure, labels = _scores(module, images).softmax(1).max(1)
    return labels, sure


def number_of_classes(module: nn.Module, images: Tensor) -> int | None:
    """How many classes the module has scores for; None if it has a loss of its own, and perhaps no scores."""
    if hasattr(module, "normgrad_loss"):
        return None
    with torch.no_grad():
        return _scores(module, images[:1]).shape[1]


def explain(
    module: nn.Module,
    images: Tensor,
    labels: Tensor,
    layers: str | Sequence[str],
    kinds: Sequence[str],
    step: InnerStep,
    *,
    progress: Callable[[int], None] = lambda done: None,
) -> KindMaps:
    """The maps of these kinds for each image, one image after the other: none depends on those beside it.

    Args:
        module: a classifier, or a module with a `normgrad_loss(batch)`.
        images: `(N, C, H, W)`.
        labels: `(N,)`.
        layers: see `select_layers`; `"auto"` decides by the first image.
        kinds: of `KINDS`.
        step: how order 1 makes its inner step.
        progress: called with the number of images that are done.
    """
    batches = [(images[i : i + 1], labels[i : i + 1]) for i in range(len(images))]
    loss = _normgrad_loss if hasattr(module, "normgrad_loss") else _cross_entropy
    if loss is _cross_entropy:
        with torch.no_grad():
            _check_labels(_scores(module, images[:1]), labels)
    chosen = _readable(module, loss, batches[0], layers)
    results = list[KindMaps]()
    for batch in batches:
        progress(len(results))
        results.append(_of_one(module, loss, batch, chosen, kinds, step))
    return {
        kind: {name: torch.cat([maps[kind][name] for maps in results]) for name in results[0][kind]} for kind in kinds
    }


def _readable(module: nn.Module, loss: LossFunction, batch: Any, layers: str | Sequence[str]) -> list[str]:
    """The names of the layers that can be read for this image; warns of the others."""
    options = ReadOptions()
    if layers == AUTO:
        try:
            return trained_layers(module, loss, batch, options)
        except ValueError:  # the model may be frozen
            return auto_layers(module, loss, batch, options)
    recorder = replayed(module, loss, batch, layers, options, training=False)
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
    layers: Sequence[str],
    kinds: Sequence[str],
    step: InnerStep,
) -> KindMaps:
    """The maps of one image. One pass gives each kind that is read; all others share theirs."""
    after_step = [kind for kind in kinds if KINDS[kind].needs_passes]
    maps = run_passes(module, loss, [batch], layers, after_step, step, ReadOptions()).maps if after_step else {}
    for kind in kinds:
        if kind not in maps:
            maps[kind] = maps_of_pass(module, _LOSSES.get(kind, loss), batch, layers, kind, ReadOptions())
    return maps


def _normgrad_loss(module: Any, batch: Any) -> Tensor:
    loss: Tensor = module.normgrad_loss(batch)
    return loss


def _cross_entropy(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    scores = _scores(module, batch[0])
    _check_labels(scores, batch[1])
    return F.cross_entropy(scores, batch[1])


def _negative_score(module: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The score of the label, before a softmax, with its sign turned: to be lowered, like a loss."""
    scores = _scores(module, batch[0])
    _check_labels(scores, batch[1])
    return -scores.gather(1, batch[1][:, None]).sum()


_LOSSES: dict[str, LossFunction] = {"grad_cam": _negative_score}
"""Kinds that are about something else than the loss."""


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
    wrong = [int(label) for label in labels if not 0 <= label < scores.shape[1]]
    if wrong:
        raise ValueError(
            f"`--label`: expected a number from 0 to {scores.shape[1] - 1}, as the model knows {scores.shape[1]} "
            f"classes, but got {wrong[0]}."
        )
