"""What the defaults cost where steps are short, and beside a device that computes by itself.

    python tests/benchmarks/short_steps.py

Small networks train on the CPU, with and without the callback, in turns of a few steps: those up to 500, in which most
events come, and those after them, where the budget holds. A device that computes by itself is a step that sleeps: the
host may run one step ahead of it (its work is hidden as long as it is shorter than the step), or waits for it in each
step.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import tempfile
import time
import warnings
from functools import partial
from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from greenlet import getcurrent, greenlet
from harness import Figures, judged, parser, quartiles, run, spread, table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from normgrad_lightning import NormGradCallback

FIRST = 502
"""Steps in which most events of the default schedule come: what step 500 has seen is shown at the end of the next."""

LIMIT = 1.015
"""Defaults ÷ plain, from then on."""

TURN = 25
"""Steps of a turn."""


class Case(NamedTuple):
    """A length of steps.

    Attributes:
        size: pixels, channels and images of a batch.
        steps: to train.
        rounds: how often each variant runs, if `--rounds` asks for no more.
        device: seconds of a step on a device that computes by itself, and whether the host may run ahead.
    """

    size: tuple[int, int, int]
    steps: int
    rounds: int
    device: tuple[float, bool] | None = None


TINY = (28, 4, 4)
CASES = {
    "3 ms": Case((28, 16, 16), 3000, 4),
    "10 ms": Case((32, 32, 16), 2000, 3),
    "30 ms": Case((64, 32, 16), 1000, 2),
    "100 ms": Case((96, 40, 16), 700, 1),
    **{
        f"device, {ms} ms, {how}": Case(TINY, steps, rounds, (ms / 1e3, how == "hidden"))
        for (ms, steps, rounds), how in itertools.product(
            ((5, 1500, 2), (20, 800, 2), (100, 560, 1)), ("hidden", "waited for")
        )
    },
}
"""By about how long a step takes: a quarter of an hour in all."""


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


class Stopwatch(pl.Callback):
    """Notes when each step begins, on a clock that stands still while the other training has its turn."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._waited = 0.0

    def now(self) -> float:
        """Return the seconds of this training."""
        return time.perf_counter() - self._waited

    def on_train_batch_start(self, *_: Any) -> None:
        """Note it; let the other one have its turn."""
        if len(self.times) % TURN == 0:
            began = time.perf_counter()
            getcurrent().parent.switch()
            self._waited += time.perf_counter() - began
        self.times.append(self.now())

    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Give our callback this clock, too: it measures what it costs."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, NormGradCallback):
                callback._state.budget._clock = self.now


def fit(case: Case, stopwatch: Stopwatch, callbacks: list[pl.Callback]) -> None:
    """Train."""
    pixels, width, images = case.size
    data = TensorDataset(torch.rand(images * 16, 3, pixels, pixels), torch.arange(images * 16) % 10)
    device = None if case.device is None else Device(case.device[0], runs_ahead=case.device[1])
    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=case.steps,
            max_epochs=-1,
            accelerator="cpu",
            callbacks=[stopwatch, *callbacks],
            logger=pl.loggers.TensorBoardLogger(folder),
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Small(width, device), DataLoader(data, images))


def side_by_side(case: Case, callback: NormGradCallback) -> dict[str, list[float]]:
    """Return when each step begins, without the callback and with it: two trainings in turns, in one thread."""
    stopwatches = {"plain": Stopwatch(), "ours": Stopwatch()}
    callbacks: dict[str, list[pl.Callback]] = {"plain": [], "ours": [callback]}
    runs = [greenlet(partial(fit, case, stopwatches[name], callbacks[name])) for name in stopwatches]
    while not all(one.dead for one in runs):
        for one in runs:
            if not one.dead:
                one.switch()
    return {name: stopwatch.times for name, stopwatch in stopwatches.items()}


def of_a_step(times: list[float], start: int, stop: int) -> float:
    """Return the mean time of these steps."""
    return (times[stop] - times[start]) / (stop - start)


def measure(args: argparse.Namespace) -> Figures:
    """Run each variant in turns."""
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    cases = {name: case for name, case in CASES.items() if args.case in name}
    if args.quick:
        devices = {name: case.device and (1e-3, case.device[1]) for name, case in cases.items()}
        cases = {name: Case(TINY, 12, 1, device) for name, device in devices.items()}
    return {"cases": {name: compared(case, case.rounds * args.rounds) for name, case in cases.items()}}


def compared(case: Case, rounds: int) -> dict[str, Any]:
    """Return the ratios of the first steps and of the others, the milliseconds of a plain one, and what we say."""
    found: dict[str, list[float]] = {"first": [], "later": [], "plain": [], "share": []}
    first, last = min(FIRST, case.steps // 2), case.steps - 1
    for _ in range(rounds):
        callback = NormGradCallback()
        times = side_by_side(case, callback)
        for name, steps in {"first": (0, first), "later": (first, last)}.items():
            found[name].append(of_a_step(times["ours"], *steps) / of_a_step(times["plain"], *steps))
        found["plain"].append(1e3 * of_a_step(times["plain"], first, last))
        found["share"].append(callback.cost)
    return {**{name: quartiles(values) for name, values in found.items()}, "steps": case.steps, "rounds": rounds}


def show(figures: Figures) -> str:
    """Return the table."""
    rows = [
        [
            name,
            f"{of['plain']['median']:.1f}",
            spread(of["first"]),
            judged(spread(of["later"], 3), of["later"]["median"], LIMIT),
            f"{100 * of['share']['median']:.1f} %",
            f"{of['steps']}, {of['rounds']} ×",
        ]
        for name, of in figures["cases"].items()
    ]
    heads = ["step", "plain, ms", f"steps 0 to {FIRST - 1}", "later ones", "`callback.cost` at the end", "steps"]
    return f"Defaults ÷ plain: at most {LIMIT} after the first {FIRST} steps.\n\n{table(heads, rows)}"


if __name__ == "__main__":
    options = parser(__doc__ or "", rounds=1)
    options.add_argument("--case", default="", help="only those whose name contains this")
    run(__file__, options, measure, show)
