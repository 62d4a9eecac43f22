"""What the entry point adds to the start of every Lightning script, in milliseconds.

    python tests/benchmarks/startup.py

Each measurement is a process of its own, with the package's entry point or as if it were not installed. The entry point
is called in `Trainer()`, so that is compared within a round; importing Lightning, which is none of our business but
takes seconds, is shown beside it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from harness import Figures, judged, parser, quartiles, run, spread, table

SCRIPT = """
import sys, time
import torch
start = time.perf_counter()
import pytorch_lightning
import lightning_fabric.utilities.registry as registry
if sys.argv[1] == "absent":
    entry_points = registry.entry_points
    registry.entry_points = lambda **group: [point for point in entry_points(**group) if point.name != "normgrad"]
import pytorch_lightning.trainer.connectors.callback_connector as connector
connector._load_external_callbacks = registry._load_external_callbacks
before = time.perf_counter()
pytorch_lightning.Trainer(logger=False, accelerator="cpu")
end = time.perf_counter()
print(before - start, end - before)
"""
VARIANTS = {
    "absent": "not installed",
    "unset": "`NORMGRAD` is not set",
    "off": "`NORMGRAD=0`",
    "on": "`NORMGRAD=1`",
}
SWITCH = {"off": "0", "on": "1"}
LIMIT = 50.0
"""Milliseconds, for a switch that is not on."""


def timed(variant: str) -> tuple[float, float]:
    """Milliseconds of `import pytorch_lightning` and of `Trainer()`."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("NORMGRAD")}
    if variant in SWITCH:
        environ["NORMGRAD"] = SWITCH[variant]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, variant], env=environ, capture_output=True, text=True, check=True
    )
    imports, trainer = done.stdout.splitlines()[-1].split()
    return 1e3 * float(imports), 1e3 * float(trainer)


def measure(args: argparse.Namespace) -> Figures:
    """All variants in turns."""
    names = list(VARIANTS)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(-1, args.rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            taken = timed(name)
            if turn >= 0:
                times[name].append(taken)
    figures = {}
    for name in names:
        rounds = zip(times[name], times["absent"], strict=True)
        figures[name] = {
            "import_ms": quartiles([imports for imports, _ in times[name]]),
            "trainer_ms": quartiles([trainer for _, trainer in times[name]]),
            "more_ms": quartiles([ours - theirs for (_, ours), (_, theirs) in rounds]),
        }
    return {"variants": figures}


def show(figures: Figures) -> str:
    """A row for each variant."""
    rows = []
    for name, of in figures["variants"].items():
        limit = None if name == "on" else LIMIT
        more = judged(spread(of["more_ms"], 1), of["more_ms"]["median"], limit)
        rows.append([VARIANTS[name], spread(of["trainer_ms"], 1), more, spread(of["import_ms"], 0)])
    header = ["", "ms of `Trainer()`", "more than not installed", "ms of `import pytorch_lightning`, after torch"]
    return f"{table(header, rows)}\n\n{figures['settings']['rounds']} rounds of fresh processes"


def main() -> None:
    """Measure, and print the table."""
    run(__file__, parser(__doc__ or "", rounds=15), measure, show)


if __name__ == "__main__":
    main()
