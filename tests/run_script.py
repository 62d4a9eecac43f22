"""Running a user's script as a user would: in a process and a folder of its own."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

from run_forked import Forks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPTS = Path(__file__).parent / "scripts"
BIN = Path(sys.executable).parent
LIGHTNINGS = ("pytorch_lightning", "lightning.pytorch")
PANEL = re.compile(
    r"normgrad_(?![^/]*probe_)[^/]+/\d\d"
)  # of any callback of the run, also of a second one; not of a probe


def run(folder, command, shell=False, **environment):
    """Run a command in a new folder, with these variables more, and return what it was like."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("NORMGRAD")}
    env = {**kept, "PATH": f"{BIN}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(command, cwd=folder, env=env, shell=shell, capture_output=True, text=True)


def run_python(folder, *arguments, imported=LIGHTNINGS, **environment):
    """Run `python …`, as if these modules were imported already; it must end well."""
    result = forks(imported).run(folder, *arguments, **environment)
    assert result.returncode == 0, result.stderr
    return result


@cache
def forks(modules):
    """The process of this test run that has imported them; it ends with the test run, when its input does."""
    return Forks(modules)


def shown(folder):
    """The steps of the panels in the event files under a folder, by tag, and of nothing else."""
    steps = {}
    for file in sorted(folder.rglob("events*")):
        events = EventAccumulator(str(file), size_guidance={"images": 0})
        events.Reload()
        for tag in (tag for tag in events.Tags()["images"] if PANEL.match(tag)):
            steps.setdefault(tag, []).extend(event.step for event in events.Images(tag))
    return steps
