"""The package as such: light to import, its modules in order, what it says of itself true."""

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import normgrad_lightning
from normgrad_lightning import kinds

PACKAGE = Path(normgrad_lightning.__file__).parent

ARROWS = {
    # plain data and checks, which anyone may know
    "both_lightnings": set(),
    "checks": set(),
    "environment": set(),
    "kinds": set(),
    "page": set(),
    "tensor_subclasses": set(),
    # from a step to maps
    "maths": {"checks", "tensor_subclasses"},
    "maps": {"kinds", "views"},  # only to show themselves
    "functional": {"maths", "tensor_subclasses"},
    "recording": {"checks", "functional", "kinds", "maps", "maths", "tensor_subclasses"},
    "passes": {"checks", "functional", "kinds", "maps", "recording", "tensor_subclasses"},
    "events": {"checks", "kinds", "passes", "recording", "tensor_subclasses", "views"},
    # from maps to a logger
    "views": {"checks", "functional", "kinds", "page"},
    "writers": {"page"},
    # what puts the two together
    "report": {"events", "kinds", "page", "views", "writers"},
    "memory": {"events", "views"},
    "run": {"events", "kinds", "memory", "report"},
    "callback": {
        "both_lightnings",
        "environment",
        "events",
        "kinds",
        "memory",
        "recording",
        "report",
        "run",
        "views",
        "writers",
    },
    "own_loop": {"checks", "kinds", "page", "views", "writers"},
    "cli": {"environment", "kinds", "passes", "recording", "views"},
    "switch": {"callback", "environment", "events", "writers"},
    "__init__": {"callback", "functional", "own_loop", "passes", "recording"},
    # the names of 0.1.0's entry points
    "activation": {"switch"},
    "command": {"cli"},
}
"""What each room, or module beside the rooms, imports of the others. No arrow is ever turned round."""

OUTSIDE = {
    "kinds": {"torch"},
    "maps": {"torch"},
    "page": {"numpy"},
    "tensor_subclasses": {"torch"},
    "maths": {"torch"},
    "functional": {"torch"},
    "recording": {"torch"},
    "passes": {"numpy", "torch"},
    "events": {"pytorch_lightning", "torch"},
    "views": {"PIL", "cmap", "numpy", "torch"},
    "writers": {"PIL", "aim", "google_crc32c", "mlflow", "numpy", "tensorboard", "wandb"},
    "report": {"pytorch_lightning"},
    "run": {"pytorch_lightning"},
    "callback": {"PIL", "pytorch_lightning", "torch"},
    "own_loop": {"torch"},
    "cli": {"PIL", "numpy", "torch"},
    "switch": {"pytorch_lightning"},
}
"""What each of them imports of other packages, where it imports any."""


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


def imported_by(room):
    names = [name.split(".") for path in PACKAGE.rglob("*.py") if room_of(path) == room for name in imports(path)]
    ours = {parts[1] for parts in names if parts[0] == "normgrad_lightning"} - {room}
    others = {parts[0] for parts in names} - {"normgrad_lightning"} - sys.stdlib_module_names
    return ours, others


def test_every_room_is_in_the_table():
    assert {room_of(path) for path in PACKAGE.rglob("*.py")} == set(ARROWS)


@pytest.mark.parametrize("room", ARROWS)
def test_dependencies_point_one_way(room):
    assert imported_by(room) == (ARROWS[room], OUTSIDE.get(room, set()))


def test_no_arrows_make_a_circle():
    TopologicalSorter(ARROWS).prepare()


def test_events_know_of_views_only_how_pictures_look():
    """It is one of the groups of flags."""
    taken = {name for path in (PACKAGE / "events").glob("*.py") for name in imports(path) if ".views" in name}
    assert taken == {"normgrad_lightning.views.look"}


def test_the_kinds_of_maps_are_known_without_torch():
    assert "torch" not in modules_after("import normgrad_lightning.kinds, normgrad_lightning.cli.command")


def test_the_type_of_order_1_kinds_names_those_of_the_table():
    assert tuple(name for name, kind in kinds.KINDS.items() if kind.needs_passes) == kinds.ORDER1_KINDS


def test_there_is_one_list_of_kinds():
    """Names of kinds stand in the table; elsewhere only where a function of this name is."""
    elsewhere = {"functional.py": {"contrast"}, "order1.py": {"adversarial"}}
    for path in PACKAGE.rglob("*.py"):
        strings = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        asked = strings & {"contrast", "adversarial"}
        assert path.name == "kinds.py" or asked <= elsewhere.get(path.name, set()), path


def modules_after(code):
    script = f"{code}\nimport sys; print(*sys.modules)"
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_importing_the_package_loads_nothing_heavy():
    heavy = {"torch", "numpy", "pytorch_lightning", "lightning", "tensorboard", "PIL", "cmap"}
    assert not heavy & modules_after("import normgrad_lightning; dir(normgrad_lightning)")


def test_nothing_heavy_is_imported_until_a_name_is_used():
    def imported(code):
        command = [sys.executable, "-X", "importtime", "-c", code]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stderr.splitlines()
        return {line.rpartition("|")[2].strip().partition(".")[0] for line in lines if line.startswith("import time:")}

    heavy = {"torch", "numpy", "pytorch_lightning", "lightning", "tensorboard"}
    assert "normgrad_lightning" in imported("import normgrad_lightning")
    assert not heavy & imported("import normgrad_lightning")
    assert heavy & imported("import normgrad_lightning; normgrad_lightning.NormGrad") == {"torch", "numpy"}
    callback = imported("from normgrad_lightning import NormGradCallback")
    assert heavy & callback == {"torch", "numpy"}  # Lightning is for the script to import


def test_the_parts_without_lightning_do_not_load_it():
    loaded = modules_after("from normgrad_lightning import NormGrad, order0_maps, select_layers, functional")
    assert "torch" in loaded
    assert not {"pytorch_lightning", "lightning", "tensorboard"} & loaded


def test_every_public_name_is_there():
    for name in normgrad_lightning.__all__:
        assert getattr(normgrad_lightning, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'NormGradient'"):
        normgrad_lightning.NormGradient  # noqa: B018
