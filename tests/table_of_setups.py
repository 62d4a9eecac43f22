"""The table of set-ups that it works with, made of the tests that are its rows: `python tests/table_of_setups.py`."""

from __future__ import annotations

import importlib
import re
import sys
from collections import defaultdict
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

TESTS = Path(__file__).parent
README = TESTS / "README.md"
PLACE = re.compile(r"(?<=<!-- works with -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)
GROUPS = ("Precision", "Loops", "Strategies", "Graph", "Around it", "Models")


class Row(NamedTuple):
    """What is set up, what to know about it, and the test that shows it."""

    setup: str
    note: str
    file: str
    test: str


def _imported(path: Path) -> ModuleType:
    sys.path.insert(0, str(path.parent))
    try:
        return importlib.import_module(path.stem)
    finally:
        sys.path.remove(str(path.parent))


def rows() -> dict[str, list[Row]]:
    """The rows of each group, in the order of the tests."""
    found: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        if "@row(" in path.read_text():
            module = _imported(path)
            for name, test in vars(module).items():
                for mark in getattr(test, "pytestmark", []) if name.startswith("test_") else []:
                    if mark.name == "works_with":
                        group, setup, note = mark.args
                        found[group].append(Row(setup, note, path.relative_to(TESTS).as_posix(), name))
    return found


def table() -> str:
    """The table, as it must stand in the README of the tests."""
    found = rows()
    assert set(found) == set(GROUPS), f"groups: {sorted(found)}"
    lines = ["| | what to know | test |", "|---|---|---|"]
    for group in GROUPS:
        (file,) = {row.file for row in found[group]}
        lines.append(f"| **{group}** | | [`{file.rpartition('/')[2]}`]({file}) |")
        lines += [f"| {row.setup} | {row.note} | `{row.test}` |" for row in found[group]]
    return "\n".join(["", f"{sum(map(len, found.values()))} set-ups:", "", *lines, "", ""])


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: table(), README.read_text()))
