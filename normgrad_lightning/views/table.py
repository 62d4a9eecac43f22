"""Tables of pictures with captions: the layout of overview, patches and atlas.

TensorBoard shrinks a picture to a card of 350 pixels. Letters are large enough to be read there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from normgrad_lightning.views.drawing import Pixels
from normgrad_lightning.views.lettering import fitted, line_height, write

_GAP = 2
_WIDE_GAP = 6  # between blocks
_CARD = 350  # pixels of TensorBoard's card
_LETTERS = 10  # pixels in that card
_WHITE, _GREY, _BLACK = 255, 64, 0


class Table:
    """A white picture with room for tiles. Some tiles side by side, with a caption above them, make a block.

    Args:
        tile: height and width of a tile.
        columns: tiles of a block.
        captions: of each block; if all are empty, no room is left for them.
        title: lines above the table.
        heads: above each column of tiles; an empty one leaves its room to the one before.
        across: blocks side by side.
        split: index of the tile of a block that a wider gap stands before.

    Attributes:
        picture: the table.
        letters: the size of its letters.
    """

    def __init__(
        self,
        tile: tuple[int, int],
        columns: int,
        captions: Sequence[str],
        title: Sequence[str],
        *,
        heads: Sequence[str] = (),
        across: int = 1,
        split: int | None = None,
    ) -> None:
        (self._height, self._width), self._columns = tile, columns
        self._across, self._split = across, columns if split is None else split
        self._block = self._left_in_block(columns) - _GAP
        width = max(across * (self._block + _WIDE_GAP) - _WIDE_GAP, _CARD)  # the title needs room
        self.letters = max(math.ceil(width * _LETTERS / _CARD), _LETTERS)
        line = line_height(self.letters)
        above = line if any(captions) else 0
        self._top = line * (len(title) + bool(heads)) + above
        self._down = self._height + _WIDE_GAP + above
        rows = -(-len(captions) // across)
        self.picture: Pixels = np.full((self._top - above + rows * self._down - _WIDE_GAP, width, 4), _WHITE, np.uint8)
        for number, text in enumerate(title):
            self._write(text, width, self.letters, (number * line, 0), _GREY)
        for block in range(min(across, len(captions))):
            self._write_heads(heads, block, len(title) * line)
        for block, caption in enumerate(captions):
            at = self._top + block // across * self._down - above, self._left(block, 0)
            self._write(caption, self._block, self.letters, at, _BLACK)

    def _write_heads(self, heads: Sequence[str], block: int, top: int) -> None:
        ends = [column for column, head in enumerate(heads) if head] + [len(heads)]
        for column, end in pairwise(ends):
            left = self._left(block, column)
            width = self._left(block, end - 1) + self._width - left
            self._write(heads[column], width, math.ceil(0.9 * self.letters), (top, left), _GREY, keep_end=True)

    def put(self, block: int, column: int, tile: Pixels) -> None:
        """Put a tile, or a smaller picture, into a column of a block."""
        top, left = self._top + block // self._across * self._down, self._left(block, column)
        height, width = min(len(tile), self._height), min(tile.shape[1], self._width)
        self.picture[top : top + height, left : left + width] = tile[:height, :width]

    def _left(self, block: int, column: int) -> int:
        return block % self._across * (self._block + _WIDE_GAP) + self._left_in_block(column)

    def _left_in_block(self, column: int) -> int:
        return column * (self._width + _GAP) + (_WIDE_GAP - _GAP) * (column >= self._split)

    def _write(
        self, text: str, width: int, size: int, at: tuple[int, int], level: int, *, keep_end: bool = False
    ) -> None:
        write(self.picture, fitted(text, width - 2, size, keep_end=keep_end), size, (at[0], at[1] + 2), level)
