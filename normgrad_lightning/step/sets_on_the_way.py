"""Sets of maps on their way to the host: whoever has them goes on at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from normgrad_lightning.hooks.to_host import OnTheWay
from normgrad_lightning.maps import MapSet

Key = TypeVar("Key")


class SetsOnTheWay:
    """Copies of sets of maps as they are now. Training may write into its images and maps afterwards.

    Args:
        sets: wherever their tensors are.
    """

    def __init__(self, sets: Sequence[MapSet] = ()) -> None:
        self._sets = sets
        tensors = {id(t): t for one in sets for t in _tensors(one)}
        self._keys = list(tensors)
        self._copy = OnTheWay(list(tensors.values()))

    def arrived(self) -> list[MapSet]:
        """Return the sets on the CPU."""
        here = dict(zip(self._keys, self._copy.arrived(), strict=True))

        def of(t: Tensor | None) -> Tensor | None:
            return None if t is None else here[id(t)]

        def all_of(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
            return {key: here[id(t)] for key, t in tensors.items()}

        return [
            replace(
                one,
                maps=all_of(one.maps),
                images=of(one.images),
                images_of={layer: of(images) for layer, images in one.images_of.items()},
                labels=here[id(one.labels)].tolist() if isinstance(one.labels, Tensor) else one.labels,
                masks=of(one.masks),
                sums=all_of(one.sums),
                largest=all_of(one.largest),
            )
            for one in self._sets
        ]


def _tensors(one: MapSet) -> Iterator[Tensor]:
    for t in (one.images, one.labels, one.masks, *one.images_of.values()):
        if isinstance(t, Tensor):
            yield t
    for tensors in (one.maps, one.sums, one.largest):
        yield from tensors.values()
