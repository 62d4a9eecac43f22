"""Names of classes for captions and tags: short, legal and unique."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from normgrad_lightning.maps import class_name

COMBINED = "combined"
"""The map of all layers."""

ALL, UNLABELLED = -1, -2
"""In place of a class: every image, if no class is known; images whose label is negative."""

CARDS = ("patches", "check", "probe", "atlas", "overview")
"""Cards of the Images tab, in the order to look at. The film and panels come after them: their tags have no number."""

_LONGEST = 64  # letters of a class in a tag
_CAPTION = 20  # the same in a caption


class TagNamer(NamedTuple):
    """Makes tags and captions for the maps of one step.

    Attributes:
        step: of training.
        group: what all tags begin with.
        classes: the names of the classes, if known.
    """

    step: int
    group: str
    classes: Sequence[str] | None

    def name(self, label: int) -> str:
        """Return the name of a class."""
        return {ALL: "all", UNLABELLED: "unlabelled"}.get(label) or class_name(label, self.classes) or str(label)

    def names(self, labels: Iterable[int]) -> dict[int, str]:
        """Return the names of classes; equal names get the class's number."""
        return _made_unique({label: self.name(label) for label in labels}, " ")

    def captions(self, labels: Iterable[int], longest: int = _CAPTION) -> dict[int, str]:
        """Return the same on one short line, so that what follows it fits, too."""
        return _made_unique({label: _line(self.name(label), longest) or str(label) for label in labels}, " ")

    def picture_tag(self, card: str, name: str) -> str:
        """Return the tag of a card of one map. Its number makes TensorBoard show the combined map before layers."""
        return f"{card_tag(self.group, card)}/{'0_' * (name == COMBINED)}{name}"

    def tags(self, of: str, labels: Iterable[int]) -> dict[int, str]:
        """Return the tag of each class's scalar; equal names get the class's number.

        All classes count, shown or not, so that a class has the same tag at every event.
        """
        wanted = list(labels)
        legal = {label: name or str(label) for label, name in enumerate(_legal_names(tuple(self.classes or ())))}
        others = {label: _legal(self.name(label)) for label in wanted if label not in legal}
        names = _made_unique({**legal, **others}, "_")
        return {label: f"{self.group}/{of}/{names[label]}" for label in wanted}


def card_tag(group: str, card: str) -> str:
    """Return the tag of a card, or of a group of cards. TensorBoard sorts them by their number."""
    return f"{group}/{CARDS.index(card) + 1}_{card}"


@lru_cache(maxsize=8)
def _legal_names(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_legal, names))


def _legal(name: str) -> str:
    """Return the name without what a tag must not have."""
    return re.sub(r"[^\w.-]+", "_", name[:_LONGEST]).strip("_.")


def _line(name: str, longest: int) -> str:
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in name).split())
    return line if len(line) <= longest else f"{line[: longest - 1]}…"


def _made_unique(names: Mapping[int, str], link: str) -> dict[int, str]:
    """Return the names, with their number behind those that occur twice, also after that."""
    found = dict(names)
    for _ in range(3):
        times = Counter(found.values())
        found = {label: name if times[name] == 1 else f"{name}{link}{label}" for label, name in found.items()}
    return found


def of_map(name: str) -> str:
    """Return what a title says of a map: its layer, without the number in its tag, or that it is of all layers."""
    return "all layers combined" if name == COMBINED else name.partition("_")[2]
