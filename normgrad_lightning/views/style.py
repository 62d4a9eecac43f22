"""How pictures look: the flags of `NormGradCallback` and `log_maps`, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from normgrad_lightning.checks import check_choice, check_normalisation, check_opacity, check_whole
from normgrad_lightning.views.colours import SIGNED_COLORMAP, check_colormap

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
