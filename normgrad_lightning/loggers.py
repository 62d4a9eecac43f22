"""From pictures to where a run keeps its results: TensorBoard, or files beside the other logs.

Lightning's loggers share no way to log an image, and ``SummaryWriter.add_image`` spends most of a second on a PNG. Each
writer here takes the panels of an event, which are JPEGs already, and does the least that its destination needs.
Loggers are recognised by the names of their classes, so that those of ``pytorch_lightning`` and of
``lightning.pytorch`` are the same to us, and neither is imported.
"""

import errno
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from normgrad_lightning.records import write_panels
from normgrad_lightning.render import Panel


class PanelWriter(Protocol):
    """What takes panels.

    Attributes:
        where: For people: where the panels go.
    """

    where: str

    def log_panels(self, step: int, panels: Sequence[Panel]) -> None:
        """Keep the panels of one event; from then on, they outlive a process that is killed."""


RESERVE = 64 * 2**20
"""Bytes of a disk that are left to the run's own files; on a small disk, a tenth of it."""


def check_room(folder: str | os.PathLike[str], size: int) -> None:
    """Raise an OSError if ``size`` bytes more in ``folder`` would leave too little to the files of the run itself.

    A full disk breaks a logger for good, and with it the training that logs its losses there.
    """
    if _is_remote(folder):
        return
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    disk = shutil.disk_usage(there)
    if disk.free - size < min(RESERVE, disk.total // 10):
        left = f"{disk.free / 2**20:.1f} MB are left on the disk, and they are for the run's own files"
        raise OSError(errno.ENOSPC, left, str(folder))


def check_file(path: str | os.PathLike[str], size: int) -> None:
    """Raise an OSError if ``size`` bytes more cannot be added to this file, or would leave too little of its limit.

    It must be found out here: a writer of TensorBoard that fails once fails for good.
    """
    if _is_remote(path):
        return
    with open(path, "ab") as file:
        end = file.tell() + size
    limit = _largest_file()
    if limit is not None and end > limit - min(RESERVE, limit // 10):
        left = f"files may have {limit / 2**20:.1f} MB (ulimit -f), and the rest is for the run's own values"
        raise OSError(errno.EFBIG, left, str(path))


def _largest_file() -> int | None:
    """Return how many bytes a file of this process may have; None if there is no limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


class TensorBoardPanels:
    """Writes panels to the event file of a ``TensorBoardLogger``, on rank 0.

    The logger's ``experiment`` is first touched when the first panel is written, for it creates files.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.where = f"TensorBoard ({logger.log_dir})"

    def log_panels(self, step: int, panels: Sequence[Panel]) -> None:
        """Write the JPEGs as they are, as image summaries."""
        writer = self._logger.experiment._get_file_writer()
        size = _size(panels)
        check_room(self._logger.log_dir, size)
        check_file(writer.event_writer._file_name, size)
        write_panels(writer, step, panels)
        if not _is_remote(self._logger.log_dir):  # that would take the whole file anew
            writer.flush()


class FilePanels:
    """Writes panels to ``<folder>/<tag>/step_00000100.jpg``; a slash in the tag is a folder."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self.where = str(self._folder)

    def log_panels(self, step: int, panels: Sequence[Panel]) -> None:
        """Write each JPEG to a file that appears at once and whole, over one of the same tag and step."""
        check_room(self._folder, _size(panels))
        for panel in panels:
            path = self._folder / panel.tag / f"step_{step:08d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}.partial")
            try:
                partial.write_bytes(panel.jpeg)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)


def _size(panels: Iterable[Panel]) -> int:
    return sum(len(panel.jpeg) for panel in panels)


def panel_writers(loggers: Iterable[Any], fallback_dir: str | os.PathLike[str]) -> tuple[list[PanelWriter], list[str]]:
    """Return a writer for each destination, and a note for each logger whose panels go to files instead.

    The dummy logger of ``fast_dev_run`` gets no writer, and neither does a second logger of the same folder.

    Args:
        loggers: ``trainer.loggers``. Nothing is created on disk here.
        fallback_dir: The parent of ``normgrad/`` for a logger that has no local folder of its own.
    """
    writers: list[PanelWriter] = []
    notes: list[str] = []
    folders: set[str] = set()
    for logger in loggers:
        names = {base.__name__ for base in type(logger).__mro__}
        if "TensorBoardLogger" in names:
            writers.append(TensorBoardPanels(logger))
        elif "DummyLogger" not in names:
            folder = os.path.join(_local_dir(logger) or fallback_dir, "normgrad")
            notes.append(
                f"NormGrad writes its panels to {folder}, for it cannot give images to {type(logger).__name__}."
            )
            if os.path.abspath(folder) not in folders:
                folders.add(os.path.abspath(folder))
                writers.append(FilePanels(folder))
    return writers, notes


def _is_remote(path: str | os.PathLike[str]) -> bool:
    return "://" in str(path)


def _local_dir(logger: Any) -> str | None:
    """Return the first folder the logger names that is not the address of a remote store."""
    for name in ("log_dir", "save_dir"):
        folder = getattr(logger, name, None)
        if folder and not _is_remote(folder):
            return str(folder)
    return None
