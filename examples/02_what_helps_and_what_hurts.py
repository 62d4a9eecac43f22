"""What in a picture helps training, and what would hurt it?

The network of the first example learns to name single objects. Then it is shown pictures with two objects of different
classes, and told that the label is one of them. Where is the training signal: on the labelled object, or on the other?
Order 0 hardly knows the difference. Order 1 looks at the loss after a small step that lowers it, adversarial maps at
the loss after one that raises it, and contrast at what the two do not share.

Every picture is measured with both labels. So a map that ignores the label puts exactly half of what it has on the two
objects on the labelled one, on average, and what differs from 50 % is due to the label.

    python examples/02_what_helps_and_what_hurts.py

It takes a few minutes on two CPU cores. See --help for the options.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from classifier import ShapeClassifier, add_options, classification_loss, quiet_lightning, train
from PIL import Image, ImageDraw, ImageFont
from pytorch_lightning.callbacks import TQDMProgressBar
from shapes import CLASSES, Pairs, make_pairs, normalise
from torch import Tensor

from normgrad_lightning import functional as NF
from normgrad_lightning import order0_maps, order1_maps
from normgrad_lightning.views.drawing import input_tiles, overlay
from normgrad_lightning.views.scales import scale_maps
from normgrad_lightning.views.style import SIGNED_COLORMAP

Maps = dict[str, dict[str, Tensor]]
"""The maps `(N, h, w)` of each kind and each layer."""

SHOWN = 6  # pictures on the sheet
KINDS = ("order0", "order1", "adversarial", "contrast")


def maps_of(model: ShapeClassifier, images: Tensor, labels: Tensor, epsilon: float) -> Maps:
    """Return the maps of each kind, each image with an inner step of its own."""
    batch = [normalise(images), labels]
    order0 = order0_maps(model, classification_loss, batch)
    layers = list(order0)
    order1 = order1_maps(model, classification_loss, batch, layers, epsilon=epsilon)
    adversarial = order1_maps(model, classification_loss, batch, layers, epsilon=epsilon, adversarial=True)
    contrast = {layer: NF.contrast(order1[layer], adversarial[layer]) for layer in layers}
    return {"order0": order0, "order1": order1, "adversarial": adversarial, "contrast": contrast}


def on_objects(maps: Tensor, masks: Tensor) -> Tensor:
    """Return how much of each map lies on each of the two objects, `(N, 2)`, as parts of the map's absolute sum.

    A map that is zero everywhere, as after an inner step that has fitted the image, has no parts: they are NaN.
    """
    cells = F.adaptive_avg_pool2d(masks, maps.shape[-2:]).double()
    maps = maps.double()
    return (maps[:, None] * cells).sum((2, 3)) / maps.abs().sum((1, 2))[:, None]


def share_of_labelled(on_labelled: Tensor, on_other: Tensor) -> Tensor:
    """Return what the labelled object has of what both have, `(N,)`: 50 % if the label makes no difference."""
    return on_labelled / (on_labelled + on_other)


def lead_of_labelled(on_labelled: Tensor, on_other: Tensor) -> Tensor:
    """Return how much more of a signed map the labelled object has, `(N,)`: 0 if the label makes no difference."""
    return on_labelled - on_other


MEASURES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    **dict.fromkeys(("order0", "order1", "adversarial"), share_of_labelled),
    "contrast": lead_of_labelled,
}


def measure(model: ShapeClassifier, pairs: Pairs, epsilon: float) -> dict[str, dict[str, Tensor]]:
    """Return the measure of each kind and layer for each picture, averaged over its two labels, `(N,)`.

    It is NaN for a picture where one of the two maps is zero everywhere.
    """
    results: dict[str, dict[str, list[Tensor]]] = {kind: {} for kind in KINDS}
    for labelled in (0, 1):
        for kind, layers in maps_of(model, pairs.images, pairs.labels[:, labelled], epsilon).items():
            for layer, maps in layers.items():
                on = on_objects(maps, pairs.masks)
                figure = MEASURES[kind](on[:, labelled], on[:, 1 - labelled])
                results[kind].setdefault(layer, []).append(figure)
    return {kind: {layer: torch.stack(f).mean(0) for layer, f in of.items()} for kind, of in results.items()}


def bootstrap(values: Tensor, rounds: int = 2000) -> tuple[float, float, float]:
    """Return the mean over pictures and its 95 % interval, by drawing the pictures anew again and again."""
    values = values[values.isfinite()]
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(values), (rounds, len(values)), generator=generator)
    low, high = values[draws].mean(1).quantile(torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return values.mean().item(), low, high


def table(results: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Return means and intervals of all layers and kinds, as text."""
    lines = [f"{'layer':<10}" + "".join(f"{kind:>22}" for kind in KINDS)]
    for layer in results["order0"]:
        cells = []
        for kind in KINDS:
            mean, low, high = (100 * figure for figure in bootstrap(results[kind][layer]))
            sign = "+" if kind == "contrast" else ""
            cells.append(f"{mean:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]")
        lines.append(f"{layer:<10}" + "".join(f"{cell:>22}" for cell in cells))
    for kind in KINDS:
        left_out = max(int(values.isnan().sum()) for values in results[kind].values())
        if left_out:
            lines.append(f"{kind}: {left_out} pictures are left out, whose map is zero for one of the labels")
    return "\n".join(lines)


def sheet(pairs: Pairs, maps_of_label: list[Maps], layer: str, tile: int = 112) -> Image.Image:
    """Return one row per picture: the input, then the maps of the layer for its one label and for its other."""
    gap, wide_gap, heading = 4, 20, 34
    tiles = input_tiles(normalise(pairs.images).numpy(), mean=0.5, std=0.5, tile_size=tile)
    columns = 1 + 2 * len(KINDS)
    width = columns * (tile + gap) + 4 * wide_gap
    height = heading + len(tiles) * (tile + gap + 18) + wide_gap - gap
    picture = Image.new("RGB", (width, height), "white")
    draw, font = ImageDraw.Draw(picture), ImageFont.load_default(size=13)
    for row, tile_of_row in enumerate(tiles):
        top = heading + row * (tile + gap + 18) + 18
        picture.paste(Image.fromarray(tile_of_row), (wide_gap, top))
        for labelled, maps in enumerate(maps_of_label):
            left = 2 * wide_gap + tile + labelled * (len(KINDS) * (tile + gap) + wide_gap)
            draw.text((left, top - 17), f"label: {CLASSES[pairs.labels[row, labelled]]}", "black", font)
            for column, kind in enumerate(KINDS):
                signed = kind == "contrast"
                scaled = scale_maps(maps[kind][layer][row : row + 1].numpy(), signed=signed)[0]
                colormap = SIGNED_COLORMAP if signed else "inferno"
                place = left + column * (tile + gap)
                covered = overlay(tile_of_row, scaled, colormap=colormap, signed=signed)
                picture.paste(Image.fromarray(covered), (place, top))
                if row == 0:
                    draw.text((place, 8), kind, "dimgray", font)
    return picture


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Measure which of two objects the maps of a trained network prefer when one of them is the label.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--pairs", type=int, default=256, help="pictures with two objects")
    parser.add_argument("--epsilon", type=float, nargs="+", default=[5e-4, 5e-3, 5e-2], help="sizes of the inner step")
    add_options(parser, epochs=14)
    return parser.parse_args()


def main() -> None:
    """Draw, train, measure, report."""
    args = parse_args()
    quiet_lightning()
    pl.seed_everything(args.seed, verbose=False)
    model = ShapeClassifier(args.pooling)
    bar = TQDMProgressBar(refresh_rate=10)
    accuracy = train(
        model, args.images, args.batch_size, args.seed, max_epochs=args.epochs, logger=False, callbacks=[bar]
    )
    model.eval()
    pairs = make_pairs(args.pairs, seed=1000 + args.seed)

    print(f"\nvalidation accuracy on single objects: {accuracy:.1%}")
    print(f"\nThe labelled object's part of what lies on both, in % (contrast: its lead over the other), {args.pairs}")
    print("pictures with both labels, mean and 95 % interval. 50 (contrast: 0) is a map that ignores the label.")
    for epsilon in args.epsilon:
        print(f"\nepsilon = {epsilon:g}\n{table(measure(model, pairs, epsilon))}")

    shown = Pairs(*(part[:SHOWN] for part in pairs))
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "helps_and_hurts.png"
    epsilon = args.epsilon[len(args.epsilon) // 2]
    maps = [maps_of(model, shown.images, shown.labels[:, labelled], epsilon) for labelled in (0, 1)]
    sheet(shown, maps, layer=list(maps[0]["order0"])[-1]).save(path)
    print(f"\nmaps of six pictures at the last layer, epsilon = {epsilon:g}: {path}")


if __name__ == "__main__":
    main()
