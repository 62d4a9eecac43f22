"""The benchmarks run, and count what they say. What they time is for people to judge: no test reads a time."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
SHARED = ("all", "harness", "training")
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem not in SHARED)


def run(name, folder, *options):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--threads", "1", "--json", folder / "out.json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((folder / "out.json").read_text())


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """What each benchmark prints and its figures; it runs once for all tests."""
    return cache(lambda name: run(name, tmp_path_factory.mktemp(name)))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_prints_the_tables_of_its_figures(name, ran, monkeypatch):
    text, figures = ran(name)
    monkeypatch.syspath_prepend(BENCHMARKS)
    monkeypatch.delitem(sys.modules, name, raising=False)
    tables = __import__(name).show(figures)
    assert tables in text
    assert figures["machine"] in text
    assert "| --- |" in tables


@pytest.mark.slow
def test_memory_of_tensors_is_counted_exactly(tmp_path):
    (of,), (again,) = (run("memory", tmp_path, "--network", "MobileNet")[1]["networks"].values() for _ in range(2))
    assert 1 <= of["tensors"]["ratio"] < 1.1
    assert again["tensors"] == of["tensors"]


@pytest.mark.slow
def test_order1_keeps_to_three_copies_of_the_weights_and_gives_the_maps_of_the_naive_way(tmp_path):
    _, figures = run("order1", tmp_path, "--maps", "image")
    for of in figures["networks"].values():
        assert of.pop("difference") < 0.05
        for variant, figure in of.items():
            assert 1 < figure["copies"] < {"7": 3.2, "n": 6.5}.get(variant.split()[1][0], 2.2)


@pytest.mark.slow
def test_scaling_reads_what_it_says(ran):
    _, figures = ran("scaling")
    for what, points in figures["series"].items():
        small, large = points.values()
        growth = {"batch": 1, "pixels": 4}.get(what, 2)
        assert large["millions_read"] == pytest.approx(growth * small["millions_read"])


@pytest.mark.slow
def test_a_log_is_as_small_as_its_pictures(ran):
    _, figures = ran("log")
    for of_size in figures["tiles"].values():
        assert of_size["ours"]["bytes"] == pytest.approx(of_size["summaries"]["bytes"], rel=0.01)
        assert of_size["ours"]["bytes"] < of_size["add_image"]["bytes"]


@pytest.mark.slow
def test_robust_pictures_of_early_layers_are_brighter_and_have_no_dots(ran):
    networks = ran("drawing")[1]["networks"]
    for network in ("ResNet-18", "ConvNeXt-T", "the demo's"):
        for (layer, of), left in zip(networks[network].items(), (0.1, 0.3), strict=False):
            before, after = of["image"], of["robust"]
            assert after["95th percentile"] > max(0.6, before["95th percentile"] + 0.03), (network, layer)
            assert after["stride"] < min(left, before["stride"] / 2), (network, layer)
    for of in networks["ViT-S"].values():  # 8 × 8: as it is
        assert of["robust"] == pytest.approx(of["image"])


@pytest.mark.slow
def test_compiling_a_model_with_the_callback_adds_no_graph_and_no_break(ran):
    _, figures = ran("compile")
    assert figures["compiled"] == {"plain": {"graphs": 1, "breaks": 0}, "all": {"graphs": 1, "breaks": 0}}


def test_the_tables_in_the_readmes_are_those_of_the_kept_figures(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import all as benchmarks

    pages = [page.read_text() for page in benchmarks.PAGES]
    named = {name for page in pages for name in re.findall(r"<!-- benchmark: (\w+) -->", page)}
    assert set(benchmarks.OPTIONS) <= named
    for page in pages:
        assert benchmarks.rewritten(page) == page, "run `python tests/benchmarks/all.py --tables`"
