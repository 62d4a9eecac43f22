"""What the defaults cost where steps are short, and beside a device that computes by itself.

    python tests/benchmarks/short_steps.py

Small networks train on the CPU, with and without the callback, in turns: the first 500 steps, in which most events
come, and those after them, where the budget holds. A device that computes by itself is a step that sleeps: the host may
run one step ahead of it (its work is hidden as long as it is shorter than the step), or waits for it in each step.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from harness import Figures, parser, quartiles, run, spread, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from normgrad_lightning import NormGradCallback

FIRST = 500
"""Steps in which most events of the default schedule come."""

LIMIT = 1.015
"""Defaults ÷ plain, from then on."""

NETWORKS = {"3 ms": (28, 12, 8), "10 ms": (32, 32, 16), "30 ms": (64, 32, 16), "100 ms": (96, 40, 24)}
"""Pixels, channels and images of a batch, by about how long a step takes."""

DEVICES = {f"{ms} ms, {how}": (ms / 1e3, how == "hidden") for ms in (5, 20, 100) for how in ("hidden", "waited for")}
"""Length of a step on the device, and whether the host may run ahead."""


class Device:
    """Computes by itself: a step is queued, and the host waits for the one before, or for the step itself."""

    def __init__(self, seconds: float, *, runs_ahead: bool) -> None:
        self._seconds, self._runs_ahead = seconds, runs_ahead
        self._free_at = 0.0

    def step(self) -> None:
        """Queue a step."""
        before, now = self._free_at, time.perf_counter()
        self._free_at = max(before, now) + self._seconds
        time.sleep(max(0.0, (before if self._runs_ahead else self._free_at) - now))


class Small(pl.LightningModule):
    """A small network."""

    def __init__(self, width: int, device: Device | None) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for given, taken, stride in ((3, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
            layers += [nn.Conv2d(given, taken, 3, stride, 1), nn.BatchNorm2d(taken), nn.ReLU()]
        self.net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
        self._of_device = device

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        if self._of_device is not None:
            self._of_device.step()
        images, labels = batch
        return F.cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Clock(pl.Callback):
    """Notes when each step begins."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Note it."""
        self.times.append(time.perf_counter())


def seconds(size: tuple[int, int, int], steps: int, device: Device | None, callback: NormGradCallback | None) -> Any:
    """Return the time of the first steps and of the others, each for one step."""
    pixels, width, images = size
    torch.manual_seed(0)
    data = TensorDataset(torch.rand(images * 16, 3, pixels, pixels), torch.arange(images * 16) % 10)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=steps,
            max_epochs=-1,
            accelerator="cpu",
            callbacks=[clock, *([] if callback is None else [callback])],
            logger=pl.loggers.TensorBoardLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Small(width, device), DataLoader(data, images))
    times, first = clock.times, min(FIRST, steps // 2)
    return (times[first] - times[0]) / first, (times[-1] - times[first]) / (len(times) - 1 - first)


def measure(args: argparse.Namespace) -> Figures:
    """Run each variant in turns."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    cases = {name: (size, None) for name, size in NETWORKS.items() if args.networks}
    cases |= {f"device, {name}": ((28, 4, 4), device) for name, device in DEVICES.items() if args.devices}
    return {"cases": {name: _compared(size, device, args) for name, (size, device) in cases.items()}}


def _compared(size: tuple[int, int, int], device: Any, args: argparse.Namespace) -> dict[str, Any]:
    found: dict[str, list[float]] = {"first": [], "later": [], "plain": [], "share": []}
    steps = args.steps
    for turn in range(args.rounds):
        callback, both = NormGradCallback(), {}
        for name in ("plain", "ours") if turn % 2 else ("ours", "plain"):
            of = None if device is None else Device(device[0], runs_ahead=device[1])
            both[name] = seconds(size, steps, of, callback if name == "ours" else None)
        found["first"].append(both["ours"][0] / both["plain"][0])
        found["later"].append(both["ours"][1] / both["plain"][1])
        found["plain"].append(1e3 * both["plain"][1])
        found["share"].append(callback.cost)
    return {name: quartiles(values) for name, values in found.items()}


def show(figures: Figures) -> str:
    """Return the table."""
    rows = [
        [name, f"{of['plain']['median']:.1f}", spread(of["first"]), spread(of["later"]), f"{of['share']['median']:.4f}"]
        for name, of in figures["cases"].items()
    ]
    last = figures["settings"]["steps"]
    heads = ["step", "plain, ms", f"steps 0 to {FIRST}", f"steps {FIRST} to {last}", "`callback.cost`"]
    return f"Defaults ÷ plain; at most {LIMIT} from step {FIRST} on.\n\n{table(heads, rows)}"


if __name__ == "__main__":
    options = parser(__doc__ or "", rounds=3, steps=2000, networks=1, devices=1)
    run(__file__, options, measure, show, steps=12)
