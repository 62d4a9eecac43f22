"""Running many scripts, each in a process of its own, without importing the same libraries each time.

As a program it imports the modules that it is given, then reads a request from each line of its input: what to run, a
folder, variables. It forks for each of them: the script finds the imports done, and nothing else.
"""

import atexit
import gc
import json
import os
import random
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from importlib.util import find_spec
from pathlib import Path


class Forks:
    """A process with some imports done, which runs scripts in forks of itself.

    Args:
        modules: what to import first.
        keeps: whether each script's next random numbers and its last maps are kept, in files of its folder.
    """

    def __init__(self, modules, keeps=False):
        kept = {name: value for name, value in os.environ.items() if not name.startswith("NORMGRAD")}
        kept["PYTHONPATH"] = str(Path(find_spec("normgrad_lightning").origin).parent.parent)  # what the tests import
        self._keeps = keeps
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, __file__, *modules],
            env={**kept, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, folder, *arguments, **environment):
        """Run `python …` in a folder, with these variables more, and return what it was like."""
        folder.mkdir(parents=True, exist_ok=True)
        arguments = [str(argument) for argument in arguments]
        with tempfile.TemporaryDirectory() as outputs:
            files = [str(Path(outputs, name)) for name in ("stdout", "stderr")]
            request = {"folder": str(folder), "arguments": arguments, "environment": environment, "outputs": files}
            self._process.stdin.write(json.dumps({**request, "keeps": self._keeps}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                self._errors.seek(0)
                raise AssertionError(self._errors.read())
            return subprocess.CompletedProcess(arguments, int(answer), *(Path(file).read_text() for file in files))

    def close(self):
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._errors.close()


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
            be_python(**json.loads(line))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)


def be_python(folder, arguments, environment, outputs, keeps):
    """Be `python …` in a folder."""
    os.chdir(folder)
    for stream, name in enumerate((os.devnull, *outputs)):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.path[1:1] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    code = 0
    try:
        kept = run_script(arguments)
        if keeps:
            keep_random_numbers()
            keep_maps()
        del kept
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run_script(arguments):
    """Run a script, or `-c` with code, as `__main__`."""
    if arguments[0] != "-c":
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).resolve().parent)
        return runpy.run_path(arguments[0], run_name="__main__")
    sys.argv, sys.path[0] = ["-c", *arguments[2:]], ""
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(arguments[1], "<string>", "exec"), vars(main))
    return main


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
