"""What classes are called, in captions and in tags: short, legal, and each one's own."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from normgrad_lightning.kinds import class_name

COMBINED = "combined"
"""The map of all layers."""

ALL, UNLABELLED = -1, -2
"""In place of a class: every image, if no class is known; images whose label is negative."""

_LONGEST = 64  # letters of a class in a tag
_CAPTION = 20  # the same in a caption


class Origin(NamedTuple):
    """Where maps come from, for tags and captions.

    Attributes:
        step: of training.
        group: what all tags begin with.
        classes: the names of the classes, if known.
    """

    step: int
    group: str
    classes: Sequence[str] | None

    def name(self, label: int) -> str:
        """What a class is called."""
        return {ALL: "all", UNLABELLED: "unlabelled"}.get(label) or class_name(label, self.classes) or str(label)

    def names(self, labels: Iterable[int]) -> dict[int, str]:
        """What classes are called; those of one name are told apart by their number."""
        return _told_apart({label: self.name(label) for label in labels}, " ")

    def captions(self, labels: Iterable[int], longest: int = _CAPTION) -> dict[int, str]:
        """The same on one short line: what stands behind it must be seen, too."""
        return _told_apart({label: _line(self.name(label), longest) or str(label) for label in labels}, " ")

    def picture_tag(self, view: str, name: str) -> str:
        """The tag of a view of one map. By its number, TensorBoard puts the combined one before those of layers."""
        return f"{self.group}/{view}/{'0_' * (name == COMBINED)}{name}"

    def tags(self, of: str, labels: Iterable[int]) -> dict[int, str]:
        """The tag of a number of each class; classes of one name are told apart by their number.

        All classes count, shown or not: a class keeps its tag from event to event.
        """
        wanted = list(labels)
        legal = {label: name or str(label) for label, name in enumerate(_legal_names(tuple(self.classes or ())))}
        others = {label: _legal(self.name(label)) for label in wanted if label not in legal}
        names = _told_apart({**legal, **others}, "_")
        return {label: f"{self.group}/{of}/{names[label]}" for label in wanted}


@lru_cache(maxsize=8)
def _legal_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_legal, names))


def _legal(name: str) -> str:
    """A name with nothing in it that a tag must not have."""
    return re.sub(r"[^\w.-]+", "_", name[:_LONGEST]).strip("_.")


def _line(name: str, longest: int) -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _told_apart(names: Mapping[int, str], link: str) -> dict[int, str]:
    """The names with their number behind those that are there twice, also after that."""
    found = dict(names)
    for _ in range(3):
        times = Counter(found.values())
        found = {label: name if times[name] == 1 else f"{name}{link}{label}" for label, name in found.items()}
    return found


def of_map(name: str) -> str:
    """What a title says of a map: its layer, without the number in its tag, or that it is of all layers."""
    return "all layers combined" if name == COMBINED else name.partition("_")[2]
