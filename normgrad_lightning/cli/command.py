"""The command `normgrad-lightning`: its commands, and what becomes of their errors."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from normgrad_lightning.cli import explain, layers, report
from normgrad_lightning.cli.terminal import say

COMMANDS: dict[str, ModuleType] = {"layers": layers, "explain": explain, "report": report}
"""Every command, by name: a module with a docstring, which is its help, `add_arguments(parser)` and `run(options)`.

`--help` imports all of them, so they import torch and the like in `run`.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 0 on success, 1 on failure, 2 for wrong arguments."""
    options = _parser().parse_args(argv)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _say_warning
            COMMANDS[options.command].run(options)
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="normgrad-lightning",
        description="Which pixels a vision model learns from. NormGradCallback shows them during training; this "
        "command is for before and after.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        text, layout = module.__doc__ or "", argparse.RawDescriptionHelpFormatter
        command = commands.add_parser(name, help=text.split("\n")[0], description=text, formatter_class=layout)
        module.add_arguments(command)
        command.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


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
