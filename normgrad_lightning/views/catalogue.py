"""The views of the package: a line for each. All else (flags, tags, checkpoints) follows from this table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views.atlas import Atlas
from normgrad_lightning.views.curves import Curves
from normgrad_lightning.views.film import Film
from normgrad_lightning.views.overview import overview
from normgrad_lightning.views.panels import panels
from normgrad_lightning.views.patches import Patches
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tab import Tab

DrawsEvent: TypeAlias = Callable[[Sequence[MapSet], Style], Page]
"""A view of one event: makes pictures, scalars or raw maps of all its map sets."""


VIEWS: dict[str, DrawsEvent | type[Any]] = {
    "overview": overview,
    "panels": panels,
    "patches": Patches,
    "atlas": Atlas,
    "curves": Curves,
    "film": Film,
    "tab": Tab,
}
"""Every view, by name, in the order to look at: a function of an event, or a class that keeps something between events.

A class has `page(map_sets, style, shown)`, which shows these classes and starts over, and may have more:

- `add(batch, style, signal)` takes what is needed of each batch that is read, of the classes in `signal`;
- `last_page(style)` makes a page for the end of training, in place of a call of `page` without map sets;
- `state_dict` and `load_state_dict`, for checkpoints.
"""

ON_REQUEST = ("panels",)
"""Views that are shown only if `views` names them."""


def collects(view: object) -> bool:
    """Return whether a view, or the class of one, needs the maps of all images, also between events."""
    return hasattr(view, "add")
