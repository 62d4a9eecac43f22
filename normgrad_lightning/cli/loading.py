"""From the words of a command line to modules, trained weights and images."""

from __future__ import annotations

import ast
import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor, nn

from normgrad_lightning.cli.finding import find
from normgrad_lightning.cli.hyperparameters import class_path


def arguments(texts: Sequence[str]) -> dict[str, Any]:
    """The arguments that are written as `name=value`; a value that is no Python literal is text."""
    pairs = dict[str, Any]()
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name.isidentifier()):
            raise ValueError(f"`--arg`: expected name=value, but got {text!r}.")
        try:
            pairs[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            pairs[name] = value
    return pairs


def build(path: str, arguments: Mapping[str, Any]) -> nn.Module:
    """The module that a class or a function makes of these arguments; a module is itself."""
    return _made(path, find(path), arguments)


def _made(path: str, found: Any, arguments: Mapping[str, Any]) -> nn.Module:
    if isinstance(found, nn.Module) and arguments:
        raise ValueError(f"`--arg`: `{path}` is a module already, and takes no arguments.")
    if not callable(found) or isinstance(found, nn.Module):
        return _checked(path, found)
    try:
        _signature(found).bind(**arguments)
    except TypeError as error:
        raise ValueError(f"`{path}`: {error}. `--arg name=value` gives an argument.") from error
    return _checked(path, found(**arguments))


def _signature(maker: Callable[..., Any]) -> inspect.Signature:
    """The arguments that it takes; any, if that cannot be inspected."""
    try:
        return inspect.signature(maker)
    except ValueError:
        return inspect.signature(lambda **_: None)


def _checked(path: str, module: Any) -> nn.Module:
    if not isinstance(module, nn.Module):
        raise ValueError(f"`{path}`: expected a torch.nn.Module or what makes one, but got {type(module).__name__!r}.")
    return module


SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
"""How names of checkpoints end, usually."""


def is_checkpoint(text: str) -> bool:
    """Whether this names a file with weights, and not `package.module:Name` or `file.py:Name`."""
    path = Path(text)
    is_named_so = path.suffix in SUFFIXES and ":" not in path.name
    return is_named_so or (path.is_file() and path.suffix != ".py")


def load_trained(
    checkpoint: Path, path: str | None, arguments: Mapping[str, Any], *, trusted: bool = False
) -> nn.Module:
    """The module of `load_with_contents`."""
    return load_with_contents(checkpoint, path, arguments, trusted=trusted)[0]


def load_with_contents(
    checkpoint: Path, path: str | None, arguments: Mapping[str, Any], *, trusted: bool = False
) -> tuple[nn.Module, dict[str, Any]]:
    """A module with the weights of a Lightning checkpoint or of a plain state dict, on the CPU, and all of the file.

    Not by `load_from_checkpoint`: in some versions it imports and calls what a checkpoint names.

    Args:
        checkpoint: the file.
        path: `package.module:Name` or `file.py:Name` of what makes the module; None: what the checkpoint names, if that
            is trusted.
        arguments: to make it with; they override hyperparameters in the checkpoint.
        trusted: whether the file may run code, as a pickle can; else it may hold only tensors and plain values.
    """
    maker = None if path is None else find(path)  # first: the checkpoint may need classes of the same folder
    contents = _read(checkpoint, trusted)
    if path is None:
        path = _named_by(checkpoint, contents, trusted)
        maker = find(path)
    module = _made(path, maker, {**_hyperparameters(contents, maker), **arguments})
    for hook, given in (("configure_model", ()), ("on_load_checkpoint", (contents,))):
        if hasattr(module, hook):
            getattr(module, hook)(*given)
    try:
        module.load_state_dict(_weights(contents), strict=getattr(module, "strict_loading", True))
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"`{checkpoint}`: its weights do not fit `{path}`. If that needs other arguments, pass them with "
            f"`--arg name=value`. {error}"
        ) from error
    return module.cpu().float().eval(), contents


def _named_by(checkpoint: Path, contents: Mapping[str, Any], trusted: bool) -> str:
    """The class that a checkpoint names, if it is trusted: its code would run."""
    path = class_path(contents)
    if path is None:
        raise ValueError(
            f"`{checkpoint}`: it holds weights, but not the class of the model. Add the class that was trained: "
            "`--module train.py:LitModel`."
        )
    if not trusted:
        raise ValueError(
            f"`{checkpoint}`: it names the class of the model, but importing that would execute code that the file "
            f"chooses. If you know the class, add `--module {path}`."
        )
    return path


def _read(checkpoint: Path, trusted: bool) -> dict[str, Any]:
    if checkpoint.is_dir() or not checkpoint.exists():
        raise ValueError(f"`{checkpoint}`: {'this is a folder' if checkpoint.is_dir() else 'there is no such file'}.")
    try:
        contents = torch.load(checkpoint, map_location="cpu", weights_only=not trusted)
    except Exception as error:  # torch has many kinds for what is no checkpoint
        refused = re.search(r"GLOBAL\s(\S+)", str(error))
        if refused is not None:
            raise ValueError(
                f"`{checkpoint}`: it holds more than tensors and plain values: {refused[1]}. Loading it would "
                "execute code from the file. If you trust it, add `--unsafe`."
            ) from error
        if trusted and isinstance(error, ImportError | AttributeError):
            raise
        raise ValueError(f"`{checkpoint}`: torch cannot read this file as a checkpoint.") from error
    if not isinstance(contents, dict):
        raise ValueError(f"`{checkpoint}`: expected weights by name, but it holds {type(contents).__name__!r}.")
    return contents


def _weights(contents: Mapping[str, Any]) -> dict[str, Any]:
    """Its weights by name: Lightning's, those under whatever other key, or all of it."""
    found = [value for value in contents.values() if _are_weights(value)]
    weights = contents.get("state_dict", found[0] if len(found) == 1 else contents)
    return {name.replace("_orig_mod.", ""): value for name, value in weights.items()}  # as if never compiled


def _are_weights(value: Any) -> bool:
    return isinstance(value, Mapping) and bool(value) and all(isinstance(t, Tensor) for t in value.values())


def _hyperparameters(contents: Mapping[str, Any], maker: Any) -> dict[str, Any]:
    """Of what a LightningModule was made with, what its `__init__` takes."""
    saved = contents.get("hyper_parameters")
    if not saved or not callable(maker) or isinstance(maker, nn.Module):
        return {}
    taken = _signature(maker).parameters
    whole = str(contents.get("hparams_name"))
    if whole in taken and whole != "kwargs":
        return {whole: saved}
    if not isinstance(saved, Mapping):
        saved = vars(saved)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    return {name: value for name, value in saved.items() if name in taken or (takes_all and not name.startswith("_"))}


def channels_of(module: nn.Module) -> int:
    """How many channels the first convolution takes: 1, or else 3."""
    convolutions = (layer for layer in module.modules() if isinstance(layer, nn.Conv2d))
    first = next(convolutions, None)
    return 1 if first is not None and first.in_channels == 1 else 3


def load_images(
    paths: Sequence[Path],
    *,
    channels: int = 3,
    size: Sequence[int] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> Tensor:
    """Pictures as a network wants them, `(N, C, H, W)`: from 0 to 1, then normalised.

    Args:
        paths: the files.
        channels: 3 for colours, 1 for grey.
        size: height and width to bring them to; None: as they are.
        mean: for each channel, or one for all.
        std: for each channel, or one for all.
    """
    for name, values in (("mean", mean), ("std", std)):
        if values is not None and not all(map(math.isfinite, values)):
            raise ValueError(f"`--{name}`: expected finite numbers, but got {values}.")
        if values is not None and len(values) not in (1, channels):
            raise ValueError(f"`--{name}`: expected one number or {channels}, as the channels, but got {len(values)}.")
    if std is not None and min(std) <= 0:
        raise ValueError(f"`--std`: expected positive numbers, but got {min(std):g}.")
    pictures = [_picture(path, channels, size) for path in paths]
    sizes = {tuple(picture.shape) for picture in pictures}
    if len(sizes) > 1:
        seen = ", ".join(f"{height}x{width}" for _, height, width in sorted(sizes))
        raise ValueError(f"`--size`: the images differ in size ({seen}), so it is needed: HEIGHTxWIDTH.")
    shift, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean or [0.0], std or [1.0]))
    return (torch.stack(pictures) - shift) / scale


def _picture(path: Path, channels: int, size: Sequence[int] | None) -> Tensor:
    try:
        with Image.open(path) as file:
            image = _of_8_bits(path, file).convert("RGB" if channels == 3 else "L")
    except FileNotFoundError as error:
        raise ValueError(f"`{path}`: there is no such file.") from error
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"`{path}`: this is no image that Pillow can read.") from error
    if size is not None:
        image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
    values = torch.from_numpy(np.array(image, np.float32) / 255.0)
    return values.reshape(*values.shape[:2], -1).permute(2, 0, 1)


def _of_8_bits(path: Path, image: Image.Image) -> Image.Image:
    """The image, or one like it that Pillow can convert: it would clip what is above 255."""
    if image.mode == "F":
        raise ValueError(f"`{path}`: expected whole numbers for pixels, but they are floating-point.")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    return image
