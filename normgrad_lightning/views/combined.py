"""All depths in one map, for pictures."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from normgrad_lightning.functional import combine
from normgrad_lightning.views.drawing import plane
from normgrad_lightning.views.resampling import FINEST, Floats, shrunk
from normgrad_lightning.views.scales import wide


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
