"""The network that the examples train on drawn shapes, and its training."""

from __future__ import annotations

import argparse
import logging
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from shapes import CLASSES, ShapesDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

HELD_OUT = 512  # pictures that the network never learns from


class GeneralisedMeanPool(nn.Module):
    """The mean of x³ over locations, to the power 1/3: between the average and the maximum.

    An average hands every location the same gradient; this hands more to strong activations. So the maps of the last
    layers are more concentrated with it by construction, even before training: an example of how the architecture, and
    not only what was learned, shapes a map.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return `(N, C, 1, 1)` from `(N, C, H, W)`."""
        return x.clamp_min(1e-4).pow(3).mean((2, 3), keepdim=True).pow(1 / 3)


POOLINGS = {"average": lambda: nn.AdaptiveAvgPool2d(1), "gem": GeneralisedMeanPool}


class Block(nn.Module):
    """Two 3×3 convolutions beside a shortcut; halves the resolution."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
        )
        self.shortcut = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 1, stride=2, bias=False), nn.BatchNorm2d(channels_out)
        )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return features at half the resolution of `x`."""
        return self.relu(self.body(x) + self.shortcut(x))


class ShapeClassifier(pl.LightningModule):
    """A residual network: a stem, three stages, global pooling and a linear layer."""

    def __init__(self, pooling: str = "average", peak_learning_rate: float = 3e-3) -> None:
        super().__init__()
        self.peak_learning_rate = peak_learning_rate
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
        self.stage1 = Block(16, 16)
        self.stage2 = Block(16, 32)
        self.stage3 = Block(32, 64)
        self.head = nn.Sequential(POOLINGS[pooling](), nn.Flatten(), nn.Linear(64, len(CLASSES)))
        self.to(memory_format=torch.channels_last)  # convolutions on a CPU are about 1.5 times as fast this way

    def forward(self, images: Tensor) -> Tensor:
        """Return one score per class, `(N, classes)`."""
        return self.head(self.stage3(self.stage2(self.stage1(self.stem(images)))))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of the batch."""
        loss = classification_loss(self, batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Log the share of pictures named correctly."""
        images, labels = batch
        correct = (self(images).argmax(1) == labels).float().mean()
        self.log("val_accuracy", correct, prog_bar=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Adam, its learning rate going up, then down to nothing at the last step."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.peak_learning_rate, weight_decay=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.peak_learning_rate, steps, pct_start=0.1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def classification_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the mean cross-entropy: what the network is trained with, and what its maps are about."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(model: ShapeClassifier, images: int, batch_size: int, seed: int, **options: Any) -> float:
    """Train on drawn pictures, and return the accuracy on others; `options` are the Trainer's."""
    training, held_out = ShapesDataset(images, seed=2 * seed), ShapesDataset(HELD_OUT, seed=2 * seed + 1)
    trainer = pl.Trainer(
        accelerator="cpu",
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(model, DataLoader(training, batch_size, shuffle=True, drop_last=True), DataLoader(held_out, batch_size))
    return trainer.callback_metrics["val_accuracy"].item()


def add_options(parser: argparse.ArgumentParser, epochs: int) -> None:
    """Add the options of the training, and of where to write."""
    parser.add_argument("--epochs", type=int, default=epochs, help="passes over the training pictures")
    parser.add_argument("--images", type=int, default=4096, help="training pictures to draw")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per step")
    parser.add_argument("--pooling", choices=POOLINGS, default="average", help="plain average, or generalised mean")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and of the network")
    parser.add_argument("--out", type=Path, default=Path("normgrad_demo"), help="folder for logs and sheets")


def quiet_lightning() -> None:
    """Silence what Lightning says about every run; warnings that concern this one still come through."""
    logging.getLogger("pytorch_lightning.utilities.rank_zero").addFilter(
        lambda record: not record.getMessage().startswith(("GPU", "TPU", "💡", "Loading `train_dataloader`"))
    )
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    # Lightning's own call, which newer versions of torch discourage.
    warnings.filterwarnings("ignore", ".*LeafSpec.*")
