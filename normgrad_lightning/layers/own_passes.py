"""Which pass is running: the user's training step, or an own pass of this package.

A recorder reads only the pass in which it was made. Own passes run compiled code eagerly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_passes: list[object] = []


def current_pass() -> object:
    """Return a token for the own pass that is running; None in the user's training step."""
    return _passes[-1] if _passes else None


@contextmanager
def own_pass() -> Iterator[None]:
    """Mark what runs inside as an own pass."""
    _passes.append(object())
    try:
        yield
    finally:
        _passes.pop()
