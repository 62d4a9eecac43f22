"""From the maps of an event to its page: the table of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from normgrad_lightning.kinds import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.overview import overview
from normgrad_lightning.views.panels import panels

View = Callable[[Sequence[MapSet], Look], Page]
"""Makes pictures, scalars or raw maps of all map sets of an event."""

VIEWS: dict[str, View] = {"overview": overview, "panels": panels}
"""Every view, by name, in the order to look at."""


def pages_of(
    map_sets: Sequence[MapSet],
    look: Look,
    shows: Callable[[str], bool] = bool,
    guard: Callable[[str], AbstractContextManager[Any]] = nullcontext,
) -> list[Page]:
    """What the views make of an event, each a page.

    Args:
        map_sets: all that was seen.
        look: how pictures look.
        shows: whether a view is on, by its name.
        guard: a context for each view, made of what it does: it may stop an exception, and the other views go on.
    """
    pages = []
    for name, view in VIEWS.items():
        if shows(name):
            with guard(f"drawing {name}"):
                pages.append(view(map_sets, look))
    return pages
