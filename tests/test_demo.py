"""The examples as a user runs them, whole."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from run_script import run_python, shown
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

EXAMPLES = Path(__file__).parent.parent / "examples"
DEMO = EXAMPLES / "01_where_does_it_learn.py"


@pytest.mark.slow
def test_the_signal_moves_onto_the_objects(tmp_path):
    run = subprocess.run(
        [sys.executable, str(DEMO), "--out", "out", "--seed", "11"], cwd=tmp_path, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    report = run.stdout.partition("How much of the training signal")[2]

    number = r"\s+([\d.]+)%"
    rows = re.findall(rf"^(\S+)\s+(\d+)×\d+{number}{number}", report, flags=re.MULTILINE)
    area = float(re.search(r"part of the area: ([\d.]+)%", report)[1])
    assert [(layer, int(size)) for layer, size, _, _ in rows] == [
        ("stem.2", 64),
        ("stage1", 32),
        ("stage2", 16),
        ("stage3", 8),
    ]
    for _, _, start, end in rows[-2:]:
        assert float(end) > 1.7 * area
        assert float(end) > 1.2 * float(start)
    assert float(re.search(r"validation accuracy\s+([\d.]+)%", report)[1]) > 60

    assert "tensorboard --logdir out" in report
    sheet = Image.open(tmp_path / re.search(r"contact sheet\s+(\S+)", report)[1])
    assert sheet.width > 900
    events = EventAccumulator(str(next((tmp_path / "out").rglob("events*")).parent))
    events.Reload()
    layers = [f"{number:02d}_{layer}" for number, (layer, *_) in enumerate(rows)]
    panels = [f"normgrad_{kind}/{layer}" for kind in ("order0", "probe_order0") for layer in layers]
    of_classes = [f"normgrad/{view}/{of}" for view in ("1_patches", "4_atlas") for of in ("0_combined", layers[-1])]
    pictures = ["normgrad/5_overview/0_order0", "normgrad/3_probe/0_order0", *of_classes, *panels]
    assert set(pictures) <= set(events.Tags()["images"])
    assert [tag for tag in events.Tags()["images"] if tag not in pictures] in ([], ["normgrad/film"])
    assert "Warning" not in run.stderr


@pytest.mark.slow
def test_two_objects_are_measured_at_every_depth(tmp_path):
    script = EXAMPLES / "02_what_helps_and_what_hurts.py"
    options = ["--epochs", "1", "--images", "256", "--pairs", "12", "--epsilon", "0.005", "--out", "out"]
    run = subprocess.run([sys.executable, str(script), *options], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    interval = r"\s+([+-]?[\d.]+) \[([+-]?[\d.]+), ([+-]?[\d.]+)\]"
    rows = re.findall(rf"^(stem\.2|stage\d){interval * 4}$", run.stdout, flags=re.MULTILINE)
    assert [row[0] for row in rows] == ["stem.2", "stage1", "stage2", "stage3"]
    for row in rows:
        figures = list(map(float, row[1:]))
        for mean, low, high in (figures[i : i + 3] for i in range(0, 12, 3)):
            assert low <= mean <= high
        assert abs(figures[0] - 50) < 3
    assert rows[-1][1:4] == ("50.0", "50.0", "50.0")  # before an average pool, order 0 cannot see the label
    assert Image.open(tmp_path / "out" / "helps_and_hurts.png").width > 900


@pytest.mark.slow
def test_a_loop_of_fabric_has_maps(tmp_path):
    done = run_python(tmp_path, EXAMPLES / "04_fabric.py")
    layers = ["00_stem.2", "01_stage1", "02_stage2", "03_stage3"]
    assert shown(tmp_path) == {f"normgrad_order0/{layer}": [0, 20, 40, 60, 80] for layer in layers}
    assert done.stdout.count("loss") == 5


@pytest.mark.slow
def test_a_plain_loop_has_maps_of_order_0_and_1(tmp_path):
    run_python(tmp_path, EXAMPLES / "05_plain_loop.py")
    layers = ["00_stem.2", "01_stage1", "02_stage2", "03_stage3"]
    tags = [f"normgrad_{kind}/{layer}" for kind in ("order0", "contrast") for layer in layers]
    assert shown(tmp_path) == {tag: [0, 20, 40, 60, 80] for tag in tags}


HUGGING_FACE = """
import runpy, sys, torch
sys.path.insert(0, sys.argv[1])
example = runpy.run_path(sys.argv[1] + "/06_hugging_face.py")
plain, watched = (example["train"](c).state_dict() for c in ([], [example["NormGradHFCallback"](every_n_steps=20)]))
assert all(torch.equal(plain[name], watched[name]) for name in plain)
print("the same weights")
"""


@pytest.mark.nightly
def test_hugging_faces_trainer_has_maps_and_the_same_weights(tmp_path):
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("needs transformers")
    done = run_python(tmp_path, "-c", HUGGING_FACE, EXAMPLES)
    assert "the same weights" in done.stdout
    panels = shown(tmp_path)
    assert len(panels) == 4
    assert {tuple(steps) for steps in panels.values()} == {(0, 20, 40, 60, 80)}


def test_the_hugging_face_callback_is_short():
    source = (EXAMPLES / "06_hugging_face.py").read_text()
    (callback,) = re.findall(r"^class NormGradHFCallback.*?(?=^class )", source, flags=re.MULTILINE | re.DOTALL)
    assert len(callback.strip().splitlines()) < 60
