"""The command `report`: the page of the NormGrad tab as one file."""

from __future__ import annotations

import argparse
import sys

from normgrad_lightning.cli.terminal import say
from normgrad_lightning.tensorboard_tab.report import write_report


def run(options: argparse.Namespace) -> None:
    """Write the report."""
    write_report(options.runs, options.out, round(options.megabytes * 1_000_000))
    say(f"Wrote {options.out}.", sys.stdout)
