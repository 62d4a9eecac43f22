"""The command `normgrad-lightning`: its commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from normgrad_lightning.cli.arguments import parser
from normgrad_lightning.cli.terminal import say


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 on success, 1 on failure, 2 for wrong arguments."""
    options = parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            import_module(f"normgrad_lightning.cli.{options.command}").run(options)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python would report it again when it exits
        return 141
    except KeyboardInterrupt:
        say("Stopped.")
        return 130
    except SystemExit:
        say("The module ended the program. Put what a script does under `if __name__ == '__main__':`.")
        return 1
    except Exception as error:
        _say_error(error, options)
        return 1
    return 0


def _say_error(error: Exception, options: argparse.Namespace) -> None:
    if options.traceback:
        for line in traceback.format_exc().splitlines():
            say(f"| {line}")  # nothing in it can pose as a line of ours
    kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    say(f"normgrad-lightning {options.command}: {kind}{error}")
    if kind and not options.traceback:
        say("--traceback shows where.")


def _say_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    say(f"Warning: {message}")
