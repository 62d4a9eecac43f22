"""Examples as modules. Their names begin with a number, and they import each other by name."""

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def example(request):
    """The script of a test module, its `SCRIPT`."""
    shared = [path.stem for path in EXAMPLES.glob("*.py")]
    others = {name: sys.modules.pop(name) for name in shared if name in sys.modules}  # of the same name, elsewhere
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location(f"example_{request.module.SCRIPT.stem}", request.module.SCRIPT)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look for it
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))
        for name in shared:
            sys.modules.pop(name, None)
        sys.modules.update(others)
