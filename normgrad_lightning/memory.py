"""What a run keeps from event to event, and what a checkpoint carries of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from normgrad_lightning.events.images import ImageChoice
from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.events.probe import ProbeImages
from normgrad_lightning.events.schedule import Schedule
from normgrad_lightning.views.collected import Collected
from normgrad_lightning.views.film import Film


class Memory:
    """What lasts longer than an event.

    Args:
        messenger: for warnings.

    Attributes:
        schedule: which steps were events.
        choice: chooses the images to show.
        probe_images: the images that are followed through training.
        film: of these.
        collected: what is shown of all steps since the last event.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self.schedule = Schedule()
        self.choice = ImageChoice()
        self.probe_images = ProbeImages(messenger)
        self.film = Film()
        self.collected = Collected()

    def begin_anew(self) -> None:
        """Forget the run before. The choice of images goes on: other images have their turn."""
        self.schedule, self.film, self.collected = Schedule(), Film(), Collected()
        self.probe_images.forget()

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on."""
        return {name: value for part in self._parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the checkpoint's run was. A part that cannot be read begins anew, and the others go on."""
        for part in self._parts:
            with self._messenger.guard("going on with the schedule or images of a checkpoint (of another version?)"):
                part.load_state_dict(state)

    @property
    def _parts(self) -> list[Any]:
        return [self.schedule, self.choice, self.probe_images, self.film, self.collected]
