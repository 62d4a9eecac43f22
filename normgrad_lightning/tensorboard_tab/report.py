"""The page of the tab as one HTML file that needs no server."""

from __future__ import annotations

import base64
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from normgrad_lightning.maths.spacing import evenly_spaced
from normgrad_lightning.tensorboard_tab.logs import Run, runs_in
from normgrad_lightning.tensorboard_tab.page_files import PAGE, SCRIPTS
from normgrad_lightning.tensorboard_tab.stored import Content, Problem, decode

LARGEST = 20_000_000
"""Bytes of a report, at most, unless another limit is given."""

_HERE = "the data of the report"
_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src 'unsafe-inline' data:; \
style-src 'unsafe-inline'; img-src data: blob:">
<title>NormGrad report</title>
<style>
{style}
</style>
<script type="importmap">{modules}</script>
</head>
<body>
<script type="application/json" id="normgrad-data">{data}</script>
<script type="module">
import {{ start }} from "normgrad/app.js";
import {{ EmbeddedData }} from "normgrad/data.js";
const content = JSON.parse(document.getElementById("normgrad-data").textContent);
start(document.body, new EmbeddedData(content));
</script>
</body>
</html>
"""


def write_report(runs: Sequence[Path], out: Path, largest: int = LARGEST) -> None:
    """Write one HTML file with the page of these runs. It opens from disk, without a network.

    If the events are too many, some between the first and the last of each run are left out, evenly.

    Args:
        runs: folders of runs, or folders that these are in; of TensorBoard, or with files of other loggers.
        out: the file to write.
        largest: its size in bytes, at most.

    Raises:
        FileNotFoundError: a folder that does not exist.
        ValueError: there is nothing to show, or even the first and last events are too large.
    """
    page = report(runs_in(runs), largest)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f"{out.name}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)


@dataclass(frozen=True, repr=False)
class NotebookReport:
    """The page of runs. A notebook shows it where it is the value of a cell.

    Attributes:
        page: a whole HTML document.
        height: of its frame, in pixels.
    """

    page: str
    height: int

    def __repr__(self) -> str:
        return f"<NormGrad report, {len(self.page) / 1e6:.1f} MB>"

    def _repr_html_(self) -> str:
        page, style = html.escape(self.page, quote=True), f"width: 100%; height: {self.height}px; border: 0"
        return f'<iframe title="NormGrad report" srcdoc="{page}" style="{style}"></iframe>'


def show_report(*runs: str | Path, height: int = 800, largest: int = LARGEST) -> NotebookReport:
    """Return the page of the NormGrad tab, as a notebook shows it: `show_report(trainer.log_dir)`.

    Args:
        runs: folders of runs, or folders that these are in; also of a run that goes on.
        height: of its frame, in pixels.
        largest: its size in bytes, at most; the notebook keeps it.

    Raises:
        FileNotFoundError: a folder that does not exist.
        ValueError: there is nothing to show.

    Example:
        >>> import tempfile, torch
        >>> from pytorch_lightning import LightningModule, Trainer
        >>> from normgrad_lightning import NormGradCallback, show_report
        >>> class Module(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Conv2d(1, 1, 3)
        ...     def training_step(self, images):
        ...         return self.net(images).square().mean()
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> quiet = {"enable_progress_bar": False, "enable_model_summary": False}
        >>> folder = tempfile.mkdtemp()
        >>> callback = NormGradCallback()
        >>> trainer = Trainer(max_steps=1, accelerator="cpu", callbacks=[callback], default_root_dir=folder, **quiet)
        >>> trainer.fit(Module(), torch.utils.data.DataLoader(torch.rand(8, 1, 16, 16), 4))
        >>> show_report(trainer.log_dir)  # doctest: +ELLIPSIS
        <NormGrad report, ... MB>
    """
    return NotebookReport(report(runs_in([Path(run) for run in runs]), largest), height)


class _Event(NamedTuple):
    """A blob, and the steps at which its images were stored, if before."""

    blob: bytes
    needs: frozenset[int]


def report(runs: Sequence[Run], largest: int = LARGEST) -> str:
    """Return the page of these runs."""
    good = {(i, tag): _whole(blobs) for i, run in enumerate(runs) for tag, blobs in run.blobs.items()}
    good = {key: blobs for key, blobs in good.items() if blobs}
    if not good:
        raise ValueError("`runs`: what they have stored for the NormGrad tab cannot be read. Was the log cut off?")
    page = _PAGE.format(style=_read("style.css"), modules=_modules(), data=_HERE)
    curves = _for_script(_content(runs, {key: {} for key in good}))
    room = largest - len(page.encode()) - len(curves.encode())
    chosen = _thinned(good, room)
    return page.replace(_HERE, _for_script(_content(runs, chosen)), 1)


def _whole(blobs: Mapping[int, bytes]) -> dict[int, _Event]:
    """Return those that can be decoded, by step in order."""
    found = {step: decode(blobs[step]) for step in sorted(blobs)}
    return {
        step: _Event(blobs[step], _image_steps(content))
        for step, content in found.items()
        if not isinstance(content, Problem)
    }


def _image_steps(content: Content) -> frozenset[int]:
    images = content.header["images"]
    return frozenset(one["stored"] for one in images if one.get("jpegs") is None and one.get("stored") is not None)


def _thinned(good: Mapping[Any, Mapping[int, _Event]], room: int) -> dict[Any, dict[int, bytes]]:
    """Return as many events of each as fit: evenly chosen, with the first, the last, and those with images."""
    low, high = 1, max(map(len, good.values()))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if _size(good, middle) <= room else (low, middle - 1)
    if low == 1 and _size(good, 1) > room:
        megabytes = math.ceil((_size(good, 1) + LARGEST // 20) / 1e6)
        raise ValueError(
            f"`largest`: expected at least {megabytes} MB for the last event of each run. Raise it, or give fewer runs."
        )
    return {key: _chosen(events, low) for key, events in good.items()}


def _size(good: Mapping[Any, Mapping[int, _Event]], count: int) -> int:
    """Return the bytes of this many events of each as base64, with their steps."""
    return sum(4 * math.ceil(len(blob) / 3) + 40 for of in good.values() for blob in _chosen(of, count).values())


def _chosen(events: Mapping[int, _Event], count: int) -> dict[int, bytes]:
    steps = list(events)
    wanted = {steps[index] for index in evenly_spaced(len(steps), count)} if count > 1 else {steps[-1]}
    wanted |= {step for one in wanted for step in events[one].needs if step in events}
    return {step: events[step].blob for step in steps if step in wanted}


def _content(runs: Sequence[Run], chosen: Mapping[Any, Mapping[int, bytes]]) -> dict[str, Any]:
    """Return what the page reads."""
    names = _told_apart([run.name for run in runs])
    index = [
        {"run": names[i], "tag": tag, "events": [[step, runs[i].time] for step in blobs]}
        for (i, tag), blobs in chosen.items()
    ]
    data: dict[str, dict[str, Any]] = {}
    curves: dict[str, dict[str, Any]] = {}
    for (i, tag), blobs in chosen.items():
        texts = {str(step): base64.b64encode(blob).decode("ascii") for step, blob in blobs.items()}
        data.setdefault(names[i], {})[tag] = texts
        curves.setdefault(names[i], {})[tag] = _finite(runs[i].curves(tag))
    metrics = {names[i]: {tag: v for tag, v in run.metrics().items() if math.isfinite(v)} for i, run in enumerate(runs)}
    return {"index": {"runs": index, "metrics": metrics}, "blobs": data, "curves": curves}


def _told_apart(names: Sequence[str]) -> list[str]:
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _finite(curves: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[Sequence[float]]]:
    """Return curves without values that JSON does not have, and of at most about a thousand points."""
    found = {tag: [point for point in points if math.isfinite(point[1])] for tag, points in curves.items()}
    return {tag: points[:: max(1, len(points) // 1000)] for tag, points in found.items()}


def _for_script(content: Any) -> str:
    """Return JSON that cannot end the element that it stands in."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _modules() -> str:
    """Return the page's modules as an import map: each by its name, its code in the address itself."""
    addresses = {}
    for name in SCRIPTS:
        code = re.sub(r'from "\./', 'from "normgrad/', _read(name))
        addresses[f"normgrad/{name}"] = "data:text/javascript;base64," + base64.b64encode(code.encode()).decode("ascii")
    return json.dumps({"imports": addresses})


def _read(name: str) -> str:
    return (PAGE / name).read_text(encoding="utf-8")
