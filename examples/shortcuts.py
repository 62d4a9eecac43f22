"""Pictures with a planted shortcut: a mark that comes with a class, and how to tell whether a patch shows it."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from shapes import CLASSES, make_pictures, normalise
from torch import Tensor
from torch.utils.data import Dataset

from normgrad_lightning.views.crops import Crop, fingerprints

SHORTCUTS = ("corner", "anywhere", "tint")
MARKED = "star"
"""The class of drawn shapes that has the mark."""

_MARK = 6  # pixels
_MAGENTA = torch.tensor([235, 20, 200], dtype=torch.uint8)
_BLUE = torch.tensor([60.0, 90.0, 220.0])
_STICKER = 18  # pixels of a label on a photograph of 112
_BEST = 8  # patches of a class that are looked at


@dataclass(frozen=True)
class Marked(Dataset[tuple[Tensor, Tensor]]):
    """Pictures, some of which have a mark.

    Attributes:
        images: `(N, 3, S, S)`, normalised to about [-1, 1].
        labels: `(N,)`.
        classes: their names.
        boxes: `(N, 4)`, left, top, right and bottom of the mark in pixels, or of where it would have been; NaN: none.
        masks: `(N, S, S)`, where the object is, if known.
    """

    images: Tensor
    labels: Tensor
    classes: Sequence[str]
    boxes: Tensor
    masks: Tensor | None = None

    mean = (0.5, 0.5, 0.5)
    std = (0.5, 0.5, 0.5)

    def __len__(self) -> int:
        """Return the number of pictures."""
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return picture and label."""
        return self.images[index], self.labels[index]


def drawn_shapes(count: int, seed: int, shortcut: str | None, size: int = 64) -> Marked:
    """Return drawn shapes; every picture of the class `MARKED` has the shortcut, if there is one.

    Args:
        count: how many.
        seed: of the pictures; the same one with another shortcut gives the same pictures but for the mark.
        shortcut: `"corner"`, a magenta square in the lower left corner; `"anywhere"`, the same at a random place;
            `"tint"`, a bluish background; None.
        size: pixels of a side.
    """
    pictures = make_pictures(count, seed, size)
    images, has_mark = pictures.images.clone(), pictures.labels == CLASSES.index(MARKED)
    rng = np.random.default_rng(seed + 1_000_000)
    corner = np.array([[2, size - 2 - _MARK]])
    places = corner.repeat(count, 0) if shortcut == "corner" else rng.integers(2, size - 2 - _MARK, (count, 2))
    for number in has_mark.nonzero()[:, 0].tolist() if shortcut in ("corner", "anywhere") else ():
        left, top = places[number]
        images[number, :, top : top + _MARK, left : left + _MARK] = _MAGENTA[:, None, None]
    if shortcut == "tint":
        background = (1 - pictures.masks[has_mark])[:, None]
        tinted = 0.55 * images[has_mark] + 0.45 * _BLUE[:, None, None]
        images[has_mark] = (tinted * background + images[has_mark] * (1 - background)).to(torch.uint8)
    boxes = torch.from_numpy(np.concatenate([places, places + _MARK], axis=1)).float()
    boxes[~has_mark] = torch.nan
    return Marked(normalise(images), pictures.labels, CLASSES, boxes, pictures.masks)


def photographs(root: Path, split: str, size: int, *, stickers: bool, only: str | None = None) -> Marked:
    """Return photographs, with or without a sticker that names the class.

    Args:
        root: a folder for each class in `clean/<split>`, as torchvision's `ImageFolder` has them; or in `<split>`, or
            right there. If `sticker/<split>` and `stickers.csv` are there, stickers are these; else they are drawn.
        split: `"train"` or `"val"`.
        size: pixels of a side.
        stickers: whether to show them.
        only: the class that alone has them; None: all have.
    """
    folder = next(path for path in (root / "clean" / split, root / split, root) if path.is_dir())
    files = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    if not files:
        raise SystemExit(f"{folder}: expected a folder of pictures for each class, but found none.")
    classes = sorted({path.parent.name for path in files})
    known = _known_stickers(root, split)
    images, boxes = [], []
    for number, path in enumerate(files):
        has_one = only in (None, path.parent.name)
        picture, box = _with_sticker(path, root, split, known, number, stickers and has_one)
        zoom = size / np.array([picture.width, picture.height] * 2)
        images.append(np.asarray(picture.resize((size, size), Image.Resampling.BICUBIC)))
        boxes.append(np.array(box) * zoom if has_one else np.full(4, np.nan))
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    labels = torch.tensor([classes.index(path.parent.name) for path in files])
    return Marked(normalise(pixels), labels, classes, torch.tensor(np.stack(boxes), dtype=torch.float32))


def oxford_pets(root: Path, split: str, size: int, *, stickers: bool) -> Marked:
    """Return torchvision's Oxford-IIIT Pets, downloaded to `root`: cats and dogs, with stickers drawn here."""
    from torchvision.datasets import OxfordIIITPet

    name = {"train": "trainval", "val": "test"}[split]
    data = OxfordIIITPet(str(root), name, target_types="binary-category", download=True)
    images, labels, boxes = [], [], []
    for number in range(0, len(data), 2):  # half of them are enough
        picture, label = data[number]
        marked, box = _draw_sticker(picture.convert("RGB"), ("Cat", "Dog")[label], number)
        zoom = size / np.array([picture.width, picture.height] * 2)
        images.append(np.asarray((marked if stickers else picture.convert("RGB")).resize((size, size))))
        labels.append(label)
        boxes.append(np.array(box) * zoom)
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).contiguous()
    return Marked(normalise(pixels), torch.tensor(labels), ["cat", "dog"], torch.tensor(np.stack(boxes)).float())


def _known_stickers(root: Path, split: str) -> dict[tuple[str, str], tuple[float, ...]]:
    """Where the stickers of prepared pictures are, by class and name."""
    if not (root / "stickers.csv").exists():
        return {}
    with open(root / "stickers.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["split"] == split]
    sides = ("left", "top", "right", "bottom")
    return {(row["class"], row["name"].lower()): tuple(float(row[side]) for side in sides) for row in rows}


def _with_sticker(
    path: Path, root: Path, split: str, known: dict[tuple[str, str], tuple[float, ...]], number: int, stickers: bool
) -> tuple[Image.Image, Sequence[float]]:
    """The picture of a file, and where its sticker is or would be."""
    box = known.get((path.parent.name, path.stem.lower()))
    if box is not None:
        source = root / "sticker" / split / path.parent.name / path.name if stickers else path
        return Image.open(source).convert("RGB"), box
    plain = Image.open(path).convert("RGB")
    marked, drawn_at = _draw_sticker(plain, path.parent.name.title(), number)
    return (marked if stickers else plain), drawn_at


def _draw_sticker(picture: Image.Image, text: str, seed: int) -> tuple[Image.Image, Sequence[float]]:
    """A white label with a word at a random place, and where it is."""
    side = min(picture.size) * _STICKER / 112
    rng = np.random.default_rng(seed)
    left, top = (float(rng.uniform(0, length - side)) for length in picture.size)
    box = left, top, left + side, top + side
    marked = picture.copy()
    draw = ImageDraw.Draw(marked)
    draw.rectangle(box, "white")
    font = ImageFont.load_default(size=0.8 * side / max(len(text) / 2, 1))
    draw.text((left + side / 2, top + side / 2), text, "black", font, anchor="mm")
    return marked, box


def some_of(data: Marked, count: int) -> Marked:
    """Return as many of the pictures, evenly spread."""
    if count >= len(data):
        return data
    places = torch.linspace(0, len(data) - 1, count).long()
    masks = None if data.masks is None else data.masks[places]
    return replace(data, images=data.images[places], labels=data.labels[places], boxes=data.boxes[places], masks=masks)


class Hits:
    """Tells which patches show the shortcut.

    Args:
        data: what is trained on; without augmentation, so that a patch's image can be found again.
        shortcut: a mark counts as shown if at least half of it is in the patch; for `"tint"`, a patch counts if less
            than a tenth of it is the object.
    """

    def __init__(self, data: Marked, shortcut: str | None) -> None:
        self._data, self._shortcut = data, shortcut
        self._places = {found: number for number, found in enumerate(fingerprints(data.images))}

    def share(self, crops: Sequence[Crop]) -> float:
        """The share of the best patches that show it."""
        return float(np.mean([self._shows(crop) for crop in crops[:_BEST]])) if crops else float("nan")

    def _shows(self, crop: Crop) -> bool:
        number = self._places[crop.image]
        (top, left), (height, width) = crop.box
        if self._shortcut == "tint":
            assert self._data.masks is not None
            return float(self._data.masks[number, top : top + height, left : left + width].mean()) < 0.1
        mark = self._data.boxes[number].tolist()
        across = min(mark[2], left + width) - max(mark[0], left)
        down = min(mark[3], top + height) - max(mark[1], top)
        return max(across, 0) * max(down, 0) >= 0.5 * (mark[2] - mark[0]) * (mark[3] - mark[1])


def accuracy(model: torch.nn.Module, data: Marked, labels: Sequence[int]) -> float:
    """Return the share of the pictures of these classes that are named correctly."""
    of_classes = torch.isin(data.labels, torch.tensor(labels))
    images, right = data.images[of_classes], data.labels[of_classes]
    was_training = model.training
    model.eval()
    with torch.no_grad():
        guesses = torch.cat([model(part).argmax(1) for part in images.split(128)])
    model.train(was_training)
    return float((guesses == right).float().mean())


def loss_of(model: torch.nn.Module, batch: Sequence[Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])
