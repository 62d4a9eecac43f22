"""Running many scripts of one library, each in a process of its own, without importing the library each time.

As a program it imports the modules that it is given, then reads a request from each line of its input: a script, a
folder, variables. It forks for each of them: the script finds the imports done, and nothing else.
"""

import gc
import json
import os
import random
import runpy
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path


@dataclass
class Ended:
    """A script that ended, and what it wrote to its error stream."""

    returncode: int
    stderr: str


class Forks:
    """A process with some imports done, which runs scripts in forks of itself.

    Args:
        folder: where it works.
        modules: what to import first.
    """

    def __init__(self, folder, modules):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NORMGRAD")}
        command = [sys.executable, __file__, *modules]
        self._errors = folder / "imports.txt"
        self._process = subprocess.Popen(
            command,
            cwd=folder,
            env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
        )

    def run(self, folder, script, **environment):
        """Run a script in a new folder, with these variables more; it must end well."""
        folder.mkdir(parents=True)
        request = {"folder": str(folder), "script": str(script), "environment": environment}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, self._errors.read_text()
        result = Ended(int(answer), (folder / "stderr.txt").read_text())
        assert result.returncode == 0, result.stderr
        return result

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def serve(modules):
    """Import, then fork for each request."""
    for module in modules:
        __import__(module)
    requests, answers = sys.stdin, os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints while it is imported is no answer
    for line in requests:
        child = os.fork()
        if child == 0:
            answers.close()
            run_script(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def run_script(folder, script, environment):
    """Be `python script` in a folder; keep the next random numbers, and the last maps."""
    os.chdir(folder)
    for stream, name in {0: os.devnull, 1: "stdout.txt", 2: "stderr.txt"}.items():
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.argv, sys.path[0] = [script], str(Path(script).parent)
    code = 0
    try:
        kept = runpy.run_path(script, run_name="__main__")
        keep_random_numbers()
        keep_maps()
        del kept
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def keep_random_numbers():
    import numpy as np
    import torch

    numbers = [torch.rand(4).tolist(), np.random.random(4).tolist(), [random.random() for _ in range(4)]]
    Path("random.json").write_text(json.dumps(numbers))


def keep_maps():
    """Keep what the callback shows at the end, if there is one: the script does not know it."""
    import torch

    for callback in (thing for thing in gc.get_objects() if type(thing).__name__ == "EnvironmentCallback"):
        maps = {"order0": callback.maps, **callback.order1}
        torch.save({"maps": maps, "images": callback.inputs}, "maps.pt")


if __name__ == "__main__":
    serve(sys.argv[1:])
