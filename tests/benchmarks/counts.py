"""What readings and events cost an accelerator, counted without one: launches, waits for the device, bytes kept.

    python tests/benchmarks/counts.py

Launches, and the bytes that hooks keep until the backward pass, are counted on meta tensors with images of 224 px.
Waits are counted in a fit on a stand-in for a device (`tests/device`), with images of 32 px and a narrow ViT, as they
depend on neither. A step is counted together with the showing of its maps. What 0.2.0 took is kept beside these
figures. It was counted with this script, where `WORKTREE` is the package of that time:

    PYTHONPATH=WORKTREE python tests/benchmarks/counts.py --json tests/benchmarks/figures/counts_before.json
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from harness import FIGURES, Figures, parser, run, table
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision import models

from normgrad_lightning import NormGradCallback

sys.path.append(str(Path(__file__).parents[1]))
from device.counting import GRAD_CAM, NETWORKS, bytes_kept, launches, on_meta

BEFORE = FIGURES / "counts_before.json"
BATCHES = (32, 256)
STEPS = {"event": 6, "reading": 3}
"""From one to the next: each is shown, and a plain step has passed, before the other comes."""

SMALL: dict[str, Callable[[], nn.Module]] = {
    "ResNet-18": models.resnet18,
    "ResNet-50": models.resnet50,
    "ViT-B": lambda: models.VisionTransformer(32, 16, num_layers=12, num_heads=12, hidden_dim=96, mlp_dim=384),
}
WAITS = {
    "a plain step": [3],
    "a reading": [4, 5],
    "an event": [7, 8],
    "the first event": [1, 2],
}
"""Whose waits, and the numbers of these steps in what is counted."""


def measure(args: argparse.Namespace) -> Figures:
    """The figures of each network and batch."""
    from device import stand_in  # registers for this process, before autograd makes a queue for each device

    names = list(NETWORKS)[: 1 if args.quick else None]
    return {"networks": {name: {str(size): counts(name, size, stand_in) for size in args.batches} for name in names}}


def counts(name: str, batch_size: int, stand_in: Any) -> Figures:
    """What is counted of a network with batches of this size."""
    make, layers = NETWORKS[name]
    plain, read = on_meta(make), images_read()
    counted = launches(plain, batch_size, layers, read)
    return {
        "launches": {"step": counted.others, "reading": counted.ours.total()},
        "kept": kept(plain, batch_size, layers, read),
        "kept with Grad-CAM, auto": kept(plain, batch_size, "auto", read, kinds=GRAD_CAM),
        "waits": waits(SMALL[name](), batch_size, layers, stand_in),
    }


def images_read() -> int | None:
    """How many images of a batch a reading looks at, at most."""
    try:
        from normgrad_lightning.settings import MOST_READ
    except ImportError:  # 0.2.0 had no limit
        return None
    return MOST_READ


def kept(*args: Any, **options: Any) -> Figures:
    """Bytes that autograd keeps, and hooks beside them."""
    autograd, hooks = bytes_kept(*args, **options)
    return {"autograd": autograd, "hooks": hooks}


class Classifier(pl.LightningModule):
    """Trains a network."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def on_train_batch_end(self, *_: Any) -> None:
        """End training without notice."""
        self.trainer.should_stop = self.trainer.global_step > max(map(max, WAITS.values()))

    def configure_optimizers(self) -> Any:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), 0.01)


def waits(net: nn.Module, batch_size: int, layers: list[str], stand_in: Any) -> dict[str, int]:
    """How often the package waits for the stand-in."""
    counted = stand_in.OfSteps()
    watching = NormGradCallback(
        layers=[f"net.{layer}" for layer in layers],
        every_n_steps=STEPS["event"],
        read_every_n_steps=STEPS["reading"],
        on_error="raise",
    )
    batch = torch.randn(batch_size, 3, 32, 32), torch.arange(batch_size) % 10
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_epochs=1,
            default_root_dir=folder,
            callbacks=[counted, watching],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **stand_in.on_stand_in(),
        )
        trainer.fit(Classifier(net), DataLoader([batch] * 100, batch_size=None))
    return {what: sum(counted.steps[number].waits.total() for number in of) for what, of in WAITS.items()}


def show(figures: Figures) -> str:
    """One table: what 0.2.0 took → what is taken now."""
    before, rows = (json.loads(BEFORE.read_text()) if BEFORE.exists() else figures)["networks"], []
    for name, of in figures["networks"].items():
        for size, now in of.items():
            then = before[name][size]

            def both(value: Callable[[Figures], str], then: Figures = then, now: Figures = now) -> str:
                return f"{value(then)} → {value(now)}"

            rows.append(
                [
                    f"{name}, {size}",
                    f"{now['launches']['step']:,}",
                    both(lambda of: f"{of['launches']['reading']:,}"),
                    *(both(lambda of, what=what: str(of["waits"][what])) for what in WAITS),  # type: ignore[misc]
                    both(lambda of: beside(of["kept"])),
                    both(lambda of: beside(of["kept with Grad-CAM, auto"])),
                ]
            )
    heads = [f"waits, {what}" for what in WAITS]
    return table(
        [
            "network, images",
            "launches of a step",
            "added by a reading",
            *heads,
            "kept by hooks",
            "with `grad_cam=True`, first event",
        ],
        rows,
    )


def beside(of: Figures) -> str:
    """Bytes that hooks keep as a part of what autograd keeps."""
    share = 100 * of["hooks"] / of["autograd"]
    return f"{share:.0f} %" if share >= 1 else f"{share:.2g} %"


def main() -> None:
    """Count, and print the table."""
    options = parser(__doc__ or "", rounds=1)
    options.add_argument("--batches", type=int, nargs="+", default=list(BATCHES), help="images of a batch")
    run(__file__, options, measure, show, batches=[32])


if __name__ == "__main__":
    main()
