"""What can be typed after `normgrad-lightning`; light to import, so that `--help` is fast.

The docstring of a command's function is its help. Of a wrong value, argparse says the name of what reads it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
from pathlib import Path
from typing import Any

from normgrad_lightning.maps import KINDS


def parser() -> argparse.ArgumentParser:
    """Return what reads the arguments of all commands."""
    whole = argparse.ArgumentParser(
        prog="normgrad-lightning",
        description="Which pixels a vision model learns from. NormGradCallback shows them during training; this "
        "command is for before and after.",
    )
    commands = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add_arguments in COMMANDS.items():
        text, layout = inspect.getdoc(add_arguments) or "", argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=text.split("\n")[0], description=text, formatter_class=layout)
        add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return whole


def layers(parser: argparse.ArgumentParser) -> None:
    """List the layers of a model that can be named in `layers`.

    A star marks those that "auto" would take. A dash for a grid marks those that
    have no features on the image, and so no map.

    Example:
      normgrad-lightning layers torchvision.models:resnet18 --input 3x224x224
    """
    model = "what makes the model: train.py:LitModel or package.module:Name; with --module, a checkpoint"
    parser.add_argument("model", metavar="MODEL", help=model)
    parser.add_argument("--input", type=shape, default=[3, 224, 224], metavar="CxHxW", help="of an image (3x224x224)")
    _add_model(parser, module_is_required=False)


def explain(parser: argparse.ArgumentParser) -> None:
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
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of Lightning, or a plain state dict")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="picture files, or folders of them")
    _add_model(parser, module_is_required=True)
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


def report(parser: argparse.ArgumentParser) -> None:
    """Write the page of the NormGrad tab as one HTML file, which opens without TensorBoard.

    RUN is a folder of a run, or one that runs are in. Several runs can be compared on the page.

    Example:
      normgrad-lightning report lightning_logs/version_0 lightning_logs/version_1 -o report.html
    """
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, or of several")
    parser.add_argument("-o", "--out", type=Path, default=Path("normgrad.html"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--megabytes", type=float, default=20.0, help="size of the file, at most (%(default)s)")


COMMANDS = {"layers": layers, "explain": explain, "report": report}
"""What adds the arguments of each command; a module of the same name has `run(options)`."""


def _add_model(parser: argparse.ArgumentParser, *, module_is_required: bool) -> None:
    """Add what says how to make the model of a checkpoint."""
    parser.add_argument(
        "--module",
        required=module_is_required,
        metavar="FILE.py:NAME",
        help="the class that was trained, or a function that makes the model: train.py:LitModel or package.module:Name",
    )
    parser.add_argument(
        "--arg",
        action="append",
        type=name_and_value,
        default=[],
        metavar="NAME=VALUE",
        help="an argument to make the model with (several)",
    )
    parser.add_argument("--unsafe", action="store_true", help="let the checkpoint run code; only if you trust it")


def name_and_value(text: str) -> tuple[str, Any]:
    """Return both parts of `name=value`; a value that is not a Python literal is text."""
    name, _, value = text.partition("=")
    if not (value and name.isidentifier()):
        raise ValueError(text)
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def shape(text: str) -> list[int]:
    """Return the sizes in a text such as `3x224x224`."""
    sizes = [int(size) for size in text.lower().split("x")]
    if min(sizes) < 1:
        raise ValueError(text)
    return sizes


def size(text: str) -> list[int]:
    """Return the height and width in `224x160`, or in `224`, which is both."""
    height, width = shape(text if "x" in text.lower() else f"{text}x{text}")
    return [height, width]


def numbers(text: str) -> list[float]:
    """Return the numbers in a text such as `0.5,0.4,0.4`."""
    return [float(number) for number in text.split(",")]
