"""`Maps`: the map of each layer, as a dict that a notebook shows as a picture."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from normgrad_lightning.maps import KINDS, MapSet

ROWS = 8
"""How many images a notebook shows."""


class Maps(dict[str, Tensor]):
    """The map `(N, *S)` of each layer, in the order of the network. A notebook shows the first images with their maps.

    It is a dict with copies of the images that are shown. Copied, pickled or saved, it is a plain `OrderedDict` without
    the images, and loads with `weights_only=True`.

    Args:
        maps: by layer.
        kind: the name of their kind.
        images_of: the images that each layer's map belongs to, `(N, C, *S)`, where they are known.

    Attributes:
        kind: the name of their kind, such as `"order0"`.
        images_of: copies of the first images that each layer's map belongs to.

    Example:
        >>> import torch
        >>> from normgrad_lightning import NormGrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
        >>> with NormGrad(model, layers=["0", "2"]) as recorder:
        ...     model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        >>> recorder.maps.kind, list(recorder.maps)
        ('order0', ['0', '2'])
    """

    def __init__(
        self,
        maps: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] = (),
        *,
        kind: str = "order0",
        images_of: Mapping[str, Tensor | None] | None = None,
    ) -> None:
        super().__init__(maps)
        self.kind = kind
        known = {name: images for name, images in (images_of or {}).items() if images is not None}
        copies = {id(images): images for images in known.values()}
        copies = {key: images.detach()[:ROWS].clone() for key, images in copies.items()}
        self.images_of = {name: copies[id(images)] for name, images in known.items()}

    def as_map_set(self) -> MapSet:
        """Return what a view takes: the maps and images that are shown, on the CPU."""
        on_cpu = {id(images): images.float().cpu() for images in self.images_of.values()}
        images_of = {name: on_cpu[id(self.images_of[name])] if name in self.images_of else None for name in self}
        shown = {name: m.detach()[:ROWS].float().cpu() for name, m in self.items()}
        return MapSet(KINDS[self.kind], 0, shown, next(iter(on_cpu.values()), None), images_of, list(self))

    def _repr_jpeg_(self) -> bytes | None:
        """Return what a notebook shows; None if the maps cannot be drawn, and then it shows the dict."""
        try:
            from normgrad_lightning.views.figure import figure_of, jpeg_of
            from normgrad_lightning.views.style import Style

            return jpeg_of(figure_of(self.as_map_set(), Style()))
        except Exception:  # a cell must not fail because of its display
            return None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())
