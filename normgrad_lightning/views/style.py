"""How pictures look: the flags of `NormGradCallback` and `log_maps`, with their defaults and checks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from normgrad_lightning.checks import check_choice, check_normalisation, check_opacity, check_whole

SIGNED_COLORMAP = "matplotlib:coolwarm"
"""For signed maps: red above zero, blue below."""

Scale = Literal["robust", "image", "shared"]
"""Each map smoothed and without its most extreme values; each from its minimum to its maximum; all on one scale."""

Statistic: TypeAlias = float | Sequence[float] | None


@dataclass(frozen=True)
class Style:
    """How pictures look; see `NormGradCallback`."""

    mean: Statistic = None
    std: Statistic = None
    colormap: str = "inferno"
    opacity: float = 0.6
    scale: Scale = "robust"
    tile_size: int = 128

    def __post_init__(self) -> None:
        check_normalisation(self.mean, self.std)
        check_colormap(self.colormap)
        check_opacity(self.opacity)
        check_choice("scale", self.scale, get_args(Scale))
        check_whole("tile_size", self.tile_size, 16)

    @property
    def colours(self) -> str:
        """What captions say of an image's colours: whether they are as before the normalisation."""
        return "stretched colours" if self.mean is None and self.std is None else "true colours"

    def colormap_of(self, *, signed: bool) -> str:
        """Return the colour map for these maps: signed ones have a diverging one, whatever the flag says."""
        return SIGNED_COLORMAP if signed else self.colormap


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
