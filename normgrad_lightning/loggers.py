"""From pictures to where a run keeps its results: TensorBoard, W&B, MLflow, Comet, Aim, or files beside other logs.

Lightning's loggers share no way to log an image, and ``SummaryWriter.add_image`` spends most of a second on a PNG. Each
writer here takes the panels of an event, which are JPEGs already, and does the least that its destination needs; all
give the step as the logger gives it for scalars. Loggers are recognised by the names of their classes, so that those of
``pytorch_lightning`` and of ``lightning.pytorch`` are the same to us, and neither is imported. Their ``experiment``,
which creates runs and files, is first touched when the first panel is written.
"""

import errno
import io
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

from PIL import Image

from normgrad_lightning.records import write_panels
from normgrad_lightning.render import Panel


class PanelWriter(Protocol):
    """What takes panels.

    Attributes:
        where: For people: where the panels go.
    """

    where: str

    def log_panels(self, step: int, panels: Sequence[Panel]) -> None:
        """Keep the panels of one event; from then on, they outlive a killed process as the logger's own values do."""


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
    """Writes panels to the event file of a ``TensorBoardLogger``, on rank 0, or of torch's ``SummaryWriter``."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.where = f"TensorBoard ({logger.log_dir})"

    def log_panels(self, step: int, panels: Sequence[Panel]) -> None:
        """Write the JPEGs as they are, as image summaries."""
        writer = getattr(self._logger, "experiment", self._logger)._get_file_writer()
        if writer is None:  # not on rank 0
            return
        size = _size(panels)
        check_room(self._logger.log_dir, size)
        check_file(writer.event_writer._file_name, size)
        write_panels(writer, step, panels)
        if not _is_remote(self._logger.log_dir):  # that would take the whole file anew
            writer.flush()


class _RunPanels:
    """Logs panels to the run of a logger, if there is room for them in its folder."""

    where: str

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def log_panels(self, step: int, panels: Sequence[Panel]) -> None:
        """Log them; see ``_log``."""
        folder = _local_dir(self._logger)
        if folder is not None:
            check_room(folder, _size(panels))
        self._log(step, panels)

    def _log(self, step: int, panels: Sequence[Panel]) -> None:
        raise NotImplementedError


class WandbPanels(_RunPanels):
    """Logs panels to the run of a ``WandbLogger``, those of an event in one row.

    They go through ``log_metrics``, as in the logger's own ``log_image``: the row has ``trainer/global_step``, which is
    the axis of all that Lightning logs. W&B's own step, which must not go back, counts rows and is left to W&B.
    """

    where = "W&B"

    def _log(self, step: int, panels: Sequence[Panel]) -> None:
        """Log the JPEGs as they are; W&B copies them to the folder of the run before it returns."""
        import wandb  # type: ignore[import, unused-ignore]

        with TemporaryDirectory() as folder:
            images = {}
            for number, panel in enumerate(panels):
                path = Path(folder, f"{number}.jpg")
                path.write_bytes(panel.jpeg)
                images[panel.tag] = wandb.Image(str(path), caption=f"step {step}")
            self._logger.log_metrics(images, step)


class MLFlowPanels(_RunPanels):
    """Logs panels to the run of an ``MLFlowLogger``, which keeps them as PNGs with thumbnails."""

    where = "MLflow"

    def _log(self, step: int, panels: Sequence[Panel]) -> None:
        """Log the pictures as time-stepped images."""
        client, run_id = self._logger.experiment, self._logger.run_id
        for panel in panels:
            client.log_image(run_id, _decoded(panel), key=self._key(panel.tag), step=step)

    def _key(self, tag: str) -> str:
        """Return the tag with only the characters that MLflow allows; before 3.11.1, it cannot read a slash back."""
        import mlflow  # type: ignore[import, unused-ignore]

        reads_slashes = [int(part) for part in re.findall(r"\d+", mlflow.__version__)[:3]] >= [3, 11, 1]
        return re.sub(r"[^\w./-]" if reads_slashes else r"[^\w.-]", "_", tag, flags=re.ASCII)


class CometPanels(_RunPanels):
    """Logs panels to the experiment of a ``CometLogger``.

    Names end in ``.jpg``, else Comet would take what follows the last dot of a layer's name for the kind of file.
    """

    where = "Comet"

    def _log(self, step: int, panels: Sequence[Panel]) -> None:
        """Log the JPEGs as they are; Comet copies them before it returns, and uploads them later."""
        for panel in panels:
            self._logger.experiment.log_image(io.BytesIO(panel.jpeg), name=f"{panel.tag}.jpg", step=step)


class AimPanels(_RunPanels):
    """Tracks panels in the run of an ``AimLogger``."""

    where = "Aim"

    def _log(self, step: int, panels: Sequence[Panel]) -> None:
        """Track the pictures as JPEGs of the quality that they have."""
        from aim import Image as AimImage  # type: ignore[import, attr-defined, unused-ignore]

        for panel in panels:
            image = AimImage(_decoded(panel), format="jpeg", quality="keep")
            self._logger.experiment.track(image, name=panel.tag, step=step)


def _decoded(panel: Panel) -> Image.Image:
    return Image.open(io.BytesIO(panel.jpeg))


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


WRITERS: dict[str, Callable[[Any], PanelWriter]] = {
    "TensorBoardLogger": TensorBoardPanels,
    "SummaryWriter": TensorBoardPanels,
    "WandbLogger": WandbPanels,
    "MLFlowLogger": MLFlowPanels,
    "CometLogger": CometPanels,
    "AimLogger": AimPanels,
}
"""By a logger's class, or one that it inherits from. All others get files."""


def panel_writers(loggers: Iterable[Any], fallback_dir: str | os.PathLike[str]) -> tuple[list[PanelWriter], list[str]]:
    """Return a writer for each destination, and a note for each logger that we do not know.

    Its panels go to files beside its logs, as do those of a ``CSVLogger``, which means just that. The dummy logger of
    ``fast_dev_run`` gets no writer, and neither does a second logger of the same folder.

    Args:
        loggers: ``trainer.loggers``. Nothing is created on disk here.
        fallback_dir: The parent of ``normgrad/`` for a logger that has no local folder of its own.
    """
    writers: list[PanelWriter] = []
    notes: list[str] = []
    folders: set[str] = set()
    for logger in loggers:
        names = [base.__name__ for base in type(logger).__mro__]
        kind = next((WRITERS[name] for name in names if name in WRITERS), None)
        if kind is not None:
            writers.append(kind(logger))
        elif "DummyLogger" not in names:
            folder = os.path.join(_local_dir(logger) or fallback_dir, "normgrad")
            if "CSVLogger" not in names:
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
        folder = None
        with suppress(Exception):  # a logger of the user's own, before its run has begun
            folder = getattr(logger, name, None)
        if folder and not _is_remote(folder):
            return str(folder)
    return None
