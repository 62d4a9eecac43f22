"""What the callback adds to the step of a compiled network: without an event, and with one on every step.

    python tests/benchmarks/compile.py

What is inside of compiled code cannot be read without changing its bits, so an event runs a pass of its own, eagerly.
Counted, too: how many graphs were compiled and where they broke, in the plain steps and in all.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from harness import Figures, judged, parser, ratio, run, spread, table
from torch import nn
from torch._dynamo.utils import counters
from training import FIVE_LAYERS, NETWORKS, Lit, Turns, batch_of, train, watching

LIMITS = {"attached": 1.005, "maps": 1.7}
NAMES = {"attached": "attached, no event", "maps": "an event on every step, maps only"}


def measure(args: argparse.Namespace) -> Figures:
    """The figures of a compiled network."""
    if args.quick:
        net: nn.Module = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.AdaptiveAvgPool2d(1))
        net, layers = nn.Sequential(net, nn.Flatten(), nn.Linear(8, 1000)), ["0.1", "0.2"]
    else:
        net, layers = NETWORKS["ResNet-18"](args.pixels), FIVE_LAYERS["ResNet-18"]
    module, batch = Lit(torch.compile(net, backend=args.backend)), batch_of(args.batch_size, args.pixels)
    flags: dict[str, Any] = {"layers": [f"net.{layer}" for layer in layers], "num_images": args.images}
    train(module, batch, Turns({"plain": None}, 1))
    before = compiled()
    with_maps = watching(**flags)
    turns = Turns({"plain": None, "attached": watching(**flags, every_n_steps=10**9), "maps": with_maps}, args.rounds)
    train(module, batch, turns)
    assert len(with_maps.maps) == len(layers)
    return {
        "ratios": {what: ratio(turns.times, what, "plain") for what in NAMES},
        "seconds": ratio(turns.times, "plain", "plain")["seconds"],
        "compiled": {"plain": before, "all": compiled()},
    }


def compiled() -> dict[str, int]:
    """How many graphs this process has compiled, and how often they broke."""
    return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


def show(figures: Figures) -> str:
    """A table of ratios, and a sentence about graphs."""
    rows = [
        [NAMES[what], judged(spread(f, 3), f["median"], LIMITS.get(what)), f"{LIMITS[what]}" if what in LIMITS else "–"]
        for what, f in figures["ratios"].items()
    ]
    plain, everything = figures["compiled"]["plain"], figures["compiled"]["all"]
    settings = figures["settings"]
    graphs = (
        f"{plain['graphs']} graph(s) with {plain['breaks']} break(s) in plain steps, "
        f"{everything['graphs']} with {everything['breaks']} in all."
    )
    note = (
        f"{settings['images']} of {settings['batch_size']} images of {settings['pixels']} px, backend "
        f"{settings['backend']}, {settings['rounds']} rounds; a plain step takes {1e3 * figures['seconds']:.0f} ms. "
        f"{graphs}"
    )
    return f"{table(['', 'step ÷ plain step', 'at most'], rows)}\n\n{note}"


def main() -> None:
    """Measure, and print the table."""
    options = parser(__doc__ or "", rounds=15, pixels=128, batch_size=32, images=8)
    options.add_argument("--backend", default="inductor", help="of torch.compile (inductor)")
    run(__file__, options, measure, show, pixels=32, batch_size=4, images=2, backend="eager")


if __name__ == "__main__":
    main()
