"""A stand-in for a view: pages with pictures, scalars and raw maps, a film, and ways to read them back from files."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from normgrad_lightning.page import Page, Picture
from normgrad_lightning.writers import raw_maps

PICTURES = ["normgrad_order0/03_layer3.1", "normgrad_order0/04_größe"]
SCALARS = ["normgrad/share/dog", "normgrad/share/Größe, large", "normgrad/drift/layer3.1"]
MAPS = ["normgrad_raw/03_layer3.1", "normgrad_raw/04_größe"]


def view(step: int) -> Page:
    """Two pictures, three scalars and two raw maps, other ones at each step."""
    rng = np.random.default_rng(step)
    values = [rng.random(), 1e-12 * rng.random(), -3e7 * rng.random()]
    maps = [1e-9 * rng.random((3, 5, 7)), rng.normal(size=(3, 11))]
    return Page(
        step,
        [encoded(tag, waves(step + number)) for number, tag in enumerate(PICTURES)],
        {tag: float(np.float32(value)) for tag, value in zip(SCALARS, values, strict=True)},
        {tag: m.astype(np.float32) for tag, m in zip(MAPS, maps, strict=True)},
    )


def waves(seed: int) -> Any:
    """A picture that JPEG keeps well, and unlike that of any other seed."""
    phase, x, y = 2.4 * seed, np.linspace(0, 6, 64), np.linspace(0, 5, 48)
    levels = [np.sin(x + phase)[:, None] * np.cos(y + turn * phase) for turn in (1, 2, 3)]
    return np.uint8(127 + 120 * np.stack(levels, -1))


def encoded(tag: str, pixels: Any) -> Picture:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return Picture(tag, file.getvalue(), *pixels.shape[:2])


def film(frames: int = 3) -> bytes:
    """An animated WebP of 64 × 48 pixels."""
    first, *rest = [Image.fromarray(waves(seed).transpose(1, 0, 2)) for seed in range(frames)]
    file = io.BytesIO()
    first.save(file, "WEBP", save_all=True, append_images=rest, duration=100)
    return file.getvalue()


def decoded(picture: bytes) -> Any:
    with Image.open(io.BytesIO(picture)) as image:
        assert image.format in ("JPEG", "PNG")
        return np.asarray(image.convert("RGB"), float)


def decoded_jpeg(picture: bytes, size: tuple[int, int] | None = None) -> Any:
    """The pixels of a JPEG, which must have this height and width if any are given."""
    assert picture.startswith(b"\xff\xd8")
    pixels = decoded(picture)
    assert size in (None, pixels.shape[:2])
    return pixels


class Store(NamedTuple):
    """What a destination has kept of a run, each by tag and step.

    Attributes:
        pictures: Pixels.
        scalars: Values.
        maps: Raw maps.
    """

    pictures: dict[tuple[str, int], Any]
    scalars: dict[tuple[str, int], float]
    maps: dict[tuple[str, int], Any]


def assert_has(store: Store, pages: Sequence[Page], *, loss: float = 0.0) -> None:
    """All of these pages are in the store, under their tags and steps, and no others.

    Args:
        store: what was read.
        pages: what was written.
        loss: what part of the largest value of a map may be lost.
    """
    pictures = {(picture.tag, page.step): decoded(picture.jpeg) for page in pages for picture in page.pictures}
    assert sorted(store.pictures) == sorted(pictures)
    for key, seen in store.pictures.items():
        away = {other: np.abs(seen - pixels).mean() for other, pixels in pictures.items()}
        assert away.pop(key) < 3
        assert min(away.values(), default=99) > 10  # and not just any picture
    assert store.scalars == {(tag, page.step): value for page in pages for tag, value in page.scalars.items()}
    maps = {(tag, page.step): values for page in pages for tag, values in page.maps.items()}
    assert sorted(store.maps) == sorted(maps)
    for key, values in maps.items():
        assert store.maps[key].shape == values.shape
        assert np.abs(store.maps[key] - values).max() <= loss * np.abs(values).max()


FLOAT16 = 2**-11
"""What `raw_maps` may lose of a map's largest value."""


def read_folder(folder: Path) -> Store:
    """What `FilesWriter` wrote."""

    def found(suffix: str) -> dict[tuple[str, int], Path]:
        paths = sorted(folder.rglob(f"*.{suffix}"))
        return {(str(path.parent.relative_to(folder)), int(path.stem.removeprefix("step_"))): path for path in paths}

    scalars = {}
    if (folder / "scalars.csv").exists():
        with open(folder / "scalars.csv", newline="", encoding="utf-8") as file:
            columns, *rows = csv.reader(file)
        assert columns == ["step", "tag", "value"]
        scalars = {(tag, int(step)): float(value) for step, tag, value in rows}
    return Store(
        {key: decoded_jpeg(path.read_bytes()) for key, path in found("jpg").items()},
        scalars,
        {key: np.load(path)["maps"] for key, path in found("npz").items()},
    )


def read_events(folder: Path | str) -> Store:
    """What TensorBoard shows of the event files in a folder; blobs as its server gives them to a tab."""
    from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
    from tensorboard.context import RequestContext

    events = EventAccumulator(str(folder))
    events.Reload()
    tags = events.Tags()
    provider = MultiplexerDataProvider(EventMultiplexer({"run": str(folder)}).Reload(), str(folder))
    context, where = RequestContext(), {"experiment_id": "", "plugin_name": "normgrad"}
    blobs = provider.read_blob_sequences(context, **where, downsample=100).get("run", {})
    assert sorted(blobs) == sorted(tags["tensors"])
    assert sorted(provider.list_blob_sequences(context, **where).get("run", {})) == sorted(blobs)
    maps = {}
    for tag, series in blobs.items():
        for datum in series:
            (blob,) = datum.values
            maps[tag, datum.step] = raw_maps.decode(provider.read_blob(context, blob_key=blob.blob_key))
    images = [(tag, event) for tag in tags["images"] for event in events.Images(tag)]
    return Store(
        {(tag, e.step): decoded_jpeg(e.encoded_image_string, (e.height, e.width)) for tag, e in images},
        {(tag, e.step): e.value for tag in tags["scalars"] for e in events.Scalars(tag)},
        maps,
    )
