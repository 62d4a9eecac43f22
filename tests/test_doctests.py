"""Every public name has an example that runs, and every example of the package is true.

`pytest --doctest-modules normgrad_lightning` runs the same examples one by one.
"""

import doctest
import importlib
from pathlib import Path

import pytest

import normgrad_lightning
from normgrad_lightning import functional

PACKAGE = Path(normgrad_lightning.__file__).parent
NAMES = [*normgrad_lightning.__all__, *(f"functional.{name}" for name in functional.__all__)]
MODULES = sorted(
    ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
    for file in PACKAGE.rglob("*.py")
    if ">>> " in file.read_text()
)


def named(name):
    """What a user gets by this name."""
    found = normgrad_lightning
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example_with_a_result(name):
    examples = doctest.DocTestParser().get_examples(named(name).__doc__)
    assert any(example.want for example in examples), f"`{name}`: write an `Example:` into its docstring"


@pytest.mark.parametrize("module", MODULES)
def test_the_examples_are_true(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0
