"""Which views a run has: the flag `views`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from normgrad_lightning.checks import check_choices
from normgrad_lightning.views.catalogue import ON_REQUEST, VIEWS, collects

if TYPE_CHECKING:
    View: TypeAlias = str | Callable[..., Any]
else:
    View = Literal[tuple(VIEWS)]  # what command lines and configs can say; a function can be given in code only


@dataclass(frozen=True)
class ViewFlags:
    """What is shown; see `NormGradCallback`."""

    views: View | Sequence[View] | None = None

    def __post_init__(self) -> None:
        if self.views is None:
            return
        views: Any = [self.views] if isinstance(self.views, str) or callable(self.views) else self.views
        own = [view for view in views if callable(view)] if isinstance(views, Sequence) else []
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
        own = {name_of(view): view for view in views if callable(view)}
        return {name: view for name, view in VIEWS.items() if name in views} | own

    @property
    def names(self) -> tuple[str, ...] | None:
        """The names of the views; None: those of all. A function may have another address in the next run."""
        return None if self.views is None else tuple(map(name_of, self.views))  # type: ignore[arg-type]

    @property
    def collects(self) -> bool:
        """Whether a view needs the maps of all images, also between events."""
        return any(map(collects, self.chosen.values()))


def _check_given(view: Callable[..., Any]) -> None:
    """Raise if what was given in code cannot be called as a view is: a function of an event, or a class with `page`."""
    is_class = isinstance(view, type)
    try:
        signature(view).bind(*(() if is_class else ((), None)))
        is_view = not is_class or callable(getattr(view, "page", None))
    except (TypeError, ValueError):
        is_view = False
    if not is_view:
        raise ValueError(
            f"`views`: expected names, functions of `(map_sets, style)`, or classes that have a method `page` and can "
            f"be made without arguments, but got {view!r}."
        )


def name_of(view: object) -> str:
    """Return what to call a view: one that was given in code has the name of its function or class."""
    return view if isinstance(view, str) else str(getattr(view, "__name__", type(view).__name__))
