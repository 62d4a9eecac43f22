"""All models of the zoo, by library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from importlib import import_module

from zoo.member import Member

LIBRARIES = {
    "timm": "timm",
    "transformers": "transformers",
    "smp": "segmentation_models_pytorch",
    "monai": "monai",
    "torchvision": "torchvision",
    "diffusers": "diffusers",
}
"""The module to import, by the name that models have in the table."""


def members(libraries: Iterable[str] = LIBRARIES) -> Iterator[Member]:
    """The models of these libraries; nothing of a library is imported before its models are built."""
    for library in libraries:
        of_library: Callable[[], Iterator[Member]] = import_module(f"zoo.of_{library}").members
        yield from of_library()


def member(name: str) -> Member:
    """The model of this name."""
    return next(one for one in members([name.partition("/")[0]]) if one.name == name)
