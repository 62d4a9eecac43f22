"""What the cost of an event grows with: images read, layers, resolution and channels; but not with the batch.

    python tests/benchmarks/scaling.py

One thing at a time is changed, on a network that is nothing but a chain of convolutions. Measured is the time in our
hooks, per event. Of each series, the table says how the time grows where the numbers read grow sixteenfold (from the
second value to the last, as the first steps are all overhead): 16 would be linear.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from harness import Figures, parser, quartiles, run, table
from torch import Tensor, nn
from training import Stopwatch

from normgrad_lightning import NormGrad

BASE = {"images": 8, "layers": 4, "pixels": 64, "channels": 32, "batch": 32}
SERIES = {
    "images": (1, 2, 4, 8, 16, 32),
    "layers": (1, 2, 4, 8, 16, 32),
    "pixels": (8, 16, 32, 64, 128),
    "channels": (4, 8, 16, 32, 64, 128),
    "batch": (8, 16, 32, 64, 128),
}


def measure(args: argparse.Namespace) -> Figures:
    """The milliseconds of each series, and the numbers read."""
    series = {}
    for what, values in SERIES.items():
        chosen = values[:2] if args.quick else values
        series[what] = {str(value): measure_one({**BASE, what: value}, args.rounds) for value in chosen}
    if args.picture is not None:
        plot({"series": series}, args.picture)
    return {"series": series}


def measure_one(sizes: dict[str, int], rounds: int) -> Figures:
    """The time in our hooks during forward and backward passes of a chain of convolutions."""
    channels = sizes["channels"]
    net = nn.Sequential(*(nn.Conv2d(channels, channels, 1, groups=channels) for _ in range(sizes["layers"])))
    images = torch.randn(sizes["batch"], channels, sizes["pixels"], sizes["pixels"], requires_grad=True)
    names = [str(i) for i in range(sizes["layers"])]
    recorder = NormGrad(net, names, num_images=sizes["images"])
    times = []
    with recorder:
        for _ in range(rounds + 1):
            with Stopwatch() as watch:
                step(net, images)
            times.append(1e3 * watch.seconds)
    read = 2 * sizes["layers"] * min(sizes["images"], sizes["batch"]) * channels * sizes["pixels"] ** 2
    return {"ms": quartiles(times[1:]), "millions_read": read / 1e6}


def step(net: nn.Module, images: Tensor) -> None:
    """A forward and a backward pass."""
    net.zero_grad()
    net(images).square().mean().backward()


def show(figures: Figures) -> str:
    """A row for each series."""
    rows = []
    for what, points in figures["series"].items():
        values = [f"{value}: {point['ms']['median']:.2f}" for value, point in points.items()]
        rows.append([what, " · ".join(values), *growth(points)])
    header = ["changed", "value: ms per event", "numbers read grow", "time grows"]
    return f"{table(header, rows)}\n\nOtherwise: {', '.join(f'{k} {v}' for k, v in BASE.items())}."


def growth(points: Figures) -> tuple[str, str]:
    """By what factor what is read, and the time, grow from the second point to the last."""
    first, last = list(points.values())[1], list(points.values())[-1]
    read = last["millions_read"] / first["millions_read"]
    return f"{read:.0f} ×", f"{last['ms']['median'] / first['ms']['median']:.1f} ×"


def plot(figures: Figures, path: Path) -> None:
    """Time against what is read, on logarithmic axes; the batch, which is not read, beside it."""
    from matplotlib import pyplot

    _, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), width_ratios=(3, 2), layout="constrained", sharey=True)
    for what, points in figures["series"].items():
        read = [point["millions_read"] for point in points.values()]
        times = [point["ms"]["median"] for point in points.values()]
        if what == "batch":
            right.plot(list(map(int, points)), times, "o-", color="C4")
        else:
            left.plot(read, times, "o-", label=what)
    linear = [0.1, 64]
    left.plot(linear, [x * 1.0 for x in linear], "--", color="grey", label="1 ms for each million", zorder=0)
    left.set(xscale="log", yscale="log", xlabel="numbers read, in millions", ylabel="ms per event, in our hooks")
    right.set(xscale="log", xlabel="images in the batch, 8 of them read")
    right.set_xticks([8, 16, 32, 64, 128], ["8", "16", "32", "64", "128"], minor=False)
    right.minorticks_off()
    left.legend(frameon=False)
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    pyplot.savefig(path, dpi=110)


def main() -> None:
    """Measure, plot, and print the table."""
    options = parser(__doc__ or "", rounds=21)
    options.add_argument("--picture", type=Path, help="draw the figures there, which takes matplotlib")
    run(__file__, options, measure, show)


if __name__ == "__main__":
    main()
