"""The report at the end of training: beside the logs, and in the stores of loggers that take files."""

import logging
from importlib.metadata import EntryPoint

import pytest
import pytorch_lightning as pl
from pytorch_lightning.loggers import TensorBoardLogger

from normgrad_lightning.page import Page
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.tensorboard_tab.event import encode_event
from normgrad_lightning.writers import tab_report
from normgrad_lightning.writers.files import FilesWriter
from normgrad_lightning.writers.outputs import Outputs
from normgrad_lightning.writers.tensorboard import TensorBoardWriter

PAGES = [Page(step, scalars={"normgrad/cost": 0.5}, blobs={"normgrad/tab": encode_event(step)}) for step in (0, 10)]


class Store:
    """A store that takes files, and has no folder."""

    where = "the store"

    def __init__(self):
        self.reports = {}

    def write(self, page):
        pass

    def log_report(self, path, name):
        self.reports[name] = path.read_text()
        return f"the file {name} in the store"


class Full(Store):
    def log_report(self, path, name):
        raise OSError(28, "No space left on device")


@pytest.fixture
def trainer():
    return pl.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)


def reported(trainer, caplog, *writers, pages=PAGES):
    """What is said when a run with these writers is over."""
    outputs = Outputs(Messenger("warn"), "", writers)
    for page in pages:
        outputs.write([page])
    with caplog.at_level(logging.INFO):
        caplog.clear()
        outputs.conclude(trainer, with_report=True)
    return [record.getMessage() for record in caplog.records]


def has_all_events(page):
    return all(f'"{step}":"TkdUQ' in page for step in (0, 10)) and '"normgrad/cost":[[0,0.5],[10,0.5]]' in page


def test_a_logger_that_takes_files_gets_a_report_though_nothing_is_written_elsewhere(trainer, caplog):
    store = Store()
    assert reported(trainer, caplog, store) == ["NormGrad: open the file normgrad/report.html in the store."]
    assert has_all_events(store.reports["normgrad/report.html"])


def test_beside_files_it_gets_the_same_report(trainer, caplog, tmp_path):
    store, folder = Store(), tmp_path / "normgrad"
    told = reported(trainer, caplog, store, FilesWriter(folder))
    assert told == [
        f"NormGrad: open {folder / 'report.html'}.",
        "NormGrad: open the file normgrad/report.html in the store.",
    ]
    assert store.reports["normgrad/report.html"] == (folder / "report.html").read_text()
    assert has_all_events(store.reports["normgrad/report.html"])


def test_a_store_that_is_full_is_one_warning_and_the_others_get_theirs(trainer, caplog):
    store = Store()
    with pytest.warns(UserWarning, match="NormGrad failed while writing the report to the store") as caught:
        reported(trainer, caplog, Full(), store)
    assert len(caught) == 1
    assert has_all_events(store.reports["normgrad/report.html"])


def test_without_blobs_there_is_no_report(trainer, caplog, tmp_path):
    store = Store()
    [told] = reported(trainer, caplog, store, FilesWriter(tmp_path), pages=[Page(0, scalars={"a": 1.0})])
    assert told == f"NormGrad: pictures are in {store.where} and {tmp_path}."
    assert store.reports == {}
    assert not (tmp_path / "normgrad").exists()


@pytest.mark.parametrize("is_known", [True, False])
def test_where_tensorboard_does_not_know_the_tab_yet_it_is_said_what_to_do(
    trainer, caplog, tmp_path, monkeypatch, is_known
):
    known = [EntryPoint("normgrad", "a:b", "tensorboard_plugins")] if is_known else []
    monkeypatch.setattr(tab_report, "entry_points", lambda group: known if group == "tensorboard_plugins" else [])
    logger = TensorBoardLogger(tmp_path)
    [told] = reported(trainer, caplog, TensorBoardWriter(logger))
    assert told.startswith(f"NormGrad: open {logger.log_dir}/normgrad/report.html")
    if is_known:
        assert told.endswith(f", or the tab NormGrad of `tensorboard --logdir {logger.log_dir}`.")
    else:
        assert told.endswith("is missing until you install the package again (`pip install -e PATH`).")
