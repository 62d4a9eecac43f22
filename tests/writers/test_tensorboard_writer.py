"""TensorBoard's event file: the bytes are those of TensorBoard's own writer, in their turn."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
import pytorch_lightning.loggers as old_loggers
from stand_in import FLOAT16, MAPS, PICTURES, SCALARS, assert_has, film, read_events, view
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_BLOB_SEQUENCE, Summary
from tensorboard.summary.writer.record_writer import RecordWriter
from tensorboard.util.tensor_util import make_tensor_proto
from torch.utils.tensorboard import SummaryWriter

from normgrad_lightning.page import Page
from normgrad_lightning.writers import raw_maps
from normgrad_lightning.writers.destinations import writers_for
from normgrad_lightning.writers.tensorboard import TensorBoardWriter, record, summaries


def only_picture(step):
    return Page(step, view(step).pictures[:1])


def slow_record(data):
    """What TensorBoard's own writer makes of it, with its checksums in pure Python."""
    file = io.BytesIO()
    RecordWriter(file).write(data)
    return file.getvalue()


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1000, 70_001])
def test_records_are_those_of_tensorboard_byte_for_byte(size):
    data = np.random.default_rng(size).bytes(size)
    assert record(data) == slow_record(data)


def event_file(folder):
    (path,) = Path(folder).glob("events.*")
    return path


def records_of(folder):
    """The records of an event file as they are, without the first, which has the time of its creation."""
    data, at, found = event_file(folder).read_bytes(), 0, []
    while at < len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        found.append(data[at : at + 16 + size])
        at += 16 + size
    return found[1:]


def own_blob(tag, maps):
    """A blob made with TensorBoard's own tools."""
    value = Summary.Value(tag=tag, tensor=make_tensor_proto([raw_maps.encode(maps)]))
    value.metadata.plugin_data.plugin_name = "normgrad"
    value.metadata.data_class = DATA_CLASS_BLOB_SEQUENCE
    return Summary(value=[value])


def test_pages_are_written_as_tensorboard_and_torch_write_them_byte_for_byte(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1234.5)
    page = view(250)
    TensorBoardWriter(SummaryWriter(tmp_path / "ours")).write(page)

    theirs = SummaryWriter(tmp_path / "theirs")
    for tag, jpeg, height, width in page.pictures:
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=jpeg)
        theirs._get_file_writer().add_summary(Summary(value=[Summary.Value(tag=tag, image=image)]), page.step)
    for tag, value in page.scalars.items():
        theirs.add_scalar(tag, value, page.step)
    for tag, maps in page.maps.items():
        theirs._get_file_writer().add_summary(own_blob(tag, maps), page.step)
    theirs.flush()
    assert len(records_of(tmp_path / "ours")) == len(PICTURES) + len(SCALARS) + len(MAPS)
    assert records_of(tmp_path / "ours") == records_of(tmp_path / "theirs")


def test_a_page_is_a_single_write(tmp_path, monkeypatch):
    logger = SummaryWriter(tmp_path)
    file, writes = logger.file_writer.event_writer._general_file_writer, []
    monkeypatch.setattr(file, "write", writes.append)
    TensorBoardWriter(logger).write(view(3))
    assert len(writes) == 1


def test_blobs_have_the_name_of_the_tab_and_a_data_class():
    for summary in summaries(Page(0, maps=view(0).maps)):
        (value,) = summary.value
        assert value.metadata.plugin_data.plugin_name == "normgrad"
        assert value.metadata.data_class == DATA_CLASS_BLOB_SEQUENCE  # else invisible, without an error


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), 1e300, np.float64(0.5), np.float32(2)])
def test_any_number_is_a_scalar(value, tmp_path):
    logger = SummaryWriter(tmp_path)
    TensorBoardWriter(logger).write(Page(3, scalars={"normgrad/a": value, "normgrad/b": 1.0}))
    logger.add_scalar("later", 1.0, 4)
    logger.flush()
    scalars = read_events(tmp_path).scalars
    with np.errstate(over="ignore"):
        assert np.array_equal(scalars["normgrad/a", 3], np.float32(value), equal_nan=True)
    assert scalars["normgrad/b", 3] == scalars["later", 4] == 1.0


def steps_in_order(log_dir):
    """The steps of an event file, as they stand in it; its checksums are checked by whoever reads it."""
    return [event.step for event in EventFileLoader(str(event_file(log_dir))).Load() if event.HasField("summary")]


def test_pages_stand_between_the_scalars_that_were_logged_before_and_after(tmp_path):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = writers_for([logger], tmp_path)
    for step in range(0, 60, 3):
        logger.log_metrics({"loss": 1.0}, step)
        writer.write(only_picture(step + 1))
        assert steps_in_order(logger.log_dir)[-2:] == [step, step + 1]  # on disk already: a kill would not matter
        logger.log_metrics({"loss": 1.0, "accuracy": 0.5}, step + 2)
    logger.finalize("success")
    assert steps_in_order(logger.log_dir) == [
        s for step in range(0, 60, 3) for s in (step, step + 1, step + 2, step + 2)
    ]


def test_a_writer_that_is_not_tensorboards_own_is_given_summaries(tmp_path):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = writers_for([logger], tmp_path)
    events = logger.experiment._get_file_writer().event_writer
    events._hidden = events.__dict__.pop("_general_file_writer")
    writer.write(view(5))
    assert_has(read_events(logger.log_dir), [view(5)], loss=FLOAT16)


def test_a_closed_writer_is_an_error(tmp_path):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = writers_for([logger], tmp_path)
    writer.write(only_picture(5))
    logger.experiment.file_writer.event_writer.close()
    with pytest.raises(Exception, match="closed"):
        writer.write(only_picture(6))
    assert steps_in_order(logger.log_dir) == [5]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    logger = old_loggers.TensorBoardLogger(tmp_path)
    (writer,), _ = writers_for([logger], tmp_path)
    monkeypatch.setattr("lightning_fabric.loggers.logger.rank_zero_only.rank", 1)
    writer.write(view(0))
    assert not list(tmp_path.rglob("events*"))


def test_a_film_is_an_image_that_moves_and_a_file(tmp_path):
    logger = SummaryWriter(tmp_path)
    TensorBoardWriter(logger).write(Page(7, films={"normgrad/film": film()}))
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    (image,) = events.Images("normgrad/film")
    assert (image.step, image.width, image.height) == (7, 64, 48)
    assert image.encoded_image_string == film()
    assert (tmp_path / "normgrad/film.webp").read_bytes() == film()
    TensorBoardWriter(logger).write(view(8))
    assert sorted(path.name for path in (tmp_path / "normgrad").iterdir()) == ["film.webp"]
