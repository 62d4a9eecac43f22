"""The tab on TensorBoard's side: it serves the page, and what runs have stored for it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from tensorboard import errors, plugin_util  # type: ignore[import-untyped]
from tensorboard.backend import http_util  # type: ignore[import-untyped]
from tensorboard.data import provider  # type: ignore[import-untyped]
from tensorboard.plugins import base_plugin  # type: ignore[import-untyped]
from werkzeug import wrappers

from normgrad_lightning.tensorboard_tab.loader import SAMPLES
from normgrad_lightning.tensorboard_tab.logs import is_of_group, is_validation
from normgrad_lightning.tensorboard_tab.page_files import PAGE, PAGE_FILES
from normgrad_lightning.tensorboard_tab.stored import NAME, SUFFIX, Problem, decode

_POINTS = 1000  # of a curve
_STEP = re.compile(r"[0-9]{1,18}")


class Plugin(base_plugin.TBPlugin):  # type: ignore[misc]
    """Serves the page, the list of runs and events, blobs and curves."""

    plugin_name = NAME

    def __init__(self, context: Any) -> None:
        self._provider = context.data_provider
        self._samples = (context.sampling_hints or {}).get(NAME, SAMPLES) or SAMPLES

    def get_plugin_apps(self) -> dict[str, Callable[..., Any]]:
        """Return what answers each address. The page's files are a fixed table: no part of an address is a path."""
        pages = {f"/{name}": _static(PAGE / name, kind) for name, kind in PAGE_FILES.items()}
        return {**pages, "/index": self._route(_index), "/event": self._route(_event), "/curves": self._route(_curves)}

    def is_active(self) -> bool:
        """Return False: TensorBoard shows the tab as soon as a run has data for it."""
        return False

    def frontend_metadata(self) -> Any:
        """Return the tab's name and where its page begins."""
        return base_plugin.FrontendMetadata(es_module_path="/entry.js", tab_name="NormGrad", disable_reload=True)

    def _route(self, answer: Callable[[_Data, Mapping[str, str]], Any]) -> Callable[..., Any]:
        @wrappers.Request.application
        def app(request: Any) -> Any:
            if request.method not in ("GET", "HEAD"):
                return _plain(request, "Only GET is answered here.", 405)
            if self._provider is None:
                return _plain(request, "The NormGrad tab needs TensorBoard's data provider.", 501)
            try:
                content = answer(_Data(self._provider, request, self._samples), request.args)
            except _RefusedError as refused:
                return _plain(request, refused.reason, refused.status)
            except (errors.NotFoundError, KeyError):
                return _plain(request, "There is nothing of this name.", 404)
            kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
            return http_util.Respond(request, content, kind)

        return app


class _RefusedError(Exception):
    """A request that cannot be answered."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Data:
    """What TensorBoard has read of the runs, for one request."""

    def __init__(self, data_provider: Any, request: Any, samples: int) -> None:
        self._provider, self._samples = data_provider, samples
        self._context = plugin_util.context(request.environ)
        self._experiment = plugin_util.experiment_id(request.environ)

    def _ask(self, method: str, plugin: str, **more: Any) -> Any:
        ask = getattr(self._provider, method)
        return ask(self._context, experiment_id=self._experiment, plugin_name=plugin, **more) or {}

    def events(self, runs: Iterable[str] | None = None, tags: Iterable[str] | None = None) -> Any:
        """Return references to blobs, by run and tag."""
        wanted = provider.RunTagFilter(runs=runs, tags=tags)
        return self._ask("read_blob_sequences", NAME, downsample=self._samples, run_tag_filter=wanted)

    def blob(self, key: str) -> bytes:
        """Return a blob."""
        return bytes(self._provider.read_blob(self._context, blob_key=key))

    def scalar_tags(self, runs: Iterable[str]) -> dict[str, list[str]]:
        """Return the tags of curves, by run."""
        wanted = provider.RunTagFilter(runs=list(runs))
        found = self._ask("list_scalars", "scalars", run_tag_filter=wanted)
        return {run: list(tags) for run, tags in found.items()}

    def scalars(self, run: str, tags: Iterable[str]) -> Any:
        """Return curves, by tag."""
        wanted = provider.RunTagFilter(runs=[run], tags=list(tags))
        return self._ask("read_scalars", "scalars", downsample=_POINTS, run_tag_filter=wanted).get(run, {})

    def last_scalars(self, run: str, tags: Iterable[str]) -> Any:
        """Return the last value of curves, by tag."""
        wanted = provider.RunTagFilter(runs=[run], tags=list(tags))
        return self._ask("read_last_scalars", "scalars", run_tag_filter=wanted).get(run, {})


def _index(data: _Data, arguments: Mapping[str, str]) -> Any:
    """Return runs with the steps of their events, and their last validation metrics."""
    runs = [
        {"run": run, "tag": tag, "events": [[datum.step, datum.wall_time] for datum in series]}
        for run, tags in sorted(data.events().items())
        for tag, series in sorted(tags.items())
        if tag.endswith(SUFFIX)
    ]
    names = {one["run"] for one in runs}
    metrics = {}
    for run, tags in (data.scalar_tags(names) if names else {}).items():
        wanted = [tag for tag in tags if is_validation(tag)]
        last = data.last_scalars(run, wanted) if wanted else {}
        metrics[run] = {tag: datum.value for tag, datum in last.items()}
    return {"runs": runs, "metrics": metrics}


def _event(data: _Data, arguments: Mapping[str, str]) -> bytes:
    """Return the blob of an event."""
    run, tag, step = (_argument(arguments, name) for name in ("run", "tag", "step"))
    if not _STEP.fullmatch(step):
        raise _RefusedError(400, "`step`: expected a whole number.")
    series = data.events([run], [tag]).get(run, {}).get(tag, [])
    found = [datum for datum in series if datum.step == int(step)]
    if not found or not found[-1].values:
        raise _RefusedError(404, "There is no event of this run, tag and step.")
    blob = data.blob(found[-1].values[0].blob_key)
    content = decode(blob)
    if isinstance(content, Problem):
        raise _RefusedError(422, f"What is stored for this step cannot be shown: {content.reason}.")
    return blob


def _curves(data: _Data, arguments: Mapping[str, str]) -> Any:
    """Return the curves of a run: ours, and those of validation."""
    run, tag = _argument(arguments, "run"), _argument(arguments, "tag")
    tags = [one for one in data.scalar_tags([run]).get(run, []) if is_of_group(one, tag) or is_validation(one)]
    found = data.scalars(run, tags) if tags else {}
    return {name: [[datum.step, datum.value] for datum in series] for name, series in found.items()}


def _argument(arguments: Mapping[str, str], name: str) -> str:
    value = arguments.get(name)
    if value is None or len(value) > 4096:
        raise _RefusedError(400, f"`{name}`: expected a text, but got {'none' if value is None else 'a long one'}.")
    return value


def _static(path: Path, kind: str) -> Callable[..., Any]:
    @wrappers.Request.application
    def app(request: Any) -> Any:
        return http_util.Respond(request, path.read_bytes(), kind)

    return app


def _plain(request: Any, text: str, code: int) -> Any:
    return http_util.Respond(request, text, "text/plain", code=code)
