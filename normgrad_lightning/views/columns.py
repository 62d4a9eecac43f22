"""The columns of a table of images: the map of all depths combined, and the map of each layer, over the images."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from normgrad_lightning.functional import combine
from normgrad_lightning.views.drawing import Pixels, overlays, plane
from normgrad_lightning.views.resampling import FINEST, Floats, shrunk
from normgrad_lightning.views.scales import wide
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tag_namer import COMBINED


def columns_of(
    greys: npt.NDArray[np.uint8],
    maps: Mapping[str, npt.NDArray[Any]],
    style: Style,
    *,
    signed: bool = False,
    shown: Sequence[str] | None = None,
) -> dict[str, Pixels]:
    """Return what each column shows, `(N, H, W, 4)`: the combined map of several layers first, unless signed.

    Args:
        greys: `(N, H, W)`, from `greys_of`.
        maps: `(N, *S)` of each layer, for the same images.
        style: how they look.
        signed: as for `overlays`.
        shown: the layers that have a column; None: all.
    """
    columns = {layer: maps[layer] for layer in (maps if shown is None else shown)}
    if len(maps) > 1 and not signed:
        columns = {COMBINED: combined_planes(maps.values(), *greys.shape[1:]), **columns}
    return {name: overlays(greys, of_column, style, signed=signed) for name, of_column in columns.items()}


def combined_planes(maps: Iterable[Floats], height: int, width: int) -> Floats:
    """Return `functional.combine` of what is drawn of the layers' maps, `(N, h, w)`.

    Args:
        maps: `(N, *S)` of each layer, for the same images.
        height: of the picture that they are for; only the aspect counts.
        width: of the picture.
    """
    zoom = FINEST / max(height, width)
    size = max(1, round(height * zoom)), max(1, round(width * zoom))
    planes = [torch.from_numpy(shrunk(plane(wide(m)))) for m in maps]
    together: Floats = combine(planes, size).numpy()
    return together
