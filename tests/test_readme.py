"""What the READMEs say is so."""

import inspect
import re
from pathlib import Path
from urllib.parse import unquote

import hydra
import pytest
import pytorch_lightning as pl
import table_of_setups
import torch
import torch.nn.functional as F
import yaml
from jsonargparse import ArgumentParser
from networks import ResNet, batch
from omegaconf import OmegaConf

from normgrad_lightning import NormGradCallback, grad_cam_maps
from normgrad_lightning.cli import arguments
from normgrad_lightning.cli.command import main

ROOT = Path(__file__).parent.parent
PAGES = {
    name: (ROOT / name).read_text()
    for name in ("README.md", "examples/README.md", "tests/README.md", "tests/benchmarks/README.md")
}
README = PAGES["README.md"]
every_page = pytest.mark.parametrize("page", PAGES)


def test_the_flags_tables_are_the_signature():
    """The README has the flags that people set, the page of the examples may have the others."""
    signature = inspect.signature(NormGradCallback.__init__).parameters
    defaults = {name: p.default for name, p in signature.items() if name != "self"}
    row = re.compile(r"^\| `(\w+)` \| `(.+?)` \|", flags=re.MULTILINE)
    in_readme = dict(row.findall(README))
    others = {name: text for name, text in row.findall(PAGES["examples/README.md"]) if name in defaults}
    assert {name: eval(text) for name, text in {**others, **in_readme}.items()} == defaults
    assert {"layers", "every_n_steps", "probe"} <= in_readme.keys()
    assert all(p.kind is p.KEYWORD_ONLY for name, p in signature.items() if name != "self")


def snippet(word, page="README.md"):
    return next(code for code in re.findall(r"```python\n(.*?)```", PAGES[page], flags=re.DOTALL) if word in code)


def test_the_loop_of_ones_own_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model, (images, labels) = ResNet(), batch(12)
    world = {
        "model": model,
        "loader": [(images, labels)] * 2,
        "loss_fn": F.cross_entropy,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    exec(snippet("with NormGrad"), world)
    assert {name: len(m) for name, m in world["recorder"].maps.items()} == {"stage1": 8, "stage2": 8, "stage3": 8}
    files = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.jpg")}
    assert files == {
        f"maps/normgrad_order0/{name}/step_00000000.jpg" for name in ("00_stage1", "01_stage2", "02_stage3")
    }


def test_the_passes_for_given_images_run_as_written():
    images, labels = batch()
    world = {"model": ResNet(), "images": images, "labels": labels, "loss_fn": F.cross_entropy}
    exec(snippet("order0_maps("), world)
    for made in ("maps", "contrast", "cams"):
        assert list(world[made]) == ["stage1", "stage2", "stage3"]
    assert all(m.min() < 0 < m.max() for m in world["contrast"].values())
    lowered = grad_cam_maps(world["model"], (images, labels), score_fn=lambda *args: -world["loss"](*args))
    assert all(torch.equal(m, lowered[name]) for name, m in world["cams"].items())


def configs():
    pages = README + PAGES["examples/README.md"]
    return [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", pages, flags=re.DOTALL)]


def test_its_config_files_make_the_callback():
    lightning_cli, hydra_config = configs()
    (in_cli,) = lightning_cli["trainer"]["callbacks"]
    parser = ArgumentParser()
    parser.add_subclass_arguments(pl.Callback, "callback")
    made = parser.instantiate(parser.parse_object({"callback": in_cli})).callback
    cfg = OmegaConf.create(hydra_config)
    world = {"hydra": hydra, "cfg": cfg}
    exec(snippet("hydra.utils.instantiate", "examples/README.md"), world)
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


def test_the_command_of_the_notes_is_one_that_the_parser_takes():
    _, told = explained()
    options = arguments.parser().parse_args(told.split())
    assert [str(path) for path in options.images] == ["cat.png", "dog.png"]
    assert (options.label, options.size) == ([3, 5], [224, 224])
    assert len(options.mean) == len(options.std) == 3


def explained():
    """The commands on the page of the examples: that of the picture, and that of the notes."""
    told = re.findall(r"^normgrad-lightning (explain .*?[^\\])$", PAGES["examples/README.md"], flags=re.M | re.S)
    return [one.replace("\\\n", "") for one in told]


def test_the_command_of_the_picture_is_one_that_the_parser_takes_and_that_of_the_example():
    told, _ = explained()
    options = arguments.parser().parse_args(told.split())
    assert options.module == "07_trained_network:lite0"
    example = (ROOT / "examples/07_trained_network.py").read_text()
    in_example = re.search(r"(explain .*?)\n\n", example, flags=re.S)[1].replace("\\\n", "")
    assert " ".join(told.split()).startswith(" ".join(in_example.split()))


def test_the_table_of_what_it_works_with_is_that_of_the_tests():
    assert table_of_setups.table() in PAGES["tests/README.md"], "`python tests/table_of_setups.py` writes it anew"


def test_every_example_has_its_line():
    scripts = sorted(path.name for path in (ROOT / "examples").glob("[01]*.py"))
    assert re.findall(r"^\| \[`(\w+\.py)`\]", PAGES["examples/README.md"], flags=re.MULTILINE) == scripts


def test_every_helper_of_the_tests_has_its_line():
    helpers = {path.name for path in (ROOT / "tests").glob("*.py") if not path.name.startswith("test_")}
    assert helpers <= set(re.findall(r"\[`(\w+\.py)`\]", PAGES["tests/README.md"]))


@every_page
def test_nothing_is_left_to_fill_in(page):
    assert "@@" not in PAGES[page]
    assert "TODO" not in PAGES[page]


def test_its_badges_say_what_the_package_needs():
    project = (ROOT / "pyproject.toml").read_text()
    python, torch_needed, license_of = (
        re.search(rf"^ *{start}(.+?)\"", project, flags=re.M)[1]
        for start in ('requires-python = "', '"(?=torch>)', 'license = "')
    )
    needed = [f"Python{python}", torch_needed, f"license{license_of}"]
    badges = re.findall(r"!\[(.+?)\]\(https://img\.shields\.io/badge/(.+?)-\w+\)", README)
    assert [said.replace(" ", "").replace("≥", ">=") for said, _ in badges] == needed
    drawn = [unquote(url).replace("--", "~").replace("-", "").replace("~", "-") for _, url in badges]
    assert drawn == [said.replace(" ", "") for said, _ in badges]


@every_page
def test_its_pictures_are_there(page):
    for path in re.findall(r"!\[.*?\]\((?!https?://)(.+?)\)", PAGES[page]):
        assert ((ROOT / page).parent / path).stat().st_size > 10_000


def anchors(text):
    """What GitHub makes of the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@every_page
def test_its_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?://)([^)\s]+)\)", PAGES[page])
    assert links
    for link in links:
        path, _, anchor = link.partition("#")
        there = (ROOT / page).parent / path if path else ROOT / page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there.read_text()), link
