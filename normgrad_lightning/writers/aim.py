"""Pages in the run of an `AimLogger`."""

import io
import os
import shutil
from pathlib import Path
from typing import Any

from PIL import Image

from normgrad_lightning.page import Page
from normgrad_lightning.writers.disk import check_room, check_room_of_logger, files_dir
from normgrad_lightning.writers.files import FilesWriter


class AimWriter:
    """Tracks pictures and scalars. Raw maps and films are files, in `normgrad/<run>/` beside it.

    Aim has no place for arrays, and would forget how long each frame of a film is shown.

    Args:
        logger: an `AimLogger`.
        fallback_dir: the parent of `normgrad/` if Aim's repository is remote.
    """

    where = "Aim"

    def __init__(self, logger: Any, fallback_dir: str | os.PathLike[str]) -> None:
        self._logger, self._fallback_dir = logger, fallback_dir

    def write(self, page: Page) -> None:
        """Track the pictures as JPEGs of the quality that they have."""
        check_room_of_logger(self._logger, page.size)
        from aim import Image as AimImage  # type: ignore[import, attr-defined, unused-ignore]

        run = self._logger.experiment
        decoded = ((picture.tag, Image.open(io.BytesIO(picture.jpeg))) for picture in page.pictures)
        images = [(tag, AimImage(image, format="jpeg", quality="keep")) for tag, image in decoded]
        if page.maps or page.films:
            FilesWriter(self._folder).write(Page(page.step, maps=page.maps, films=page.films))
        scalars = [(tag, float(value)) for tag, value in page.scalars.items()]
        for tag, tracked in [*images, *scalars]:
            run.track(tracked, name=tag, step=page.step)

    def log_report(self, path: Path, name: str) -> str:
        """Copy the report to our files of the run, as Aim shows no files. Return where that is."""
        folder = Path(self._folder)
        check_room(folder, path.stat().st_size)
        folder.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(path, folder / path.name))

    @property
    def _folder(self) -> str:
        return os.path.join(files_dir(self._logger, self._fallback_dir), self._logger.experiment.hash)
