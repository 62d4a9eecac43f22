"""Write the page of the NormGrad tab as one HTML file, which opens without TensorBoard.

RUN is a folder of a run, or one that runs are in. Several runs can be compared on the page.

Example:
  normgrad-lightning report lightning_logs/version_0 lightning_logs/version_1 -o report.html
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from normgrad_lightning.cli.terminal import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, or of several")
    parser.add_argument("-o", "--out", type=Path, default=Path("normgrad.html"), metavar="FILE", help="(%(default)s)")
    parser.add_argument("--megabytes", type=float, default=20.0, help="size of the file, at most (%(default)s)")


def run(options: argparse.Namespace) -> None:
    """Write the report."""
    from normgrad_lightning.tensorboard_tab.report import write_report

    write_report(options.runs, options.out, round(options.megabytes * 1_000_000))
    say(f"Wrote {options.out}.", sys.stdout)
