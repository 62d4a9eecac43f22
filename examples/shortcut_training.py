"""Training on pictures with a shortcut, with a journal: what patches show at each event, and what validation says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from sameness import sameness, thumbnails
from shortcuts import Marked, accuracy, loss_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normgrad_lightning import NormGradCallback
from normgrad_lightning.check.rule import rests
from normgrad_lightning.views.crops import Crop


def resnet18() -> nn.Module:
    """Return a ResNet-18 for two classes, untrained."""
    import torchvision

    net: nn.Module = torchvision.models.resnet18(num_classes=2)
    return net


def lite0() -> nn.Module:
    """Return an EfficientNet-Lite0 with ImageNet weights and a new head for two classes."""
    import photographs

    net: Any = photographs.lite0().train()
    net._fc = nn.Linear(net._fc.in_features, 2)
    return net


class Classifier(pl.LightningModule):
    """Any network, trained by AdamW, its learning rate at `learning_rate` at most."""

    def __init__(self, net: nn.Module, learning_rate: float) -> None:
        super().__init__()
        self.net, self.learning_rate = net, learning_rate

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return the cross-entropy of the batch."""
        return loss_of(self.net, batch)

    def configure_optimizers(self) -> dict[str, object]:
        """AdamW, its learning rate going up, then down to nothing at the last step."""
        optimizer = torch.optim.AdamW(self.parameters(), self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, self.learning_rate, steps, pct_start=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Hits(Protocol):
    """Tells which patches show what is looked for."""

    def share(self, crops: Sequence[Crop]) -> float:
        """Return the share of the best patches that show it."""


@dataclass
class Entry:
    """What was seen at one event.

    Attributes:
        step: of training.
        hits: the share of patches that show the shortcut, by map and class.
        alike: the sameness of the patches, by map and class.
        check: both differences to the control, covered and pasted, by class, as far as they are known.
        clean: accuracy on validation pictures of the marked classes, without the shortcut.
        marked: accuracy on the same pictures with it.
    """

    step: int
    hits: dict[str, dict[str, float]]
    alike: dict[str, dict[str, float]]
    check: dict[str, tuple[float, float | None]]
    clean: float
    marked: float


class Journal(pl.Callback):
    """Writes an entry at each event of a `NormGradCallback`.

    Args:
        callback: whose patches to look at; it must come before this one.
        hits: tells which patches show the shortcut.
        validate: returns both accuracies of a network.

    Attributes:
        entries: one for each event.
        told: the classes that rest on one small place, with the step after which the check said so first.
    """

    def __init__(
        self, callback: NormGradCallback, hits: Hits, validate: Callable[[nn.Module], tuple[float, float]]
    ) -> None:
        self._callback, self._hits, self._validate = callback, hits, validate
        self.entries: list[Entry] = []
        self.told: dict[str, int] = {}
        self._seen: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        """Note what the check says; look whether there was an event, and write down what it shows."""
        check = self._callback.check
        for name in (name for name, found in check.items() if rests(found)):
            self.told.setdefault(name, trainer.global_step - 1)
        patches = self._callback.patches
        if patches is self._seen:
            return
        self._seen = patches
        hits, alike = (
            {name: {of: number(crops) for of, crops in rows.items()} for name, rows in patches.items()}
            for number in (self._hits.share, _sameness)
        )
        known = {name: (found.covered_difference, found.pasted_difference) for name, found in check.items()}
        accuracies = self._validate(pl_module.net)
        self.entries.append(Entry(trainer.global_step - 1, hits, alike, known, *accuracies))


def _sameness(crops: Sequence[Crop]) -> float:
    return sameness(thumbnails(crops))


def train(
    net: nn.Module,
    training: Marked,
    validation: tuple[Marked, Marked],
    hits: Hits,
    *,
    steps: int,
    every_n_steps: int,
    seed: int,
    out: Path,
    classes: Sequence[str] | None = None,
    learning_rate: float = 1e-3,
    batch_size: int = 32,
    **flags: Any,
) -> tuple[Journal, Path]:
    """Train, and return the journal, and the folder with the pictures as files.

    Args:
        net: the network.
        training: pictures to learn from.
        validation: the same pictures without and with the shortcut.
        hits: what to look for in the patches.
        steps: of training.
        every_n_steps: from one event to the next.
        seed: of the order of the pictures.
        out: folder for the logs.
        classes: those that validation is about; None: all.
        learning_rate: of AdamW.
        batch_size: pictures of a step.
        flags: of the callback.
    """
    callback = NormGradCallback(
        every_n_steps=every_n_steps,
        read_every_n_steps=max(1, every_n_steps // 8),
        mean=training.mean,
        std=training.std,
        classes=list(training.classes),
        **flags,
    )
    labels = [training.classes.index(name) for name in classes or training.classes]

    def validate(model: nn.Module) -> tuple[float, float]:
        return accuracy(model, validation[0], labels), accuracy(model, validation[1], labels)

    journal = Journal(callback, hits, validate)
    logger = TensorBoardLogger(out, name="", default_hp_metric=False)
    files = CSVLogger(out, name="files", version=logger.version)  # the same pictures as files
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        logger=[logger, files],
        callbacks=[callback, journal],
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    order = torch.Generator().manual_seed(seed)
    trainer.fit(Classifier(net, learning_rate), DataLoader(training, batch_size, True, drop_last=True, generator=order))
    return journal, Path(files.log_dir)
