"""Which writer takes a page to which logger, and that pages arrive there."""

import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock, Mock

import lightning.pytorch.loggers as new_loggers
import pytest
import pytorch_lightning.loggers as old_loggers
from lightning.pytorch.loggers.logger import DummyLogger as NewDummyLogger
from pytorch_lightning.loggers.logger import DummyLogger as OldDummyLogger
from stand_in import FLOAT16, assert_has, read_events, read_folder, view
from torch.utils.tensorboard import SummaryWriter

from normgrad_lightning.writers.aim import AimWriter
from normgrad_lightning.writers.comet import CometWriter
from normgrad_lightning.writers.destinations import WRITERS, writers_for
from normgrad_lightning.writers.files import FilesWriter
from normgrad_lightning.writers.mlflow import MLFlowWriter
from normgrad_lightning.writers.tensorboard import TensorBoardWriter
from normgrad_lightning.writers.wandb import WandbWriter

FLAVOURS = pytest.mark.parametrize("loggers", [old_loggers, new_loggers], ids=["pytorch_lightning", "lightning"])


@FLAVOURS
def test_tensorboard_keeps_whole_pages_under_their_tags_and_steps(loggers, tmp_path):
    logger = loggers.TensorBoardLogger(tmp_path)
    (writer,), notes = writers_for([logger], tmp_path)
    assert isinstance(writer, TensorBoardWriter)
    assert not notes
    assert logger.log_dir in writer.where
    assert not list(tmp_path.iterdir())  # nothing before the first page

    pages = [view(0), view(250)]
    for page in pages:
        writer.write(page)
    logger.finalize("success")
    assert_has(read_events(logger.log_dir), pages, loss=FLOAT16)


def test_a_summary_writer_keeps_whole_pages_under_their_tags_and_steps(tmp_path):
    logger = SummaryWriter(tmp_path)
    (writer,), notes = writers_for([logger], "unused")
    assert not notes
    pages = [view(0), view(250)]
    for page in pages:
        writer.write(page)
    assert_has(read_events(tmp_path), pages, loss=FLOAT16)  # on disk already


@FLAVOURS
def test_subclass_of_a_tensorboard_logger_is_one(loggers, tmp_path):
    class Mine(loggers.TensorBoardLogger):
        pass

    logger = Mine(tmp_path)
    (writer,), notes = writers_for([logger], tmp_path)
    writer.write(view(7))
    logger.finalize("success")
    assert_has(read_events(logger.log_dir), [view(7)], loss=FLOAT16)
    assert not notes


@FLAVOURS
def test_a_csv_logger_has_the_pages_beside_it_and_its_own_file_untouched(loggers, tmp_path):
    logger = loggers.CSVLogger(tmp_path)
    (writer,), notes = writers_for([logger], tmp_path / "unused")
    assert isinstance(writer, FilesWriter)
    assert writer.where == f"{logger.log_dir}/normgrad"
    assert not notes
    assert not list(tmp_path.iterdir())

    logger.log_metrics({"loss": 0.5}, step=1)
    logger.save()
    own = Path(logger.log_dir, "metrics.csv").read_bytes()
    pages = [view(0), view(100)]
    for page in pages:
        writer.write(page)
    logger.save()
    assert Path(logger.log_dir, "metrics.csv").read_bytes() == own
    assert_has(read_folder(Path(writer.where)), pages)
    assert Path(f"{logger.log_dir}/normgrad/normgrad_order0/03_layer3.1/step_00000100.jpg").exists()


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


def test_folder_of_a_logger_that_we_do_not_know_is_its_own_else_the_fallback(tmp_path):
    loggers = [SaveDirOnly(tmp_path / "own"), Folderless(), SaveDirOnly("s3://bucket/run")]
    writers, notes = writers_for(loggers, tmp_path / "fallback")
    assert [w.where for w in writers] == [str(tmp_path / "own/normgrad"), str(tmp_path / "fallback/normgrad")]
    folders = [tmp_path / "own", tmp_path / "fallback", tmp_path / "fallback"]
    for note, folder, logger in zip(notes, folders, loggers, strict=True):
        assert f"cannot log images to {type(logger).__name__}" in note
        assert f"writes files to {folder}/normgrad" in note
    for writer in writers:
        writer.write(view(100))
        assert_has(read_folder(Path(writer.where)), [view(100)])
    assert {path.parent.name for path in tmp_path.rglob("normgrad")} == {"own", "fallback"}


class Unready(Folderless):
    """Knows its folder only when its run has begun."""

    @property
    def log_dir(self):
        raise KeyError("the run has not begun")


def test_a_logger_that_cannot_tell_its_folder_yet(tmp_path):
    (writer,), notes = writers_for([Unready()], tmp_path)
    assert writer.where == str(tmp_path / "normgrad")
    assert len(notes) == 1


class PathOfItsOwn:
    """A path, though no string and none of pathlib."""

    def __init__(self, path):
        self.path = path

    def __fspath__(self):
        return str(self.path)


@pytest.mark.parametrize("odd", [Mock(), MagicMock(), 7, ["logs"], b"logs"], ids=lambda odd: type(odd).__name__)
def test_what_is_no_path_is_no_folder(odd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (writer,), _ = writers_for([SaveDirOnly(odd)], tmp_path / "fallback")
    assert writer.where == str(tmp_path / "fallback/normgrad")
    writer.write(view(0))
    assert [path.name for path in tmp_path.iterdir()] == ["fallback"]


@pytest.mark.parametrize("mock", [Mock, MagicMock])
def test_a_mock_of_a_logger_leaves_no_folders_of_its_name(mock, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (writer,), _ = writers_for([mock(spec=old_loggers.CSVLogger)], tmp_path / "fallback")
    writer.write(view(0))
    assert [path.name for path in tmp_path.iterdir()] == ["fallback"]


def test_any_path_is_a_folder(tmp_path):
    for folder in (str(tmp_path / "a"), tmp_path / "a", PathOfItsOwn(tmp_path / "a")):
        (writer,), _ = writers_for([SaveDirOnly(folder)], tmp_path / "fallback")
        assert writer.where == str(tmp_path / "a/normgrad")


class Untouched:
    """A logger before the first page: nobody may ask for its run."""

    log_dir = "logs"

    @property
    def experiment(self):
        raise AssertionError("this would create a run")

    name = version = run_id = experiment_id = experiment


KNOWN = {
    "TensorBoardLogger": TensorBoardWriter,
    "SummaryWriter": TensorBoardWriter,
    "WandbLogger": WandbWriter,
    "MLFlowLogger": MLFlowWriter,
    "CometLogger": CometWriter,
    "AimLogger": AimWriter,
}


@pytest.mark.parametrize("name", WRITERS)
def test_loggers_are_known_by_the_names_of_their_classes_and_left_alone(name, tmp_path):
    theirs = type(name, (Untouched,), {})
    mine = type("Mine", (theirs,), {})
    writers, notes = writers_for([theirs(), mine()], tmp_path)
    assert [type(writer) for writer in writers] == [KNOWN[name]] * 2
    assert all(writer.where for writer in writers)
    assert not notes
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dummy", [OldDummyLogger, NewDummyLogger])
def test_fast_dev_run_gets_nothing(dummy, tmp_path):
    assert writers_for([dummy()], tmp_path) == ([], [])


def test_no_loggers_no_writers(tmp_path):
    assert writers_for([], tmp_path) == ([], [])


def test_each_logger_has_its_writer_and_each_folder_only_one(tmp_path):
    board, csv = old_loggers.TensorBoardLogger(tmp_path), old_loggers.CSVLogger(tmp_path, version="a")
    same, other = old_loggers.CSVLogger(tmp_path, version="a"), old_loggers.CSVLogger(tmp_path, version="b")
    writers, notes = writers_for([csv, board, same, other], tmp_path)
    assert [type(w) for w in writers] == [FilesWriter, TensorBoardWriter, FilesWriter]
    assert [writers[0].where, writers[2].where] == [f"{csv.log_dir}/normgrad", f"{other.log_dir}/normgrad"]
    assert not notes


def test_import_takes_neither_torch_nor_lightning_nor_any_logger():
    code = (
        "import sys, normgrad_lightning.writers.destinations;"
        "heavy = {'torch', 'lightning', 'pytorch_lightning', 'tensorboard', 'wandb', 'mlflow', 'comet_ml', 'aim'};"
        "print(heavy & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
