"""Checkpoints as people have them: of Lightning, with hyperparameters, and plain state dicts."""

import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from networks import ResNet
from omegaconf import OmegaConf
from run_script import run_python
from torch import nn

from normgrad_lightning.cli.checkpoint import load_trained
from normgrad_lightning.cli.command import main

WEIGHTS = {"weight": torch.ones(1)}


class TakesAll(nn.Module):
    def __init__(self, hparams=None, **others):
        super().__init__()
        self.given = hparams, others
        self.weight = nn.Parameter(torch.zeros(1))
        self.seen = []

    def on_load_checkpoint(self, checkpoint):
        self.seen.append(sorted(checkpoint))


class Late(nn.Module):
    def configure_model(self):
        self.weight = nn.Parameter(torch.zeros(1))


class Lenient(TakesAll):
    strict_loading = False


MADE = TakesAll()


@pytest.fixture
def load(tmp_path):
    """Saves contents, and loads them into one of the modules above."""

    def load(contents, name="TakesAll", arguments=None, **options):
        torch.save(contents, tmp_path / "a.ckpt")
        return load_trained(tmp_path / "a.ckpt", f"{__name__}:{name}", arguments or {}, **options)

    return load


@pytest.mark.parametrize(
    ("name", "given"), [("hparams", ({"a": 1, "_b": 2}, {})), ("kwargs", (None, {"a": 1})), (None, (None, {"a": 1}))]
)
def test_hyperparameters_as_lightning_saves_them(name, given, load):
    contents = {"state_dict": WEIGHTS, "hyper_parameters": {"a": 1, "_b": 2}, "hparams_name": name}
    module = load(contents)
    assert module.given == given
    assert module.weight == 1
    assert module.seen == [sorted(contents)]
    assert not module.training


def test_only_hyperparameters_that_the_class_takes(tmp_path):
    saved = {"classes": 7, "_class_path": "os.system", "unknown": 1, "channels": 3}
    contents = {"state_dict": ResNet(classes=7).state_dict(), "hyper_parameters": saved, "hparams_name": "kwargs"}
    torch.save(contents, tmp_path / "a.ckpt")
    assert load_trained(tmp_path / "a.ckpt", "networks:ResNet", {}).fc.out_features == 7


def test_arguments_go_before_hyperparameters(load):
    assert load({"state_dict": WEIGHTS, "hyper_parameters": {"a": 1}}, arguments={"a": 2}).given == (None, {"a": 2})


@pytest.mark.parametrize("saved", [OmegaConf.create({"a": 1}), Namespace(a=1)], ids=["OmegaConf", "Namespace"])
def test_hyperparameters_that_are_no_plain_dict(saved, load):
    contents = {"state_dict": WEIGHTS, "hyper_parameters": saved}
    assert load({**contents, "hparams_name": "hparams"}, trusted=True).given[0].a == 1
    assert load(contents, trusted=True).given == (None, {"a": 1})


def test_what_a_trusted_checkpoint_holds_may_be_in_this_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("of_mine.py").write_text(
        "import torch\nclass Settings: pass\n"
        "class Net(torch.nn.Module):\n    def __init__(self, settings):\n        super().__init__()\n"
        "        self.settings = settings\n        self.weight = torch.nn.Parameter(torch.zeros(1))\n"
    )
    save = (
        "import torch, of_mine\nhparams = {'settings': of_mine.Settings()}\n"
        "torch.save({'state_dict': {'weight': torch.ones(1)}, 'hyper_parameters': hparams}, 'a.ckpt')"
    )
    run_python(tmp_path, "-c", save)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for path in ("of_mine:Net", "of_mine.py:Net"):
        monkeypatch.delitem(sys.modules, "of_mine", raising=False)
        module = load_trained(Path("a.ckpt"), path, {}, trusted=True)
        assert type(module.settings) is sys.modules["of_mine"].Settings


@pytest.mark.parametrize(
    "contents",
    [
        {"model": WEIGHTS, "epoch": 3},
        {"_orig_mod.weight": torch.ones(1)},
        {"state_dict": WEIGHTS, "ema": {"weight": torch.zeros(1)}},
        {"weight": torch.ones(1).half()},
    ],
)
@pytest.mark.parametrize("name", ["TakesAll", "Late"])
def test_weights_wherever_people_keep_them(contents, name, load):
    module = load(contents, name)
    assert module.weight == 1
    assert module.weight.dtype == torch.float32


def test_weights_in_the_format_of_old_versions_of_torch(tmp_path):
    torch.save(WEIGHTS, tmp_path / "a.pth", _use_new_zipfile_serialization=False)
    assert load_trained(tmp_path / "a.pth", f"{__name__}:TakesAll", {}).weight == 1


def test_a_module_that_is_made_already_takes_the_weights_alone(load):
    module = load({"state_dict": WEIGHTS, "hyper_parameters": {"a": 1}}, "MADE")
    assert module.given == (None, {})
    assert module.weight == 1


def test_a_module_that_is_not_strict(load):
    assert load({"state_dict": {"other": torch.ones(1)}}, "Lenient").weight == 0


def test_layers_of_a_checkpoint_have_its_hyperparameters(tmp_path, capsys):
    contents = {"state_dict": ResNet(classes=7).state_dict(), "hyper_parameters": {"classes": 7}}
    torch.save(contents, tmp_path / "a.ckpt")
    assert main(["layers", f"{tmp_path}/a.ckpt", "--module", "networks:ResNet", "--input", "3x16x16"]) == 0
    assert ["fc", "Linear", "7", "-", "175"] in [line.split() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("contents", "said"),
    [
        ([1], "expected weights by name, but it holds 'list'"),
        ({"bias": torch.ones(1)}, r"do not fit `.*:TakesAll`.*`--arg name=value`.*Missing.*\"weight\".*\"bias\""),
        ({"state_dict": [1, 2]}, "do not fit"),
        ({"state_dict": {1: "a"}}, "do not fit"),
        ({"a": Namespace()}, r"argparse.Namespace. If you trust it, add `--unsafe`"),
    ],
)
def test_what_cannot_be_loaded(contents, said, load):
    with pytest.raises(ValueError, match=said):
        load(contents)


def test_files_that_are_no_checkpoint(tmp_path):
    for name, content in (("a.ckpt", b"abc"), ("b.ckpt", b"PK\x03\x04abc"), ("c.ckpt", b"")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name}`: expected only tensors and plain values, but torch cannot read"):
            load_trained(tmp_path / name, f"{__name__}:TakesAll", {})
    for path in (tmp_path, tmp_path / "none.ckpt"):
        with pytest.raises(ValueError, match=f"`{path}`: the file does not exist"):
            load_trained(path, f"{__name__}:TakesAll", {})
