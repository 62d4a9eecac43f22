"""Pages in TensorBoard's event file: pictures, scalars and raw maps, in a single write.

`SummaryWriter.add_image` spends most of a second on a PNG, so the JPEGs are written as they are. TensorBoard's own
writer computes the checksum of every record in pure Python, 0.1 ms for each kilobyte. It does so in its own thread, but
holds the interpreter's lock meanwhile: training waits. Here the checksum is computed in C, and the records go to the
writer's own file after all that was logged before.
"""

import io
import os
import struct
import time
from collections.abc import Iterator, Sequence
from typing import Any

from PIL import Image

from normgrad_lightning.page import Page
from normgrad_lightning.writers import raw_maps
from normgrad_lightning.writers.disk import check_file, check_room, is_remote
from normgrad_lightning.writers.files import FilesWriter

PLUGIN = "normgrad"
"""The plugin that raw maps belong to, in the words of TensorBoard."""


class TensorBoardWriter:
    """Writes to the event file of a `TensorBoardLogger`, on rank 0, or of torch's `SummaryWriter`.

    A film is shown among the images, and is a file beside the event file, too: `normgrad/film.webp`.
    """

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.where = f"TensorBoard ({logger.log_dir})"

    @property
    def folder(self) -> str | None:
        """The folder of the run; None if it is remote."""
        return None if is_remote(self._logger.log_dir) else str(self._logger.log_dir)

    def write(self, page: Page) -> None:
        """Write image summaries, scalar summaries, and a blob for each tag of raw maps and of the NormGrad tab."""
        writer = getattr(self._logger, "experiment", self._logger)._get_file_writer()
        if writer is None:  # not on rank 0
            return
        check_room(self._logger.log_dir, page.size)
        check_file(writer.event_writer._file_name, page.size)
        add_summaries(writer, page.step, list(summaries(page)))
        if not is_remote(self._logger.log_dir):  # a remote file would be uploaded as a whole
            writer.flush()
        if page.films and not is_remote(self._logger.log_dir):
            FilesWriter(os.path.join(self._logger.log_dir, "normgrad")).write(Page(page.step, films=page.films))


def summaries(page: Page) -> Iterator[Any]:
    """Yield a `Summary` for each picture, scalar, tag of raw maps, film and blob of the NormGrad tab."""
    from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]

    for tag, jpeg, height, width in page.pictures:
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=jpeg)
        yield Summary(value=[Summary.Value(tag=tag, image=image)])
    for tag, value in page.scalars.items():
        yield Summary(value=[Summary.Value(tag=tag, simple_value=float(value))])
    for tag, maps in page.maps.items():
        yield Summary(value=[_blob(tag, raw_maps.encode(maps))])
    for tag, blob in page.blobs.items():
        yield Summary(value=[_blob(tag, blob)])
    for tag, film in page.films.items():
        width, height = Image.open(io.BytesIO(film)).size
        image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=film)
        yield Summary(value=[Summary.Value(tag=tag, image=image)])


def _blob(tag: str, data: bytes) -> Any:
    """Return a summary value that TensorBoard serves as a blob. Without a data class it would be invisible."""
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_BLOB_SEQUENCE, Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto  # type: ignore[import-untyped]
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto  # type: ignore[import-untyped]
    from tensorboard.compat.proto.types_pb2 import DT_STRING  # type: ignore[import-untyped]

    plugin = SummaryMetadata.PluginData(plugin_name=PLUGIN)
    metadata = SummaryMetadata(plugin_data=plugin, data_class=DATA_CLASS_BLOB_SEQUENCE)
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype=DT_STRING, tensor_shape=shape, string_val=[data])
    return Summary.Value(tag=tag, metadata=metadata, tensor=tensor)


def add_summaries(writer: Any, step: int, summaries: Sequence[Any]) -> None:
    """Add summaries to the event file of a `torch.utils.tensorboard.FileWriter`."""
    from tensorboard.compat.proto.event_pb2 import Event  # type: ignore[import-untyped]

    queue = getattr(writer.event_writer, "_async_writer", None)
    file = getattr(writer.event_writer, "_general_file_writer", None)
    if queue is None or file is None:  # another version, or a writer that is not TensorBoard's
        for summary in summaries:
            writer.add_summary(summary, step)
        return
    now = time.time()
    records = [record(Event(wall_time=now, step=step, summary=s).SerializeToString()) for s in summaries]
    with queue._lock:
        queue._byte_queue.join()
        file.write(b"".join(records))


def record(data: bytes) -> bytes:
    """Return `data` in TensorFlow's record format: its length, itself, and a checksum of each."""
    length = struct.pack("<Q", len(data))
    return length + _checksum(length) + data + _checksum(data)


def _checksum(data: bytes) -> bytes:
    import google_crc32c

    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
