"""The object that a user names: `package.module:Name`, or `path/to/file.py:Name`."""

from __future__ import annotations

import ast
import difflib
import re
import sys
from collections.abc import Iterable
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any


def find(path: str) -> Any:
    """The object that `package.module:Name` or `file.py:Name` names, seen from the current folder.

    Raises:
        ValueError: there is no such object.
    """
    where, _, name = path.rpartition(":")
    if path.endswith(".py"):
        raise ValueError(f"`{path}`: expected file.py:Name, but the name is missing.{_names_in(Path(path))}")
    is_file = where.endswith(".py")
    if not name or not (is_file or re.fullmatch(r"\w+(\.\w+)*", where)):
        raise ValueError(
            f"`{path}`: expected package.module:Name or file.py:Name, such as torchvision.models:resnet18 or "
            "train.py:LitModel."
        )
    found = _module_in(path, Path(where)) if is_file else _module_named(path, where)
    for part in name.split("."):
        if not hasattr(found, part):
            hint = did_you_mean(part, [one for one in dir(found) if not one.startswith("_")])
            whose = getattr(found, "__name__", type(found).__name__)
            raise ValueError(f"`{path}`: {whose} has no {part!r}.{hint}")
        found = getattr(found, part)
    return found


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the nearest of the known names; empty if none is near."""
    near = difflib.get_close_matches(name, list(known))
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _module_named(path: str, name: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"`{path}`: there is no module {error.name!r} here. Name it as Python would import it from this folder."
        ) from error


def _module_in(path: str, file: Path) -> ModuleType:
    """The module in this file, imported as `python file.py` would; if it is part of a package, as that part."""
    file = file.expanduser().resolve()
    if not file.is_file():
        hint = did_you_mean(file.name, [one.name for one in file.parent.glob("*.py")])
        raise ValueError(f"`{path}`: there is no such file.{hint}")
    folder, parts = file.parent, [file.stem]
    while (folder / "__init__.py").is_file():
        folder, parts = folder.parent, [folder.name, *parts]
    _look_in(folder)
    if all(part.isidentifier() for part in parts):
        module = import_module(".".join(parts))
        if module.__file__ is not None and Path(module.__file__).resolve() == file:
            return module
    return _loaded(file)


def _loaded(file: Path) -> ModuleType:
    """The module in a file whose name cannot be imported: it has a dash or a digit, or is another module's."""
    name = file.stem if file.stem not in sys.modules else f"{file.stem}.py"
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[name] = module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _look_in(folder: Path) -> None:
    """Let Python import from this folder first."""
    if str(folder) not in sys.path and not ("" in sys.path and folder == Path.cwd()):
        sys.path.insert(0, str(folder))


def _names_in(file: Path) -> str:
    """A hint with the classes that a file defines; empty if it cannot be read."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return ""
    names = [f"{file}:{node.name}" for node in body if isinstance(node, ast.ClassDef)]
    return f" Did you mean {' or '.join(names[-3:])}?" if names else ""
