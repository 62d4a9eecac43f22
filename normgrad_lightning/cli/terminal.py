"""What goes to the terminal, without control characters: names in it may come from a file that nobody has vetted."""

from __future__ import annotations

import sys
from typing import TextIO


def printable(text: object, longest: int = 1000) -> str:
    """Return the text as one line without control characters; if it is longer, cut and marked with dots."""
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text)[: longest + 1])
    return line if len(line) <= longest else f"{line[:longest]}..."


def say(text: object, to: TextIO | None = None) -> None:
    """Print a line, to stderr unless another stream is given."""
    print(printable(text), file=to or sys.stderr, flush=True)
