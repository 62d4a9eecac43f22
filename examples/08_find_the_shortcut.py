"""Find out what a network learns each class from: a shortcut is planted, and the patches and the atlas show it.

    python examples/08_find_the_shortcut.py --shortcut anywhere        # drawn shapes; every star has a magenta mark
    python examples/08_find_the_shortcut.py --data FOLDER              # your photographs, with a sticker drawn on each
    python examples/08_find_the_shortcut.py --data oxford              # torchvision's OxfordIIITPet, downloaded

It trains for three epochs, and once more without the shortcut. Both runs are in TensorBoard; `sheet.jpg` has pictures
of their first and last events side by side.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytorch_lightning as pl
from classifier import ShapeClassifier, quiet_lightning
from PIL import Image, ImageDraw, ImageFont
from shortcut_training import Entry, train
from shortcuts import MARKED, SHORTCUTS, Hits, Marked, drawn_shapes, oxford_pets, photographs
from torch import nn

GAP = 16
PICTURES = {
    "what each class is learned from, all layers combined": "1_patches/0_combined",
    "what each class is learned from, last layer": "1_patches/[0-9][0-9]_*",
    "where each class is learned": "4_atlas/0_combined",
}


def shapes(args: argparse.Namespace) -> tuple[Callable[[], nn.Module], Callable[[str, bool], Marked], list[str]]:
    """The network, the pictures of a split with and without the shortcut, and the classes that have it."""

    def data(split: str, is_marked: bool) -> Marked:
        count, seed = (args.images, 2 * args.seed) if split == "train" else (512, 2 * args.seed + 1)
        return drawn_shapes(count, seed, args.shortcut if is_marked else None)

    return ShapeClassifier, data, [MARKED]


def photos(args: argparse.Namespace) -> tuple[Callable[[], nn.Module], Callable[[str, bool], Marked], list[str]]:
    """The same for photographs, each with a sticker that names its class."""
    import torchvision

    def data(split: str, is_marked: bool) -> Marked:
        if args.data == "oxford":
            return oxford_pets(args.out / "data", split, 96, stickers=is_marked)
        return photographs(Path(args.data), split, 96, stickers=is_marked)

    classes = list(data("train", False).classes)
    return lambda: torchvision.models.resnet18(num_classes=len(classes)), data, classes


def main() -> None:
    """Train with the shortcut and without it, and show what was seen."""
    args = options().parse_args()
    quiet_lightning()
    net, data, classes = photos(args) if args.data else shapes(args)
    shortcut = "sticker" if args.data else args.shortcut
    validation = data("val", False), data("val", True)
    sheets = []
    for name, is_marked in (("with the shortcut", True), ("without it", False)):
        pl.seed_everything(args.seed, verbose=False)
        training = data("train", is_marked)
        if not is_marked:  # a patch counts if it shows the place where the mark would have been
            training = replace(training, boxes=data("train", True).boxes)
        steps = args.epochs * (len(training) // 32)
        journal, logs = train(
            net(),
            training,
            validation,
            Hits(training, shortcut),
            steps=steps,
            every_n_steps=max(1, steps // 8),
            seed=args.seed,
            out=args.out / name.replace(" ", "_"),
            classes=classes,
            learning_rate=1e-3 if args.data else 1e-2,
        )
        tell(name, journal.entries, classes)
        sheets.append((name, logs))
    write_sheet(sheets, args.out / "sheet.jpg")
    print(
        f"\nLook at {args.out / 'sheet.jpg'}, or: tensorboard --logdir {args.out}\n"
        "What to do about a shortcut: remove the mark from the pictures (crop it, cover it), or put it on the pictures "
        "of all classes alike, and train again. The second run above did that: its patches show something else."
    )


def tell(name: str, entries: Sequence[Entry], classes: Sequence[str]) -> None:
    """Print how many of the patches show the shortcut at each event, and what validation says."""
    print(f"\nTrained {name}. Share of the patches of {', '.join(classes)} that show the mark, or where it would be:")
    for entry in entries:
        shares = [
            f"{'combined' if of == 'combined' else 'last layer'} "
            + ", ".join(f"{rows[label]:.2f}" for label in classes if label in rows)
            for of, rows in entry.hits.items()
        ]
        print(
            f"  step {entry.step:4d}: {'; '.join(shares)}; accuracy on {', '.join(classes)} without the mark "
            f"{entry.clean:.2f}, with it {entry.marked:.2f}"
        )


def write_sheet(runs: Sequence[tuple[str, Path]], path: Path) -> None:
    """Draw the pictures of the first and the last event of both runs: a row for each, with a title."""
    rows: list[tuple[str, list[Image.Image]]] = []
    for name, logs in runs:
        for title, tag in PICTURES.items():
            files = sorted(logs.glob(f"normgrad/normgrad/{tag}/*.jpg"))
            rows.append((f"{name}: {title}. First event, last event", [Image.open(files[i]) for i in (0, -1)]))
    font = ImageFont.load_default(size=18)
    width = max(sum(one.width for one in pictures) + GAP for _, pictures in rows)
    height = sum(max(one.height for one in pictures) + 2 * GAP + 10 for _, pictures in rows)
    sheet = Image.new("RGB", (width, height), "white")
    draw, top = ImageDraw.Draw(sheet), 0
    for title, pictures in rows:
        draw.text((4, top + 4), title, "black", font)
        left = 0
        for picture in pictures:
            sheet.paste(picture, (left, top + GAP + 14))
            left += picture.width + GAP
        top += max(one.height for one in pictures) + 2 * GAP + 10
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path, quality=85)


def options() -> argparse.ArgumentParser:
    """What can be set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shortcut", choices=SHORTCUTS, default="anywhere", help="in drawn shapes: what stars have")
    parser.add_argument("--data", help="a folder with a folder of pictures for each class, or `oxford`")
    parser.add_argument("--images", type=int, default=4096, help="drawn pictures to train on")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("normgrad_demo") / "shortcut", help="folder for what is made")
    return parser


if __name__ == "__main__":
    main()
