"""The model that a user names: `package.module:Name`, or `path/to/file.py:Name`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from normgrad_lightning.auto_layers.candidates import has_weights

_NO_FORWARD = ("_forward_unimplemented", "LightningModule.forward")
"""What a module has that does all in its `training_step`: it is called as its one part with weights is."""


def find(path: str) -> Any:
    """Return the object that `package.module:Name` or `file.py:Name` names, seen from the current folder."""
    where, _, name = path.rpartition(":")
    if not (where and name):
        raise ValueError(
            f"`{path}`: expected package.module:Name or file.py:Name, such as torchvision.models:resnet18 or "
            "train.py:LitModel. A checkpoint needs `--module`."
        )
    file = Path(where).expanduser().resolve()
    sys.path[:0] = [str(file.parent), str(Path.cwd())]
    found: Any = _module_in(file) if file.suffix == ".py" else import_module(where)
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found))
            raise ValueError(f"`{path}`: there is no {part!r}.{f' Did you mean {near[0]}?' if near else ''}")
        found = getattr(found, part)
    return found


def _module_in(file: Path) -> ModuleType:
    """Return the module in a file of any name, also one that cannot be imported or that another module has."""
    name = file.stem if file.stem not in sys.modules else str(file)
    spec = spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(name)
    module = sys.modules[name] = module_from_spec(spec)  # where pickles look for its classes
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(
            f"`{file.name}`: running it ends with {type(error).__name__}: {error}. It is run to find the model in it: "
            "put what a script does besides under `if __name__ == '__main__':`."
        ) from error
    return module


def made_by(path: str, maker: Any, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the module that the class or function named `path` makes of these arguments; a module is itself."""
    module = maker
    if callable(maker) and not isinstance(maker, nn.Module):
        try:
            module = maker(**arguments)
        except TypeError as error:
            raise ValueError(f"`{path}`: {error}. `--arg name=value` gives an argument.") from error
    elif arguments:
        raise ValueError(f"`--arg`: `{path}` is made already and takes no arguments.")
    if not isinstance(module, nn.Module):
        raise ValueError(f"`{path}`: expected a torch.nn.Module or what makes one, but got {type(module).__name__!r}.")
    if type(module).forward.__qualname__ in _NO_FORWARD:
        parts = [part for part in module.children() if has_weights(part)]
        if len(parts) == 1:
            vars(module)["forward"] = parts[0].__call__
    return module
