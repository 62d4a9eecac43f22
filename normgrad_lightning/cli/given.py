"""What `explain` is given, or finds in the checkpoint: the normalisation, the names of classes, the labels."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrad_lightning.cli.classes import check_number_of_classes, class_name, class_number, read_classes
from normgrad_lightning.cli.explain import number_of_classes, predicted
from normgrad_lightning.cli.hyperparameters import class_names, normalisation, unfit_normalisation

Numbers = Sequence[float] | None

SAME_GUESS = 3
"""How many images must get one guess before that looks wrong."""


class Labels(NamedTuple):
    """The label of each image.

    Attributes:
        labels: `(N,)`.
        spoken: each of them in words.
        doubt: a question, if the guesses of the model look wrong; else empty.
    """

    labels: Tensor
    spoken: list[str]
    doubt: str = ""


def normalisation_for(
    contents: Mapping[str, Any], channels: int, mean: Numbers, std: Numbers
) -> tuple[Numbers, Numbers]:
    """The mean and std to normalise with: those given, or else those in the checkpoint, if both of them fit."""
    given = {"mean": mean, "std": std}
    saved = {name: values for name, values in normalisation(contents, channels).items() if given[name] is None}
    unfit = {name: v for name, v in unfit_normalisation(contents, channels).items() if given[name] is None}
    if unfit:
        saved = {}
        spoken = " and ".join(f"{name} {value!r}" for name, value in unfit.items())
        tell(
            f"The checkpoint's hyperparameters have {spoken}, which cannot normalise images of {channels} channels: "
            "nothing of them is used. Set --mean and --std."
        )
    if saved:
        spoken = " and ".join(f"{name} {','.join(f'{v:.4g}' for v in values)}" for name, values in saved.items())
        tell(f"Images are normalised with {spoken}, from the checkpoint's hyperparameters.")
    used: dict[str, Numbers] = {**given, **saved}
    return used["mean"], used["std"]


def classes_for(contents: Mapping[str, Any], module: nn.Module, images: Tensor, given: str | None) -> list[str] | None:
    """The names of the classes: those given, or else those in the checkpoint; None if there are none."""
    classes = class_names(contents) if given is None else read_classes(given)
    if classes is None:
        return None
    count = number_of_classes(module, images)
    if given is not None:
        check_number_of_classes(classes, count)
    elif count not in (None, len(classes)):
        tell(f"The checkpoint has names for {len(classes)} classes, but the model knows {count}: they are not used.")
        return None
    return classes


def labels_for(
    module: nn.Module, images: Tensor, classes: Sequence[str] | None, given: Sequence[int | str] | None
) -> Labels:
    """The labels of the images: those given, or else what the model guesses."""
    if given is None:
        labels, sure = predicted(module, images)
        names = [class_name(label, classes) for label in labels.tolist()]
        spoken = [f"{name} (the model's own guess, {share:.0%})" for name, share in zip(names, sure, strict=True)]
        return Labels(labels, spoken, _doubt(labels.tolist(), names[0]))
    if len(given) not in (1, len(images)):
        raise ValueError(f"`--label`: expected one, or {len(images)} for as many images, but got {len(given)}.")
    numbers = [class_number(label, classes) for label in given]
    if not all(0 <= number < 2**31 for number in numbers):
        raise ValueError(f"`--label`: expected the numbers of classes, but got {numbers}.")
    labels = torch.tensor(numbers).expand(len(images)).clone()
    return Labels(labels, [class_name(label, classes) for label in labels.tolist()])


def tell(sentence: str) -> None:
    """Print a sentence beside the output."""
    print(sentence, file=sys.stderr, flush=True)


def _doubt(guesses: Sequence[int], name: str) -> str:
    """A question, if several images get one guess: with wrongly normalised pixels they often do."""
    if len(guesses) < SAME_GUESS or len(set(guesses)) > 1:
        return ""
    return f"All {len(guesses)} images get one guess, {name}: is the normalisation right? --mean and --std set it."
