"""The views of a run: what they have collected since the last event, and the pages that they make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views.catalogue import VIEWS, ViewFlags, collects
from normgrad_lightning.views.class_signal import ClassSignal, IdDetector
from normgrad_lightning.views.crops import Crop
from normgrad_lightning.views.pooled_batch import Guard, pooled_batch
from normgrad_lightning.views.style import Style


class RunViews:
    """The views of a run. Those that keep something between events live as long as the run."""

    def __init__(self) -> None:
        self._kept: dict[Any, Any] = {view: view() for view in VIEWS.values() if isinstance(view, type)}
        self._signal, self._ids = ClassSignal(), IdDetector()
        self["tab"].patches, self["tab"].atlas = self["patches"], self["atlas"]

    def __getitem__(self, name: str) -> Any:
        """Return the view of the package with this name."""
        return self._kept[VIEWS[name]]

    @property
    def patches(self) -> dict[str, dict[str, list[Crop]]]:
        """The latest patches by map and class, the strongest first."""
        shown: dict[str, dict[str, list[Crop]]] = self["patches"].shown
        return shown

    def add(self, batch: MapSet, style: Style, flags: ViewFlags, guard: Guard = nullcontext) -> None:
        """Let the views that collect take what they need of a batch."""
        are_ids = self._ids.are_ids(batch)
        pooled = pooled_batch(replace(batch, labels=None) if are_ids else batch, guard=guard)
        if pooled is None:
            return
        if are_ids:
            self._signal.forget_classes()
        self._signal.add(pooled)
        for name, view in flags.chosen.items():
            if collects(view):
                with guard(f"collecting {name}"):
                    self._of_run(view).add(_unspoilt(pooled, view), style, self._signal.totals)

    def pages(
        self, map_sets: Sequence[MapSet], style: Style, flags: ViewFlags, guard: Guard = nullcontext
    ) -> list[Page]:
        """Return what the views make of an event, a page for each that has something to show."""
        pages: list[Page] = []
        for name, chosen in flags.chosen.items():
            with guard(f"drawing {name}"):
                view = self._of_run(chosen)
                draws = partial(view.page, shown=self._signal.shown) if hasattr(view, "page") else view
                pages += _checked(draws(_unspoilt(map_sets, chosen), style), pages)
        self._signal.halve()
        return pages

    def last_pages(self, style: Style, flags: ViewFlags, guard: Guard = nullcontext) -> list[Page]:
        """Return what is shown at the end of training, or where it breaks off: also what was collected last."""
        pages: list[Page] = []
        for name, chosen in flags.chosen.items():
            with guard(f"making the {name}"):
                view = self._of_run(chosen)
                if hasattr(view, "last_page"):
                    pages += _checked(view.last_page(style), pages)
                elif collects(view):
                    pages += _checked(view.page([], style, self._signal.shown), pages)
        return pages

    def _of_run(self, view: Any) -> Any:
        """Return a view as it is called; of a class, the one of this run."""
        if isinstance(view, type) and view not in self._kept:
            self._kept[view] = view()
        return self._kept.get(view, view)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: what the views of the package compare with."""
        states = [view.state_dict() for view in self._of_package() if hasattr(view, "state_dict")]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint."""
        for view in self._of_package():
            if hasattr(view, "load_state_dict"):
                view.load_state_dict(state)

    def _of_package(self) -> list[Any]:
        return [self._kept[view] for view in VIEWS.values() if view in self._kept]


def _unspoilt(seen: Any, view: Any) -> Any:
    """Return what a view gets: one that is not of the package may write into it, so it gets a copy."""
    return seen if view in VIEWS.values() else deepcopy(seen)


def _checked(page: Any, before: Sequence[Page]) -> list[Page]:
    """Return the page of a view, if there is one. A view may be somebody else's: it costs only its own page."""
    if page is None:
        return []
    if not isinstance(page, Page):
        raise TypeError(f"Expected a `Page` or None from a view, but got a {type(page).__name__}.")
    taken = {tag for one in before for tag in one.tags}.intersection(page.tags)
    if taken:
        raise ValueError(f"`page`: expected tags that no other view has, but got {min(taken)!r}.")
    return [page]
