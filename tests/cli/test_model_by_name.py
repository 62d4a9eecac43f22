"""What `package.module:Name` and `file.py:Name` name."""

import random
import sys

import pytest
from networks import ResNet

from normgrad_lightning.cli.command import main
from normgrad_lightning.cli.model_by_name import find, made_by

NET = """
import torch
from sizes_beside import CHANNELS

class Net(torch.nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.conv = torch.nn.Conv2d(CHANNELS, width, 3)

    def forward(self, x):
        return self.conv(x)
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of scripts; what they import is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/sizes_beside.py").write_text("CHANNELS = 2")
    yield tmp_path / "scripts"
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("name", ["train", "07-train net", "2nd", "random"])
def test_a_file_of_any_name_with_the_modules_beside_it(name, folder, monkeypatch, capsys):
    (folder / f"{name}.py").write_text(NET)
    monkeypatch.chdir(folder.parent)
    for path in (f"scripts/{name}.py", f"{folder}/{name}.py", f"scripts/../scripts/{name}.py"):
        assert main(["layers", f"{path}:Net", "--input", "2x16x16", "--arg", "width=4"]) == 0
        assert capsys.readouterr().out.endswith("1 layers; auto takes conv\n")
    assert sys.modules["random"] is random


def test_files_of_one_name_are_told_apart(folder):
    for where in (folder, folder.parent):
        (where / "train.py").write_text(f"class Net: where = {str(where)!r}")
    assert [find(f"{where}/train.py:Net").where for where in (folder, folder.parent)] == [
        str(folder),
        str(folder.parent),
    ]


def test_modules_are_found_from_this_folder(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    (folder / "of_mine.py").write_text("class Net:\n    class Inner: pass")
    assert find("scripts.of_mine:Net.Inner").__qualname__ == "Net.Inner"
    (folder / "07_net.py").write_text("from scripts.of_mine import Net")
    assert find("scripts/07_net.py:Net") is find("scripts.of_mine:Net")


def test_what_a_file_lacks_is_the_users_own_error(folder, capsys):
    (folder / "lacking.py").write_text("import no_such_package")
    assert main(["layers", f"{folder}/lacking.py:Net"]) == 1
    assert "ModuleNotFoundError: No module named 'no_such_package'" in capsys.readouterr().err


def test_a_script_that_does_more_is_told_of_and_what_the_message_advises_works(folder, capsys):
    (folder / "train.py").write_text(f"{NET}\nopen('no such file')")
    assert main(["layers", f"{folder}/train.py:Net", "--input", "2x16x16"]) == 1
    err = capsys.readouterr().err
    assert "`train.py`" in err
    assert "FileNotFoundError" in err
    guard = err.partition("under `")[2].partition("`")[0]
    (folder / "train.py").write_text(f"{NET}\n{guard}\n    open('no such file')")
    assert main(["layers", f"{folder}/train.py:Net", "--input", "2x16x16"]) == 0


A_MODULE = ResNet()


@pytest.mark.parametrize(
    ("path", "arguments", "said"),
    [
        ("torchvision.models", {}, "`torchvision.models`: expected package.module:Name or file.py:Name"),
        ("a.ckpt", {}, "A checkpoint needs `--module`"),
        ("collections:OrderdDict", {}, "no 'OrderdDict'. Did you mean OrderedDict"),
        ("torch.nn:Conv2d", {"in_channels": 3}, "'out_channels'.*`--arg name=value`"),
        ("builtins:dict", {}, "`builtins:dict`: expected a torch.nn.Module or what makes one, but got 'dict'"),
        (f"{__name__}:A_MODULE", {"a": 1}, "`--arg`.*no arguments"),
    ],
)
def test_what_names_no_model(path, arguments, said):
    with pytest.raises(ValueError, match=said):
        made_by(path, find(path), arguments)


def test_a_model_that_is_made_already():
    path = f"{__name__}:A_MODULE"
    assert made_by(path, find(path), {}) is A_MODULE
