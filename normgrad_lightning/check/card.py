"""The check as a card: each class's clearest image with its region, covered and pasted, and what that does to losses.

A card of TensorBoard is 350 pixels wide. The picture is twice as wide, and its letters are legible in the card.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image

from normgrad_lightning.check.results import ClassCheck, Example
from normgrad_lightning.check.rule import rests, sentence, verdict
from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.drawing import Pixels, display_image, jpeg
from normgrad_lightning.views.lettering import fitted, length_of, line_height, write
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tag_namer import TagNamer

CLASSES = 4
"""On the card, at most: those with the largest differences."""

_WIDTH, _LETTERS, _GAP = 700, 22, 8
_TILE = (_WIDTH - 2 * _GAP) // 3
_TALLEST, _FLATTEST = 3 * _TILE // 2, _TILE // 4
_BAR_LEFT, _BAR_RIGHT, _BAR_HEIGHT = 290, 600, 16
_WHITE, _GREY, _BLACK = 255, 96, 0
_OF_REGION, _OF_DOUBT, _OF_CONTROL = (208, 60, 40), (100, 100, 100), (165, 165, 165)
_OUTLINE = (255, 225, 0)


class _Bar(NamedTuple):
    """A loss, what it is of, and the bar's colour."""

    text: str
    loss: float
    colour: tuple[int, int, int]


def check_page(checks: Mapping[int, ClassCheck], style: Style, namer: TagNamer, seen: int = 0) -> Page | None:
    """Return a card of what the check has measured, and curves of the differences to the controls; None if nothing.

    Args:
        checks: by class.
        style: how pictures look.
        namer: for tags.
        seen: how many classes training has shown.
    """
    if not checks:
        return None
    differences: dict[str, dict[int, float | None]] = {
        "check/covered": {label: one.covered_difference for label, one in checks.items()},
        "check/pasted": {label: one.pasted_difference for label, one in checks.items()},
    }
    scalars = {
        tag: value
        for name, values in differences.items()
        for label, tag in namer.tags(name, values).items()
        if (value := values[label]) is not None
    }
    picture = check_card(list(checks.values()), style, seen)
    tag = f"{namer.group}/2_check/0_what_classes_rest_on"
    return Page(namer.step, [Picture(tag, jpeg(picture, 90), *picture.shape[:2])], scalars)


def check_card(checks: Sequence[ClassCheck], style: Style, seen: int = 0) -> Pixels:
    """Return the card, `(H, W, 4)`: the sentence, then a block for each class."""
    shown = sorted(checks, key=lambda one: (rests(one), _least(one)), reverse=True)[:CLASSES]
    told = sentence(checks, seen)
    parts = [_text(told.replace("`", ""), _BLACK)]
    most = max([1.0, *(bar.loss for one in shown for bar in _bars(one))])
    for one in shown:
        parts += _block(one, style, most)
    if len(shown) < len(checks):
        parts.append(_text(f"{len(shown)} of {len(checks)} classes, by the smaller of both differences", _GREY))
    return np.concatenate(parts)


def _least(check: ClassCheck) -> float:
    pasted = check.pasted_difference
    return check.covered_difference if pasted is None else min(check.covered_difference, pasted)


def _block(check: ClassCheck, style: Style, most: float) -> Iterator[Pixels]:
    """Yield the rows of a class: whether it rests on the place, its pictures, and bars, at full length for `most`."""
    yield _blank(2 * _GAP)
    yield _text(f"{check.name}: {verdict(check)} ({check.n} images)", _BLACK)
    if check.example is not None:
        heads = heads_of(check)
        tiles = example_tiles(check.example, style)[: len(heads)]
        yield _heads(heads)
        yield _side_by_side(tiles)
    for bar in _bars(check):
        yield _drawn(bar, most)
    if check.called is not None and check.called_control is not None:
        called, control = (f"{100 * share:.0f} %" for share in (check.called, check.called_control))
        yield _text(f"place pasted: {called} of others are called {check.name} (another part: {control})", _BLACK)


def heads_of(check: ClassCheck) -> list[str]:
    """Return what to write above the pictures of a class."""
    heads = [f"the place, {100 * check.area:.0f} %", "covered by another", "pasted into another"]
    return heads[: 2 if check.pasted is None else 3]


def _bars(check: ClassCheck) -> Iterator[_Bar]:
    of_region = _OF_REGION if rests(check) else _OF_DOUBT
    yield _Bar("loss of its images", check.plain, _OF_CONTROL)
    yield _Bar("  place covered", check.covered, of_region)
    yield _Bar("  another place covered", check.covered_control, _OF_CONTROL)
    if check.pasted is not None and check.pasted_control is not None:
        yield _Bar("of others, place pasted", check.pasted, of_region)
        yield _Bar("  another part pasted", check.pasted_control, _OF_CONTROL)


def _blank(height: int) -> Pixels:
    return np.full((height, _WIDTH, 4), _WHITE, np.uint8)


def _text(text: str, level: int) -> Pixels:
    """Return lines of text, broken where the card ends."""
    lines = _wrapped(text)
    picture = _blank(len(lines) * line_height(_LETTERS))
    for number, line in enumerate(lines):
        write(picture, fitted(line, _WIDTH - 4, _LETTERS), _LETTERS, (number * line_height(_LETTERS), 2), level)
    return picture


def _wrapped(text: str) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and length_of(longer, _LETTERS) > _WIDTH - 4:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def _heads(heads: Sequence[str]) -> Pixels:
    picture = _blank(line_height(_LETTERS))
    for number, head in enumerate(heads):
        write(picture, head, _LETTERS, (0, number * (_TILE + _GAP) + 2), _GREY)
    return picture


def _side_by_side(tiles: Sequence[Pixels]) -> Pixels:
    picture = _blank(len(tiles[0]) + _GAP // 2)
    for number, tile in enumerate(tiles):
        left = number * (_TILE + _GAP)
        picture[: len(tile), left : left + _TILE] = tile
    return picture


def _drawn(bar: _Bar, most: float) -> Pixels:
    """Return a line with a loss as a bar and as a number."""
    height = line_height(_LETTERS)
    picture, top = _blank(height), (height - _BAR_HEIGHT) // 2
    write(picture, bar.text, _LETTERS, (0, 2), _GREY if bar.colour == _OF_CONTROL else _BLACK)
    length = max(round(max(bar.loss, 0.0) / most * (_BAR_RIGHT - _BAR_LEFT)), 2)
    picture[top : top + _BAR_HEIGHT, _BAR_LEFT : _BAR_LEFT + length, :3] = bar.colour
    write(picture, f"{bar.loss:.2f}", _LETTERS, (0, _BAR_LEFT + length + 6), _BLACK)
    return picture


def example_tiles(example: Example, style: Style) -> list[Pixels]:
    """Return the image with its region outlined, the covered and the pasted picture, in the same colours."""
    region = example.region.numpy()
    pictures = [t.float().numpy() for t in (example.image, example.covered, example.pasted)]
    if region.ndim == 3:  # of a volume, the slice in the middle of the region
        depth = int(np.median(np.flatnonzero(region.any((1, 2)))))
        region, pictures = region[depth], [values[:, depth] for values in pictures]
    drawn = display_image(np.concatenate(pictures, axis=-1), style.mean, style.std)
    height, width = drawn.shape[0], drawn.shape[1] // len(pictures)
    size = _TILE, int(np.clip(round(_TILE * height / width), _FLATTEST, _TALLEST))
    tiles = [_enlarged(drawn[:, n * width : (n + 1) * width], size) for n in range(len(pictures))]
    inside = np.asarray(Image.fromarray(region.reshape(height, width)).resize(size, Image.Resampling.NEAREST))
    tiles[0] = _outlined(tiles[0], inside)
    return tiles


def _enlarged(pixels: Pixels, size: tuple[int, int]) -> Pixels:
    how = Image.Resampling.BICUBIC if pixels.shape[1] > 48 else Image.Resampling.NEAREST
    return np.array(Image.fromarray(np.ascontiguousarray(pixels[..., :3])).resize(size, how).convert("RGBX"))


def _outlined(tile: Pixels, inside: npt.NDArray[np.bool_]) -> Pixels:
    """Return the picture with a line around the region, black on its outer side: it shows on any colour."""
    outer, line = _grown(inside, 5) & ~inside, _grown(inside, 3) & ~inside
    tile[outer, :3] = _BLACK
    tile[line, :3] = _OUTLINE
    return tile


def _grown(inside: npt.NDArray[np.bool_], by: int) -> npt.NDArray[np.bool_]:
    """Return the region with a rim of so many pixels."""
    for axis in (0, 1):
        padded = np.pad(inside, [(by, by) if axis == other else (0, 0) for other in (0, 1)])
        side = inside.shape[axis]
        inside = np.any([padded.take(range(shift, shift + side), axis) for shift in range(2 * by + 1)], axis=0)
    return inside
