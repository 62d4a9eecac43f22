"""The command `normgrad-lightning`: which layers a model has, and what a trained model makes of given images."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normgrad_lightning.environment import parse
from normgrad_lightning.kinds import EPSILON, KINDS


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 on success, 1 on failure, 2 for wrong arguments."""
    options = _parser().parse_args(argv)
    try:
        options.run(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would tell of it again at its end
        return 141
    except SystemExit:
        print(
            f"normgrad-lightning {options.command}: the module ended the program. What a script does belongs under "
            '`if __name__ == "__main__":`.',
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        return 130
    except Exception as error:
        if options.traceback:
            raise
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        print(f"normgrad-lightning {options.command}: {kind}{error}", file=sys.stderr)
        if kind:
            print("--traceback shows where.", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="normgrad-lightning",
        description="Which pixels a vision model learns from. NormGradCallback shows them during training; this "
        "command is for before and after.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_layers(commands)
    _add_explain(commands)
    return parser


def _add_layers(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "layers",
        help="list the layers of a model that can be named",
        description="List the layers of a model that can be named in `layers`, what they give, and with a star those "
        'that "auto" would take.',
        epilog="example: normgrad-lightning layers torchvision.models:resnet18 --input 3x224x224",
    )
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="what makes it: a class or a function, such as train.py:LitModel or torchvision.models:resnet18; or a "
        "checkpoint",
    )
    parser.add_argument(
        "--input", type=_shape, default=[3, 224, 224], metavar="CxHxW", help="the size of an image (3x224x224)"
    )
    _add_module(parser, "what makes the model of a checkpoint, such as train.py:LitModel or train:LitModel")
    _add_common(parser)
    parser.set_defaults(run=_layers)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="maps of a trained model for given images",
        description="Make maps of a trained model for given images, as a sheet (OUT.png) and as numbers (OUT.npz: "
        "`kind/layer`, for images, rows and columns). The loss is the module's `normgrad_loss(batch)` if it has one, "
        "else the cross-entropy of its scores and the label.",
        epilog="example: normgrad-lightning explain last.ckpt cat.png --module train.py:LitModel --label 3 "
        "--size 224x224",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of Lightning, or a plain state dict")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="picture files")
    _add_module(parser, "what makes the model, such as train.py:LitModel or train:LitModel")
    parser.add_argument(
        "--label",
        type=_label,
        nargs="+",
        metavar="N",
        help="class of all images, or of each, by number or name (the model's own guess)",
    )
    parser.add_argument(
        "--classes",
        metavar="A,B,C",
        help="names of the classes, or a text file with one per line (`classes` or `class_names` in the checkpoint's "
        "hyperparameters)",
    )
    parser.add_argument(
        "--maps", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"{', '.join(KINDS)} (all)"
    )
    parser.add_argument("--layers", nargs="+", metavar="NAME", default=["auto"], help="names or globs (auto)")
    parser.add_argument(
        "--epsilon", type=float, default=EPSILON, help="size of order 1's inner step (%(default)s, the paper's)"
    )
    parser.add_argument("--size", type=_size, metavar="HxW", help="what to resize images to (as they are)")
    parser.add_argument(
        "--mean",
        type=_numbers,
        metavar="M,M,M",
        help="subtracted after scaling to [0, 1] (`mean` in the checkpoint's hyperparameters, or nothing)",
    )
    parser.add_argument(
        "--std", type=_numbers, metavar="S,S,S", help="divided by, after --mean (`std` in the same place, or nothing)"
    )
    parser.add_argument("--grey", action="store_true", help="one channel (as many as the first convolution takes)")
    parser.add_argument(
        "--out", type=Path, default=Path("normgrad"), help="where to write, without a suffix (normgrad)"
    )
    _add_common(parser)
    parser.set_defaults(run=_explain)


def _add_module(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--module", metavar="FILE.py:NAME", help=what)
    parser.add_argument(
        "--unsafe", action="store_true", help="load a checkpoint that holds code; only if you trust its author"
    )


def _add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--arg", action="append", default=[], metavar="NAME=VALUE", help="an argument to make the model with (several)"
    )
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")


def _shape(text: str) -> list[int]:
    return _sizes(text, "CHANNELSxHEIGHTxWIDTH", range(2, 5))


def _size(text: str) -> list[int]:
    sizes = _sizes(text, "HEIGHTxWIDTH", range(1, 3))
    return sizes * (3 - len(sizes))


def _sizes(text: str, expected: str, axes: range) -> list[int]:
    parts = text.lower().replace("×", "x").split("x")
    if len(parts) not in axes or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"expected {expected}, but got {text!r}")
    return [int(part) for part in parts]


def _numbers(text: str) -> list[float]:
    try:
        numbers: list[float] = parse(text, Sequence[float])
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected numbers, separated by commas, but got {text!r}") from None
    return numbers


def _label(text: str) -> int | str:
    """A class by its number, or by its name."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def _layers(options: argparse.Namespace) -> None:
    import torch

    from normgrad_lightning.cli.layers import as_text, layer_rows
    from normgrad_lightning.cli.loading import arguments, build, is_checkpoint, load_trained

    given = arguments(options.arg)
    if is_checkpoint(options.model):
        module = load_trained(Path(options.model), options.module, given, trusted=options.unsafe)
    elif options.module is not None:
        raise ValueError(f"`--module`: expected a checkpoint beside it, but got {options.model!r}. Name one of them.")
    else:
        module = build(options.model, given).float().eval()
    try:
        rows = layer_rows(module, torch.rand(2, *options.input))
    except Exception as error:
        size = "x".join(map(str, options.input))
        raise ValueError(f"`--input`: the model cannot be called with images of {size}. It says: {error}") from error
    print(as_text(rows))
    auto = [row.name for row in rows if row.auto]
    print(f"\n{len(rows)} layers; auto takes {', '.join(auto) or 'none of them: name those to be read'}")


def _explain(options: argparse.Namespace) -> None:
    import numpy as np

    from normgrad_lightning.cli.explain import explain
    from normgrad_lightning.cli.given import classes_for, labels_for, normalisation_for, tell
    from normgrad_lightning.cli.loading import arguments, channels_of, load_images, load_with_contents
    from normgrad_lightning.passes.inner_step import InnerStep
    from normgrad_lightning.views.figure import with_heading
    from normgrad_lightning.views.look import Look
    from normgrad_lightning.views.sheet import explanation_sheet

    step = InnerStep(options.epsilon)
    out = options.out.with_suffix("") if options.out.suffix in (".png", ".npz") else options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    module, contents = load_with_contents(
        options.checkpoint, options.module, arguments(options.arg), trusted=options.unsafe
    )
    channels = 1 if options.grey else channels_of(module)
    mean, std = normalisation_for(contents, channels, options.mean, options.std)
    images = load_images(options.images, channels=channels, size=options.size, mean=mean, std=std)
    classes = classes_for(contents, module, images, options.classes)
    given = labels_for(module, images, classes, options.label)
    captions = [f"{path.name}: label {label}" for path, label in zip(options.images, given.spoken, strict=True)]
    names = [name for text in options.layers for name in text.split(",")]
    layers = "auto" if names == ["auto"] else names

    def progress(done: int) -> None:
        tell(f"[{done + 1}/{len(images)}] {captions[done]}")

    maps = explain(module, images, given.labels, layers, options.maps, step, progress=progress)
    arrays = {kind: {layer: m.numpy() for layer, m in of.items()} for kind, of in maps.items()}
    picture, numbers = (Path(f"{out}.{ending}") for ending in ("png", "npz"))
    look = Look(mean=mean or 0.0, std=std or 1.0)  # pixels as the files have them
    sheet = explanation_sheet(images.numpy(), captions, arrays, look)
    if given.doubt:
        sheet = with_heading(sheet, given.doubt)
        tell(given.doubt)
    sheet.save(picture)
    by_name: dict[str, Any] = {f"{kind}/{layer}": m for kind, of in arrays.items() for layer, m in of.items()}
    by_name["files"] = np.array([str(path) for path in options.images])
    if classes is not None:
        by_name["classes"] = np.array(classes)
    np.savez_compressed(numbers, images=images.numpy(), labels=given.labels.numpy(), **by_name)
    print(f"{picture}\n{numbers}")
