"""Pages as files: for a `CSVLogger`, for a logger that we do not know, and for a folder."""

import csv
import errno
import io
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from normgrad_lightning.page import Page
from normgrad_lightning.writers.disk import check_room, film_path

SCALARS = "scalars.csv"
COLUMNS = ("step", "tag", "value")


class FilesWriter:
    """Writes pictures and raw maps to `<folder>/<tag>/step_00000100.jpg` and `.npz`, scalars to `scalars.csv`.

    A slash in a tag is a folder. A file of raw maps has them under `maps`; `scalars.csv` has a row for each value. The
    film of a run is `film.webp`. Blobs of the NormGrad tab are `<tag>/step_00000100.tab`.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        self.where = str(self._folder)

    @property
    def folder(self) -> str:
        """The folder of the files."""
        return str(self._folder)

    def write(self, page: Page) -> None:
        """Write all files under other names; once they are complete, they replace those of the same tag and step."""
        check_room(self._folder, page.size)
        partials: dict[Path, Path] = {}
        try:
            for path, data in self._files(page):
                path.parent.mkdir(parents=True, exist_ok=True)
                partials[path] = path.with_name(f"{path.name}.{os.getpid()}.partial")
                partials[path].write_bytes(data)
            if page.scalars:
                self._folder.mkdir(parents=True, exist_ok=True)
                _append(self._folder / SCALARS, page.step, page.scalars)
            for path, partial in partials.items():
                partial.replace(path)
        finally:
            for partial in partials.values():
                partial.unlink(missing_ok=True)

    def _files(self, page: Page) -> Iterator[tuple[Path, bytes]]:
        name = f"step_{page.step:08d}"
        for picture in page.pictures:
            yield self._folder / picture.tag / f"{name}.jpg", picture.jpeg
        for tag, maps in page.maps.items():
            yield self._folder / tag / f"{name}.npz", _npz(maps)
        for tag, film in page.films.items():
            yield film_path(self._folder, tag), film
        for tag, blob in page.blobs.items():
            yield self._folder / tag / f"{name}.tab", blob


def _npz(maps: npt.NDArray[np.floating[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, maps=np.asarray(maps, np.float32))
    return file.getvalue()


def _append(path: Path, step: int, scalars: Mapping[str, float]) -> None:
    """Append a row for each scalar, in one write that is taken back if the disk has no room for all of it."""
    with open(path, "ab", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerows([COLUMNS] if end == 0 else [])
        rows.writerows([step, tag, repr(float(value))] for tag, value in scalars.items())
        data = text.getvalue().encode()
        if file.write(data) < len(data):
            file.truncate(end)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
