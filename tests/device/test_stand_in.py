"""Training on a stand-in for an accelerator, in a process of its own: the stand-in registers for the whole process."""

import pytest
from device.elsewhere import run


def test_training_on_a_stand_in_for_an_accelerator():
    run("standin", "-m", "pytest", "device/on_device.py", "-n", "0", "-p", "no:cacheprovider")


@pytest.mark.slow
def test_the_table_for_bug_reports():
    table = run("standin", "device/measure.py", "--small")
    lines = [line for line in table.splitlines() if line.startswith("|")]
    assert len(lines) == 9, table
    assert "FAILED" not in table
