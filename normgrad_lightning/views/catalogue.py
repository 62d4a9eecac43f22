"""The views of the package: a line for each. The flag `views`, tags and checkpoints follow from this table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from normgrad_lightning.checks import check_choices
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


if TYPE_CHECKING:
    View: TypeAlias = str | Callable[..., Any]
else:
    View = Literal[tuple(VIEWS)]  # what command lines and configs can say; a function can be given in code only


def collects(view: object) -> bool:
    """Return whether a view, or the class of one, needs the maps of all images, also between events."""
    return hasattr(view, "add")


@dataclass(frozen=True)
class ViewFlags:
    """What is shown; see `NormGradCallback`."""

    views: View | Sequence[View] | None = None

    def __post_init__(self) -> None:
        if self.views is None:
            return
        views: Any = [self.views] if isinstance(self.views, str) or _is_given(self.views) else self.views
        own = [view for view in views if _is_given(view)] if isinstance(views, Sequence) else []
        for view in own:
            _check_given(view)
        named = [view for view in views if view not in own] if own else views
        if named or not own:
            check_choices("views", named, VIEWS)
        names = [name_of(view) for view in views]
        if len(set(names)) < len(names):
            raise ValueError(f"`views`: expected each name once, but got {', '.join(names)}.")
        object.__setattr__(self, "views", tuple(views))

    @property
    def chosen(self) -> dict[str, Any]:
        """The views to show, by name: functions and classes of the package, and those given in code."""
        if self.views is None:
            return {name: view for name, view in VIEWS.items() if name not in ON_REQUEST}
        views = tuple(self.views)  # type: ignore[arg-type]
        own = {name_of(view): view for view in views if _is_given(view)}
        return {name: view for name, view in VIEWS.items() if name in views} | own

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the views; None: those of all. A function may have another address in the next run."""
        return None if self.views is None else tuple(map(name_of, self.views))  # type: ignore[arg-type]

    @property
    def collects(self) -> bool:
        """Whether a view needs the maps of all images, also between events."""
        return any(map(collects, self.chosen.values()))


def _is_given(view: object) -> bool:
    """Return whether this is a view, or what should be one, that was given in code."""
    return callable(view) or hasattr(view, "page")


def _check_given(view: Any) -> None:
    """Raise if what was given in code cannot be called as a view is."""
    is_class, has_page = isinstance(view, type), callable(getattr(view, "page", None))
    try:
        if is_class or not has_page:
            signature(view).bind(*(() if is_class else ((), None)))
        is_view = has_page or not is_class
    except (TypeError, ValueError):
        is_view = False
    if not is_view:
        raise ValueError(
            "`views`: expected names, functions of `(map_sets, style)`, objects that have a method "
            f"`page(map_sets, style, shown)`, or classes of these, but got {view!r}."
        )


def name_of(view: object) -> str:
    """Return what to call a view: one that was given in code has the name of its function or class."""
    return view if isinstance(view, str) else str(getattr(view, "__name__", type(view).__name__))
