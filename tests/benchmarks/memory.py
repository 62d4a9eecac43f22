"""What events add to the peak memory of a training step: with an event on every step ÷ without, side by side.

    python tests/benchmarks/memory.py

Twice: as bytes of tensors, as torch's own profiler counts each allocation; and as resident memory of the process, its
high-water mark within each step as Linux keeps it.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from harness import Figures, judged, peak_bytes, quartiles, run, spread, table
from training import FIVE_LAYERS, NETWORKS, Lit, Turns, batch_of, by_network, loss_fn, network_parser, train, watching

from normgrad_lightning import NormGrad

LIMIT = 1.005
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def measure_network(name: str, args: argparse.Namespace) -> Figures:
    """Both kinds of memory."""
    module, batch = Lit(NETWORKS[name](args.pixels)), batch_of(args.batch_size, args.pixels)
    return {
        "tensors": tensors(module.net, batch, FIVE_LAYERS[name], args.images),
        "resident": resident(module, batch, [f"net.{layer}" for layer in FIVE_LAYERS[name]], args),
    }


def tensors(net: torch.nn.Module, batch: Any, layers: list[str], images: int) -> Figures:
    """Peaks of one forward and backward pass, which is where a training step has them."""

    def step() -> None:
        net.zero_grad()
        loss_fn(net, batch).backward()

    def watched_step() -> None:
        with NormGrad(net, layers, num_images=images) as recorder:
            step()
            assert len(recorder.maps) == len(layers)

    plain, watched = peak_bytes(step), peak_bytes(watched_step)
    return {"plain": plain, "watched": watched, "ratio": watched / plain}


class HighWater(Turns):
    """Notes the most resident memory of each step."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.peaks: dict[str, list[float]] = {name: [] for name in self.times}

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any) -> None:
        """Forget the steps before."""
        gc.collect()
        CLEAR.write_text("5")
        super().on_train_batch_start(trainer, *args)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        """Read the mark."""
        super().on_train_batch_end(trainer, *args)
        (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        if self.times[self._name]:
            self.peaks[self._name].append(1024 * int(line.split()[1]))


def resident(module: Lit, batch: Any, layers: list[str], args: argparse.Namespace) -> Figures | None:
    """Peaks of whole training steps, with panels in TensorBoard; None where the system does not tell."""
    try:
        CLEAR.write_text("5")
    except OSError:
        return None
    turns = HighWater({"plain": None, "watched": watching(layers=layers, num_images=args.images)}, args.rounds)
    with tempfile.TemporaryDirectory() as folder:
        train(module, batch, turns, Path(folder))
    pairs = list(zip(turns.peaks["watched"], turns.peaks["plain"], strict=True))
    return {"plain": max(turns.peaks["plain"]), "ratio": quartiles([watched / plain for watched, plain in pairs])}


def show(figures: Figures) -> str:
    """One table."""
    rows = [
        [
            name,
            f"{of['tensors']['plain'] / 2**20:.0f} MB",
            judged(f"{of['tensors']['ratio']:.4f}", of["tensors"]["ratio"], LIMIT),
            "–" if of["resident"] is None else f"{of['resident']['plain'] / 2**20:.0f} MB",
            "–"
            if of["resident"] is None
            else judged(spread(of["resident"]["ratio"], 4), of["resident"]["ratio"]["median"], LIMIT),
        ]
        for name, of in figures["networks"].items()
    ]
    header = ["", "tensors, plain step", "with an event ÷ without", "resident, plain step", "with an event ÷ without"]
    return f"{table(header, rows)}\n\nAt most: {LIMIT}."


def main() -> None:
    """Measure, and print the table."""
    options = network_parser(__doc__ or "", rounds=5)
    run(__file__, options, partial(by_network, measure_network), show, pixels=64, batch_size=4, images=2)


if __name__ == "__main__":
    main()
