"""Runs all benchmarks, one after the other, and puts their tables into the README.

    python tests/benchmarks/all.py

The figures are kept in `figures/`; `--tables` writes the README's tables anew from those, without a run. In the README,
a table stands between `<!-- benchmark: NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

from harness import FIGURES, Figures, judged, spread, table

HERE = Path(__file__).parent
README = HERE.parents[1] / "README.md"
OPTIONS = {
    "overhead": [],
    "memory": [],
    "peers": [],
    "order1": [],
    "scaling": ["--picture", "examples/pictures/scaling.png"],
    "log": [],
    "compile": [],
}


def command(name: str) -> str:
    """What to type for one benchmark."""
    return " ".join(["python", f"tests/benchmarks/{name}.py", *OPTIONS[name]])


def kept(name: str) -> Figures:
    """The figures of the latest run."""
    figures: Figures = json.loads((FIGURES / f"{name}.json").read_text())
    return figures


def block(name: str) -> str:
    """What the README says of a benchmark."""
    if name == "summary":
        return summary()
    figures = kept(name)
    tables = importlib.import_module(name).show(figures)
    return f"{tables}\n\n(`{command(name)}`; {figures['machine']})"


def summary() -> str:
    """What was promised, the worst that was measured of it, and where."""
    overhead, memory, order1 = kept("overhead")["networks"], kept("memory")["networks"], kept("order1")["networks"]
    peers, compiled = kept("peers"), kept("compile")
    rows = []
    for what, name, limit in (
        ("attached", "attached, no event", 1.005),
        ("maps", "an event on every step, maps only", 1.01),
        ("panels", "an event on every step, drawn and logged", 1.1),
        ("default", "the default, an event every 100 steps", 1.002),
    ):
        network, of = max(overhead.items(), key=lambda item: item[1][what]["ratio"]["median"])
        rows.append(row(f"step ÷ plain step, {name}", spread(of[what]["ratio"], 3), of[what]["ratio"]["median"], limit, network))
    return table(["", "measured, at worst", "at most", "where"], rows)


def row(what: str, text: str, value: float, limit: float, where: str) -> list[str]:
    """A line of the summary."""
    return [what, judged(text, value, limit), f"{limit:g}", where]


def rewritten(readme: str) -> str:
    """The README with the tables of the kept figures."""
    return re.sub(
        r"(<!-- benchmark: (\w+) -->\n).*?(\n<!-- end -->)",
        lambda match: f"{match[1]}\n{block(match[2])}\n{match[3]}",
        readme,
        flags=re.DOTALL,
    )


def main() -> None:
    """Run what is asked for, and rewrite the README."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", nargs="+", choices=list(OPTIONS), default=list(OPTIONS), help="run just these")
    options.add_argument("--tables", action="store_true", help="run nothing, write the tables anew")
    args = options.parse_args()
    for name in [] if args.tables else args.only:
        print(f"\n+ {command(name)}", flush=True)
        subprocess.run([sys.executable, HERE / f"{name}.py", *OPTIONS[name]], cwd=HERE.parents[1], check=True)
    README.write_text(rewritten(README.read_text()))


if __name__ == "__main__":
    main()
