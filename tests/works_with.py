"""The README's table "Works with", made of the tests that are its rows: `python tests/works_with.py` writes it anew."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
PLACE = re.compile(r"(?<=<!-- works with -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)
GROUPS = ("Precision", "Loops", "Strategies", "Graph", "Around it", "Models")


def rows() -> dict[str, list[tuple[str, str, str]]]:
    """Of each group, the set-up, the note and the test of each row, in the order of the tests."""
    found: dict[str, list[tuple[str, str, str]]] = defaultdict(list)
    for path in sorted(TESTS.glob("test_*.py")):
        if "@row(" in path.read_text():
            module = importlib.import_module(path.stem)
            for name, test in vars(module).items():
                for mark in getattr(test, "pytestmark", []) if name.startswith("test_") else []:
                    if mark.name == "works_with":
                        group, setup, note = mark.args
                        found[group].append((setup, note, f"{path.name}::{name}"))
    return found


def table() -> str:
    """The table, as it must stand in the README."""
    found = rows()
    assert set(found) <= set(GROUPS), f"groups without a place in the table: {set(found) - set(GROUPS)}"
    lines = ["| | what to know | test |", "|---|---|---|"]
    for group in GROUPS:
        lines.append(f"| **{group}** | | |")
        lines += [f"| {setup} | {note} | `{test}` |" for setup, note, test in found[group]]
    return "\n" + "\n".join(lines) + "\n\n"


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: table(), README.read_text()))
