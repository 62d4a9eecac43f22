"""Training for benchmarks: the networks, and a real Trainer whose steps take turns at having a callback or none.

All variants share one run, one model and its memory: on each step another callback hears of it, or none. Whatever else
is the same. So a step can be divided by the plain step next to it.
"""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import torchvision.models as zoo
from harness import Figures, Times, parser
from pytorch_lightning.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normgrad_lightning import NormGradCallback
from normgrad_lightning.hooks import gradients, safe_hooks

CLASSES = 1000


def vit_small(image_size: int) -> nn.Module:
    """ViT-S/16, with a head that does not start at zero, so that the first step has gradients everywhere."""
    net = zoo.VisionTransformer(
        image_size=image_size, patch_size=16, num_layers=12, num_heads=6, hidden_dim=384, mlp_dim=1536
    )
    nn.init.normal_(net.heads.head.weight, std=0.02)
    return net


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "ResNet-18": lambda _: zoo.resnet18(),
    "ResNet-50": lambda _: zoo.resnet50(),
    "MobileNet-V3": lambda _: zoo.mobilenet_v3_large(),
    "ConvNeXt-T": lambda _: zoo.convnext_tiny(),
    "ViT-S": vit_small,
}

FIVE_LAYERS = {
    "ResNet-18": ["relu", "layer1", "layer2", "layer3", "layer4"],
    "ResNet-50": ["relu", "layer1", "layer2", "layer3", "layer4"],
    "MobileNet-V3": ["features.1", "features.3", "features.6", "features.12", "features.16"],
    "ConvNeXt-T": ["features.0", "features.1", "features.3", "features.5", "features.7"],
    "ViT-S": [f"encoder.layers.encoder_layer_{i}" for i in (0, 2, 5, 8, 10)],
}
"""One layer for each resolution; of the ViT, blocks at even distances."""


def batch_of(size: int, pixels: int) -> tuple[Tensor, Tensor]:
    """Images with the spectrum of photographs (1/f) and as little colour, normalised; and labels."""
    generator = torch.Generator().manual_seed(0)
    frequencies = torch.fft.fftfreq(pixels)[:, None].square() + torch.fft.rfftfreq(pixels).square()
    white = torch.randn(size, 3, pixels, pixels, generator=generator)
    pink = torch.fft.irfft2(torch.fft.rfft2(white) / frequencies.sqrt().clamp_min(1 / pixels), s=(pixels, pixels))
    grey = pink.mean(1, keepdim=True)
    images = grey + 0.3 * (pink - grey)
    images = (images - images.mean((1, 2, 3), keepdim=True)) / images.std((1, 2, 3), keepdim=True)
    return images, torch.randint(CLASSES, (size,), generator=generator)


def loss_fn(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The cross-entropy of a batch."""
    return F.cross_entropy(net(batch[0]), batch[1])


class Lit(pl.LightningModule):
    """A network that learns to classify, with SGD, as anyone would write it."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """The loss of a batch."""
        return loss_fn(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, so slow that the loss stays finite on noise."""
        return torch.optim.SGD(self.parameters(), lr=1e-4, momentum=0.9)


class Turns(pl.Callback):
    """Lets one of the variants hear of each step, in turns, and notes how long the step took."""

    def __init__(self, variants: Mapping[str, pl.Callback | None], rounds: int) -> None:
        self._variants = dict(variants)
        self._order = [name for turn in range(-1, rounds) for name in self._rotated(turn)]
        self.times: Times = {name: [] for name in variants}
        self.seconds_of_ours: Times = {name: [] for name in variants}

    def _rotated(self, turn: int) -> list[str]:
        names, first = list(self._variants), turn % len(self._variants)
        return names[first:] + names[:first]

    @property
    def steps(self) -> int:
        """How many steps the run needs: one round that does not count, and the others."""
        return len(self._order)

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Set all variants up."""
        for callback in filter(None, self._variants.values()):
            callback.setup(*args, **kwargs)

    def on_fit_start(self, *args: Any) -> None:
        """Let all variants look at the model."""
        for callback in filter(None, self._variants.values()):
            callback.on_fit_start(*args)

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Whose turn it is begins."""
        self._name = self._order[trainer.global_step]
        self._watch = Stopwatch()
        self._watch.__enter__()
        self._start = time.perf_counter()
        self._tell("on_train_batch_start", trainer, *args)

    def on_after_backward(self, *args: Any) -> None:
        """Whose turn it is hears of the backward pass."""
        self._tell("on_after_backward", *args)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Its turn is over."""
        self._tell("on_train_batch_end", trainer, *args)
        seconds = time.perf_counter() - self._start
        self._watch.__exit__(None, None, None)
        if trainer.global_step > len(self._variants):
            self.times[self._name].append(seconds)
            self.seconds_of_ours[self._name].append(self._watch.seconds)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Tear all variants down."""
        for callback in filter(None, self._variants.values()):
            callback.teardown(*args, **kwargs)

    def _tell(self, hook: str, *args: Any) -> None:
        callback = self._variants[self._name]
        if callback is not None:
            with self._watch.running():
                getattr(callback, hook)(*args)


class Stopwatch:
    """Adds up the time that training's own thread spends in our code: in the callback, and in hooks on tensors."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """What happens here is ours."""
        start = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - start

    def __enter__(self) -> Stopwatch:
        self._originals = [
            (kind, kind.__call__) for kind in (safe_hooks.Hook, gradients.LayerCall, gradients.BaseGradient)
        ]
        for kind, original in self._originals:
            kind.__call__ = self._timed(original)
        return self

    def __exit__(self, *_: object) -> None:
        for kind, original in self._originals:
            kind.__call__ = original

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def timed(*args: Any) -> None:
            start = time.perf_counter()
            call(*args)
            self.seconds += time.perf_counter() - start

        return timed


def train(module: pl.LightningModule, batch: Any, turns: Turns, log_dir: Path | None = None) -> None:
    """Train on the same batch, until every variant had its turns; with a `log_dir`, with TensorBoard."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=turns.steps,
        callbacks=[turns],
        logger=False if log_dir is None else TensorBoardLogger(log_dir, name=None, version=""),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader([batch] * turns.steps, batch_size=None))


def watching(**flags: Any) -> NormGradCallback:
    """The callback with an event on every step, at whose first failure the benchmark stops."""
    return NormGradCallback(**{"every_n_steps": 1, "on_error": "raise", **flags})


def network_parser(description: str, *, rounds: int) -> argparse.ArgumentParser:
    """The options of a benchmark of training steps, network by network."""
    options = parser(description, rounds=rounds, pixels=128, batch_size=32, images=8)
    options.add_argument("--network", default="", help="only those whose name contains this")
    return options


def by_network(measure: Callable[[str, argparse.Namespace], Figures], args: argparse.Namespace) -> Figures:
    """The figures of each network that is asked for."""
    return {"networks": {name: measure(name, args) for name in NETWORKS if args.network in name}}
