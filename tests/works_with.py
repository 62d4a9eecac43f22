"""The README's table "Works with", made of the tests that are its rows: `python tests/works_with.py` writes it anew."""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent
README = TESTS.parent / "README.md"
PLACE = re.compile(r"(?<=<!-- works with -->\n).*?(?=<!-- end -->)", flags=re.DOTALL)
GROUPS = ("Precision", "Loops", "Strategies", "Graph", "Around it", "Models")


class Row(NamedTuple):
    """What is set up, what to know about it, and the test that shows it."""

    setup: str
    note: str
    file: str
    test: str


def rows() -> dict[str, list[Row]]:
    """The rows of each group, in the order of the tests."""
    found: dict[str, list[Row]] = defaultdict(list)
    for path in sorted(TESTS.glob("test_*.py")):
        if "@row(" in path.read_text():
            module = importlib.import_module(path.stem)
            for name, test in vars(module).items():
                for mark in getattr(test, "pytestmark", []) if name.startswith("test_") else []:
                    if mark.name == "works_with":
                        group, setup, note = mark.args
                        found[group].append(Row(setup, note, path.name, name))
    return found


def table() -> str:
    """The table, as it must stand in the README."""
    found = rows()
    assert set(found) == set(GROUPS), f"groups: {sorted(found)}"
    lines = ["| | what to know | test |", "|---|---|---|"]
    for group in GROUPS:
        (file,) = {row.file for row in found[group]}
        lines.append(f"| **{group}** | | [`{file}`](tests/{file}) |")
        lines += [f"| {row.setup} | {row.note} | `{row.test}` |" for row in found[group]]
    return f"""
<details>
<summary>The table: {sum(map(len, found.values()))} set-ups</summary>

{chr(10).join(lines)}

</details>

"""


if __name__ == "__main__":
    README.write_text(PLACE.sub(lambda _: table(), README.read_text()))
