"""What does a network tell X-rays by? Nobody has planted anything here.

    python examples/14_what_x_rays_are_told_by.py                  # drawn stand-ins, most with a letter in a corner
    python examples/14_what_x_rays_are_told_by.py --data XRAYS     # X-rays: XRAYS/{train,val}/{covid,other}/*.jpg

Chest X-rays of the COVID-19 image data collection (Cohen et al. 2020, https://github.com/ieee8023/covid-chestxray-dataset)
come from articles and archives. Many have letters and arrows in their corners, others for other sources, and networks
learn these (DeGrave et al. 2021). Clone the collection, take the frontal pictures (`view` in its `metadata.csv`), put
them into folders by `finding`, and split them by `patientid`.

By epoch: how many patches of the class lie in a corner, and what the check measures. At the end: how well validation
does with the corners of an image of the other class in place of its own, or with the middles of that image's sides.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from classifier import ShapeClassifier, quiet_lightning
from photographs import markdown
from PIL import Image, ImageDraw, ImageFont
from shapes import normalise
from shortcut_training import Entry, Journal, lite0, resnet18, train
from shortcuts import Marked, accuracy, photographs
from torch import Tensor, nn

from normgrad_lightning.views.crops import Crop
from normgrad_lightning.views.tag_namer import COMBINED

CLASSES = ("covid", "other")
CORNER = 0.25  # of a side: four corners are a quarter of the image
BEST = 8  # patches of a class
LETTERS = 0.7  # of the drawn class: so many have one


def drawn(count: int, seed: int, size: int = 48) -> Marked:
    """Return pictures of two dark ovals; one class has a letter in a corner more often, and slightly brighter ovals."""
    rng = np.random.default_rng(seed)
    labels, pictures = rng.integers(0, 2, count), []
    font = ImageFont.load_default(size=size / 5)
    for label in labels:
        picture = Image.new("L", (size, size), int(rng.integers(110, 150)))
        draw = ImageDraw.Draw(picture)
        for middle in (0.3, 0.7):
            left, top = (size * (at + rng.uniform(-0.04, 0.04)) for at in (middle - 0.15, 0.15))
            draw.ellipse(
                (left, top, left + 0.3 * size, top + 0.7 * size), int(rng.integers(30, 60) + 10 * (label == 0))
            )
        if rng.random() < (LETTERS if label == 0 else 0.1):
            draw.text(((0.04, 0.86)[rng.integers(2)] * size, 0.02 * size), "R", 255, font)
        noisy = np.asarray(picture) + rng.normal(0, 12, (size, size))
        pictures.append(np.clip(noisy, 0, 255).astype(np.uint8))
    pixels = torch.from_numpy(np.stack(pictures))[:, None].expand(-1, 3, -1, -1).contiguous()
    boxes = torch.full((count, 4), torch.nan)
    return Marked(normalise(pixels), torch.from_numpy(labels), CLASSES, boxes)


class InCorners:
    """Tells which patches have their middle in a corner of the image."""

    def share(self, crops: Sequence[Crop]) -> float:
        """Return the share of the best patches that are."""
        return float(np.mean([self._is(crop) for crop in crops[:BEST]])) if crops else float("nan")

    def _is(self, crop: Crop) -> bool:
        middles = [(start + length / 2) / side for start, length, side in zip(*crop.box, crop.size, strict=True)]
        return all(at < CORNER or at > 1 - CORNER for at in middles)


def corners(size: int) -> Tensor:
    """Return where the corners are, `(size, size)`."""
    along = (torch.arange(size) + 0.5) / size
    outer = (along < CORNER) | (along > 1 - CORNER)
    return outer[:, None] & outer


def sides(size: int) -> Tensor:
    """Return where the middles of the four sides are: as large as the corners, and as near to the edge."""
    along = (torch.arange(size) + 0.5) / size
    outer, middle = (along < CORNER) | (along > 1 - CORNER), (along - 0.5).abs() < CORNER / 2
    return (outer[:, None] & middle) | (middle[:, None] & outer)


def covered(data: Marked, where: Tensor, seed: int = 0) -> Marked:
    """Return the pictures with what an image of another class has there."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
    donors = torch.empty(len(data), dtype=torch.long)
    for label in data.labels.unique():
        own, others = (data.labels == label).nonzero()[:, 0], order[data.labels[order] != label]
        donors[own] = others[torch.arange(len(own)) % len(others)]
    return replace(data, images=torch.where(where, data.images[donors], data.images))


def run(
    net: Callable[[], nn.Module], training: Marked, held_out: Marked, seed: int, epochs: int, rate: float
) -> tuple[Journal, dict[str, list[float]]]:
    """Train once; return what was seen, and the accuracy of both classes for each way of covering."""
    pl.seed_everything(seed, verbose=False)
    size, epoch = held_out.images.shape[-1], len(training) // 32
    ways = {
        "as they are": held_out,
        "corners of the other class": covered(held_out, corners(size)),
        "sides of the other class": covered(held_out, sides(size)),
    }
    model = net()
    with tempfile.TemporaryDirectory() as folder:
        journal, _ = train(
            model,
            training,
            (ways["corners of the other class"], held_out),
            InCorners(),
            steps=epochs * epoch,
            every_n_steps=epoch,
            seed=seed,
            out=Path(folder),
            learning_rate=rate,
        )
    found = {name: [accuracy(model, data, [label]) for label in range(len(CLASSES))] for name, data in ways.items()}
    return journal, found


def span(values: Sequence[float]) -> str:
    """Return the range of values over seeds; those that are not known are left out."""
    known = sorted(value for value in values if math.isfinite(value))
    texts = [f"{value:.2f}" for value in known[:: max(len(known) - 1, 1)]]
    return " – ".join(dict.fromkeys(texts)) or "–"


def by_epoch(runs: Sequence[Journal], name: str = CLASSES[0]) -> str:
    """Return a table with a line for each event: ranges over seeds."""
    head = ["step", "accuracy", "with corners of the other class"]
    head += [f"patches of {name} in corners, {which}" for which in ("combined", "last layer")]
    head += [f"check of {name}: {what}" for what in ("covered", "pasted")]
    return markdown(head, [_line(entries, name) for entries in zip(*(one.entries for one in runs), strict=True)])


def _line(entries: Sequence[Entry], name: str) -> list[str]:
    cells = [[entry.marked for entry in entries], [entry.clean for entry in entries]]
    for is_combined in (True, False):
        maps = [[rows for of, rows in entry.hits.items() if (of == COMBINED) == is_combined] for entry in entries]
        cells.append([rows[0].get(name, math.nan) if rows else math.nan for rows in maps])
    found = [entry.check.get(name, (math.nan, None)) for entry in entries]
    cells += [[math.nan if (value := one[which]) is None else value for one in found] for which in (0, 1)]
    return [str(entries[0].step), *map(span, cells)]


def in_the_end(found: Sequence[dict[str, list[float]]]) -> str:
    """Return a table of the accuracies on validation pictures, covered in several ways."""
    rows = [
        [
            way,
            *(span([of[way][label] for of in found]) for label in range(len(CLASSES))),
            span([np.mean(of[way]) for of in found]),
        ]
        for way in found[0]
    ]
    return markdown(["validation pictures", *CLASSES, "mean of both"], rows)


def studies(data: Path | None, quick: bool) -> Iterator[tuple[str, Callable[[], nn.Module], float, Marked, Marked]]:
    """Yield each network, with a name and a learning rate, and the pictures to train on and to validate with."""
    if data is None:
        count = 1024 if quick else 2048
        yield "drawn, the demo's network", ShapeClassifier, 1e-2, drawn(count, 0), drawn(256, 1)
        return
    for name, net, size, rate in (
        ("X-rays, ResNet-18", resnet18, 96, 1e-3),
        ("X-rays, EfficientNet-Lite0, pretrained", lite0, 96, 3e-4),
    ):
        training, held_out = (photographs(data, split, size, stickers=False) for split in ("train", "val"))
        if sorted(training.classes) != sorted(CLASSES):
            raise SystemExit(f"{data}: expected the folders {' and '.join(CLASSES)}, but found {training.classes}.")
        yield name, net, rate, training, held_out


def main() -> None:
    """Train with each seed, and print both tables of each network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder of X-rays; without it, drawn pictures")
    parser.add_argument("--only", default="", help="run the networks whose name has this text")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--quick", action="store_true", help="small and short, for a test")
    args = parser.parse_args()
    quiet_lightning()
    torch.set_num_threads(1)
    seeds, epochs = (1, 3) if args.quick else (args.seeds, args.epochs)
    kept: dict[str, Any] = {}
    for name, net, rate, training, held_out in studies(args.data, args.quick):
        if args.only not in name:
            continue
        runs = [run(net, training, held_out, seed, epochs, rate) for seed in range(seeds)]
        journals, found = [journal for journal, _ in runs], [accuracies for _, accuracies in runs]
        told = [", ".join(f"{of} from step {step}" for of, step in one.told.items()) or "nothing" for one in journals]
        print(f"{name}, {seeds} seeds\n\n{by_epoch(journals)}\n\n{in_the_end(found)}\n", flush=True)
        print(f"Told by the check, seed by seed: {'; '.join(told)}.\n", flush=True)
        kept[name] = [
            {"told": one.told, "entries": [asdict(entry) for entry in one.entries], "accuracy": accuracies}
            for one, accuracies in runs
        ]
        if args.json:
            args.json.write_text(json.dumps(kept))


if __name__ == "__main__":
    main()
