"""What outlives a `fit`: what a checkpoint carries of a run, and the latest maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from normgrad_lightning.check.for_tab import check_for_tab
from normgrad_lightning.check.rounds import Check
from normgrad_lightning.maps import MapSet
from normgrad_lightning.step.budget import Budget
from normgrad_lightning.step.image_choice import ImageChoice
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.probe_images import ProbeImages
from normgrad_lightning.step.schedule import Schedule
from normgrad_lightning.tensorboard_tab import event
from normgrad_lightning.views.run_views import RunViews
from normgrad_lightning.views.style import Style


class RunState:
    """The state of a run between steps, and after it.

    Args:
        messenger: for warnings.

    Attributes:
        schedule: which steps were events.
        budget: what they have cost.
        choice: chooses the images to show.
        probe_images: the images that are followed through training.
        views: what they have collected.
        check: what covering and pasting has shown.
        latest: the latest maps of every kind.
        skipped: how often an event lacked maps because gradients were not finite.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.choice = ImageChoice()
        self.probe_images = ProbeImages(messenger)
        self.start_over()
        self.forget_maps()

    def start_over(self) -> None:
        """Forget the run before. The choice of images goes on: other images have their turn."""
        self.schedule, self.views, self.budget, self.check = Schedule(), RunViews(), Budget(), Check()
        self.views["tab"].check = self._check_for_tab
        self.probe_images.forget()

    def _check_for_tab(self, style: Style) -> event.Check | None:
        return check_for_tab(self.check.results(), style, self.check.seen)

    def forget_maps(self) -> None:
        """Forget the maps of the run before."""
        self.latest: dict[str, MapSet] = {}
        self.skipped = 0

    def keep_maps(self, map_sets: Sequence[MapSet], skipped: int) -> None:
        """Keep the maps of an event."""
        self.latest = self.latest | {one.name: one for one in map_sets}
        self.skipped += skipped

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs to continue."""
        return {name: value for part in self._parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint. A part that cannot be read starts over, and the others go on."""
        for part in self._parts:
            with self._messenger.guard("loading the schedule or images of a checkpoint (of another version?)"):
                part.load_state_dict(state)

    @property
    def _parts(self) -> list[Any]:
        return [self.schedule, self.budget, self.choice, self.probe_images, self.views, self.check]
