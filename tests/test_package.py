"""The package as such: light to import, its modules in order, what it says of itself true."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import normgrad_lightning

PACKAGE = Path(normgrad_lightning.__file__).parent

# What each module may import of the package. Nothing else, so that no arrow is ever turned round.
ARROWS = {
    "__init__": {"functional", "callback", "capture", "order1", "passes", "show"},
    "windows": {"checks"},
    "products": {"windows"},
    "functional": {"products", "windows"},
    "checks": set(),
    "environment": set(),
    "telling": set(),
    "activation": {"ambient", "environment", "telling"},
    "ambient": {"callback", "environment"},
    "command": {"environment", "explain", "layer_table", "loading", "order1", "sheet"},
    "loading": set(),
    "explain": {"layers", "order1", "passes"},
    "layer_table": {"hooks", "isolation", "layers", "passes", "scout"},
    "sheet": {"render"},
    "show": {"checks", "loggers", "panels"},
    "hooks": set(),
    "isolation": set(),
    "batches": set(),
    "tokens": set(),
    "render": {"checks"},
    "panels": {"checks", "render"},
    "records": {"render"},
    "loggers": {"records", "render"},
    "layers": {"isolation", "tokens"},
    "scout": {"hooks", "isolation", "layers", "tokens"},
    "capture": {"checks", "hooks", "isolation", "layers", "products", "scout", "tokens", "windows"},
    "passes": {"batches", "capture", "functional", "isolation", "layers", "scout"},
    "order1": {"batches", "capture", "checks", "functional", "isolation", "layers", "passes"},
    "training_loss": {"isolation"},
    "watch": {"capture", "isolation", "layers", "passes"},
    "callback": {
        "batches",
        "capture",
        "checks",
        "environment",
        "isolation",
        "layers",
        "loggers",
        "order1",
        "panels",
        "passes",
        "render",
        "telling",
        "training_loss",
        "watch",
    },
}
OUTSIDE = {
    "windows": {"torch"},
    "products": {"torch"},
    "functional": {"torch"},
    "checks": set(),
    "environment": set(),
    "telling": set(),
    "activation": set(),
    "ambient": {"pytorch_lightning"},
    "command": {"torch", "numpy"},
    "loading": {"torch", "numpy", "PIL"},
    "explain": {"torch"},
    "layer_table": {"torch"},
    "sheet": {"numpy", "PIL"},
    "show": {"torch"},
    "hooks": {"torch"},
    "isolation": {"torch", "numpy"},
    "batches": {"torch", "numpy"},
    "tokens": {"torch"},
    "layers": {"torch"},
    "scout": {"torch"},
    "capture": {"torch"},
    "passes": {"torch"},
    "order1": {"torch"},
    "render": {"numpy", "PIL", "cmap"},
    "panels": {"torch"},
    "loggers": {"PIL", "wandb", "mlflow", "aim"},
    "records": {"tensorboard", "google_crc32c"},
    "training_loss": {"torch", "pytorch_lightning"},
    "watch": {"torch"},
    "callback": {"torch", "pytorch_lightning"},
    "__init__": set(),
}


def imports(module):
    for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.module == "normgrad_lightning":
                yield from (f"normgrad_lightning.{alias.name}" for alias in node.names)
            else:
                yield node.module


def test_every_module_is_in_the_table():
    assert {path.stem for path in PACKAGE.glob("*.py")} == set(ARROWS)


@pytest.mark.parametrize("module", ARROWS)
def test_dependencies_point_one_way(module):
    names = [name.split(".") for name in imports(module)]
    assert {parts[1] for parts in names if parts[0] == "normgrad_lightning"} == ARROWS[module]
    others = {parts[0] for parts in names} - {"normgrad_lightning"}
    assert {name for name in others if name not in sys.stdlib_module_names} == OUTSIDE[module]


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
    assert {"pytorch_lightning", "lightning"} <= imported("from normgrad_lightning import NormGradCallback")


def test_the_parts_without_lightning_do_not_load_it():
    loaded = modules_after("from normgrad_lightning import NormGrad, order0_maps, select_layers, functional")
    assert "torch" in loaded
    assert not {"pytorch_lightning", "lightning", "tensorboard"} & loaded


def test_every_public_name_is_there():
    for name in normgrad_lightning.__all__:
        assert getattr(normgrad_lightning, name).__doc__
    with pytest.raises(AttributeError, match="has no attribute 'NormGradient'"):
        normgrad_lightning.NormGradient  # noqa: B018
