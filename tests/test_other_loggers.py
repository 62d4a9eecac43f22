"""Panels in W&B, MLflow, Comet and Aim: real runs without a network, read back from each tool's own store."""

from __future__ import annotations

import importlib.util
import io
import json
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
from PIL import Image

pytestmark = pytest.mark.extras

SCRIPT = """
import contextlib, importlib, json, os, sys, warnings
from pathlib import Path
from unittest import mock

kind, package, folder = sys.argv[1:]

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from normgrad_lightning import NormGradCallback

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


IMAGE_CALLS = {
    "wandb": "wandb.Image",
    "mlflow": "mlflow.MlflowClient.log_image",
    "comet": "comet_ml.OfflineExperiment.log_image",
    "aim": "aim.Image",
}

run("plain", [])
run("watched", [NormGradCallback(every_n_steps=2)])
with mock.patch(IMAGE_CALLS[kind], side_effect=OSError(28, "No space left on device")):
    run("broken", [NormGradCallback(every_n_steps=2)])
"""

PACKAGES = {"wandb": "wandb", "mlflow": "mlflow", "comet": "comet_ml", "aim": "aim"}
NAMES = {"wandb": "W&B", "mlflow": "MLflow", "comet": "Comet", "aim": "Aim"}
TAGS = ["normgrad_order0/00_net.stem.1", "normgrad_order0/01_net.größe.1"]
STEPS = [0, 2, 4]


class Store(NamedTuple):
    """What a tool has kept of a run.

    Attributes:
        panels: Pixels, by name and step.
        scalars: Values, by name and step.
    """

    panels: dict[tuple[str, int], Any]
    scalars: dict[tuple[str, int], float]


def pixels(picture: bytes) -> Any:
    with Image.open(io.BytesIO(picture)) as image:
        return np.asarray(image.convert("RGB"), float)


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
    panels, scalars = {}, {}
    for row in wandb_rows(folder):
        step = row.pop("trainer/global_step")
        for name, value in row.items():
            if isinstance(value, dict):
                assert value["caption"] == f"step {step}"
                panels[name, step] = pixels((files / value["path"]).read_bytes())
            elif not name.startswith("_"):
                scalars[name, step] = value
    return Store(panels, scalars)


def read_mlflow(folder: Path) -> Store:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    panels, scalars = {}, {}
    for file in client.list_artifacts(run.info.run_id, "images"):
        if file.path.endswith(".png"):
            name, _, step, *_ = Path(file.path).name.split("+")
            local = client.download_artifacts(run.info.run_id, file.path)
            panels[name.replace("~", "/"), int(step)] = pixels(Path(local).read_bytes())
    for name in run.data.metrics:
        scalars |= {(name, metric.step): metric.value for metric in client.get_metric_history(run.info.run_id, name)}
    return Store(panels, scalars)


def read_comet(folder: Path) -> Store:
    (path,) = folder.glob("*.zip")
    panels, scalars = {}, {}
    with zipfile.ZipFile(path) as archive:
        for line in archive.read("messages.json").splitlines():
            message = json.loads(line)
            payload = message["payload"]
            if payload.get("upload_type") == "visualization":
                about = payload["additional_params"]
                assert about["extension"] == "jpg"
                panels[about["figName"], about["step"]] = pixels(archive.read(payload["file_path"]))
            elif message["type"] == "metric_msg":
                metric = payload["metric"]
                scalars[metric["metricName"], metric["step"]] = metric["metricValue"]
    return Store(panels, scalars)


def read_aim(folder: Path) -> Store:
    from aim import Repo, Run
    from aim.sdk.index_manager import RepoIndexManager

    (run_hash,) = Repo(str(folder)).list_all_runs()
    RepoIndexManager.get_index_manager(Repo(str(folder))).index(run_hash)  # as `aim up` does
    run = Run(run_hash, repo=str(folder), read_only=True)
    panels, scalars = {}, {}
    for name, context, _ in run.iter_sequence_info_by_type("aim.image"):
        steps, (images, *_) = run.get_image_sequence(name, context).data.items_list()
        for step, image in zip(steps, images, strict=True):
            assert image.format == "jpeg"
            panels[name, step] = pixels(bytes(image.storage["data"]))
    for name, context, _ in run.iter_metrics_info():
        steps, (values, *_) = run.get_metric(name, context).data.items_list()
        scalars |= {(name, step): value for step, value in zip(steps, values, strict=True)}
    return Store(panels, scalars)


READERS = {"wandb": read_wandb, "mlflow": read_mlflow, "comet": read_comet, "aim": read_aim}


def read_csv(folder: Path) -> dict[tuple[str, int], float]:
    """What the CSVLogger of the same run was given."""
    names, *rows = (line.split(",") for line in (folder / "csv/metrics.csv").read_text().splitlines())
    tables = [dict(zip(names, row, strict=True)) for row in rows]
    return {(name, int(row["step"])): float(row[name]) for row in tables for name in names if row[name] != ""}


def read_files(folder: Path) -> dict[tuple[str, int], Any]:
    """The panels that went to files beside the CSVLogger."""
    root = folder / "csv/normgrad"
    return {(str(p.parent.relative_to(root)), int(p.stem[5:])): pixels(p.read_bytes()) for p in root.rglob("*.jpg")}


def name_in(kind: str, tag: str) -> str:
    """What a panel is called in a tool."""
    if kind == "mlflow":
        return re.sub("[^ -~]", "_", tag)
    return f"{tag}.jpg" if kind == "comet" else tag


# ---------------------------------------------------------------- the runs


class Runs(NamedTuple):
    """A folder with three runs: `plain`, `watched`, and `broken`, where the tool cannot keep images."""

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
    command = [sys.executable, "-c", SCRIPT, kind, package, str(folder)]
    done = subprocess.run(command, cwd=folder, env={**os.environ, **offline}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return Runs(kind, folder)


def test_the_panels_of_all_layers_are_there_under_their_steps(runs):
    store = READERS[runs.kind](runs.folder / "watched")
    assert sorted(store.panels) == sorted((name_in(runs.kind, tag), step) for tag in TAGS for step in STEPS)


def test_each_panel_is_the_picture_that_others_got(runs):
    store, files = READERS[runs.kind](runs.folder / "watched"), read_files(runs.folder / "watched")
    assert len(files) == len(TAGS) * len(STEPS)
    for tag, step in files:
        seen = store.panels[name_in(runs.kind, tag), step]
        away = {other: np.abs(seen - file).mean() for other, file in files.items()}
        assert away.pop((tag, step)) < 3
        assert min(away.values()) > 3  # and no other layer's, nor of another step


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
        f"NormGrad failed at writing to {NAMES[runs.kind]}, and training goes on: OSError: [Errno 28] No space left on "
        "device"
    )
    assert len(read_files(runs.folder / "broken")) == len(TAGS) * len(STEPS)  # the other logger has them
    assert not READERS[runs.kind](runs.folder / "broken").panels


@pytest.mark.parametrize("runs", [case for case in CASES if "wandb" in case], indirect=True, ids="-".join)
def test_panels_of_an_event_are_one_row_in_wandb(runs):
    rows = wandb_rows(runs.folder / "watched")
    of_panels = [row for row in rows if any(isinstance(value, dict) for value in row.values())]
    assert [row["trainer/global_step"] for row in of_panels] == STEPS
    assert all(set(TAGS) <= set(row) and "loss_step" not in row for row in of_panels)
    assert [row["_step"] for row in rows] == list(range(len(rows)))  # W&B's own, which must not go back
