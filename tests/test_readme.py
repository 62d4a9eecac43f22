"""What the README says is so."""

import doctest
import inspect
import re
from pathlib import Path

import hydra
import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import works_with
import yaml
from jsonargparse import ArgumentParser
from networks import ResNet, batch
from omegaconf import OmegaConf

from normgrad_lightning import NormGradCallback, callback, capture, command, order1
from normgrad_lightning.command import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_the_flags_table_is_the_signature():
    rows = re.findall(r"^\| `(\w+)` \| `(.+?)` \|", README, flags=re.MULTILINE)
    signature = inspect.signature(NormGradCallback.__init__).parameters
    told = {name: eval(default) for name, default in rows}
    assert told == {name: p.default for name, p in signature.items() if name != "self"}
    assert all(p.kind is p.KEYWORD_ONLY for name, p in signature.items() if name != "self")


def snippet(word):
    return next(code for code in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL) if word in code)


def test_the_loop_of_ones_own_runs_as_written():
    model, (images, labels) = ResNet(), batch(12)
    world = {
        "model": model,
        "loader": [(images, labels)] * 2,
        "loss_fn": F.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    exec(snippet("with NormGrad"), world)
    assert {name: len(m) for name, m in world["recorder"].maps.items()} == {"stage1": 8, "stage2": 8, "stage3": 8}


def test_the_pass_for_given_images_runs_as_written():
    images, labels = batch()
    world = {"model": ResNet(), "images": images, "labels": labels, "loss_fn": F.cross_entropy}
    exec(snippet("order0_maps("), world)
    assert list(world["maps"]) == ["stage1", "stage2", "stage3"]


def test_order_1_of_given_images_runs_as_written():
    images, labels = batch()
    world = {"model": ResNet(), "images": images, "labels": labels, "loss_fn": F.cross_entropy}
    exec(snippet("order1_maps("), world)
    assert list(world["contrast"]) == ["stage1", "stage2", "stage3"]
    assert all(m.min() < 0 < m.max() for m in world["contrast"].values())


def configs():
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", README, flags=re.DOTALL)]


def test_its_config_files_make_the_callback():
    lightning_cli, hydra_config = configs()
    (in_cli,) = lightning_cli["trainer"]["callbacks"]
    parser = ArgumentParser()
    parser.add_subclass_arguments(pl.Callback, "callback")
    made = parser.instantiate(parser.parse_object({"callback": in_cli})).callback
    cfg = OmegaConf.create(hydra_config)
    world = {"hydra": hydra, "cfg": cfg}
    exec(snippet("hydra.utils.instantiate"), world)
    for one in (made, *world["callbacks"]):
        assert isinstance(one, NormGradCallback)
        assert (one.layers, one.every_n_steps) == (["net.layer1", "net.layer4"], 50)


def test_its_variables_are_flags(monkeypatch):
    told = set(re.findall(r"NORMGRAD_([A-Z0-9_]+)=", README))
    assert {"LAYERS", "SCALE", "EVERY_N_STEPS", "ORDER1_EVERY_N_STEPS"} <= told
    assert {name.lower() for name in told} <= set(inspect.signature(NormGradCallback).parameters)


def test_its_list_of_layers_is_what_the_command_prints(capsys):
    told = re.search(r"\$ normgrad-lightning (layers .*?)\n(.*?)```", README, flags=re.DOTALL)
    assert main(told[1].split()) == 0
    printed = capsys.readouterr().out
    for part in told[2].split("...\n"):
        assert part in printed


def test_its_other_command_is_one_that_the_parser_takes():
    (told,) = re.findall(r"^normgrad-lightning (explain .*)$", README, flags=re.MULTILINE)
    options = command._parser().parse_args(told.split())
    assert [str(path) for path in options.images] == ["cat.png", "dog.png"]
    assert (options.label, options.size) == ([3, 5], [224, 224])


@pytest.mark.parametrize("module", [callback, capture, order1])
def test_the_docstrings_examples_run(module):
    results = doctest.testmod(module)
    assert results.attempted >= 3
    assert results.failed == 0


def test_the_table_of_what_it_works_with_is_that_of_the_tests():
    assert works_with.table() in README, "`python tests/works_with.py` writes it anew"


def test_nothing_is_left_to_fill_in():
    assert "@@" not in README
    assert "TODO" not in README


def test_its_pictures_are_there():
    for path in re.findall(r"!\[.*?\]\((.+?)\)", README):
        assert (ROOT / path).stat().st_size > 10_000
