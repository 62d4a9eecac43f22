"""Text in pictures. It is cached: most words stand in every picture of a run."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache(maxsize=32)
def font_of(size: int) -> Font:
    """Return Pillow's own font in this size."""
    return ImageFont.load_default(size=size)


@lru_cache(maxsize=512)
def ink(text: str, size: int) -> npt.NDArray[np.uint8]:
    """Return how much of each pixel the text covers, `(height, width)` from 0 to 255; lines of one size are as high."""
    page = Image.new("L", (max(1, length_of(text, size)), line_height(size)))
    ImageDraw.Draw(page).text((0, line_height(size) // 2), text, 255, font_of(size), anchor="lm")
    return np.asarray(page)


def length_of(text: str, size: int) -> int:
    """Return the length of a line of text, in pixels."""
    return math.ceil(font_of(size).getlength(text))


def line_height(size: int) -> int:
    """Return the height of a line of text."""
    return round(1.3 * size)


def write(picture: npt.NDArray[np.uint8], text: str, size: int, at: tuple[int, int], level: int = 0) -> None:
    """Write text in a grey level onto a picture `(H, W, …)`; `at` is its upper left corner, (y, x)."""
    covered = ink(text, size)
    behind = picture[at[0] :, at[1] :][: covered.shape[0], : covered.shape[1]]
    alpha: npt.NDArray[Any] = covered[: behind.shape[0], : behind.shape[1]].astype(np.float32) / 255.0
    kept, added = 1.0 - alpha, level * alpha + np.float32(0.5)
    for channel in range(min(behind.shape[2], 3)):  # one at a time: much faster than four side by side
        behind[..., channel] = behind[..., channel] * kept + added


@lru_cache(maxsize=512)
def fitted(text: str, width: int, size: int, *, keep_end: bool = False) -> str:
    """Return the text, or as much of its beginning as fits; or of its end, whole words if possible.

    The ends of layers' names tell them apart.
    """
    cuts = range(1, len(text))
    if keep_end:
        words = [start for start in cuts if text[start - 1] in "._/ "]
        shorter = [f"…{text[start:]}" for start in (*words, *cuts)]
    else:
        shorter = [f"{text[:-cut]}…" for cut in cuts]
    return next((shown for shown in (text, *shorter) if length_of(shown, size) <= width), "")
