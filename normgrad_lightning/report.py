"""What a run shows: pages of its events and the film of its probe, drawn and taken to all its loggers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normgrad_lightning.events.messages import Messenger
from normgrad_lightning.kinds import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.views.collected import Collected
from normgrad_lightning.views.film import Film
from normgrad_lightning.views.look import Draw, Look
from normgrad_lightning.views.pages import pages_of
from normgrad_lightning.writers.destinations import Writer

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


@dataclass
class Report:
    """Draws and writes, and announces where to look.

    Attributes:
        messenger: for warnings and announcements.
        film: of the probe.
        collected: what is shown of all steps since the last event.
        without_writers: what to announce if nobody takes pictures.
        writers: where pages go.
        notes: what to warn of when the first page is written.
    """

    _is_announced = False

    messenger: Messenger
    film: Film
    collected: Collected
    without_writers: str
    writers: Sequence[Writer] = ()
    notes: Sequence[str] = ()

    def wants_batches(self, draw: Draw) -> bool:
        """Whether a view that somebody will see needs the maps of whole batches."""
        return bool(self.writers) and draw.collects

    def collect(self, batch: MapSet, look: Look, draw: Draw) -> None:
        """Let views take what they need of a whole batch."""
        self.collected.add(batch, look, draw, self.messenger.guard)

    def show(self, trainer: Trainer, map_sets: Sequence[MapSet], look: Look, draw: Draw, about: Sequence[str]) -> None:
        """Draw the page of an event and write it.

        Args:
            trainer: whose event it is.
            map_sets: what was seen.
            look: how pictures look.
            draw: what to show.
            about: sentences on what is read, for the first announcement.
        """
        page = self._page(map_sets, look, draw) if self.writers else None
        comes_later = self.writers if draw.views == ("film",) else ()
        written = comes_later if page is None else self._write(page)
        if not self._is_announced and (written or not self.writers):
            self._is_announced = True
            for note in self.notes:
                self.messenger.warn_once(note)
            where = f"Pictures go to {_places(written)}." if written else self.without_writers
            sentences = " ".join(filter(None, [*about, where]))
            self.messenger.announce(trainer, sentences, cause="what is read, and where it goes")

    def finish(self, trainer: Trainer, look: Look) -> None:
        """Write the film, if there is one: at the end of training, or where it breaks off."""
        page = None
        if self.writers:
            with self.messenger.guard("making the film"):
                page = self.film.page(look)
        if page is not None and (written := self._write(page)):
            films = ", ".join(f"{tag}.webp" for tag in page.films)
            self.messenger.announce(trainer, f"NormGrad wrote a film of the probe, {films}, to {_places(written)}.")

    def _page(self, map_sets: Sequence[MapSet], look: Look, draw: Draw) -> Page | None:
        guard = self.messenger.guard
        if draw.shows("film"):
            with guard("making the film"):
                self.film.add(map_sets)
        pages = pages_of(map_sets, look, draw.shows, guard) + self.collected.pages(map_sets, look, draw, guard)
        return Page.joined(pages) if pages else None

    def _write(self, page: Page) -> list[Writer]:
        """The writers that have written the page."""
        written: list[Writer] = []
        for writer in self.writers:
            with self.messenger.guard(f"writing to {writer.where}"):
                writer.write(page)
                written.append(writer)
        return written


def _places(writers: Sequence[Writer]) -> str:
    return " and ".join(writer.where for writer in writers)
