"""The command `normgrad-lightning`: which layers a model has, and what a trained model makes of given images."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normgrad_lightning.environment import parse

if TYPE_CHECKING:
    from torch import Tensor

KINDS = ("order0", "order1", "adversarial", "contrast", "grad_cam")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; 0 if it did what it was asked for, 1 if it could not, 2 if it was asked in a wrong way."""
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
        description="Which pixels a vision model learns from. While it trains, NormGradCallback shows them; this "
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
    parser.add_argument("module", metavar="PACKAGE.MODULE:NAME", help="what makes the model: a class or a function")
    parser.add_argument(
        "--input", type=_shape, default=[3, 224, 224], metavar="CxHxW", help="the size of an image (3x224x224)"
    )
    _add_common(parser)
    parser.set_defaults(run=_layers)


def _add_explain(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "explain",
        help="maps of a trained model for given images",
        description="Make maps of a trained model for given images, as a sheet (OUT.png) and as numbers (OUT.npz: "
        "`kind/layer`, for images, rows and columns). The loss is the module's `normgrad_loss(batch)` if it has one, "
        "else the cross-entropy of its scores and the label.",
        epilog="example: normgrad-lightning explain last.ckpt cat.png --module train:LitModel --label 3 --size 224x224",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="of Lightning, or a plain state dict")
    parser.add_argument("images", type=Path, nargs="+", metavar="IMAGE", help="picture files")
    parser.add_argument("--module", required=True, metavar="PACKAGE.MODULE:NAME", help="what makes the model")
    parser.add_argument(
        "--label", type=int, nargs="+", metavar="N", help="one for all images, or one for each (the model's own guess)"
    )
    parser.add_argument(
        "--maps", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help=f"{', '.join(KINDS)} (all)"
    )
    parser.add_argument("--layers", nargs="+", metavar="NAME", default=["auto"], help="names or globs (auto)")
    parser.add_argument(
        "--epsilon", type=float, default=5e-3, help="size of order 1's inner step (%(default)s, ten times the paper's)"
    )
    parser.add_argument("--size", type=_size, metavar="HxW", help="what to resize images to (as they are)")
    parser.add_argument("--mean", type=_numbers, metavar="M,M,M", help="what to normalise with, after 0 to 1 (nothing)")
    parser.add_argument("--std", type=_numbers, metavar="S,S,S", help="as --mean")
    parser.add_argument("--grey", action="store_true", help="one channel (as many as the first convolution takes)")
    parser.add_argument(
        "--out", type=Path, default=Path("normgrad"), help="where to write, without an ending (normgrad)"
    )
    parser.add_argument(
        "--unsafe", action="store_true", help="load a checkpoint that holds code: only if you trust who made it"
    )
    _add_common(parser)
    parser.set_defaults(run=_explain)


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


def _layers(options: argparse.Namespace) -> None:
    import torch

    from normgrad_lightning.layer_table import as_text, layer_rows
    from normgrad_lightning.loading import arguments, build

    module = build(options.module, arguments(options.arg)).float().eval()
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

    from normgrad_lightning.explain import explain
    from normgrad_lightning.loading import arguments, channels_of, load_images, load_trained
    from normgrad_lightning.order1 import Settings
    from normgrad_lightning.sheet import explanation_sheet

    Settings(options.epsilon)
    out = options.out.with_suffix("") if options.out.suffix in (".png", ".npz") else options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    module = load_trained(options.checkpoint, options.module, arguments(options.arg), trusted=options.unsafe)
    look = {"mean": options.mean, "std": options.std}
    channels = 1 if options.grey else channels_of(module)
    images = load_images(options.images, channels=channels, size=options.size, **look)
    labels, captions = _labels(options, module, images)
    names = [name for text in options.layers for name in text.split(",")]
    layers = "auto" if names == ["auto"] else names

    def progress(done: int) -> None:
        print(f"[{done + 1}/{len(images)}] {captions[done]}", file=sys.stderr, flush=True)

    maps = explain(module, images, labels, layers, options.maps, epsilon=options.epsilon, progress=progress)
    arrays = {kind: {layer: m.numpy() for layer, m in of.items()} for kind, of in maps.items()}
    picture, numbers = (Path(f"{out}.{ending}") for ending in ("png", "npz"))
    if options.mean is None and options.std is None:
        look = {"mean": 0.0, "std": 1.0}  # as the files have them
    explanation_sheet(images.numpy(), captions, arrays, **look).save(picture)
    files = np.array([str(path) for path in options.images])
    by_name: dict[str, Any] = {f"{kind}/{layer}": m for kind, of in arrays.items() for layer, m in of.items()}
    np.savez_compressed(numbers, images=images.numpy(), labels=labels.numpy(), files=files, **by_name)
    print(f"{picture}\n{numbers}")


def _labels(options: argparse.Namespace, module: object, images: Tensor) -> tuple[Tensor, list[str]]:
    """The label of each image, and what to say of it."""
    import torch

    from normgrad_lightning.explain import predicted

    names = [path.name for path in options.images]
    if options.label is None:
        labels, sure = predicted(module, images)  # type: ignore[arg-type]
        told = [f"{label} (the model's own guess, {share:.0%})" for label, share in zip(labels, sure, strict=True)]
    else:
        if len(options.label) not in (1, len(images)):
            raise ValueError(
                f"`--label`: expected one, or {len(images)} for as many images, but got {len(options.label)}."
            )
        if not all(0 <= label < 2**31 for label in options.label):
            raise ValueError(f"`--label`: expected the numbers of classes, but got {options.label}.")
        labels = torch.tensor(options.label).expand(len(images)).clone()
        told = [str(int(label)) for label in labels]
    return labels, [f"{name}: label {label}" for name, label in zip(names, told, strict=True)]
