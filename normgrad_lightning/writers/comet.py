"""Pages in the experiment of a `CometLogger`."""

import io
from pathlib import Path
from typing import Any

from normgrad_lightning.page import Page
from normgrad_lightning.writers import raw_maps
from normgrad_lightning.writers.disk import check_room_of_logger


class CometWriter:
    """Logs pictures and films as images, scalars as metrics, raw maps as assets.

    The names of pictures end in `.jpg`: else Comet takes what follows the last dot of a layer's name for the file type.
    """

    where = "Comet"

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write(self, page: Page) -> None:
        """Log the JPEGs as they are; Comet copies them before it returns, and uploads them later."""
        check_room_of_logger(self._logger, page.size)
        experiment, step = self._logger.experiment, page.step
        for picture in page.pictures:
            experiment.log_image(io.BytesIO(picture.jpeg), name=f"{picture.tag}.jpg", step=step)
        for tag, film in page.films.items():
            experiment.log_image(io.BytesIO(film), name=f"{tag}.webp", step=step)
        for tag, maps in page.maps.items():
            experiment.log_asset_data(raw_maps.encode(maps), name=raw_maps.file_name(tag, step), step=step)
        if page.scalars:
            self._logger.log_metrics({tag: float(value) for tag, value in page.scalars.items()}, step)

    def log_report(self, path: Path, name: str) -> str:
        """Log the report as an asset, which Comet copies before it returns. Return where that is."""
        check_room_of_logger(self._logger, path.stat().st_size)
        self._logger.experiment.log_asset_data(path.read_bytes(), name=name)
        return f"the asset {name} of the experiment in Comet"
