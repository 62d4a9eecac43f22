"""`Maps`: the map of each layer, as a dict that a notebook shows as a picture."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any
from weakref import ref

from torch import Tensor
from torch.utils import _pytree

from normgrad_lightning.kinds import KINDS, MapSet

ROWS = 8
"""How many images a notebook shows."""

_RESULTS = 16
"""How many results keep copies of their images, the latest ones: those that are collected in a loop would add up."""

_with_copies: deque[ref[Maps]] = deque()


class Maps(dict[str, Tensor]):
    """The map `(N, *S)` of each layer, in the order of the network. A notebook shows the first images with their maps.

    It is a dict. Pickled or saved, it is a plain `OrderedDict` without the images, and loads with `weights_only=True`.
    It refers to the images weakly: they belong to the recorder, or to the caller.

    Args:
        maps: by layer.
        kind: the name of their kind.
        images_of: the images that each layer's map belongs to, `(N, C, *S)`, where they are known.

    Attributes:
        kind: the name of their kind, such as `"order0"`.

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
        self._images_of = {name: ref(images) for name, images in known.items()}
        self._copies: list[Tensor] = []

    def keep_images(self) -> Maps:
        """These maps with copies of the images that a notebook shows, for when their owner is gone.

        Only the latest results keep theirs; older ones are shown without images.
        """
        copies = dict[int, Tensor]()
        for name, weak in self._images_of.items():
            images = weak()
            if images is not None:
                copy = copies.setdefault(id(images), images.detach()[:ROWS].clone())
                self._images_of[name] = ref(copy)
        self._copies = list(copies.values())
        _with_copies.append(ref(self))
        while len(_with_copies) > _RESULTS:
            oldest = _with_copies.popleft()()
            if oldest is not None:
                oldest._copies = []
        return self

    def as_map_set(self) -> MapSet:
        """What a view takes: the maps and images that are shown, on the CPU."""
        on_cpu = dict[int, Tensor]()
        images_of = dict[str, Tensor | None]()
        for name in self:
            images = self._images_of.get(name, _nothing)()
            if images is not None:
                images = on_cpu.setdefault(id(images), images.detach()[:ROWS].float().cpu())
            images_of[name] = images
        shown = {name: m.detach()[:ROWS].float().cpu() for name, m in self.items()}
        first = next(iter(on_cpu.values()), None)
        return MapSet(KINDS[self.kind], 0, shown, first, images_of, list(self))

    def _repr_jpeg_(self) -> bytes | None:
        """What a notebook shows; None if the maps cannot be drawn, and then it shows the dict."""
        try:
            from normgrad_lightning.views.figure import figure_of, jpeg_of
            from normgrad_lightning.views.look import Look

            return jpeg_of(figure_of(self.as_map_set(), Look()))
        except Exception:  # a cell must not fail because of its display
            return None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return OrderedDict, (), None, None, iter(self.items())

    def __copy__(self) -> Maps:
        return self._with(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Maps:
        return self._with({name: deepcopy(m, memo) for name, m in self.items()})

    def _with(self, maps: Mapping[str, Tensor]) -> Maps:
        """Other maps of the same images."""
        other = Maps(maps, kind=self.kind)
        other._images_of, other._copies = dict(self._images_of), list(self._copies)
        return other


def _nothing() -> None:
    return None


# torch's `tree_map` takes a dict apart, but not a subclass that it does not know.
_pytree.register_pytree_node(
    Maps,
    lambda maps: (list(maps.values()), (tuple(maps), maps.kind)),
    lambda values, context: Maps(zip(context[0], values, strict=True), kind=context[1]),
)
