"""Where in the pictures does a network learn?

A small residual network learns to name the one object in each picture: a disc, a ring, a square, a triangle, a cross
or a star, in any colour, place, size and rotation, on a textured background. Nobody tells it where the object is.
`NormGradCallback` shows in TensorBoard where the training signal comes from, while the network learns. Since the
pictures are drawn, the object's place is known, and the end of the run says how much of each map lies on it.

    python examples/01_where_does_it_learn.py

It takes about a minute on two CPU cores and needs nothing but the package. See --help for the options.
"""

from __future__ import annotations

import argparse

import numpy as np
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from classifier import HELD_OUT, ShapeClassifier, add_options, classification_loss, quiet_lightning, train
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont
from pytorch_lightning.callbacks import TQDMProgressBar
from pytorch_lightning.loggers import TensorBoardLogger
from shapes import CLASSES, Pictures, ShapesDataset, normalise
from torch import Tensor, nn

from normgrad_lightning import NormGradCallback, order0_maps
from normgrad_lightning.views.drawing import input_tiles, overlay
from normgrad_lightning.views.scales import scale_maps

Maps = dict[str, Tensor]
"""The map `(N, h, w)` of each layer, in the order of the network."""

MEASURED = 256  # of these, the ones whose maps are compared with the objects


def maps_of(model: nn.Module, pictures: Pictures) -> Maps:
    """Return the maps of the pictures at the last layer of each resolution."""
    return order0_maps(model, classification_loss, [normalise(pictures.images), pictures.labels])


def share_on_object(maps: Tensor, masks: Tensor) -> float:
    """Return which part of each map lies on the object, averaged over pictures.

    The masks are averaged down to the grid of the maps: a cell counts by the part of it that the object covers. So an
    even map scores exactly the object's part of the area, at every resolution, and nothing is interpolated. A coarse
    map cannot reach 100 %, as its cells at the object's edge are partly background. Maps that are zero everywhere have
    no share and are left out.

    Args:
        maps: `(N, h, w)`.
        masks: `(N, H, W)` in [0, 1].
    """
    cells = F.adaptive_avg_pool2d(masks[:, None], maps.shape[-2:])[:, 0]
    maps = maps.double()
    total = maps.sum((1, 2))
    on_object = (maps * cells).sum((1, 2))
    return (on_object[total > 0] / total[total > 0]).mean().item()


def train_watched(model: ShapeClassifier, args: argparse.Namespace) -> float:
    """Train the model, with the callback watching, and return its accuracy on the held-out pictures."""
    batches = args.images // args.batch_size
    callback = NormGradCallback(
        every_n_steps=max(1, args.epochs * batches // 9),  # ten events with the last: as many as TensorBoard keeps
        probe="train",
        mean=ShapesDataset.mean,
        std=ShapesDataset.std,
    )
    return train(
        model,
        args.images,
        args.batch_size,
        args.seed,
        max_epochs=args.epochs,
        logger=TensorBoardLogger(args.out, name="shapes"),
        callbacks=[callback, TQDMProgressBar(refresh_rate=10)],
    )


def table(start: Maps, end: Maps, masks: Tensor) -> str:
    """Return the shares of all layers before and after training, as text."""
    area = masks.mean().item()
    lines = [f"{'layer':<10}{'grid':>8}{'start':>9}{'end':>9}{'end / area':>13}"]
    for layer, maps in end.items():
        before, after = share_on_object(start[layer], masks), share_on_object(maps, masks)
        grid = "×".join(map(str, maps.shape[1:]))
        lines.append(f"{layer:<10}{grid:>8}{before:>9.1%}{after:>9.1%}{after / area:>12.1f}×")
    return "\n".join([*lines, f"an even map scores the object's part of the area: {area:.1%}"])


def contact_sheet(pictures: Pictures, start: Maps, end: Maps, tile: int = 128) -> Image.Image:
    """Return one row per picture: the input, then the overlays of the last three layers before and after training.

    Finer maps than these are fine dots at this size; TensorBoard has them.
    """
    gap, wide_gap, heading = 4, 20, 52
    tiles = input_tiles(normalise(pictures.images).numpy(), mean=0.5, std=0.5, tile_size=tile)
    groups = [("", {"input": list(tiles)})]
    for title, maps in (("before training", start), ("after training", end)):
        groups.append((title, {layer: _overlays(tiles, m) for layer, m in list(maps.items())[-3:]}))
    columns = sum(len(group) for _, group in groups)
    width = columns * (tile + gap) + len(groups) * (wide_gap - gap) + wide_gap
    height = heading + len(tiles) * (tile + gap) + wide_gap - gap
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    title_font, font = ImageFont.load_default(size=17), ImageFont.load_default(size=14)
    left = wide_gap
    for title, group in groups:
        draw.text((left, 8), title, "black", title_font)
        for name, column in group.items():
            draw.text((left, 31), name, "dimgray", font)
            for row, picture in enumerate(column):
                sheet.paste(Image.fromarray(picture), (left, heading + row * (tile + gap)))
            left += tile + gap
        left += wide_gap - gap
    return sheet


def _overlays(tiles: NDArray[np.uint8], maps: Tensor) -> list[NDArray[np.uint8]]:
    return [overlay(tile, m) for tile, m in zip(tiles, scale_maps(maps.numpy()), strict=True)]


def one_of_each_class(labels: Tensor) -> Tensor:
    """Return the place of the first picture of each class."""
    return torch.stack([(labels == label).nonzero()[0, 0] for label in range(len(CLASSES))])


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Train a small network on drawn shapes and measure how much of its training signal is on them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_options(parser, epochs=7)
    return parser.parse_args()


def main() -> None:
    """Draw, measure, train, measure again, report."""
    args = parse_args()
    quiet_lightning()
    pl.seed_everything(args.seed, verbose=False)
    print(f"Drawing {args.images + HELD_OUT} pictures ...")
    held_out = ShapesDataset(HELD_OUT, seed=2 * args.seed + 1)
    measured = Pictures(*(part[:MEASURED] for part in held_out.pictures))

    model = ShapeClassifier(args.pooling)
    start = maps_of(model, measured)
    accuracy = train_watched(model, args)
    end = maps_of(model, measured)

    chosen = one_of_each_class(measured.labels)
    sheet = contact_sheet(
        Pictures(*(part[chosen] for part in measured)),
        {layer: m[chosen] for layer, m in start.items()},
        {layer: m[chosen] for layer, m in end.items()},
    )
    path = args.out / "contact_sheet.png"
    sheet.save(path)

    print(f"\nHow much of the training signal is on the object ({MEASURED} held-out pictures)\n")
    print(table(start, end, measured.masks))
    print(f"\nvalidation accuracy  {accuracy:.1%}  (guessing: {1 / len(CLASSES):.1%})")
    print(f"contact sheet        {path}")
    print(f"all pictures         tensorboard --logdir {args.out}")
    print(f"film of eight of them {max(args.out.rglob('film.webp'), default='none')}")


if __name__ == "__main__":
    main()
