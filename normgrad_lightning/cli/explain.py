r"""Make maps of a trained model for given images.

OUT.png is a sheet of them, OUT.npz has the numbers: `kind/layer`, for images,
rows and columns. Of classes with eight images or more, the strongest place is
covered, and pasted into others, to see what the loss does. The loss is the
module's `normgrad_loss(batch)` if it has one, else the cross-entropy of its
scores and the label.

Example:
  normgrad-lightning explain last.ckpt cat.png dog.png \
      --module train.py:LitModel --label 3 5 --size 224x224
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from normgrad_lightning.cli.arguments import add_model_arguments, numbers, size
from normgrad_lightning.cli.terminal import say
from normgrad_lightning.maps import KINDS

RAW = (
    "Images go in as 0 to 1: --mean and --std are not given, and the checkpoint has none that can be used. If "
    "training normalised its images, the maps are wrong."
)
"""What to say where nothing is normalised: such maps look plausible."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of Lightning, or a plain state dict")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="picture files, or folders of them")
    add_model_arguments(parser, module_is_required=True)
    label = "number of the class of all images, or of each (the model's own guess)"
    parser.add_argument("--label", type=int, nargs="+", metavar="N", help=label)
    parser.add_argument(
        "--maps", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"{', '.join(KINDS)} (all)"
    )
    parser.add_argument("--layers", nargs="+", metavar="NAME", default=["auto"], help="names or globs (auto)")
    parser.add_argument("--size", type=size, metavar="HxW", help="what to resize images to (as they are)")
    parser.add_argument("--mean", type=numbers, metavar="M,M,M", help="of pixels in [0, 1] (the hyperparameter `mean`)")
    parser.add_argument("--std", type=numbers, metavar="S,S,S", help="of pixels in [0, 1] (the hyperparameter `std`)")
    parser.add_argument("--out", type=Path, default=Path("normgrad"), help="what to write, without .png (normgrad)")


def run(options: argparse.Namespace) -> None:
    """Write the sheet and the numbers."""
    picture, arrays = _files_to_write(options.out)
    import numpy as np

    from normgrad_lightning.cli.checkpoint import load_trained
    from normgrad_lightning.cli.image_check import checks_of, with_check
    from normgrad_lightning.cli.image_maps import auto_layers_of, labels_for, maps_of
    from normgrad_lightning.cli.images import channels_of, load_images, normalised, pictures_of, saved_numbers
    from normgrad_lightning.views.figure import explanation_sheet, with_heading
    from normgrad_lightning.views.style import Style

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
    checks, lines = checks_of(module, images, labels, layers)
    sheet = with_check(explanation_sheet(images.numpy(), captions, maps, style), checks, style)
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
