"""The same on a real device, for those who have one: `pytest -m gpu`. It prints a table to paste into a bug report."""

import pytest
import torch
from device.elsewhere import run

CAN_TRAIN = ("cuda", "xpu", "mps")
FOUND = [name for name in CAN_TRAIN if hasattr(torch, name) and torch.get_device_module(name).is_available()]
NONE = pytest.param(None, marks=pytest.mark.skip(reason="no accelerator here"), id="none")
each_device = pytest.mark.parametrize("name", FOUND or [NONE])
pytestmark = pytest.mark.gpu


@each_device
def test_training_on_a_real_device(name):
    run(name, "-m", "pytest", "device/on_device.py", "-n", "0", "-p", "no:cacheprovider")


@each_device
def test_the_table_for_bug_reports(name, capsys):
    table = run(name, "device/measure.py")
    with capsys.disabled():
        print("\nPaste this into an issue:\n")
        print("\n".join(line for line in table.splitlines() if line.startswith("|")))
    assert "FAILED" not in table
