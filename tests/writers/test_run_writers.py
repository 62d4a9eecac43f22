"""Pages in W&B, MLflow, Comet and Aim: real runs without a network, read back from each tool's own store."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from stand_in import FLOAT16, Store, assert_has, decoded, film, read_folder, view

from normgrad_lightning.page import Page
from normgrad_lightning.writers import raw_maps

pytestmark = pytest.mark.nightly

SCRIPT = """
import contextlib, importlib, json, os, sys, warnings
from pathlib import Path
from unittest import mock

kind, package, folder = sys.argv[1:]

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from stand_in import film, view

from normgrad_lightning import NormGradCallback
from normgrad_lightning.page import Page
from normgrad_lightning.writers.destinations import writers_for

pl = importlib.import_module(package)
loggers = importlib.import_module(f"{package}.loggers")


def make_logger(where):
    if kind == "wandb":
        return loggers.WandbLogger(save_dir=where, offline=True)
    if kind == "mlflow":
        return loggers.MLFlowLogger(tracking_uri=f"sqlite:///{where}/mlflow.db", artifact_location=f"{where}/artifacts")
    if kind == "comet":
        return loggers.CometLogger(project="normgrad", offline_directory=str(where))
    from aim.pytorch_lightning import AimLogger

    return AimLogger(repo=str(where))


def finish(logger):
    if kind == "wandb":
        import wandb

        wandb.finish()
    if kind == "comet":
        logger.experiment.end()
    if kind == "aim":
        logger.finalize("success")


class Lit(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential()
        self.net.add_module("stem", nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()))
        self.net.add_module("größe", nn.Sequential(nn.Conv2d(8, 8, 3, 2, padding=1), nn.ReLU()))
        self.net.add_module("head", nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05)


def run(name, callbacks):
    where = Path(folder, name)
    where.mkdir()
    pl.seed_everything(3)
    data = DataLoader(TensorDataset(torch.randn(24, 3, 16, 24), torch.randint(5, (24,))), batch_size=4)
    logger, csv, module = make_logger(where), loggers.CSVLogger(where, "csv", version=""), Lit()
    trainer = pl.Trainer(
        max_epochs=1, accelerator="cpu", default_root_dir=where, logger=[logger, csv], callbacks=callbacks,
        log_every_n_steps=1, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, data)
    logger.log_metrics({"late": 1.0}, step=1)
    finish(logger)
    torch.save(module.state_dict(), where / "weights.pt")
    told = [str(w.message) for w in caught if "NormGrad" in str(w.message)]
    (where / "told.json").write_text(json.dumps(told))


def write(name, pages):
    where = Path(folder, name)
    where.mkdir()
    logger = make_logger(where)
    (writer,), notes = writers_for([logger], where)
    assert not notes
    for page in pages:
        writer.write(page)
    logger.log_metrics({"late": 1.0}, step=1)
    finish(logger)


IMAGE_CALLS = {
    "wandb": "wandb.Image",
    "mlflow": "mlflow.MlflowClient.log_image",
    "comet": "comet_ml.OfflineExperiment.log_image",
    "aim": "aim.Image",
}

VIEWS = ["overview", "patches", "atlas", "curves", "tab", "panels"]
run("plain", [])
run("watched", [NormGradCallback(every_n_steps=2, views=VIEWS)])
with mock.patch(IMAGE_CALLS[kind], side_effect=OSError(28, "No space left on device")):
    run("broken", [NormGradCallback(every_n_steps=2, views=VIEWS)])
write("pages", [view(0), view(250)])
write("film", [Page(9, films={"normgrad/film": film()})])
numbers = {"nan": float("nan"), "plus": float("inf"), "minus": float("-inf"), "one": 1.0}
write("odd", [Page(3, scalars={f"normgrad/{name}": value for name, value in numbers.items()})])
"""

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "aim": "aim"}
NAMES = {"wandb": "W&B", "mlflow": "MLflow", "comet": "Comet", "aim": "Aim"}
TAGS = [
    "normgrad/5_overview/0_order0",
    *(f"normgrad/{view}/{of}" for view in ("1_patches", "4_atlas") for of in ("0_combined", "01_net.größe.1")),
    *(f"normgrad_order0/{layer}" for layer in ("00_net.stem.1", "01_net.größe.1")),
]
STEPS = [0, 2, 4, 5]


def maps_in(folder: Path) -> dict[tuple[str, int], Any]:
    """The raw maps among the files of a run."""
    paths = sorted(folder.rglob("*.normgrad"))
    assert not any(path.is_symlink() for path in paths)  # the folder of a run may be moved
    return {
        (str(path.parent.relative_to(folder)), int(path.stem.removeprefix("step_"))): raw_maps.decode(path.read_bytes())
        for path in paths
    }


# ---------------------------------------------------------------- the stores


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a `.wandb` file, which is a LevelDB log: blocks of 32 KB, records in one or more parts."""
    from wandb.proto import wandb_internal_pb2

    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, part = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if part in (1, 4):  # whole, or the last one
            yield wandb_internal_pb2.Record.FromString(record)
            record = b""


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's history; media are dicts."""
    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    rows = []
    for record in wandb_records(path):
        if record.HasField("history"):
            rows.append({})
            for item in record.history.item:
                *keys, last = item.nested_key or [item.key]
                place = rows[-1]
                for key in keys:
                    place = place.setdefault(key, {})
                place[last] = json.loads(item.value_json)
    return rows


def read_wandb(folder: Path) -> Store:
    (files,) = folder.glob("wandb/offline-run-*/files")
    pictures, scalars = {}, {}
    for row in wandb_rows(folder):
        step = row.pop("trainer/global_step")
        for name, value in row.items():
            if isinstance(value, dict):
                assert value["caption"] == f"step {step}"
                pictures[name, step] = decoded((files / value["path"]).read_bytes())
            elif not name.startswith("_"):
                scalars[name, step] = float(value)
    return Store(pictures, scalars, maps_in(files))


def read_mlflow(folder: Path) -> Store:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    pictures, scalars = {}, {}
    for file in client.list_artifacts(run.info.run_id, "images"):
        if file.path.endswith(".png"):
            name, _, step, *_ = Path(file.path).name.split("+")
            local = client.download_artifacts(run.info.run_id, file.path)
            pictures[name.replace("~", "/"), int(step)] = decoded(Path(local).read_bytes())
    for name in run.data.metrics:
        scalars |= {(name, metric.step): metric.value for metric in client.get_metric_history(run.info.run_id, name)}
    folders = [file.path for file in client.list_artifacts(run.info.run_id) if "raw" in file.path]
    roots = [Path(client.download_artifacts(run.info.run_id, name)).parent for name in folders]
    return Store(pictures, scalars, {key: maps for root in roots for key, maps in maps_in(root).items()})


def read_comet(folder: Path) -> Store:
    (path,) = folder.glob("*.zip")
    pictures, scalars, maps = {}, {}, {}
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            payload = message["payload"]
            if payload.get("upload_type") == "visualization":
                about = payload["additional_params"]
                assert about["extension"] == "jpg"
                pictures[about["figName"], about["step"]] = decoded(archive.read(payload["file_path"]))
            elif payload.get("upload_type") == "asset" and payload["additional_params"]["fileName"].endswith(
                ".normgrad"
            ):
                about = payload["additional_params"]
                tag, _, name = about["fileName"].rpartition("/")
                assert name == f"step_{about['step']:08d}.normgrad"
                maps[tag, about["step"]] = raw_maps.decode(archive.read(payload["file_path"]))
            elif message["type"] == "metric_msg":
                metric = payload["metric"]
                scalars[metric["metricName"], metric["step"]] = float(metric["metricValue"])
    return Store(pictures, scalars, maps)


def read_aim(folder: Path) -> Store:
    from aim import Repo, Run
    from aim.sdk.index_manager import RepoIndexManager

    (run_hash,) = Repo(str(folder)).list_all_runs()
    RepoIndexManager.get_index_manager(Repo(str(folder))).index(run_hash)  # as `aim up` does
    run = Run(run_hash, repo=str(folder), read_only=True)
    pictures, scalars = {}, {}
    for name, context, _ in run.iter_sequence_info_by_type("aim.image"):
        steps, (images, *_) = run.get_image_sequence(name, context).data.items_list()
        for step, image in zip(steps, images, strict=True):
            assert image.format == "jpeg"
            pictures[name, step] = decoded(bytes(image.storage["data"]))
    for name, context, _ in run.iter_metrics_info():
        steps, (values, *_) = run.get_metric(name, context).data.items_list()
        scalars |= {(name, step): value for step, value in zip(steps, values, strict=True)}
    return Store(pictures, scalars, read_folder(folder / ".aim/normgrad" / run_hash).maps)


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "comet": read_comet, "aim": read_aim}


def read_csv(folder: Path) -> dict[tuple[str, int], float]:
    """What the CSVLogger of the same run was given."""
    names, *rows = (line.split(",") for line in (folder / "csv/metrics.csv").read_text().splitlines())
    tables = [dict(zip(names, row, strict=True)) for row in rows]
    return {(name, int(row["step"])): float(row[name]) for row in tables for name in names if row[name] != ""}


def read_files(folder: Path) -> dict[tuple[str, int], Any]:
    """The panels that went to files beside the CSVLogger."""
    return read_folder(folder / "csv/normgrad").pictures


def name_in(kind: str, tag: str) -> str:
    """What a scalar or a raw map is called in a tool."""
    return re.sub("[^a-zA-Z0-9_./-]", "_", tag) if kind == "mlflow" else tag


def picture_in(kind: str, tag: str) -> str:
    """What a panel is called in a tool."""
    return f"{tag}.jpg" if kind == "comet" else name_in(kind, tag)


def page_in(kind: str, page: Page) -> Page:
    """A page under the names that a tool has for it."""
    return Page(
        page.step,
        [picture._replace(tag=picture_in(kind, picture.tag)) for picture in page.pictures],
        {name_in(kind, tag): value for tag, value in page.scalars.items()},
        {name_in(kind, tag): maps for tag, maps in page.maps.items()},
    )


# ---------------------------------------------------------------- the runs


class Runs(NamedTuple):
    """A folder with runs.

    Three of a Trainer: `plain`, `watched`, and `broken`, where the tool cannot keep images. Two of pages without one:
    `pages`, and `odd`, with scalars that are not finite.
    """

    kind: str
    folder: Path


CASES = [
    *(
        (kind, package)
        for kind in ("wandb", "mlflow", "comet")
        for package in ("pytorch_lightning", "lightning.pytorch")
    ),
    ("aim", "lightning.pytorch"),  # where both are installed, its logger is of this one
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def runs(request, tmp_path_factory):
    kind, package = request.param
    if importlib.util.find_spec(PACKAGES[kind]) is None:  # not imported here, for Comet changes other modules
        pytest.skip(f"needs {PACKAGES[kind]}")
    if kind == "aim" and importlib.util.find_spec("pkg_resources") is None:
        pytest.skip("aim 3.29 needs pkg_resources, of setuptools before 81")
    folder = tmp_path_factory.mktemp(kind)
    offline = {"HOME": str(folder), "COMET_START_ONLINE": "0", "COMET_DISABLE_AUTO_LOGGING": "1"}
    offline["PYTHONPATH"] = str(Path(__file__).parent)
    command = [sys.executable, "-c", SCRIPT, kind, package, str(folder)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Runs(kind, folder)


def test_the_panels_of_all_layers_are_there_under_their_steps(runs):
    store = READERS[runs.kind](runs.folder / "watched")
    assert sorted(store.pictures) == sorted((picture_in(runs.kind, tag), step) for tag in TAGS for step in STEPS)


def test_each_panel_is_the_picture_that_others_got(runs):
    store, files = READERS[runs.kind](runs.folder / "watched"), read_files(runs.folder / "watched")
    assert len(files) == len(TAGS) * len(STEPS)
    for tag, step in files:
        seen = store.pictures[picture_in(runs.kind, tag), step]
        alike = {other: file for other, file in files.items() if file.shape == seen.shape}
        away = {other: np.abs(seen - file).mean() for other, file in alike.items()}
        own = away.pop((tag, step))
        assert own < 3
        if "atlas" not in tag:  # whose tiles are nearly the same from step to step
            assert min(away.values(), default=9) > 2 * own  # and no other layer's, nor of another step


@pytest.mark.parametrize("name", ["plain", "watched", "broken"])
def test_scalars_before_and_after_keep_their_values_and_steps(runs, name):
    folder = runs.folder / name
    wanted = {key: value for key, value in read_csv(folder).items() if key[0].startswith("loss")}
    assert sorted(wanted) == [("loss_epoch", 5), *(("loss_step", step) for step in range(6))]
    scalars = READERS[runs.kind](folder).scalars
    assert {key: scalars[key] for key in scalars if key[0].startswith("loss")} == pytest.approx(wanted)
    assert [key for key in scalars if key[0] == "late"] == [("late", 1)]


@pytest.mark.parametrize("name", ["watched", "broken"])
def test_the_weights_are_the_same_bits_as_without_the_callback(runs, name):
    plain, other = (torch.load(runs.folder / run / "weights.pt") for run in ("plain", name))
    assert list(plain) == list(other)
    assert all(torch.equal(plain[key], other[key]) for key in plain)


def test_nothing_is_warned_of(runs):
    assert json.loads((runs.folder / "watched/told.json").read_text()) == []


def test_a_tool_that_cannot_keep_images_is_one_warning(runs):
    (told,) = json.loads((runs.folder / "broken/told.json").read_text())
    assert told == (
        f"NormGrad failed while writing to {NAMES[runs.kind]}; training continues. OSError: [Errno 28] No space left "
        "on device"
    )
    assert len(read_files(runs.folder / "broken")) == len(TAGS) * len(STEPS)  # the other logger has them
    assert not READERS[runs.kind](runs.folder / "broken").pictures


def written(runs, name):
    """What the tool has kept of what the writer wrote; the metric that was logged after it must be there, too."""
    store = READERS[runs.kind](runs.folder / name)
    assert store.scalars["late", 1] == 1.0
    ours = {key: value for key, value in store.scalars.items() if key[0].startswith("normgrad")}
    return store._replace(scalars=ours)


def test_whole_pages_are_there_under_their_tags_and_steps(runs):
    pages = [page_in(runs.kind, view(step)) for step in (0, 250)]
    assert_has(written(runs, "pages"), pages, loss=0.0 if runs.kind == "aim" else FLOAT16)


def test_scalars_that_are_not_finite_are_kept_as_the_tool_keeps_them(runs):
    scalars = written(runs, "odd").scalars
    assert sorted(scalars) == [(f"normgrad/{name}", 3) for name in ("minus", "nan", "one", "plus")]
    assert math.isnan(scalars["normgrad/nan", 3])
    most = sys.float_info.max if runs.kind == "mlflow" else math.inf  # its database has no infinity
    assert (scalars["normgrad/plus", 3], scalars["normgrad/minus", 3]) == (most, -most)
    assert scalars["normgrad/one", 3] == 1.0


@pytest.mark.parametrize("runs", [case for case in CASES if "wandb" in case], indirect=True, ids="-".join)
def test_pictures_and_scalars_of_a_page_are_one_row_in_wandb(runs):
    rows = [row for row in wandb_rows(runs.folder / "pages") if "late" not in row]
    assert [row["trainer/global_step"] for row in rows] == [0, 250]
    for row in rows:
        page = view(row["trainer/global_step"])
        assert {*(picture.tag for picture in page.pictures), *page.scalars} <= set(row)


@pytest.mark.parametrize("runs", [case for case in CASES if "wandb" in case], indirect=True, ids="-".join)
def test_raw_maps_are_sent_to_wandb_as_files_of_the_run(runs):
    (path,) = runs.folder.glob("pages/wandb/offline-run-*/*.wandb")
    sent = {file.path for record in wandb_records(path) if record.HasField("files") for file in record.files.files}
    assert {raw_maps.file_name(tag, step) for step in (0, 250) for tag in view(step).maps} <= sent


@pytest.mark.parametrize("runs", [case for case in CASES if "wandb" in case], indirect=True, ids="-".join)
def test_panels_of_an_event_are_one_row_in_wandb(runs):
    rows = wandb_rows(runs.folder / "watched")
    of_panels = [row for row in rows if any(isinstance(value, dict) for value in row.values())]
    assert [row["trainer/global_step"] for row in of_panels] == STEPS
    assert all(set(TAGS) <= set(row) and "loss_step" not in row for row in of_panels)
    assert [row["_step"] for row in rows] == list(range(len(rows)))  # W&B's own, which must not go back


def films_in(kind: str, folder: Path) -> list[bytes]:
    """The films that a tool has kept of a run, as they are."""
    if kind == "wandb":
        (row,) = (row for row in wandb_rows(folder) if "normgrad/film" in row)
        assert row["trainer/global_step"] == 9
        (files,) = folder.glob("wandb/offline-run-*/files")
        return [(files / row["normgrad/film"]["path"]).read_bytes()]
    if kind == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return [Path(client.download_artifacts(run.info.run_id, "normgrad/film.webp")).read_bytes()]
    if kind == "comet":
        (path,) = folder.glob("*.zip")
        with zipfile.ZipFile(path) as archive:
            payloads = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
            pictures = [one for one in payloads if one.get("upload_type") == "visualization"]
            assert [one["additional_params"]["figName"] for one in pictures] == ["normgrad/film.webp"]
            assert [one["additional_params"]["step"] for one in pictures] == [9]
            return [archive.read(one["file_path"]) for one in pictures]
    return [path.read_bytes() for path in folder.glob(".aim/normgrad/*/film.webp")]


def test_a_film_is_kept_byte_for_byte(runs):
    assert films_in(runs.kind, runs.folder / "film") == [film()]


def report_in(kind: str, folder: Path) -> bytes:
    """The report that a tool has kept of a run."""
    if kind == "wandb":
        (path,) = folder.glob("wandb/offline-run-*/files/normgrad/report.html")
        return path.read_bytes()
    if kind == "mlflow":
        from mlflow import MlflowClient

        client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
        (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
        return Path(client.download_artifacts(run.info.run_id, "normgrad/report.html")).read_bytes()
    if kind == "comet":
        (path,) = folder.glob("*.zip")
        with zipfile.ZipFile(path) as archive:
            payloads = [json.loads(line)["payload"] for line in archive.read("messages.json").splitlines()]
            assets = [one for one in payloads if one.get("upload_type") == "asset"]
            (report,) = [one for one in assets if one["additional_params"]["fileName"] == "normgrad/report.html"]
            return archive.read(report["file_path"])
    (path,) = folder.glob(".aim/normgrad/*/report.html")
    return path.read_bytes()


def test_the_report_is_kept_byte_for_byte(runs):
    watched = runs.folder / "watched"
    assert report_in(runs.kind, watched) == (watched / "csv/normgrad/report.html").read_bytes()
