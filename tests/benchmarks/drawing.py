"""What can be seen of the maps of untrained networks: how bright they are drawn, and how much of it is a grid of dots.

    python tests/benchmarks/drawing.py

Drawn shapes on textured backgrounds (`examples/shapes.py`), several random weights for each network, all of its layers
whose grid has 12 cells or more a side; coarser ones are drawn in the same way by both scales. Of each map, as numbers
from 0 (dark) to 1 (bright):

- 95th percentile: near 0, and almost the whole picture is dark. The median over images and weights.
- stride: the share of the variance that repeats every four cells, the pattern that strides leave. Same median. By
  chance it is 16 over the number of cells.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import Figures, parser, run, table
from torch import nn
from training import FIVE_LAYERS, NETWORKS, loss_fn

from normgrad_lightning import order0_maps
from normgrad_lightning.views.scales import scale_maps

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from classifier import ShapeClassifier
from shapes import make_pictures, normalise

DEMO = "the demo's"
LAYERS = {name: FIVE_LAYERS[name] for name in ("ResNet-18", "ConvNeXt-T", "ViT-S")} | {
    DEMO: ["stem.2", "stage1", "stage2", "stage3"]
}
SCALES = ("image", "robust")
PERIOD = 4
COARSEST = 16


def bright(drawn: npt.NDArray[Any]) -> list[float]:
    """The 95th percentile of each map `(N, H, W)`."""
    return [float(value) for value in np.percentile(drawn, 95, axis=(1, 2))]


def stride_share(drawn: npt.NDArray[Any]) -> list[float]:
    """The share of each map's variance that is between the 4 × 4 places that a cell may have in a stride."""
    count, height, width = (side - side % PERIOD if i else side for i, side in enumerate(drawn.shape))
    cells = drawn[:, :height, :width].astype(np.float64)
    phases = cells.reshape(count, height // PERIOD, PERIOD, width // PERIOD, PERIOD).mean((1, 3))
    between, whole = phases.var((1, 2)), cells.var((1, 2))
    return [float(value) for value in between / np.where(whole > 0, whole, 1.0)]


MEASURES: dict[str, Callable[[npt.NDArray[Any]], list[float]]] = {"95th percentile": bright, "stride": stride_share}


def network_of(name: str, pixels: int) -> nn.Module:
    """The network with random weights."""
    return ShapeClassifier() if name == DEMO else NETWORKS[name](pixels)


def measure(args: argparse.Namespace) -> Figures:
    """Both measures of both scales for each layer that is fine enough."""
    return {"networks": {name: measure_network(name, args) for name in LAYERS if args.network in name}}


def measure_network(name: str, args: argparse.Namespace) -> Figures:
    """The figures of each layer."""
    pixels = args.pixels // 2 if name == DEMO else args.pixels  # 64, as in the demo
    pictures = make_pictures(args.images, seed=1, size=pixels)
    batch = normalise(pictures.images), pictures.labels
    values: dict[str, dict[str, dict[str, list[float]]]] = {}
    grids: dict[str, int] = {}
    for seed in range(args.rounds):
        torch.manual_seed(seed)
        for layer, maps in order0_maps(network_of(name, pixels), loss_fn, batch, LAYERS[name]).items():
            grids[layer] = maps.shape[-1]
            of_layer = values.setdefault(layer, {scale: {what: [] for what in MEASURES} for scale in SCALES})
            for scale in SCALES:
                drawn = scale_maps(maps.numpy(), scale)
                for what, measure_of in MEASURES.items():
                    of_layer[scale][what] += measure_of(drawn)
    return {
        layer: {
            "grid": grids[layer],
            **{scale: {what: statistics.median(v) for what, v in of.items()} for scale, of in of_layer.items()},
        }
        for layer, of_layer in values.items()
    }


def show(figures: Figures) -> str:
    """A row for each layer that is smoothed; one for those of a network that has no such layer."""
    rows = []
    for name, layers in figures["networks"].items():
        fine = {layer: of for layer, of in layers.items() if of["grid"] >= COARSEST} or dict(
            [next(iter(layers.items()))]
        )
        for layer, of in fine.items():
            changes = [f"{of['image'][what]:.2f} → {of['robust'][what]:.2f}" for what in MEASURES]
            rows.append([name, f"`{layer}`", f"{of['grid']} × {of['grid']}", *changes])
    heads = ["network", "layer", "grid", "95th percentile", "variance at strides"]
    settings = figures["settings"]
    sizes = f"{settings['pixels']} px ({settings['pixels'] // 2} for the demo's)"
    note = f"{settings['images']} pictures of {sizes}, {settings['rounds']} times random weights"
    return f'`scale="image"` → `scale="robust"`:\n\n{table(heads, rows)}\n\n{note}'


def main() -> None:
    """Measure, and print the table."""
    options = parser(__doc__ or "", rounds=3, pixels=128, images=16)
    options.add_argument("--network", default="", help="only those whose name contains this")
    run(__file__, options, measure, show, images=4, rounds=1)


if __name__ == "__main__":
    main()
