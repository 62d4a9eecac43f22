"""The command `explain`: maps of a trained model for given images, and its check."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor, nn

from normgrad_lightning.check.card import check_card
from normgrad_lightning.check.given import check_maps
from normgrad_lightning.check.passes import CannotCheck
from normgrad_lightning.check.results import ClassCheck
from normgrad_lightning.check.rule import MIN_IMAGES, sentence
from normgrad_lightning.cli.checkpoint import load_trained
from normgrad_lightning.cli.image_maps import auto_layers_of, labels_for, loss_of, maps_of
from normgrad_lightning.cli.images import channels_of, load_images, normalised, pictures_of, saved_numbers
from normgrad_lightning.cli.terminal import say
from normgrad_lightning.views.figure import explanation_sheet, with_heading
from normgrad_lightning.views.style import Style

RAW = (
    "Images go in as 0 to 1: --mean and --std are not given, and the checkpoint has none that can be used. If "
    "training normalised its images, the maps are wrong."
)
"""What to say where nothing is normalised: such maps look plausible."""


def run(options: argparse.Namespace) -> None:
    """Write the sheet and the numbers."""
    picture, arrays = _files_to_write(options.out)
    module = load_trained(options.checkpoint, options.module, dict(options.arg), trusted=options.unsafe)
    mean, std = options.mean or saved_numbers(module, "mean"), options.std or saved_numbers(module, "std")
    if mean is None and std is None:
        say(RAW)
    files = pictures_of(options.images)
    images = normalised(load_images(files, channels_of(module), options.size), mean, std)
    labels, spoken = labels_for(module, images, options.label)
    captions = [f"{path.name}: label {label}" for path, label in zip(files, spoken, strict=True)]
    batches = [(images[i : i + 1], labels[i : i + 1]) for i in range(len(images))]
    layers = auto_layers_of(module, batches[0]) if options.layers == ["auto"] else ",".join(options.layers).split(",")
    results = []
    for number, (batch, caption) in enumerate(zip(batches, captions, strict=True), 1):
        say(f"[{number}/{len(images)}] {caption}")
        results.append(maps_of(module, batch, layers, options.maps))
    maps = {
        kind: {layer: np.concatenate([result[kind][layer] for result in results]) for layer in of_layers}
        for kind, of_layers in results[0].items()
    }
    style = Style(mean=mean or 0.0, std=std or 1.0)  # pixels as the files have them
    checks, lines = _checks_of(module, images, labels, layers)
    sheet = _with_check(explanation_sheet(images.numpy(), captions, maps, style), checks, style)
    if options.label is None and len(images) > 2 and len(set(labels.tolist())) == 1:  # often so if wrongly normalised
        doubt = f"All images get one guess, {labels[0]}: is the normalisation right? --mean and --std set it."
        sheet = with_heading(sheet, doubt)
        say(doubt)
    for line in lines:
        say(line)
    sheet.save(picture)
    by_name: dict[str, Any] = {f"{kind}/{layer}": m for kind, of in maps.items() for layer, m in of.items()}
    by_name["files"] = np.array([str(path) for path in files])
    np.savez_compressed(arrays, images=images.numpy(), labels=labels.numpy(), **by_name)
    say(picture, sys.stdout)
    say(arrays, sys.stdout)


def _files_to_write(out: Path) -> list[Path]:
    """Return the files of the sheet and of the numbers; raise if they cannot be written, before any work is done."""
    if not out.name:
        raise ValueError(f"`--out`: expected what to write, without .png, but got a folder, {str(out)!r}.")
    stem = out.with_suffix("") if out.suffix in (".png", ".npz") else out
    stem.parent.mkdir(parents=True, exist_ok=True)
    files = [Path(f"{stem}.png"), Path(f"{stem}.npz")]
    for file in files:
        is_new = not file.exists()
        file.open("ab").close()
        if is_new:
            file.unlink()
    return files


def _checks_of(
    module: nn.Module, images: Tensor, labels: Tensor, layers: Sequence[str]
) -> tuple[dict[str, ClassCheck], list[str]]:
    """Return the check of each class with at least eight images, by number, and lines to print; of few images, none."""
    if len(images) < MIN_IMAGES:
        return {}, []
    try:
        checks = check_maps(module, loss_of(module), (images, labels), layers, labels=labels.tolist())
    except CannotCheck as error:
        return {}, [f"The check cannot be done: {error}."]
    return checks, [sentence(list(checks.values())).replace("`", ""), *map(_line, checks.values())]


def _with_check(sheet: Image.Image, checks: Mapping[str, ClassCheck], style: Style) -> Image.Image:
    """Return the sheet with the card of the check below, if there is one."""
    if not checks:
        return sheet
    card = Image.fromarray(np.ascontiguousarray(check_card(list(checks.values()), style)[..., :3]))
    whole = Image.new("RGB", (max(sheet.width, card.width + 20), sheet.height + card.height), "white")
    whole.paste(sheet, (0, 0))
    whole.paste(card, (20, sheet.height))
    return whole


def _line(one: ClassCheck) -> str:
    line = f"  {one.name}, {one.n} images: loss {one.plain:.2f}"
    line += f", place covered {one.covered:.2f}, another {one.covered_control:.2f}"
    if one.pasted is None or one.pasted_control is None:
        return line
    return f"{line}; others with the place pasted {one.pasted:.2f}, with another part {one.pasted_control:.2f}"
