"""All destinations of a run: a page goes to each, and the user is told once where to look."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from normgrad_lightning.page import Page
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.writers.destinations import Writer
from normgrad_lightning.writers.disk import check_room
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
        self._has_blobs = False
        self._working: Sequence[Writer] = ()
        self._has_said_where = False

    def write(self, pages: Sequence[Page]) -> list[Writer]:
        """Write what is on these pages, of one step, as one page. Return the writers that have written it."""
        written: list[Writer] = []
        if not pages:
            return written
        with self._messenger.guard("joining the pages of views"):
            page = Page.joined(pages)
            self._working = written
            for writer in self.writers:
                with self._messenger.guard(f"writing to {writer.where}"):
                    writer.write(page)
                    written.append(writer)
                    self._has_blobs |= bool(page.blobs)
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

    def write_report(self, trainer: Trainer) -> None:
        """Write the page of the NormGrad tab as a file beside the logs, and say where to look."""
        from normgrad_lightning.tensorboard_tab.report import LARGEST, write_report  # TensorBoard is slow to import

        folders = [getattr(writer, "folder", None) for writer in self._working]
        of_tensorboard = [writer.folder for writer in self._working if isinstance(writer, TensorBoardWriter)]
        for folder in dict.fromkeys(folder for folder in folders if folder and self._has_blobs):
            with self._messenger.guard("writing the report"):
                path = Path(folder, *(() if Path(folder).name == "normgrad" else ("normgrad",)), "report.html")
                check_room(path.parent, LARGEST)
                path.parent.mkdir(exist_ok=True)
                write_report([Path(folder)], path)
                self._has_said_where = True
                tab = f", or the tab NormGrad of `tensorboard --logdir {folder}`" if folder in of_tensorboard else ""
                self._messenger.announce(trainer, f"NormGrad: open {path}{tab}.")

    def say_where(self, trainer: Trainer) -> None:
        """Say where to look, if the report has not said so."""
        if self._working and not self._has_said_where:
            of_tensorboard = [writer.folder for writer in self._working if isinstance(writer, TensorBoardWriter)]
            command = "".join(f" To look: `tensorboard --logdir {folder}`." for folder in of_tensorboard)
            self._messenger.announce(trainer, f"NormGrad: pictures are in {places_of(self._working)}.{command}")


def places_of(writers: Sequence[Writer]) -> str:
    """Return where these writers write, for people."""
    return " and ".join(writer.where for writer in writers)
