"""What is not dropped where a failure is: Ctrl-C, also if cleaning up has raised since, lack of memory, collectives."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_OUT_OF_MEMORY = (MemoryError, torch.cuda.OutOfMemoryError)
_SAYS_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
"""What torch says on devices for which it has no special exception: on the CPU, for example."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception means too little memory, on any device."""
    says_so = isinstance(error, RuntimeError) and any(words in str(error) for words in _SAYS_OUT_OF_MEMORY)
    return says_so or isinstance(error, _OUT_OF_MEMORY)


class NotEnoughMemory(RuntimeError):
    """Passes that need more memory than there is."""


class TalksToOthers(RuntimeError):
    """A collective operation in a pass that only one process runs."""


@contextmanager
def memory_explained(remedy: str) -> Iterator[None]:
    """Raise `NotEnoughMemory`, with this remedy, for a lack of memory inside."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0].rstrip(".") or type(error).__name__
        raise NotEnoughMemory(f"too little memory ({said}). {remedy}") from None


@contextmanager
def failures_dropped(but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Drop exceptions, as `suppress(Exception)` does, `but` these.

    An interrupt behind one is never dropped. Neither are a lack of memory and a collective: what comes next would need
    as much, and ask for the same.
    """
    handled = sys.exc_info()[1]
    try:
        yield
    except Exception as error:
        interrupt = interrupt_behind(error, handled)
        if interrupt is not None:
            raise interrupt from None
        if isinstance(error, (TalksToOthers, *but)) or is_out_of_memory(error):
            raise


def interrupt_behind(error: BaseException, handled: BaseException | None) -> BaseException | None:
    """Return what is not a failure, such as Ctrl-C, and was on its way when the error was raised; None if nothing was.

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
