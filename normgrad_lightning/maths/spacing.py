"""Some of many: layers of all depths, events of a whole run."""

from __future__ import annotations


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return this many indices below `count`, the first and the last included; all, if there are no more."""
    gaps = max(min(count, most) - 1, 1)
    return [round(i * (count - 1) / gaps) for i in range(min(count, most))]
