"""The same maps in Hugging Face's `Trainer`: a callback of a few lines around `NormGrad`.

    pip install transformers accelerate
    python examples/06_hugging_face.py

Each map is that of the last backward of an optimizer step, so with gradient accumulation of its last batch.
"""

from __future__ import annotations

from typing import Any

from shapes import CLASSES, ShapesDataset
from torch import Tensor, nn
from torch.utils.data import Dataset
from torch.utils.tensorboard import SummaryWriter
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from normgrad_lightning import NormGrad, log_maps


class NormGradHFCallback(TrainerCallback):
    """Logs order-0 maps to TensorBoard, in the folder `normgrad` of the run; the arguments are those of `NormGrad`."""

    def __init__(self, every_n_steps: int = 100, num_images: int = 8, layers: str | list[str] = "auto") -> None:
        self.every_n_steps, self.num_images, self.layers = every_n_steps, num_images, layers
        self.recorder: NormGrad | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: Any, **_: Any) -> None:
        """Get ready."""
        if state.is_world_process_zero:
            self.recorder = NormGrad(model, self.layers, self.num_images)
            self.writer = SummaryWriter(f"{args.output_dir}/normgrad")

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Listen, if an event is due."""
        if self.recorder is not None and state.global_step % self.every_n_steps == 0:
            self.recorder.attach()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log what was heard."""
        if self.recorder is not None and state.global_step % self.every_n_steps == 0:
            log_maps(self.writer, self.recorder.maps, self.recorder.images, state.global_step)
            self.recorder.detach()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Close the log."""
        if self.recorder is not None:
            self.recorder.detach()
            self.writer.close()


class ForTransformers(Dataset):
    """Drawn pictures, as a `Trainer` wants them."""

    def __init__(self, n: int) -> None:
        self.pictures = ShapesDataset(n, seed=0)

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.pictures)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return picture and label by the names of the model's arguments."""
        image, label = self.pictures[index]
        return {"pixel_values": image, "labels": label}


def train(callbacks: list[TrainerCallback]) -> nn.Module:
    """Train a small ResNet for a hundred steps, and return it."""
    set_seed(0)
    config = ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64], depths=[1, 1, 1], layer_type="basic", num_labels=len(CLASSES)
    )
    model = ResNetForImageClassification(config)
    arguments = TrainingArguments(
        output_dir="normgrad_demo/hugging_face",
        max_steps=100,
        per_device_train_batch_size=32,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
    )
    Trainer(model, arguments, train_dataset=ForTransformers(3200), callbacks=callbacks).train()
    return model


if __name__ == "__main__":
    train([NormGradHFCallback(every_n_steps=20)])
    print("all panels: tensorboard --logdir normgrad_demo")
