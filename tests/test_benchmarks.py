"""The benchmarks run and report what they say they report; what they measure is not for a test to judge."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parent / "benchmarks"


def run(name, tmp_path):
    command = [
        sys.executable,
        BENCHMARKS / f"{name}.py",
        "--quick",
        "--threads",
        "1",
        "--json",
        tmp_path / "figures.json",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads((tmp_path / "figures.json").read_text())["figures"]


def test_order1_reports_ratios_and_keeps_to_three_copies_of_the_weights(tmp_path):
    text, figures = run("order1", tmp_path)
    assert list(figures) == ["ResNet-18", "MobileNet-V3"]
    for of_network in figures.values():
        assert len(of_network) == 6
        for variant, figure in of_network.items():
            assert f"| {variant} | {figure['median']:.2f} |" in text
            assert figure["low"] <= figure["median"] <= figure["high"]
            assert 1 < figure["copies"] < (3.2 if "7 passes" in variant else 2.2)
