"""Wrong labels by training signal, in the quick mode: the signal finds some, and no more than the loss."""

import re
from pathlib import Path

import pytest
import torch
from run_script import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "12_label_noise.py"


@pytest.mark.nightly
def test_the_signal_finds_wrong_labels_but_no_more_than_the_loss(tmp_path):
    done = run_python(tmp_path, SCRIPT, "--quick")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", done.stdout, flags=re.MULTILINE)
    last = [float(cell.split()[0]) for cell in rows[-1][1].split(" | ")]
    assert len(rows) == 6
    assert min(last) > 15  # chance is 10
    leads = dict(re.findall(r"^(\S+|all layers) +([+-][\d.]+) \[", done.stdout, flags=re.MULTILINE))
    assert list(leads) == ["stem.2", "stage1", "stage2", "stage3", "all layers"]
    assert all(float(lead) < 1 for lead in leads.values())


def test_a_tenth_of_the_labels_is_really_wrong(example):
    labels = torch.arange(200) % 6
    noisy = example.with_noise(torch.zeros(200, 1), labels, 6, seed=3)
    assert int(noisy.wrong.sum()) == 20
    assert torch.equal(noisy.labels != labels, noisy.wrong)
    assert set(noisy.labels.tolist()) <= set(range(6))


def test_precision_is_the_part_of_wrong_labels_on_top(example):
    wrong = torch.tensor([True, False, True, False, False])
    assert example.precision(torch.tensor([5.0, 4.0, 3.0, 2.0, 1.0]), wrong) == 0.5
    assert example.precision(torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0]), wrong) == 1.0


def test_scores_are_those_of_each_image_alone(example):
    torch.manual_seed(0)
    model = example.ShapeClassifier()
    data = example.with_noise(torch.rand(5, 3, 32, 32), torch.arange(5), 6, seed=0)
    together = example.scores(model, data, ["stage2"])
    for i in range(5):
        alone = example.scores(model, example.Noisy(*(part[i : i + 1] for part in data)), ["stage2"])
        torch.testing.assert_close(together["stage2"][i : i + 1], alone["stage2"], rtol=1e-4, atol=0)
        torch.testing.assert_close(together["loss"][i : i + 1], alone["loss"], rtol=1e-4, atol=1e-6)
