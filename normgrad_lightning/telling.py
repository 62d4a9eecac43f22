"""Warnings that never stop training."""

import logging
import warnings


def warn(sentence: str) -> None:
    """Warn; where warnings are errors, only log it, for ours are no reason to end a run."""
    try:
        warnings.warn(sentence, stacklevel=3)
    except Warning:
        logging.getLogger(__name__).warning(sentence)
