"""What `package.module:Name`, `file.py:Name` and a checkpoint name."""

import sys
from pathlib import Path

import pytest
import torch
from run_script import run
from test_command import COMMAND, TakesAll

from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.finding import find
from normgrad_lightning.cli.loading import is_checkpoint, load_trained

NET = """
import torch
from sizes_beside import CHANNELS

class Net(torch.nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, width, 3)
        self.relu = torch.nn.ReLU()

    def forward(self, x):
        return self.relu(self.conv(x))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of scripts; what they import is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    tmp_path.joinpath("scripts").mkdir()
    tmp_path.joinpath("scripts/sizes_beside.py").write_text("CHANNELS = 2")
    for name in ("train", "07-train net", "2nd", "random"):
        tmp_path.joinpath(f"scripts/{name}.py").write_text(NET)
    yield tmp_path / "scripts"
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["train", "07-train net", "2nd", "random"])
def test_a_file_of_any_name_with_the_modules_beside_it(name, folder, monkeypatch):
    import random

    monkeypatch.chdir(folder.parent)
    for path in (f"scripts/{name}.py:Net", f"{folder}/{name}.py:Net", f"scripts/../scripts/{name}.py:Net"):
        made = find(path)(width=5)
        assert made.conv.weight.shape == (5, 2, 3, 3)
    assert Path(sys.modules[find(path).__module__].__file__) == folder / f"{name}.py"
    assert sys.modules["random"] is random  # that of Python stays what it is


def test_the_same_file_is_imported_once(folder):
    assert find(f"{folder}/train.py:Net") is find(f"{folder}/train.py:Net")


def test_files_of_one_name_are_told_apart(folder):
    other = folder.parent / "train.py"
    other.write_text("class Net: where = 'above'")
    assert find(f"{folder}/train.py:Net").__init__.__annotations__ == {"width": int}
    assert find(f"{other}:Net").where == "above"


def test_a_file_in_a_package_is_imported_as_its_part(folder):
    package = folder / "of_vision" / "nets"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.write_text("")
    (package.parent / "sizes.py").write_text("WIDTH = 7")
    (package / "small.py").write_text("from ..sizes import WIDTH\nclass Net: width = WIDTH")
    found = find(f"{package}/small.py:Net")
    assert found.width == 7
    assert found.__module__ == "of_vision.nets.small"


def test_a_file_that_fails_is_tried_again(folder):
    broken = folder / "bro-ken.py"
    broken.write_text("raise RuntimeError('not yet')")
    with pytest.raises(RuntimeError, match="not yet"):
        find(f"{broken}:Net")
    broken.write_text("Net = 3")
    assert find(f"{broken}:Net") == 3


def test_an_import_that_a_file_lacks_is_the_users_own_error(folder):
    (folder / "lacking.py").write_text("import no_such_package")
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        find(f"{folder}/lacking.py:Net")


def test_layers_of_a_file_as_typed(folder):
    for path in ("train.py:Net", f"{folder}/07-train net.py:Net"):
        result = run(folder, [COMMAND, "layers", path, "--input", "2x16x16", "--arg", "width=4"])
        assert result.returncode == 0, result.stderr
        assert result.stdout.endswith("2 layers; auto takes conv\n")


# ---------------------------------------------------------------- checkpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last.ckpt", True),
        ("runs/a/epoch=3-step=10.ckpt", True),
        ("weights.pth", True),
        ("there", True),
        ("train:LitModel", False),
        ("train.py:LitModel", False),
        ("package.module:Net.pt", False),
        ("script.py", False),
        ("not_there", False),
    ],
)
def test_what_is_taken_for_a_checkpoint(text, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("there", "script.py"):
        Path(name).write_text("")
    assert is_checkpoint(text) == expected


def test_layers_of_a_checkpoint_have_its_hyperparameters(folder, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    weights = find("train.py:Net")(width=6).state_dict()
    torch.save({"state_dict": weights, "hyper_parameters": {"width": 6}}, "a.ckpt")
    assert main(["layers", "a.ckpt", "--module", "train.py:Net", "--input", "2x16x16", "--traceback"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["*", "conv", "Conv2d", "6x14x14", "14x14", "114"] in rows


def test_a_checkpoint_alone_asks_for_the_class(folder, capsys):
    torch.save({"state_dict": {}}, folder / "a.ckpt")
    for command in (["layers", f"{folder}/a.ckpt"], ["explain", f"{folder}/a.ckpt", "a.png"]):
        assert main(command) == 1
        assert "`--module train.py:LitModel`" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["_class_path", "_target_"])
def test_the_class_that_a_checkpoint_names_runs_only_if_it_is_trusted(key, tmp_path):
    saved = {key: f"{TakesAll.__module__}.TakesAll", "a": 1}
    torch.save({"state_dict": {"weight": torch.ones(1)}, "hyper_parameters": saved}, tmp_path / "a.ckpt")
    with pytest.raises(ValueError, match=f"`--module {TakesAll.__module__}:TakesAll`"):
        load_trained(tmp_path / "a.ckpt", None, {})
    module = load_trained(tmp_path / "a.ckpt", None, {}, trusted=True)
    assert module.given == (None, {"a": 1})
    assert module.weight == 1
