"""Pictures from files, as a network wants them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from normgrad_lightning.checks import check_normalisation
from normgrad_lightning.cli.terminal import say


def channels_of(module: nn.Module) -> int:
    """Return how many channels the images need: 1 if the first convolution takes one, else 3."""
    first = next((layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)
    return 1 if first is not None and first.in_channels == 1 else 3


def pictures_of(paths: Sequence[Path]) -> list[Path]:
    """Return the files, with the pictures in a folder, by name, in place of the folder."""
    Image.init()
    endings = {ending for ending, kind in Image.EXTENSION.items() if kind in Image.OPEN}
    files: list[Path] = []
    for path in paths:
        found = sorted(file for file in path.iterdir() if file.suffix.lower() in endings) if path.is_dir() else [path]
        if not found:
            raise ValueError(f"`{path}`: the folder has no images.")
        files += found
    return files


def load_images(paths: Sequence[Path], channels: int = 3, size: Sequence[int] | None = None) -> Tensor:
    """Return the pictures in these files, `(N, C, H, W)`, with values from 0 to 1; `size` is what to resize them to."""
    pictures = [_picture(path, channels, size) for path in paths]
    sizes = {tuple(picture.shape[1:]) for picture in pictures}
    if len(sizes) > 1:
        seen = ", ".join(f"{height}x{width}" for height, width in sorted(sizes))
        raise ValueError(f"`--size`: expected HEIGHTxWIDTH, as the images differ in size ({seen}).")
    return torch.stack(pictures)


def _picture(path: Path, channels: int, size: Sequence[int] | None) -> Tensor:
    try:
        with Image.open(path) as file:
            image = _of_8_bits(file).convert("RGB" if channels == 3 else "L")
    except (OSError, Image.DecompressionBombError) as error:
        raise ValueError(f"`{path}`: cannot be read as an image: {error}") from error
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(image, np.float32) / 255.0)
    return values.reshape(*values.shape[:2], -1).permute(2, 0, 1)


def _of_8_bits(image: Image.Image) -> Image.Image:
    """Return the image, or one like it that Pillow can convert: it would clip what is above 255."""
    if image.mode == "F":
        raise OSError("floating-point pixels, whose range is not known")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    return image


def normalised(images: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Return `(images - mean) / std`, with a number for each channel or one for all."""
    check_normalisation(mean, std)
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and len(values) not in (1, images.shape[1]):
            raise ValueError(f"`--{name}`: expected one number or {images.shape[1]}, but got {len(values)}.")
    shift, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean or [0.0], std or [1.0]))
    return (images - shift) / scale


def saved_numbers(module: Any, name: str) -> list[float] | None:
    """Return a hyperparameter of a LightningModule, if it can be the mean or std of pixels from 0 to 1; and say so."""
    saved = getattr(module, "hparams", {}).get(name)
    values: list[Any] = list(saved) if isinstance(saved, list | tuple) else [saved]
    if not all(isinstance(value, float | int) and 0 <= value <= 1 for value in values):
        return None
    say(f"--{name} {','.join(f'{value:.4g}' for value in values)} is taken from the hyperparameters.")
    return values
