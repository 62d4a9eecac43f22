"""Colour maps, by the names of the cmap package."""

import difflib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

SIGNED_COLORMAP = "matplotlib:coolwarm"
"""For signed maps: red above zero, blue below."""


def check_colormap(name: str) -> None:
    """Raise a ValueError that suggests near misses if `name` is not a colour map of the cmap package."""
    if not isinstance(name, str):
        raise ValueError(f"`colormap`: expected the name of a colour map in the cmap package, but got {name!r}.")
    colours_of(name)


@lru_cache(maxsize=8)
def colours_of(name: str) -> npt.NDArray[np.float32]:
    """Return the 256 colours of a map, `(256, 3)` in [0, 1]."""
    import cmap

    try:
        colours = cmap.Colormap(name).lut(256)
    except (ValueError, TypeError) as error:
        known = sorted({key.rpartition(":")[2] for key in cmap.Catalog()})
        near = difflib.get_close_matches(str(name).lower(), known)
        hint = f"Did you mean {' or '.join(map(repr, near))}?" if near else "Try 'inferno' or 'viridis'."
        raise ValueError(
            f"`colormap`: expected the name of a colour map in the cmap package, but got {name!r}. {hint}"
        ) from error
    return np.ascontiguousarray(colours[:, :3], dtype=np.float32)
