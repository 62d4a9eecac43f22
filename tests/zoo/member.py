"""A model of the zoo: how to build it, what images it takes, and the loss that its user would train it with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 10
Step = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Member:
    """A model of the zoo.

    Attributes:
        name: the library and the model's name in it.
        build: returns the model with random weights.
        size: of its images, the axes after the channels; not square where the model allows it.
        loss: returns the loss of a model and its images, as its user would write it.
        run: calls the model in eval mode; None: as for the loss.
        channels: of its images.
    """

    name: str
    build: Callable[[], nn.Module]
    size: Sequence[int]
    loss: Step
    run: Callable[[nn.Module, Tensor], Any] | None = None
    channels: int = 3

    @property
    def library(self) -> str:
        """The library that it comes from."""
        return self.name.partition("/")[0]

    def images(self, seed: int = 0, count: int = 2) -> Tensor:
        """Images of coarse and fine noise, so that shallow and deep layers have something to see."""
        generator = torch.Generator().manual_seed(seed)
        shape = (count, self.channels)
        coarse = torch.rand(*shape, *(max(size // 8, 1) for size in self.size), generator=generator)
        fine = torch.rand(*shape, *self.size, generator=generator)
        return (F.interpolate(coarse, size=tuple(self.size)) + fine) / 2


def classify(model: nn.Module, images: Tensor) -> Tensor:
    """The cross-entropy of a classifier."""
    logits = logits_of(model(images))
    return F.cross_entropy(logits, torch.arange(len(images)) % logits.shape[1])


def segment(model: nn.Module, images: Tensor) -> Tensor:
    """The cross-entropy of each pixel, for logits of the images' size or smaller."""
    logits = logits_of(model(images))
    if logits.shape[1] == 1:
        return F.binary_cross_entropy_with_logits(logits, labels_of(logits, 2)[:, None].to(logits.dtype))
    return F.cross_entropy(logits, labels_of(logits, logits.shape[1]))


def reconstruct(model: nn.Module, images: Tensor) -> Tensor:
    """The squared error of an autoencoder."""
    return F.mse_loss(logits_of(model(images)), images)


def labels_of(logits: Tensor, classes: int) -> Tensor:
    """A class for each pixel `(N, *S)`."""
    shape = (logits.shape[0], *logits.shape[2:])
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(3))


def logits_of(output: Any) -> Tensor:
    """The tensor that a loss reads in what a model gives."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        return output["logits"] if "logits" in output else output["out"]
    if hasattr(output, "logits"):
        return output.logits
    return logits_of(output[0])
