"""Pages in the run of a `WandbLogger`."""

import glob
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from normgrad_lightning.page import Page
from normgrad_lightning.writers import raw_maps
from normgrad_lightning.writers.disk import check_room_of_logger


class WandbWriter:
    """Logs the pictures and scalars of an event in one row, and raw maps among the run's files.

    The row goes through `log_metrics`, as in the logger's own `log_image`: it has `trainer/global_step`, the axis of
    all that Lightning logs. W&B's own step, which must not go back, counts rows and is left to W&B.
    """

    where = "W&B"

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write(self, page: Page) -> None:
        """Log the JPEGs, and films, as they are; W&B copies them to the folder of the run before it returns."""
        check_room_of_logger(self._logger, page.size)
        import wandb  # type: ignore[import, unused-ignore]

        with TemporaryDirectory() as folder:
            row: dict[str, Any] = {tag: float(value) for tag, value in page.scalars.items()}
            for number, picture in enumerate(page.pictures):
                path = Path(folder, f"{number}.jpg")
                path.write_bytes(picture.jpeg)
                row[picture.tag] = wandb.Image(str(path), caption=f"step {page.step}")
            for number, (tag, film) in enumerate(page.films.items()):
                path = Path(folder, f"{number}.webp")
                path.write_bytes(film)
                row[tag] = wandb.Image(str(path), caption=f"step {page.step}")
            self._save_maps(page)
            if row:
                self._logger.log_metrics(row, page.step)

    def _save_maps(self, page: Page) -> None:
        """Write raw maps to the run's folder of files, where `save` links to nothing outside, and upload them."""
        for tag, maps in page.maps.items():
            self._save(raw_maps.file_name(tag, page.step), raw_maps.encode(maps))

    def log_report(self, path: Path, name: str) -> str:
        """Write the report to the run's files. Return where that is."""
        check_room_of_logger(self._logger, path.stat().st_size)
        self._save(name, path.read_bytes())
        return f"the file {name} of the run in W&B"

    def _save(self, name: str, data: bytes) -> None:
        run = self._logger.experiment
        path = Path(run.dir, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        run.save(os.path.join(run.dir, glob.escape(name)), base_path=run.dir, policy="now")
