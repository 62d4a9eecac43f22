"""With too little room, nothing of a page is written."""

import os
import shutil
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import pytorch_lightning.loggers as old_loggers
from stand_in import FLOAT16, assert_has, read_events, view

from normgrad_lightning.page import Page
from normgrad_lightning.writers.destinations import WRITERS, writers_for
from normgrad_lightning.writers.disk import RESERVE, check_file, check_room, next_log_dir
from normgrad_lightning.writers.files import FilesWriter


class Untouched:
    """A logger whose run nobody may ask for."""

    @property
    def experiment(self):
        raise AssertionError("this would create a run")

    name = version = run_id = experiment_id = experiment


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**30, free=10 * 2**20))


@pytest.mark.usefixtures("little_room")
@pytest.mark.parametrize("name", sorted(WRITERS.keys() - {"TensorBoardLogger", "SummaryWriter"}))
def test_the_last_of_a_disk_is_left_to_the_run(name, tmp_path):
    logger = type(name, (Untouched,), {"log_dir": str(tmp_path)})()
    (writer,), _ = writers_for([logger], tmp_path)
    with pytest.raises(OSError, match=r"10\.0 MB are left on the disk, and NormGrad keeps 64\.0 MB free"):
        writer.write(view(0))
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("little_room")
def test_a_folder_gets_nothing_of_the_page(tmp_path):
    with pytest.raises(OSError, match=r"10\.0 MB are left on the disk"):
        FilesWriter(tmp_path / "a").write(view(0))
    assert not list(tmp_path.iterdir())


def test_tensorboard_gets_nothing_of_the_page_and_the_next_one_whole(tmp_path, monkeypatch):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = writers_for([logger], tmp_path)
    writer.write(view(0))
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=2**30, free=10 * 2**20))
        with pytest.raises(OSError, match=r"10\.0 MB are left on the disk"):
            writer.write(view(1))
    with monkeypatch.context() as patch:
        patch.setattr("normgrad_lightning.writers.disk._largest_file", lambda: 100)
        with pytest.raises(OSError, match=r"ulimit -f\).* Raise the limit: '.*events.*'"):
            writer.write(view(2))
    writer.write(view(3))
    assert_has(read_events(logger.log_dir), [view(0), view(3)], loss=FLOAT16)


PAGES = {
    "pictures": lambda page: Page(0, page.pictures),
    "scalars": lambda page: Page(0, scalars=page.scalars),
    "maps": lambda page: Page(0, maps=page.maps),
}


@pytest.mark.parametrize("part", PAGES)
def test_each_part_of_a_page_needs_room(part, tmp_path, monkeypatch):
    """As many bytes as its files take, or a few more."""
    page = PAGES[part](view(0))
    FilesWriter(tmp_path / "enough").write(page)
    taken = sum(path.stat().st_size for path in (tmp_path / "enough").rglob("*") if path.is_file())
    assert page.size > 0
    assert taken <= page.size + 512 * len(page.maps)
    disk = SimpleNamespace(total=2**40, free=RESERVE + page.size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    with pytest.raises(OSError, match="are left on the disk"):
        FilesWriter(tmp_path / "little").write(page)
    disk.free += 1
    FilesWriter(tmp_path / "little").write(page)


@pytest.mark.usefixtures("little_room")
def test_a_remote_store_is_not_looked_at():
    check_room("s3://bucket/run", 2**40)
    check_file("s3://bucket/run/events", 2**40)


def test_a_mock_is_no_file():
    """Opened as one, it would be file descriptor 1, and standard output would be closed with it."""
    check_file(MagicMock(), 2**40)
    check_room(MagicMock(), 2**60)
    assert os.fstat(1)


@pytest.mark.parametrize(
    ("there", "expected"),
    [((), 0), (("version_0", "version_10", "version_2"), 11), (("version_x", "another"), 0)],
)
def test_a_run_without_a_logger_gets_the_next_version(there, expected, tmp_path):
    for name in there:
        (tmp_path / "lightning_logs" / name).mkdir(parents=True)
    assert next_log_dir(tmp_path) == str(tmp_path / "lightning_logs" / f"version_{expected}")


def test_a_remote_root_has_its_files_here():
    assert next_log_dir("s3://bucket").startswith("lightning_logs")


def test_a_tag_is_used_once():
    page = view(0)
    with pytest.raises(ValueError, match=r"expected each tag once, but got 'normgrad_order0/03_layer3\.1' 2 times"):
        Page(0, page.pictures, {page.pictures[0].tag: 1.0})
    with pytest.raises(ValueError, match=r"expected each tag once, but got 'normgrad/energy' 2 times"):
        Page.joined([Page(0, scalars={"normgrad/energy": 1.0}), Page(0, scalars={"normgrad/energy": 2.0})])
