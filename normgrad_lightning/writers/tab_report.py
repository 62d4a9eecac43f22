"""The page of the NormGrad tab as one file at the end of training: beside the logs, and in the stores of loggers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from normgrad_lightning.page import Page
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.tensorboard_tab.stored import SUFFIX
from normgrad_lightning.writers.destinations import Writer
from normgrad_lightning.writers.disk import check_room
from normgrad_lightning.writers.files import FilesWriter
from normgrad_lightning.writers.tensorboard import PLUGIN, TensorBoardWriter

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

NAME = "report.html"


class TabReport:
    """Writes the report, and keeps meanwhile what it is made of, if no writer has that as files.

    Args:
        messenger: for warnings and announcements.
    """

    def __init__(self, messenger: Messenger) -> None:
        self._messenger = messenger
        self._written: Sequence[Writer] = ()
        self._group = ""
        self._spare: TemporaryDirectory[str] | None = None

    def add(self, page: Page, written: Sequence[Writer]) -> None:
        """Take a page that these writers have written."""
        if page.blobs and written:
            self._written, self._group = written, next(iter(page.blobs)).removesuffix(SUFFIX)
        if self._group and not _folders(self._written):
            self._spare = self._spare or TemporaryDirectory(prefix="normgrad_")
            FilesWriter(Path(self._spare.name, "run", PLUGIN)).write(
                Page(page.step, scalars=page.scalars, blobs=page.blobs)
            )

    def write(self, trainer: Trainer) -> bool:
        """Write the report into each local folder and to each store that takes files. Return whether it said where."""
        paths, has_said = list[Path](), False
        for folder in _folders(self._written):
            with self._messenger.guard("writing the report"):
                path = _write(folder, Path(folder, *(() if Path(folder).name == PLUGIN else (PLUGIN,)), NAME))
                paths.append(path)
                tabs = [one for one in self._written if isinstance(one, TensorBoardWriter) and one.folder == folder]
                self._messenger.announce(trainer, f"NormGrad: open {path}{_tab(folder) if tabs else ''}.")
                has_said = True
        if self._spare is not None:
            with self._messenger.guard("writing the report"):
                paths.append(_write(self._spare.name, Path(self._spare.name, NAME)))
        for writer in self._written:
            if paths and hasattr(writer, "log_report"):
                with self._messenger.guard(f"writing the report to {writer.where}"):
                    where = writer.log_report(paths[0], f"{self._group}/{NAME}")
                    self._messenger.announce(trainer, f"NormGrad: open {where}.")
                    has_said = True
        if self._spare is not None:
            self._spare.cleanup()
            self._spare = None
        return has_said


def _write(run: str, path: Path) -> Path:
    from normgrad_lightning.tensorboard_tab.report import LARGEST, write_report  # TensorBoard is slow to import

    check_room(path.parent, LARGEST)
    path.parent.mkdir(exist_ok=True)
    write_report([Path(run)], path)
    return path


def _folders(writers: Sequence[Writer]) -> list[str]:
    """Return the local folders that have the blobs of the tab."""
    return list(dict.fromkeys(folder for one in writers if (folder := getattr(one, "folder", None))))


def _tab(folder: str) -> str:
    """Return how to see the same in TensorBoard, which finds the tab by what `pip` has noted of it."""
    command = f"`tensorboard --logdir {folder}`"
    if any(one.name == PLUGIN for one in entry_points(group="tensorboard_plugins")):
        return f", or the tab NormGrad of {command}"
    return f". The tab NormGrad of {command} is missing until you install the package again (`pip install -e PATH`)"
