"""Views that collect over many steps: the table of them, and what is read for all of them once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from normgrad_lightning.kinds import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views.atlas import Atlas
from normgrad_lightning.views.class_signal import ClassSignal
from normgrad_lightning.views.coarse import Coarse, Guard, coarse
from normgrad_lightning.views.curves import Curves, Drift
from normgrad_lightning.views.look import Draw, Look
from normgrad_lightning.views.patches import Crop, Patches


class CollectedView(Protocol):
    """A view that is shown at events, of all batches since the event before."""

    def add(self, batch: Coarse, look: Look, signal: Mapping[int, float]) -> None:
        """Take what is needed of a batch. `signal` has the classes that anything is kept of."""

    def page(self, shown: Sequence[int], look: Look) -> Page | None:
        """What to show, of these classes; what was collected is over with it. None if there is nothing."""


COLLECTED_VIEWS: dict[str, Callable[[], CollectedView]] = {"patches": Patches, "atlas": Atlas, "curves": Curves}
"""Every such view, by name, in the order to look at."""


class Collected:
    """What is collected between events.

    Attributes:
        views: those of the table, by name.
    """

    def __init__(self) -> None:
        self.views = {name: view() for name, view in COLLECTED_VIEWS.items()}
        self._signal = ClassSignal()
        self._drift = Drift()

    @property
    def patches(self) -> dict[str, dict[str, list[Crop]]]:
        """The latest patches by map and class, the strongest first."""
        view = self.views["patches"]
        return view.shown if isinstance(view, Patches) else {}

    def add(self, batch: MapSet, look: Look, draw: Draw, guard: Guard) -> None:
        """Let the views that are on take what they need of a batch."""
        found = coarse(batch, draw.patch_layers, guard)
        if found is None:
            return
        self._signal.add(found)
        for name in self._wanted(draw):
            with guard(f"collecting {name}"):
                self.views[name].add(found, look, self._signal.totals)

    def pages(self, map_sets: Sequence[MapSet], look: Look, draw: Draw, guard: Guard) -> list[Page]:
        """What the views that are on show at an event."""
        pages: list[Page | None] = []
        for name in self._wanted(draw):
            with guard(f"drawing {name}"):
                pages.append(self.views[name].page(self._signal.shown, look))
        if draw.shows("curves"):
            with guard("drawing the drift of a probe"):
                pages.append(self._drift.page(map_sets))
        self._signal.begin_anew()
        return [page for page in pages if page is not None]

    def _wanted(self, draw: Draw) -> list[str]:
        return [name for name in self.views if draw.shows(name)]

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run compares with."""
        states = [view.state_dict() for view in self.views.values() if hasattr(view, "state_dict")]
        return {name: value for state in states for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        for view in self.views.values():
            if hasattr(view, "load_state_dict"):
                view.load_state_dict(state)
