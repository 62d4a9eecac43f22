"""A trained model from a checkpoint of Lightning, or from a plain state dict.

Nothing in the file decides what code runs: the user names the class, and the file gives it weights and plain values.
`load_from_checkpoint` cannot be used for that: some versions import and call what a checkpoint names.
"""

from __future__ import annotations

import inspect
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning.cli.model_by_name import find, made_by
from normgrad_lightning.cli.terminal import printable

NAMES_CODE = ("_target_", "class_path", "_class_path", "_instantiator")
"""Keys of a config whose values Hydra and LightningCLI import and call."""


def load_trained(checkpoint: Path, path: str, arguments: Mapping[str, Any], *, trusted: bool = False) -> nn.Module:
    """Return the module with the weights of a checkpoint, on the CPU.

    Args:
        checkpoint: the file.
        path: `package.module:Name` or `file.py:Name` of what makes the module.
        arguments: to make it with. They override hyperparameters in the checkpoint.
        trusted: whether the file may run code, as a pickle can. Else it may hold tensors and plain values only.
    """
    maker = find(path)  # first: a trusted checkpoint may need classes of the same folder
    contents = _read(checkpoint, trusted)
    saved = {name: v for name, v in _hyperparameters(contents, maker).items() if name not in arguments}
    if not trusted and _names_code(saved):
        raise ValueError(
            f"`{checkpoint}`: its hyperparameters name code ({', '.join(NAMES_CODE)}) that `{path}` might run. If you "
            "trust it, add `--unsafe`. Or give those arguments with `--arg name=value`."
        )
    module = made_by(path, maker, {**saved, **arguments})
    for hook, given in (("configure_model", ()), ("on_load_checkpoint", (contents,))):
        if hasattr(module, hook):
            getattr(module, hook)(*given)
    try:
        module.load_state_dict(_weights(contents), strict=getattr(module, "strict_loading", True))
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"`{checkpoint}`: its weights do not fit `{path}`. If that needs other arguments, pass them with "
            f"`--arg name=value`. {' '.join(str(error).split())}"
        ) from error
    return module.cpu().float().eval()


def _read(checkpoint: Path, trusted: bool) -> dict[str, Any]:
    if not checkpoint.is_file():
        raise ValueError(f"`{checkpoint}`: the file does not exist.")
    if trusted:
        contents = torch.load(checkpoint, map_location="cpu", weights_only=False)
    else:
        try:
            _check_archive(checkpoint)
            contents = torch.load(checkpoint, map_location="cpu", weights_only=True)
        except Exception as error:  # torch has many kinds for files that are not checkpoints
            code, why = re.search(r"GLOBAL\s(\S+)", str(error)), "torch cannot read it"
            if code is not None:
                why = f"loading it would run {printable(code[1], 80)}. If you trust it, add `--unsafe`"
            raise ValueError(f"`{checkpoint}`: expected only tensors and plain values, but {why}.") from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{checkpoint}`: expected weights by name, but it holds {type(contents).__name__!r}.")
    return contents


def _check_archive(checkpoint: Path) -> None:
    """Raise for an archive that says it unpacks to more than the file is long; torch.save compresses nothing."""
    if zipfile.is_zipfile(checkpoint):
        with zipfile.ZipFile(checkpoint) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > checkpoint.stat().st_size:
                raise ValueError("a compressed archive, or one that lies")


def _weights(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Return the weights by name: Lightning's, those under the one other key that has some, or the whole file."""
    groups = [value for value in contents.values() if isinstance(value, Mapping)]
    found = [group for group in groups if group and all(isinstance(value, Tensor) for value in group.values())]
    weights = contents.get("state_dict", found[0] if len(found) == 1 else contents)
    return {str(name).replace("_orig_mod.", ""): value for name, value in dict(weights).items()}  # as if never compiled


def _hyperparameters(contents: Mapping[str, Any], maker: Any) -> dict[str, Any]:
    """Return those of the saved hyperparameters that a class of modules takes; nothing else gets any of a file."""
    saved = contents.get("hyper_parameters")
    if not saved or not (isinstance(maker, type) and issubclass(maker, nn.Module)):
        return {}
    taken, whole = inspect.signature(maker).parameters, str(contents.get("hparams_name"))
    if whole in taken and whole != "kwargs":
        return {whole: saved}
    plain = saved if isinstance(saved, Mapping) else vars(saved)  # a namespace
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return {name: v for name, v in plain.items() if name in taken or (takes_all and not name.startswith("_"))}


def _names_code(values: Any) -> bool:
    """Return whether one of `NAMES_CODE` is anywhere in these values, which may be nested or hold themselves."""
    waiting, seen = [values], set[int]()
    while waiting:
        value = waiting.pop()
        if isinstance(value, Mapping | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            if isinstance(value, Mapping) and any(name in value for name in NAMES_CODE):
                return True
            waiting.extend(value.values() if isinstance(value, Mapping) else value)
    return False
