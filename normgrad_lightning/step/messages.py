"""Warnings, guards and announcements: each cause once, and never at the price of training."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import walk_tb
from typing import TYPE_CHECKING

from normgrad_lightning.isolated.interrupts import interrupt_behind
from normgrad_lightning.settings import OnError

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


def warn(sentence: str) -> None:
    """Warn; where warnings are errors, log it instead: ours must not end a run."""
    try:
        warnings.warn(sentence, stacklevel=3)
    except Warning:
        logging.getLogger(__name__).warning(sentence)


def _is_ours(error: Exception) -> bool:
    """Return whether this package has raised it, and not code of the user's that it has called."""
    *_, (frame, _) = walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__")).startswith(__name__.partition(".")[0])


class Messenger:
    """Tells the user what there is to know of a run, each thing once.

    Args:
        on_error: `"warn"` turns failures into warnings; `"raise"` lets them stop training, for debugging.

    Attributes:
        phrase: what to make of a sentence before a user reads it: flags may be set under other names.
    """

    def __init__(self, on_error: OnError) -> None:
        self.on_error = on_error
        self.phrase: Callable[[str], str] = str
        self._known: set[str] = set()
        self._holds = False
        self._held: list[str] = []

    def start_over(self) -> None:
        """Tell everything once more: there is a new run."""
        self._known.clear()
        self._held.clear()

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Keep warnings back until `release`: if training fails in the same way, its own error says enough."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False

    def release(self) -> None:
        """Give the warnings that were kept back."""
        held, self._held = self._held, []
        for sentence in held:
            warn(sentence)

    def forget(self) -> None:
        """Drop the warnings that were kept back."""
        self._held.clear()

    def _warn(self, sentence: str) -> None:
        if self._holds:
            self._held.append(self.phrase(sentence))
        else:
            warn(self.phrase(sentence))

    def warn_once(self, sentence: str, cause: str | None = None) -> None:
        """Warn, unless there was a warning of this cause (by default, with this sentence) before."""
        if self._is_new(cause or sentence):
            self._warn(sentence)

    def problem(self, sentence: str) -> None:
        """Warn once of something that keeps maps from being shown; raise it if failures should stop training."""
        if self.on_error == "raise":
            raise RuntimeError(sentence)
        self.warn_once(sentence)

    def announce(self, trainer: Trainer, sentence: str, cause: str | None = None) -> None:
        """Log it once, on rank 0, where Lightning logs such things."""
        if trainer.is_global_zero and self._is_new(cause or sentence):
            home = next(kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
            logging.getLogger(f"{home.split('.trainer')[0]}.normgrad").info(sentence)

    @contextmanager
    def guard(self, doing: str, *, reraise: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Turn exceptions into one warning; our own in `reraise` propagate, and all do with `on_error="raise"`.

        Ctrl-C always does, also if cleaning up after it has raised an exception.
        """
        handled = sys.exc_info()[1]
        try:
            yield
        except Exception as error:
            interrupt = interrupt_behind(error, handled)
            if interrupt is not None:
                raise interrupt from None
            if self.on_error == "raise" or (isinstance(error, reraise) and _is_ours(error)):
                raise
            kind = type(error).__name__
            is_new = self._is_new(f"{kind}: {error}")  # the same failure may show in several places
            if self._is_new(f"{doing}: {kind}") and is_new:
                self._warn(f"NormGrad failed while {doing}; training continues. {kind}: {error}")

    def _is_new(self, cause: str) -> bool:
        is_new = cause not in self._known
        self._known.add(cause)
        return is_new
