"""The benchmarks run and report what they say they report; what they measure is not for a test to judge."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
NETWORKS = ["ResNet-18", "ResNet-50", "MobileNet-V3", "ConvNeXt-T", "ViT-S"]


def run(name, tmp_path, *options):
    command = [sys.executable, BENCHMARKS / f"{name}.py", "--quick", "--threads", "1", "--json", tmp_path / "out.json"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout, json.loads((tmp_path / "out.json").read_text())


def assert_spread(figure):
    assert 0 <= figure["low"] <= figure["median"] <= figure["high"]


def test_overhead(tmp_path):
    text, figures = run("overhead", tmp_path)
    assert list(figures["networks"]) == NETWORKS
    for of in figures["networks"].values():
        for what in ("again", "attached", "maps", "reading", "panels", "everything", "default"):
            assert_spread(of[what]["ratio"])
            assert f"{of[what]['ratio']['median']:.3f} ({of[what]['ratio']['low']:.3f} – " in text
        own = {what: figure["ours_ms"]["median"] for what, figure in of.items() if what not in ("again", "seconds")}
        assert 0 < own["attached"] < own["default"] < own["maps"] < own["panels"] < own["everything"]
        assert own["default"] < own["reading"] < own["everything"]


def test_memory_of_tensors_is_counted_exactly(tmp_path):
    text, figures = run("memory", tmp_path, "--network", "MobileNet")
    (of,) = figures["networks"].values()
    assert f"| {of['tensors']['ratio']:.4f}" in text
    assert 1 <= of["tensors"]["ratio"] < 1.1
    _, again = run("memory", tmp_path, "--network", "MobileNet")
    assert again["networks"]["MobileNet-V3"]["tensors"] == of["tensors"]


def test_peers(tmp_path):
    text, figures = run("peers", tmp_path)
    assert "order0_maps" in text
    assert figures["settings"]["rounds"] == 2


def test_order1_keeps_to_three_copies_of_the_weights_and_gives_the_maps_of_the_naive_way(tmp_path):
    text, figures = run("order1", tmp_path, "--maps", "image")
    assert list(figures["networks"]) == ["ResNet-18", "MobileNet-V3"]
    for of in figures["networks"].values():
        assert of.pop("difference") < 0.05
        assert list(of) == ["image, 4 passes", "image, 2 passes", "image, 7 passes", "image, naive"]
        for variant, figure in of.items():
            assert_spread(figure)
            assert f"{figure['median']:.2f} ({figure['low']:.2f} – " in text
            assert 1 < figure["copies"] < {"7": 3.2, "n": 6.5}.get(variant.split()[1][0], 2.2)


def test_scaling_reads_what_it_says(tmp_path):
    _, figures = run("scaling", tmp_path)
    assert list(figures["series"]) == ["images", "layers", "pixels", "channels", "batch"]
    for what, points in figures["series"].items():
        small, large = points.values()
        growth = {"batch": 1, "pixels": 4}.get(what, 2)
        assert large["millions_read"] == pytest.approx(growth * small["millions_read"])


def test_log_writes_less_than_add_image_in_less_time(tmp_path):
    _, figures = run("log", tmp_path)
    for of_size in figures["tiles"].values():
        assert of_size["ours"]["bytes"] == pytest.approx(of_size["summaries"]["bytes"], rel=0.01)
        assert of_size["ours"]["bytes"] < of_size["add_image"]["bytes"]
        for figure in of_size.values():
            assert_spread(figure["thread_ms"])
            assert figure["thread_ms"]["median"] <= figure["disk_ms"]["median"]


def test_robust_pictures_of_early_layers_are_brighter_and_have_no_dots(tmp_path):
    text, figures = run("drawing", tmp_path)
    networks = figures["networks"]
    assert list(networks) == ["ResNet-18", "ConvNeXt-T", "ViT-S", "the demo's"]
    for network in ("ResNet-18", "ConvNeXt-T", "the demo's"):
        for (layer, of), left in zip(networks[network].items(), (0.1, 0.3), strict=False):
            before, after = of["image"], of["robust"]
            assert after["95th percentile"] > max(0.6, before["95th percentile"] + 0.03), (network, layer)
            assert after["stride"] < min(left, before["stride"] / 2), (network, layer)
            percentiles = f"{before['95th percentile']:.2f} → {after['95th percentile']:.2f}"
            assert f"| {network} | `{layer}` | {of['grid']} × {of['grid']} | {percentiles} | " in text
    for of in networks["ViT-S"].values():  # 8 × 8: as it is
        assert of["robust"] == pytest.approx(of["image"])


def test_compile_counts_graphs_and_breaks(tmp_path):
    text, figures = run("compile", tmp_path)
    assert figures["compiled"] == {"plain": {"graphs": 1, "breaks": 0}, "all": {"graphs": 1, "breaks": 0}}
    assert "1 graph(s) with 0 break(s) in plain steps, 1 with 0 in all." in text


def test_startup_compares_with_a_machine_that_has_us_not(tmp_path):
    text, figures = run("startup", tmp_path)
    of = figures["variants"]
    assert list(of) == ["absent", "unset", "off", "on"]
    assert of["absent"]["more_ms"]["median"] == 0
    assert of["on"]["more_ms"]["low"] > of["unset"]["more_ms"]["high"]  # that one does import us
    assert f"| `NORMGRAD=0` | {of['off']['trainer_ms']['median']:.1f} (" in text


def test_the_tables_in_the_readmes_are_those_of_the_kept_figures(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import all as benchmarks

    pages = [page.read_text() for page in benchmarks.PAGES]
    named = [re.findall(r"<!-- benchmark: (\w+) -->", page) for page in pages]
    assert named[0] == ["short"]
    assert sorted(named[1]) == sorted(["summary", *benchmarks.OPTIONS])
    for page in pages:
        assert benchmarks.rewritten(page) == page, "run `python tests/benchmarks/all.py --tables`"
