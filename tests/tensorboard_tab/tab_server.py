"""A real TensorBoard in a process of its own, with the tab as an installed package would bring it."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRY = "[tensorboard_plugins]\nnormgrad = normgrad_lightning.tensorboard_tab.loader:Loader\n"


def environment(folder):
    """Where the tab is found: as it is installed, or, in a checkout that is not, as it would be."""
    found = [str(ROOT)]
    if not [one for one in entry_points(group="tensorboard_plugins") if one.name == "normgrad"]:
        info = Path(folder, "entry", "normgrad_tab-0.dist-info")
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: normgrad-tab\nVersion: 0\n")
        (info / "entry_points.txt").write_text(ENTRY)
        found.append(str(info.parent))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(found)}


@contextmanager
def running_tensorboard(logdir, folder, *flags, python=None):
    """The address of a TensorBoard of this folder, on a free port; of another Python, as it is installed there."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python or sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir), "--port", str(port), *flags]
    with open(Path(folder, f"tensorboard_{port}.log"), "w") as log:
        process = subprocess.Popen(
            [*command, "--reload_interval", "1"],
            stdout=log,
            stderr=log,
            env=environment(folder) if python is None else dict(os.environ, PYTHONPATH=""),
            cwd=folder,
        )
    prefix = next((flags[i + 1] for i, flag in enumerate(flags) if flag == "--path_prefix"), "")
    address = f"http://127.0.0.1:{port}{prefix}"
    try:
        end = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{address}/data/plugin/normgrad/index", timeout=10).read()
                break
            except OSError:
                assert process.poll() is None, Path(log.name).read_text()
                assert time.monotonic() < end, "TensorBoard did not answer"
                time.sleep(0.2)
        yield address
    finally:
        process.terminate()
        process.wait(20)
