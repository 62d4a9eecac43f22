"""What runs have stored, read from event files or from the files that other loggers get."""

from __future__ import annotations

import csv
import math
import os
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normgrad_lightning.tensorboard_tab.stored import NAME, SUFFIX

_EVENT_FILE = "tfevents"
_SCALARS = "scalars.csv"
_VALIDATION = re.compile(r"(^|[_/.-])(val|valid|validation)([_/.-]|$)", re.IGNORECASE)
_BLOB_FILE = re.compile(r"step_([0-9]{1,18})\.tab")


@dataclass
class Run:
    """A run's blobs and curves.

    Attributes:
        name: of the run.
        blobs: by tag and step.
        scalars: values by tag and step.
        time: when the last of it was stored, in seconds since 1970.
    """

    name: str
    blobs: dict[str, dict[int, bytes]] = field(default_factory=dict)
    scalars: dict[str, dict[int, float]] = field(default_factory=dict)
    time: float = 0.0

    def curves(self, tag: str) -> dict[str, list[list[float]]]:
        """Return the curves that belong to blobs of this tag, and those of validation, as points by tag."""
        wanted = [name for name in self.scalars if is_of_group(name, tag) or is_validation(name)]
        return {name: [[step, value] for step, value in sorted(self.scalars[name].items())] for name in wanted}

    def metrics(self) -> dict[str, float]:
        """Return the last value of each metric of validation."""
        found = {tag: values for tag, values in self.scalars.items() if is_validation(tag)}
        return {tag: values[max(values)] for tag, values in found.items()}


def runs_in(paths: Sequence[Path]) -> list[Run]:
    """Return the runs with data for the tab in these folders and those below them, or in these event files.

    Raises:
        FileNotFoundError: a path that does not exist.
        ValueError: nothing was stored for the tab in any of them.
    """
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"`runs`: expected folders of runs, but {str(path)!r} does not exist.")
    folders = dict.fromkeys(folder for path in paths for folder in _folders(path))
    names = _names(list(folders))
    found = [run for folder in folders if (run := _read(folder, names[folder])).blobs]
    if not found:
        where = ", ".join(repr(str(path)) for path in paths)
        raise ValueError(
            f"`runs`: expected folders of runs with data of the NormGrad tab, but found none in {where}. "
            "Give the folder with TensorBoard's event file, or the one that has the `normgrad` folder in it."
        )
    return found


def _folders(path: Path) -> Iterator[Path]:
    """Yield the folders of runs at or below a path; an event file stands for its folder."""
    if path.is_file():
        yield path.parent
        return
    for folder in [path, *sorted(one for one in path.rglob("*") if one.is_dir())]:
        if any(_EVENT_FILE in one.name for one in folder.iterdir()):
            yield folder
        elif folder.name == NAME and any(folder.rglob("*.tab")):
            yield folder.parent


def _names(folders: Sequence[Path]) -> dict[Path, str]:
    """Return what runs are called: their path without the folders that all share."""
    parts = {folder: folder.resolve().parts for folder in folders}
    shared = 0
    while len({names[: shared + 1] for names in parts.values()}) == 1 and all(
        len(names) > shared + 1 for names in parts.values()
    ):
        shared += 1
    return {folder: "/".join(names[shared:]) for folder, names in parts.items()}


def _read(folder: Path, name: str) -> Run:
    run = Run(name)
    for path in sorted(folder.iterdir()):
        if _EVENT_FILE in path.name and path.is_file():
            _read_event_file(path, run)
    files = folder / NAME
    if files.is_dir():
        _read_files(files, run)
    return run


def _read_event_file(path: Path, run: Run) -> None:
    """Read as far as the file goes: one that is cut off gives what is whole."""
    from tensorboard.util import tensor_util  # type: ignore[import-untyped]

    scalars: set[str] = set()  # only the first value of a series says what it is
    for event in _events(path):
        if event.wall_time < math.inf:
            run.time = max(run.time, event.wall_time)
        for value in event.summary.value:
            if value.metadata.plugin_data.plugin_name == "scalars":
                scalars.add(value.tag)
            if value.HasField("simple_value"):
                run.scalars.setdefault(value.tag, {})[event.step] = value.simple_value
            elif value.tag.endswith(SUFFIX) and value.tensor.string_val:
                run.blobs.setdefault(value.tag, {})[event.step] = value.tensor.string_val[0]
            elif value.tag in scalars and value.HasField("tensor"):
                _keep(run, value.tag, event.step, tensor_util.make_ndarray(value.tensor))


def _events(path: Path) -> Iterator[Any]:
    """Yield the events of a file. Checksums are not compared: in TensorBoard's reader that takes most of a minute."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped, unused-ignore]
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    with open(path, "rb") as file:
        while len(length := file.read(8)) == 8:
            (size,) = struct.unpack("<Q", length)
            file.seek(4, os.SEEK_CUR)  # the checksum of the length
            if size > path.stat().st_size:
                return
            data = file.read(size)
            file.seek(4, os.SEEK_CUR)
            if len(data) < size:
                return
            try:
                yield Event.FromString(data)
            except DecodeError:
                return


def _keep(run: Run, tag: str, step: int, value: Any) -> None:
    if value.size == 1:
        run.scalars.setdefault(tag, {})[step] = float(value.reshape(()))


def _read_files(folder: Path, run: Run) -> None:
    for path in sorted(folder.rglob("*.tab")):
        match = _BLOB_FILE.fullmatch(path.name)
        tag = path.parent.relative_to(folder).as_posix()
        if match and tag.endswith(SUFFIX):
            run.blobs.setdefault(tag, {})[int(match[1])] = path.read_bytes()
            run.time = max(run.time, path.stat().st_mtime)
    if (folder / _SCALARS).is_file():
        with open(folder / _SCALARS, newline="", encoding="utf-8") as file:
            for row in csv.reader(file):
                if len(row) == 3 and row[0].isdecimal():
                    run.scalars.setdefault(row[1], {})[int(row[0])] = float(row[2])


def is_validation(tag: str) -> bool:
    """Whether a curve is a metric of validation."""
    return bool(_VALIDATION.search(tag))


def is_of_group(tag: str, blobs: str) -> bool:
    """Whether a curve comes from the callback that stored blobs under this tag."""
    group = blobs.removesuffix(SUFFIX)
    return tag.startswith((f"{group}/", f"{group}_layers/"))
