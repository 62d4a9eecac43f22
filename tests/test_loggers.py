"""Panels read back from where they were written."""

import io
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch.loggers as new_loggers
import numpy as np
import pytest
import pytorch_lightning.loggers as old_loggers
from lightning.pytorch.loggers.logger import DummyLogger as NewDummyLogger
from PIL import Image
from pytorch_lightning.loggers.logger import DummyLogger as OldDummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.summary.writer.record_writer import RecordWriter

from normgrad_lightning.loggers import WRITERS, FilePanels, MLFlowPanels, TensorBoardPanels, panel_writers
from normgrad_lightning.records import record
from normgrad_lightning.render import Panel, Sheet, input_tiles, jpeg

FLAVOURS = pytest.mark.parametrize("loggers", [old_loggers, new_loggers], ids=["pytorch_lightning", "lightning"])
TAG = "normgrad_order0/03_layer3.1"


def make_panel(seed=0):
    rng = np.random.default_rng(seed)
    waves = np.sin(np.linspace(0, 6, 64) + seed)[:, None] * np.cos(np.linspace(0, 5, 48))
    return Sheet(input_tiles(waves[None, None], tile_size=64)).panel(rng.random((1, 4, 3)))


def encoded_as(tag, picture):
    return Panel(tag, jpeg(picture), *picture.shape[:2])


def log(writer, picture, step=100):
    writer.log_panels(step, [encoded_as(TAG, picture)])


def decoded(encoded):
    with Image.open(io.BytesIO(encoded)) as image:
        assert image.format == "JPEG"
        return np.asarray(image, float)


def assert_same_picture(encoded, picture):
    assert np.abs(decoded(encoded) - picture[..., :3]).mean() < 3
    assert np.abs(decoded(encoded) - make_panel(seed=3)[..., :3]).mean() > 10  # and not just any picture


@FLAVOURS
def test_tensorboard_keeps_the_panels_under_their_tags_and_steps(loggers, tmp_path):
    logger = loggers.TensorBoardLogger(tmp_path)
    (writer,), notes = panel_writers([logger], tmp_path)
    assert isinstance(writer, TensorBoardPanels)
    assert not notes
    assert logger.log_dir in writer.where
    assert not list(tmp_path.iterdir())  # nothing before the first panel

    picture, later = make_panel(0), make_panel(1)
    log(writer, picture, step=0)
    writer.log_panels(250, [encoded_as(TAG, later), encoded_as("normgrad_order1/00_conv1", later)])
    logger.finalize("success")

    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert sorted(events.Tags()["images"]) == [TAG, "normgrad_order1/00_conv1"]
    first, second = events.Images(TAG)
    assert (first.step, second.step) == (0, 250)
    assert (first.height, first.width) == picture.shape[:2]
    assert_same_picture(first.encoded_image_string, picture)
    assert_same_picture(second.encoded_image_string, later)


def slow_record(data):
    """What TensorBoard's own writer makes of it, with its checksums in pure Python."""
    file = io.BytesIO()
    RecordWriter(file).write(data)
    return file.getvalue()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 70_001])
def test_records_are_those_of_tensorboard_byte_for_byte(size):
    data = np.random.default_rng(size).bytes(size)
    assert record(data) == slow_record(data)


def steps_in_order(log_dir):
    """The steps of an event file, as they stand in it; its checksums are checked by whoever reads it."""
    (path,) = Path(log_dir).glob("events.*")
    return [event.step for event in EventFileLoader(str(path)).Load() if event.HasField("summary")]


def test_panels_stand_between_the_scalars_that_were_logged_before_and_after(tmp_path):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = panel_writers([logger], tmp_path)
    for step in range(0, 60, 3):
        logger.log_metrics({"loss": 1.0}, step)
        log(writer, make_panel(), step + 1)
        assert steps_in_order(logger.log_dir)[-2:] == [step, step + 1]  # on disk already: a kill would not matter
        logger.log_metrics({"loss": 1.0, "accuracy": 0.5}, step + 2)
    logger.finalize("success")
    assert steps_in_order(logger.log_dir) == [
        s for step in range(0, 60, 3) for s in (step, step + 1, step + 2, step + 2)
    ]


def test_a_writer_that_is_not_tensorboards_own_is_given_summaries(tmp_path):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = panel_writers([logger], tmp_path)
    events = logger.experiment._get_file_writer().event_writer
    events._hidden = events.__dict__.pop("_general_file_writer")
    log(writer, make_panel(), step=5)
    assert steps_in_order(logger.log_dir) == [5]


def test_a_closed_writer_is_an_error(tmp_path):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = panel_writers([logger], tmp_path)
    log(writer, make_panel(), step=5)
    logger.experiment.file_writer.event_writer.close()
    with pytest.raises(Exception, match="closed"):
        log(writer, make_panel(), step=6)
    assert steps_in_order(logger.log_dir) == [5]


@FLAVOURS
def test_subclass_of_a_tensorboard_logger_is_one(loggers, tmp_path):
    class Mine(loggers.TensorBoardLogger):
        pass

    logger = Mine(tmp_path)
    (writer,), notes = panel_writers([logger], tmp_path)
    log(writer, make_panel(), step=7)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert [event.step for event in events.Images(TAG)] == [7]
    assert not notes


@FLAVOURS
def test_a_csv_logger_has_the_panels_beside_it(loggers, tmp_path):
    logger = loggers.CSVLogger(tmp_path)
    (writer,), notes = panel_writers([logger], tmp_path / "unused")
    assert isinstance(writer, FilePanels)
    assert writer.where == f"{logger.log_dir}/normgrad"
    assert not notes
    assert not list(tmp_path.iterdir())

    log(writer, make_panel())
    (path,) = (p for p in tmp_path.rglob("*") if p.is_file())
    assert str(path) == f"{logger.log_dir}/normgrad/normgrad_order0/03_layer3.1/step_00000100.jpg"
    assert_same_picture(path.read_bytes(), make_panel())


class Untouched:
    """A logger before the first panel: nobody may ask for its run."""

    log_dir = "logs"

    @property
    def experiment(self):
        raise AssertionError("this would create a run")

    name = version = run_id = experiment_id = experiment


@pytest.mark.parametrize("name", WRITERS)
def test_loggers_are_known_by_the_names_of_their_classes_and_left_alone(name, tmp_path):
    theirs = type(name, (Untouched,), {})
    mine = type("Mine", (theirs,), {})
    writers, notes = panel_writers([theirs(), mine()], tmp_path)
    assert [type(writer) for writer in writers] == [WRITERS[name]] * 2
    assert all(writer.where for writer in writers)
    assert not notes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"TensorBoardLogger", "SummaryWriter"}))
def test_the_last_of_a_disk_is_left_to_the_run(name, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**30, free=10 * 2**20))
    logger = type(name, (Untouched,), {"log_dir": str(tmp_path)})()
    (writer,), _ = panel_writers([logger], tmp_path)
    with pytest.raises(OSError, match=r"10\.0 MB are left on the disk"):
        log(writer, make_panel())


@pytest.mark.parametrize("dummy", [OldDummyLogger, NewDummyLogger])
def test_fast_dev_run_gets_nothing(dummy, tmp_path):
    assert panel_writers([dummy()], tmp_path) == ([], [])


def test_no_loggers_no_writers(tmp_path):
    assert panel_writers([], tmp_path) == ([], [])


def test_each_logger_has_its_writer_and_each_folder_only_one(tmp_path):
    board, csv = old_loggers.TensorBoardLogger(tmp_path), old_loggers.CSVLogger(tmp_path, version="a")
    same, other = old_loggers.CSVLogger(tmp_path, version="a"), old_loggers.CSVLogger(tmp_path, version="b")
    writers, notes = panel_writers([csv, board, same, other], tmp_path)
    assert [type(w) for w in writers] == [FilePanels, TensorBoardPanels, FilePanels]
    assert [writers[0].where, writers[2].where] == [f"{csv.log_dir}/normgrad", f"{other.log_dir}/normgrad"]
    assert not notes


class Folderless(old_loggers.logger.Logger):
    """A logger of the user's own, as small as Lightning allows."""

    name = "mine"
    version = 0

    def log_metrics(self, metrics, step=None): ...

    def log_hyperparams(self, params): ...


class SaveDirOnly(Folderless):
    def __init__(self, save_dir):
        self._save_dir = save_dir

    @property
    def save_dir(self):
        return self._save_dir


def test_folder_is_the_loggers_own_else_the_fallback(tmp_path):
    loggers = [SaveDirOnly(tmp_path / "own"), Folderless(), SaveDirOnly("s3://bucket/run")]
    writers, notes = panel_writers(loggers, tmp_path / "fallback")
    assert [w.where for w in writers] == [str(tmp_path / "own/normgrad"), str(tmp_path / "fallback/normgrad")]
    folders = [tmp_path / "own", tmp_path / "fallback", tmp_path / "fallback"]
    assert notes == [
        f"NormGrad writes its panels to {folder}/normgrad, for it cannot give images to {type(logger).__name__}."
        for folder, logger in zip(folders, loggers, strict=True)
    ]
    for writer in writers:
        log(writer, make_panel())
    written = {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()}
    assert written == {f"{d}/normgrad/{TAG}/step_00000100.jpg" for d in ("own", "fallback")}


def test_a_file_is_replaced_whole_and_steps_sort_by_name(tmp_path):
    writer = FilePanels(tmp_path)
    for step in (1000, 20, 20):
        log(writer, make_panel(), step=step)
    writer.log_panels(3, [Panel(TAG, b"old, and longer than the new", 1, 1)])
    writer.log_panels(3, [Panel(TAG, b"new", 1, 1)])
    names = sorted(p.name for p in (tmp_path / TAG).iterdir())
    assert names == ["step_00000003.jpg", "step_00000020.jpg", "step_00001000.jpg"]
    assert (tmp_path / TAG / names[0]).read_bytes() == b"new"


def test_import_takes_neither_torch_nor_lightning_nor_any_logger():
    code = (
        "import sys, normgrad_lightning.loggers;"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'tensorboard', 'wandb', 'mlflow', 'comet_ml', 'aim'};"
        "print(heavy & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("version", "key"),
    [
        ("3.11.1", "normgrad_order0/03_gr__e.1"),
        ("3.12.0rc1", "normgrad_order0/03_gr__e.1"),
        ("3.10.1", "normgrad_order0_03_gr__e.1"),
        ("2.22.0", "normgrad_order0_03_gr__e.1"),
    ],
)
def test_mlflow_gets_names_that_it_can_read_back(version, key, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", SimpleNamespace(__version__=version))
    assert MLFlowPanels(None)._key("normgrad_order0/03_größe.1") == key


class Unready(Folderless):
    """Knows its folder only when its run has begun."""

    @property
    def log_dir(self):
        raise KeyError("the run has not begun")


def test_a_logger_that_cannot_tell_its_folder_yet(tmp_path):
    (writer,), notes = panel_writers([Unready()], tmp_path)
    assert writer.where == str(tmp_path / "normgrad")
    assert len(notes) == 1


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = panel_writers([logger], tmp_path)
    monkeypatch.setattr("lightning_fabric.loggers.logger.rank_zero_only.rank", 1)
    log(writer, make_panel())
    assert not list(tmp_path.rglob("events*"))
