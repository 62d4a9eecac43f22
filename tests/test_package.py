"""The package as such: light to import, its rooms in order, what it says of itself true."""

import ast
import re
import subprocess
import sys
from itertools import pairwise, product
from pathlib import Path

import pytest

import normgrad_lightning
from normgrad_lightning import maps

PACKAGE = Path(normgrad_lightning.__file__).parent


def arrows_of_the_picture():
    """What each room imports, by the picture of the rooms in tests/README.md: `a, b ─► c` are two arrows."""
    page = (Path(__file__).parent / "README.md").read_text()
    picture = re.search(r"<!-- rooms -->\n\n```\n(.*?)```", page, flags=re.DOTALL)[1]
    for line in picture.splitlines():
        rooms = [part.strip().split(", ") for part in line.split("─►")]
        for left, right in pairwise(rooms):
            yield from product(left, right)


def room_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "normgrad_lightning":
                yield from (f"normgrad_lightning.{alias.name}" for alias in node.names)
            else:
                yield node.module


ARROWS = set(arrows_of_the_picture())
ROOMS = {room_of(path) for path in PACKAGE.rglob("*.py")} - {"__init__"}


def below(room):
    """The rooms that a room may import: those that arrows lead to. A circle of arrows has no end."""
    nearest = {to for start, to in ARROWS if start == room}
    return nearest.union(*map(below, nearest))


def test_the_picture_shows_every_room():
    assert {room for arrow in ARROWS for room in arrow} == ROOMS


@pytest.mark.parametrize("room", sorted(ROOMS))
def test_a_room_imports_those_that_its_arrows_lead_to(room):
    names = [name.split(".") for path in PACKAGE.rglob("*.py") if room_of(path) == room for name in imports(path)]
    ours = {parts[1] for parts in names if parts[0] == "normgrad_lightning"} - {room}
    assert {to for start, to in ARROWS if start == room} <= ours <= below(room)
    others = {parts[0] for parts in names}
    assert "settings" in below(room) or not {"lightning", "pytorch_lightning"} & others


def test_at_most_ten_modules_lie_flat():
    assert len([path for path in PACKAGE.glob("*.py") if path.name != "__init__.py"]) <= 10


def test_the_type_of_order_1_kinds_names_those_of_the_table():
    assert tuple(name for name, kind in maps.KINDS.items() if kind.needs_passes) == maps.ORDER1_KINDS


def test_there_is_one_list_of_kinds():
    """Names of kinds stand in the table; elsewhere only where a function of this name is."""
    elsewhere = {"functional.py": {"contrast"}, "order1.py": {"adversarial"}}
    for path in PACKAGE.rglob("*.py"):
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        asked = strings & {"contrast", "adversarial"}
        assert path.name == "maps.py" or asked <= elsewhere.get(path.name, set()), path


def modules_after(code):
    script = f"{code}\nimport sys; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_package_and_the_command_loads_nothing_heavy():
    names = "normgrad_lightning, normgrad_lightning.maps, normgrad_lightning.cli.command"
    loaded = modules_after(f"import {names}; dir(normgrad_lightning)")
    assert not loaded & {"torch", "numpy", "pytorch_lightning", "lightning", "tensorboard", "PIL", "cmap"}


def test_lightning_is_for_the_script_to_import():
    loaded = modules_after("from normgrad_lightning import *; import normgrad_lightning; normgrad_lightning.functional")
    assert {"torch", "normgrad_lightning.callback", "normgrad_lightning.isolated.order1"} <= loaded
    assert not loaded & {"pytorch_lightning", "lightning", "tensorboard"}


def test_every_public_name_is_there():
    for name in normgrad_lightning.__all__:
        assert getattr(normgrad_lightning, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'NormGradient'"):
        normgrad_lightning.NormGradient  # noqa: B018


def test_the_oldest_versions_that_are_tested_are_those_that_are_allowed():
    root = PACKAGE.parent
    allowed = re.search(r"\ndependencies = \[(.*?)\]", (root / "pyproject.toml").read_text(), flags=re.DOTALL)[1]
    tested = dict(re.findall(r"^([\w-]+)==([\d.]+)$", (root / ".ci/floor.txt").read_text(), flags=re.MULTILINE))
    for name, version in re.findall(r'"([\w-]+)>=([\d.]+)"', allowed):
        assert f"{tested[name]}.".startswith(f"{version}."), name
