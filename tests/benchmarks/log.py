"""What it takes to draw and to log the panels of an event, in milliseconds of the training thread and in bytes.

    python tests/benchmarks/log.py

Eight images and their maps at five layers, by tile size. "On disk" is when a kill would lose nothing: TensorBoard's own
writer works in a thread, but in Python, so training waits for it all the same.

- ours: panels as JPEG, their records written with a checksum taken in C.
- by TensorBoard's writer: the same JPEGs through `add_summary`, whose checksum is taken in Python.
- files: the same JPEGs beside a CSVLogger's file.
- add_image: the same pictures through `SummaryWriter.add_image`, which makes PNGs of them.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from harness import Figures, parser, quartiles, run, spread, table
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary
from torch import Tensor
from torch.utils.tensorboard import SummaryWriter
from training import batch_of

from normgrad_lightning.page import Page, Picture
from normgrad_lightning.views.drawing import Sheet, input_tiles
from normgrad_lightning.views.panels import layer_panels
from normgrad_lightning.views.style import Style
from normgrad_lightning.writers.files import FilesWriter
from normgrad_lightning.writers.tensorboard import TensorBoardWriter

TILES = (64, 128, 256)
GRIDS = (64, 32, 16, 8, 4)
WAYS = {
    "ours": "ours",
    "summaries": "the same by TensorBoard's writer",
    "files": "files",
    "add_image": "`add_image`",
}


class Event:
    """Images and maps of one event, to be drawn and logged in any way, step after step."""

    def __init__(self, images: int, pixels: int, tile_size: int, folder: Path) -> None:
        self.images, _ = batch_of(images, pixels)
        self.maps: dict[str, Tensor] = {f"layer{i}": torch.rand(images, grid, grid) for i, grid in enumerate(GRIDS)}
        self.tile_size, self.folder = tile_size, folder
        self.style = Style(tile_size=tile_size)
        self.board = TensorBoardLogger(folder, name="ours", version="")
        self.writer = SummaryWriter(folder / "summaries")
        self.pictures = SummaryWriter(folder / "add_image")
        self.step = 0

    def drawn(self) -> list[Picture]:
        """The panels, encoded."""
        images_of, tags = dict.fromkeys(self.maps, self.images), dict(zip(self.maps, self.maps, strict=True))
        return list(layer_panels(self.maps, images_of, tags, self.style, signed=False))

    def ours(self) -> None:
        """As the callback does it."""
        TensorBoardWriter(self.board).write(Page(self.step, self.drawn()))

    def summaries(self) -> None:
        """The same JPEGs, through TensorBoard's own writer."""
        for tag, jpeg, height, width in self.drawn():
            image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=jpeg)
            self.writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), self.step)

    def files(self) -> None:
        """The same JPEGs, as files."""
        FilesWriter(self.folder / "files").write(Page(self.step, self.drawn()))

    def add_image(self) -> None:
        """The same pictures, as one would log them without us."""
        sheet = Sheet(input_tiles(self.images.numpy(), tile_size=self.tile_size))
        for tag, maps in self.maps.items():
            self.pictures.add_image(tag, sheet.panel(maps.numpy())[..., :3], self.step, dataformats="HWC")

    def flush(self) -> None:
        """Wait until all is on disk."""
        self.writer.flush()
        self.pictures.flush()

    def timed(self, way: str) -> tuple[float, float]:
        """Milliseconds until training may go on, and until all is on disk."""
        self.step += 1
        log: Callable[[], Any] = getattr(self, way)
        start = time.perf_counter()
        log()
        handed_over = time.perf_counter()
        self.flush()
        return 1e3 * (handed_over - start), 1e3 * (time.perf_counter() - start)


def measure(args: argparse.Namespace) -> Figures:
    """All ways of logging in turns, for each tile size."""
    return {"tiles": {str(size): measure_size(size, args) for size in TILES}}


def measure_size(tile_size: int, args: argparse.Namespace) -> Figures:
    """The figures of one tile size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        event = Event(args.images, args.pixels, tile_size, folder)
        times: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        for _ in range(args.rounds + 1):
            for way in WAYS:
                times[way].append(event.timed(way))
        written = {way: size_of(folder / way) / (args.rounds + 1) for way in WAYS}
    return {
        way: {
            "thread_ms": quartiles([handed_over for handed_over, _ in of_way[1:]]),
            "disk_ms": quartiles([on_disk for _, on_disk in of_way[1:]]),
            "bytes": written[way],
        }
        for way, of_way in times.items()
    }


def size_of(folder: Path) -> int:
    """The bytes of all files in it."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def show(figures: Figures) -> str:
    """A row for each tile size and way."""
    rows = [
        [
            f"{size} px",
            WAYS[way],
            spread(f["thread_ms"], 1),
            spread(f["disk_ms"], 1),
            f"{f['bytes'] / 1e3:.0f} KB",
        ]
        for size, of_size in figures["tiles"].items()
        for way, f in of_size.items()
    ]
    settings = figures["settings"]
    note = f"{settings['images']} images of {settings['pixels']} px, five layers, {settings['rounds']} rounds"
    return f"{table(['tiles', 'how', 'ms of the thread', 'ms until on disk', 'per event'], rows)}\n\n{note}"


def main() -> None:
    """Measure, and print the table."""
    run(__file__, parser(__doc__ or "", rounds=15, pixels=224, images=8), measure, show, pixels=64, images=2)


if __name__ == "__main__":
    main()
