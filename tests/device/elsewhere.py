"""Runs Python in a process of its own, with a device to test."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent


def run(device, *arguments):
    """Run `python arguments` in the folder of the tests; it must end well. Return its output."""
    environment = {**os.environ, "NORMGRAD_TEST_DEVICE": device, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    command = [sys.executable, *arguments]
    ended = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
