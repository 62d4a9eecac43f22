"""Long runs with labels that are ids, with many classes and with videos: what is kept and written has bounds."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from normgrad_lightning import NormGradCallback


class Images(Dataset):
    """Images of noise, with a label for each."""

    def __init__(self, count: int, classes: int | None, frames: int = 0) -> None:
        self._count, self._classes = count, classes
        self._shape = (frames, 3, 16, 16) if frames else (3, 16, 16)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        torch_generator = torch.Generator().manual_seed(index)
        label = index if self._classes is None else index % self._classes
        return torch.randn(self._shape, generator=torch_generator), label


class Tiny(pl.LightningModule):
    """A network of two layers; frames of videos are images to it."""

    def __init__(self, classes: int | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.head = nn.Linear(8, classes or 4)
        self.classes = classes

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        frames = images.shape[1] if images.dim() == 5 else 1
        scores = self.head(self.conv(images.reshape(-1, *images.shape[-3:])).relu().mean((2, 3)))
        scores = scores.reshape(-1, frames, scores.shape[1]).mean(1)
        return F.cross_entropy(scores, labels) if self.classes else scores.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


KINDS: dict[str, dict[str, Any]] = {
    "ids": {"classes": None},
    "a thousand classes": {"classes": 1000},
    "videos": {"classes": 20, "frames": 3},
}


def size_of(state: Any) -> int:
    """The bytes of a checkpoint with this."""
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    if isinstance(state, dict):
        return sum(8 + size_of(value) for value in state.values())
    return sum(map(size_of, state)) if isinstance(state, list | tuple) else 8


class Sizes(pl.Callback):
    """What there is at half of the run and at its end."""

    def __init__(self, callback: NormGradCallback, at: int) -> None:
        self.callback, self.at = callback, at
        self.found: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step in (self.at, 2 * self.at):
            self.found.append(
                {
                    "state, kB": size_of(self.callback.state_dict()) / 1e3,
                    "memory of the process, MB": psutil.Process().memory_info().rss / 1e6,
                    "event file, MB": sum(file.stat().st_size for file in self.files(trainer)) / 1e6,
                }
            )

    @staticmethod
    def files(trainer: Any) -> list[Path]:
        return list(Path(trainer.logger.log_dir).glob("events*"))


def run(folder: Path, steps: int, classes: int | None, frames: int = 0, **flags: Any) -> tuple[Any, ...]:
    """Train; the callback, sizes at half of the run and at its end, tags of pictures, tags of scalars."""
    pl.seed_everything(1, verbose=False)
    callback = NormGradCallback(on_error="raise", **flags)
    sizes = Sizes(callback, steps // 2)
    trainer = pl.Trainer(
        max_steps=steps,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[callback, sizes],
        logger=pl.loggers.TensorBoardLogger(folder),
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*(does not have many workers|lead to unexpected|torchmetrics).*")
        trainer.fit(Tiny(classes), DataLoader(Images(20_000, classes, frames), 8, shuffle=True))
    read = EventAccumulator(trainer.logger.log_dir, size_guidance={"images": 1, "scalars": 1})
    read.Reload()
    tags = read.Tags()
    return callback, sizes.found, tags["images"], [tag for tag in tags["scalars"] if tag.startswith("normgrad")]


FREQUENT = {"every_n_steps": 5, "read_every_n_steps": 2, "views": ["patches", "atlas", "curves"]}


@pytest.mark.parametrize("kind", ["ids", "a thousand classes"])
def test_tags_and_state_do_not_grow_with_images(tmp_path, kind):
    callback, (half, whole), pictures, scalars = run(tmp_path, 60, **KINDS[kind], **FREQUENT)
    of_classes = [tag for tag in scalars if "hot_spot" in tag]
    assert len(of_classes) <= 24
    assert len(pictures) <= 9
    assert len(scalars) <= 24 + 12
    assert whole["state, kB"] < 1.5 * half["state, kB"] + 50
    if kind == "ids":
        assert list(callback.patches["combined"]) == ["all"]
    else:
        assert len(callback.patches["combined"]) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_ten_thousand_steps(tmp_path, kind):
    _, (half, whole), pictures, scalars = run(tmp_path, 10_000, **KINDS[kind])
    print(f"\n{kind}: {len(pictures)} tags of pictures, {len(scalars)} of curves; at half and at the end:")
    for name, value in whole.items():
        print(f"  {name}: {half[name]:.1f}, {value:.1f}")
    assert len(pictures) <= 9
    assert len(scalars) <= 24 + 12
    assert whole["state, kB"] < 1.5 * half["state, kB"] + 50
    assert whole["memory of the process, MB"] < half["memory of the process, MB"] + 50
    assert whole["event file, MB"] < 30


def test_videos_whose_labels_belong_to_all_of_their_frames(tmp_path):
    flags = {"every_n_steps": 4, "order1_every_n_steps": 8, "num_images": 2, "probe": "train", "views": ["overview"]}
    callback, _, pictures, _ = run(tmp_path, 12, classes=20, frames=3, **flags)
    cards = {tag.removeprefix("normgrad/").partition("/")[0] for tag in pictures}
    assert cards == {"3_probe", "5_overview"}
    assert len(pictures) == 2 * 4  # order 0 and the three of order 1
    for name in ("order1", "probe_order0", "probe_order1"):
        one = callback.latest[name]
        assert len(one.images) == len(one.maps["conv"]) == 2 * 3  # all frames of two videos
        assert one.labels is None
    assert len({tuple(image.flatten().tolist()) for image in callback.latest["order0"].images}) == 2
