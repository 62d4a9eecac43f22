"""What an event shows: pictures, scalars and raw maps. Views make a page, writers take it to a logger."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index, itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class Picture(NamedTuple):
    """An encoded picture.

    Attributes:
        tag: what it is logged under; a slash makes a group.
        jpeg: the picture as JPEG.
        height: in pixels.
        width: in pixels.
    """

    tag: str
    jpeg: bytes
    height: int
    width: int


@dataclass(frozen=True)
class Page:
    """All that one event shows. A writer takes the whole page or nothing of it.

    No tag is used twice: TensorBoard would show one of them as if it were the other.

    Attributes:
        step: of training.
        pictures: in the order to look at.
        scalars: by tag.
        maps: raw maps `(N, *S)`, float32, by tag.
        films: animated WebP pictures, by tag.
        blobs: what the NormGrad tab shows, by tag.
    """

    step: int
    pictures: Sequence[Picture] = ()
    scalars: Mapping[str, float] = field(default_factory=dict)
    maps: Mapping[str, npt.NDArray[np.floating[Any]]] = field(default_factory=dict)
    films: Mapping[str, bytes] = field(default_factory=dict)
    blobs: Mapping[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", index(self.step))
        encoded = {"pictures": [one.jpeg for one in self.pictures], "films": self.films.values()}
        for name, values in encoded.items():
            odd_kinds = [type(value).__name__ for value in values if not isinstance(value, bytes)]
            if odd_kinds:
                raise TypeError(f"`{name}`: expected encoded pictures as bytes, but got a {odd_kinds[0]}.")
        object.__setattr__(self, "scalars", {tag: float(value) for tag, value in self.scalars.items()})
        object.__setattr__(self, "maps", {tag: np.asarray(values) for tag, values in self.maps.items()})
        _check_that_each_is_there_once(self.tags)
        odd = [tag for tag in self.tags if not {"", ".", ".."}.isdisjoint(tag.split("/"))]
        if odd:
            raise ValueError(f"`tag`: expected names with single slashes between them, but got {odd[0]!r}.")

    @property
    def tags(self) -> list[str]:
        """What all of this is logged under."""
        return [*(picture.tag for picture in self.pictures), *self.scalars, *self.maps, *self.films, *self.blobs]

    @property
    def size(self) -> int:
        """About how many bytes it takes, at most: four for each value of a map, a hundred for a scalar and its tag."""
        encoded = [*(picture.jpeg for picture in self.pictures), *self.films.values(), *self.blobs.values()]
        return sum(map(len, encoded)) + sum(4 * values.size for values in self.maps.values()) + 100 * len(self.scalars)

    @classmethod
    def joined(cls, pages: Sequence[Page]) -> Page:
        """Return one page with all that these show. They belong to one step."""
        _check_that_each_is_there_once([tag for page in pages for tag in page.tags])
        return cls(
            pages[0].step,
            [picture for page in pages for picture in page.pictures],
            {tag: value for page in pages for tag, value in page.scalars.items()},
            {tag: values for page in pages for tag, values in page.maps.items()},
            {tag: film for page in pages for tag, film in page.films.items()},
            {tag: blob for page in pages for tag, blob in page.blobs.items()},
        )


def _check_that_each_is_there_once(tags: Sequence[str]) -> None:
    tag, count = max(Counter(tags).items(), key=itemgetter(1), default=("", 0))
    if count > 1:
        raise ValueError(f"`page`: expected each tag once, but got {tag!r} {count} times.")
