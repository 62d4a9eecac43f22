"""How pictures look: the flags of `NormGradCallback` and `log_maps`, with their defaults and checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from normgrad_lightning.checks import (
    check_choice,
    check_choices,
    check_names,
    check_normalisation,
    check_opacity,
    check_whole,
)
from normgrad_lightning.views.colours import SIGNED_COLORMAP, check_colormap

Scale = Literal["robust", "image", "shared"]
"""Each map smoothed and without its most extreme values; each from its minimum to its maximum; all on one scale."""

View = Literal["overview", "panels", "patches", "atlas", "curves", "film"]
"""What can be shown: see the tables `VIEWS` and `COLLECTED_VIEWS`; the film is made at the end."""

_OF_SHOWN_IMAGES = ("overview", "panels", "film")
"""Views of the images that an event shows. All others collect from whole batches."""

Statistic: TypeAlias = float | Sequence[float] | None


@dataclass(frozen=True)
class Look:
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

    def colormap_of(self, *, signed: bool) -> str:
        """The colour map for these maps: signed ones have a diverging one, whatever the flag says."""
        return SIGNED_COLORMAP if signed else self.colormap


@dataclass(frozen=True)
class Draw:
    """What is shown; see `NormGradCallback`."""

    views: View | Sequence[View] | None = None
    patch_layers: str | Sequence[str] = ("combined", "last")

    def __post_init__(self) -> None:
        views = [self.views] if isinstance(self.views, str) else self.views
        if views is not None:
            check_choices("views", views, get_args(View))
        layers = [self.patch_layers] if isinstance(self.patch_layers, str) else self.patch_layers
        check_names("patch_layers", layers, "map")
        object.__setattr__(self, "views", None if views is None else tuple(views))
        object.__setattr__(self, "patch_layers", tuple(layers))

    @property
    def collects(self) -> bool:
        """Whether a view needs the maps of all images, also between events."""
        return any(self.shows(view) for view in get_args(View) if view not in _OF_SHOWN_IMAGES)

    def shows(self, view: str) -> bool:
        """Whether a view is on."""
        return self.views is None or view in self.views
