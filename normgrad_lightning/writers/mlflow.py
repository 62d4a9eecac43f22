"""Pages in the run of an `MLFlowLogger`."""

import io
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from normgrad_lightning.page import Page
from normgrad_lightning.writers import raw_maps
from normgrad_lightning.writers.disk import check_room_of_logger


class MLFlowWriter:
    """Logs pictures as time-stepped images (MLflow makes PNGs of them), scalars as metrics, the rest as artifacts."""

    where = "MLflow"

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def write(self, page: Page) -> None:
        """Log pictures, then raw maps and films, then scalars."""
        check_room_of_logger(self._logger, page.size)
        client, run_id = self._logger.experiment, self._logger.run_id
        for picture in page.pictures:
            image = Image.open(io.BytesIO(picture.jpeg))
            client.log_image(run_id, image, key=key(picture.tag), step=page.step)
        files = {raw_maps.file_name(key(tag), page.step): raw_maps.encode(maps) for tag, maps in page.maps.items()}
        files |= {f"{key(tag)}.webp": film for tag, film in page.films.items()}
        if files:
            with TemporaryDirectory() as folder:
                for name, data in files.items():
                    path = Path(folder, name)
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(data)
                client.log_artifacts(run_id, folder)
        if page.scalars:
            self._logger.log_metrics({key(tag): float(value) for tag, value in page.scalars.items()}, page.step)

    def log_report(self, path: Path, name: str) -> str:
        """Log the report as an artifact, which MLflow shows on its page. Return where that is."""
        check_room_of_logger(self._logger, path.stat().st_size)
        self._logger.experiment.log_artifact(self._logger.run_id, str(path), str(Path(key(name)).parent))
        return f"the artifact {key(name)} of the run in MLflow"


def key(tag: str) -> str:
    """Return the tag with only the characters that MLflow allows; before 3.11.1, it cannot read a slash back."""
    import mlflow  # type: ignore[import, unused-ignore]

    reads_slashes = [int(part) for part in re.findall(r"\d+", mlflow.__version__)[:3]] >= [3, 11, 1]
    return re.sub(r"[^\w./-]" if reads_slashes else r"[^\w.-]", "_", tag, flags=re.ASCII)
