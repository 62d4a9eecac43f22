"""Raw maps as bytes: TensorBoard keeps them as blobs, W&B, MLflow and Comet as files.

The layout: the length of the header as a 32-bit integer, the header as JSON, the values as float16; all little-endian.
Spaces after the header let the values begin at a multiple of 8 bytes. The header has the `shape` `(N, *S)` and the
`maximum`, the largest magnitude of each of the `N` maps. A map is divided by its maximum before it becomes float16:
maps are often smaller than the smallest float16.

Nothing here imports torch or Lightning: TensorBoard's server reads these bytes, too.
"""

import json
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

VERSION = 1


def encode(maps: npt.NDArray[np.floating[Any]]) -> bytes:
    """Return maps `(N, *S)` as bytes. Their relative error is at most 2⁻¹¹, or 2⁻²⁵ of their map's maximum."""
    maps = np.asarray(maps, np.float32)
    maximum = np.max(np.abs(maps), axis=_axes(maps), keepdims=True, initial=0, where=np.isfinite(maps))
    fields = {"version": VERSION, "shape": maps.shape, "maximum": maximum.ravel().tolist()}
    header = json.dumps(fields, separators=(",", ":")).encode("ascii")
    header += b" " * (-(4 + len(header)) % 8)
    values = (maps / _scale(maximum)).astype("<f2")
    return struct.pack("<I", len(header)) + header + values.tobytes()


def decode(data: bytes) -> npt.NDArray[np.float32]:
    """Return the maps `(N, *S)` that were encoded."""
    fields = header_of(data)
    values = np.frombuffer(data, "<f2", offset=_start(data)).reshape(fields["shape"]).astype(np.float32)
    maximum = np.array(fields["maximum"], np.float32).reshape(len(values), *[1] * (values.ndim - 1))
    return values * _scale(maximum)


def header_of(data: bytes) -> dict[str, Any]:
    """Return the header of encoded maps: `version`, `shape` and `maximum`."""
    fields: dict[str, Any] = json.loads(data[4 : _start(data)])
    if fields["version"] != VERSION:
        raise ValueError(f"`data`: expected raw maps of version {VERSION}, but got version {fields['version']}.")
    return fields


def file_name(tag: str, step: int) -> str:
    """Return where encoded maps are found among the files of a run."""
    return f"{tag}/step_{step:08d}.normgrad"


def _start(data: bytes) -> int:
    """Return where the values begin."""
    return int(4 + struct.unpack_from("<I", data)[0])


def _axes(maps: npt.NDArray[Any]) -> tuple[int, ...]:
    return tuple(range(1, maps.ndim))


def _scale(maximum: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return what a map is divided by: its maximum, or 1 if the map is zero."""
    return np.where(maximum == 0, np.float32(1), maximum)
