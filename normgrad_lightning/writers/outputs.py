"""All destinations of a run: a page goes to each, and the user is told once where to look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from normgrad_lightning.page import Page
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.writers.destinations import Writer
from normgrad_lightning.writers.tab_report import TabReport
from normgrad_lightning.writers.tensorboard import TensorBoardWriter

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


class Outputs:
    """Where the pages of a run go.

    Args:
        messenger: for warnings and announcements.
        without_writers: what to announce if nobody takes pictures.
        writers: one for each destination.
        notes: what to warn of when the first page is written.
    """

    def __init__(
        self, messenger: Messenger, without_writers: str, writers: Sequence[Writer] = (), notes: Sequence[str] = ()
    ) -> None:
        self.writers = writers
        self._messenger = messenger
        self._without_writers = without_writers
        self._notes = notes
        self._is_announced = False
        self._report = TabReport(messenger)
        self._working: Sequence[Writer] = ()

    def write(self, pages: Sequence[Page]) -> list[Writer]:
        """Write what is on these pages, of one step, as one page. Return the writers that have written it."""
        written: list[Writer] = []
        if not pages:
            return written
        with self._messenger.guard("joining the pages of views"):
            page = Page.joined(pages)
            for writer in self.writers:
                with self._messenger.guard(f"writing to {writer.where}"):
                    writer.write(page)
                    written.append(writer)
            with self._messenger.guard("keeping what the report shows"):
                self._report.add(page, written)
        self._working = written or self._working
        return written

    def announce(self, trainer: Trainer, written: Sequence[Writer], about: Iterable[str]) -> None:
        """Announce once what is read, and where it goes.

        Args:
            trainer: whose run it is.
            written: the writers that have pages, or will have.
            about: sentences on what is read.
        """
        if self._is_announced or (self.writers and not written):
            return
        self._is_announced = True
        for note in self._notes:
            self._messenger.warn_once(note)
        where = f"Pictures go to {places_of(written)}." if written else self._without_writers
        sentences = " ".join(filter(None, [*about, where]))
        self._messenger.announce(trainer, sentences, cause="what is read, and where it goes")

    def conclude(self, trainer: Trainer, *, with_report: bool) -> None:
        """Write the page of the NormGrad tab as one file, if it is wanted; say where to look, once."""
        if (with_report and self._report.write(trainer)) or not self._working:
            return
        of_tensorboard = [writer.folder for writer in self._working if isinstance(writer, TensorBoardWriter)]
        command = "".join(f" To look: `tensorboard --logdir {folder}`." for folder in of_tensorboard)
        self._messenger.announce(trainer, f"NormGrad: pictures are in {places_of(self._working)}.{command}")


def places_of(writers: Sequence[Writer]) -> str:
    """Return where these writers write, for people."""
    return " and ".join(writer.where for writer in writers)
