"""Ctrl-C is no failure: it is never dropped where a failure is, also if cleaning up after it has raised an error."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def failures_dropped(but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Drop exceptions, as `suppress(Exception)` does, `but` these, and never an interrupt behind one."""
    handled = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        interrupt = interrupt_behind(error, handled)
        if interrupt is not None:
            raise interrupt from None
        if isinstance(error, but):
            raise


def interrupt_behind(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """What is no failure, as Ctrl-C, and was on its way when the error was raised; None if nothing was.

    Args:
        error: what was raised last.
        handled: what the code around it is handling already.
    """
    behind = error.__context__
    while behind is not None and behind is not handled:
        if not isinstance(behind, Exception):
            return behind
        behind = behind.__context__
    return None
