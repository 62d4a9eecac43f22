"""What the tab needs of one event, as bytes: a JSON header and parts, which are JPEGs or maps.

The layout: `NGTB`, the version and the length of the header as 32-bit integers, the header as JSON, the parts. All
numbers are little-endian. The header and each part are padded to a multiple of 8 bytes. The header's `parts` are the
lengths of the parts, and what refers to a part gives its number.

A map is divided by its largest magnitude before it becomes float16: raw maps are often smaller than the smallest
float16.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

NAME = "normgrad"
"""Of the plugin: what blobs are stored under, and the tab's address."""

MAGIC, VERSION = b"NGTB", 1
SUFFIX = "/tab"
"""How the tag of these blobs ends; what is before it is the group of all tags of a callback."""

_START = struct.Struct("<4sII")
_LONGEST_HEADER = 16 * 2**20
_LONGEST_SIDE = 4096  # cells of a map
_MOST = 4096  # parts, images, classes or patches
_LONGEST_TEXT = 4096


@dataclass(frozen=True)
class Content:
    """A decoded blob.

    Attributes:
        header: checked against `_EVENT`.
        parts: bytes of JPEGs and maps.
    """

    header: Mapping[str, Any]
    parts: Sequence[memoryview]

    def maps(self, reference: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        """Return the maps `(N, H, W)` that a part of the header refers to."""
        values = np.frombuffer(self.parts[reference["part"]], "<f2").reshape(reference["shape"]).astype(np.float32)
        finite = np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0)
        scaled: npt.NDArray[np.float32] = finite * _per_map(reference["max"])
        return scaled


@dataclass(frozen=True)
class Problem:
    """Why bytes are not a blob of ours, in a sentence."""

    reason: str


class Parts:
    """Collects the parts of a blob.

    Attributes:
        parts: in the order of their numbers.
    """

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._numbers: dict[bytes, int] = {}

    def add(self, data: bytes) -> int:
        """Return the number of a part; the same bytes are kept once."""
        if data not in self._numbers:
            self._numbers[data] = len(self.parts)
            self.parts.append(data)
        return self._numbers[data]

    def add_maps(self, maps: npt.NDArray[Any]) -> dict[str, Any]:
        """Add maps `(N, H, W)` and return what refers to them. Values that are not finite become 0."""
        half, largest = _packed(maps)
        return {"part": self.add(half.tobytes()), "shape": list(half.shape), "max": largest}

    def add_each(self, maps: npt.NDArray[Any]) -> list[dict[str, Any]]:
        """Add maps `(N, H, W)` as a part each, and return what refers to each, as to one of `(1, H, W)`."""
        half, largest = _packed(maps)
        return [
            {"part": self.add(one.tobytes()), "shape": [1, *one.shape], "max": [value]}
            for one, value in zip(half, largest, strict=True)
        ]

    def encode(self, header: Mapping[str, Any]) -> bytes:
        """Return the blob."""
        fields = {**header, "parts": [len(part) for part in self.parts]}
        text = json.dumps(fields, separators=(",", ":"), allow_nan=False).encode("ascii")
        text += b" " * (-(_START.size + len(text)) % 8)
        padded = [part + bytes(-len(part) % 8) for part in self.parts]
        return b"".join([_START.pack(MAGIC, VERSION, len(text)), text, *padded])


def _packed(maps: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float16], list[float]]:
    """Return maps divided by their largest magnitudes, and these, with as many digits as float32 has."""
    values = np.asarray(maps, np.float32)
    finite = np.isfinite(values)
    values = values if finite.all() else np.where(finite, values, np.float32(0))
    largest = np.abs(values).max(axis=(1, 2), initial=0.0)
    half = (values / _per_map(np.where(largest > 0, largest, 1))).astype("<f2")
    return half, [float(f"{value:.7g}") for value in largest]


def decode(data: bytes) -> Content | Problem:
    """Return what is in a blob, or why it is not one. Nothing is allocated on the word of a header."""
    try:
        header, start = _header(data)
        parts = _parts(header, data, start)
        _Checker([len(part) for part in parts]).check(header, _EVENT, "header")
    except _BadError as error:
        return Problem(str(error))
    return Content(header, parts)


class _BadError(ValueError):
    """What is wrong with a blob."""


def _header(data: bytes) -> tuple[dict[str, Any], int]:
    if len(data) < _START.size:
        raise _BadError("it is too short to be data of the NormGrad tab")
    magic, version, length = _START.unpack_from(data)
    if magic != MAGIC:
        raise _BadError("it is not data of the NormGrad tab")
    if version != VERSION:
        raise _BadError(f"it has version {version} of the format, and this is version {VERSION}: update the package")
    end = _START.size + length
    if length > _LONGEST_HEADER or end > len(data):
        raise _BadError("its header is cut off")
    try:
        header = json.loads(bytes(data[_START.size : end]).decode("ascii"), parse_constant=_no_constant)
    except (ValueError, RecursionError):
        raise _BadError("its header is not JSON, or is nested too deeply") from None
    if not isinstance(header, dict):
        raise _BadError("its header is not an object")
    return header, end


def _no_constant(name: str) -> float:
    raise ValueError(name)


def _parts(header: Mapping[str, Any], data: bytes, start: int) -> list[memoryview]:
    sizes = header.get("parts")
    if not isinstance(sizes, list) or len(sizes) > 4 * _MOST or not all(_is_whole(size) for size in sizes):
        raise _BadError("its header does not list its parts")
    view, parts = memoryview(data), []
    for size in sizes:
        if start + size > len(data):
            raise _BadError("it is cut off")
        parts.append(view[start : start + size])
        start += size + -size % 8
    return parts


def _per_map(values: Any) -> npt.NDArray[np.float32]:
    return np.asarray(values, np.float32)[:, None, None]


def _is_whole(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**53


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)  # type: ignore[arg-type]


def _is_magnitude(value: object) -> bool:
    """Return whether this is a magnitude that float32 has."""
    return _is_number(value) and 0 <= value < 3e38  # type: ignore[operator]


def _is_text(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST_TEXT


def _are_steps(value: object) -> bool:
    """Return whether these are a first and a last step."""
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value))


def _is_estimate(value: object) -> bool:
    """Return whether this is a mean with its standard error."""
    return isinstance(value, list) and len(value) == 2 and all(map(_is_number, value))


def _is_box(value: object) -> bool:
    """Return whether these are top, left, height and width as shares of the image's sides."""
    return isinstance(value, list) and len(value) == 4 and all(_is_number(v) and -1e-6 <= v <= 1 + 1e-6 for v in value)


@dataclass(frozen=True)
class _Optional:
    """A field that may be missing or null."""

    of: Any


_MAPS, _JPEG = "maps", "jpeg"
_LAYER = {"name": _is_text, "maps": _MAPS, "typical": _Optional(_MAPS)}
_PATCH = {
    "strength": _is_number,
    "step": _is_whole,
    "box": _is_box,
    "image": _Optional(_JPEG),
    "map": _Optional(_MAPS),
    "layers": _Optional([_LAYER]),
}
_PATCHES = {
    "map": _is_text,
    "tile": [_is_whole],
    "sprite": _JPEG,
    "items": [_PATCH],
}
_ATLAS = {"map": _is_text, "mean": _MAPS, "lift": _Optional(_MAPS), "spot": _Optional(_is_number)}
_CLASS = {
    "name": _is_text,
    "seen": _is_whole,
    "steps": _Optional(_are_steps),
    "patches": [_PATCHES],
    "atlas": [_ATLAS],
}
_SET = {
    "name": _is_text,
    "kind": _is_text,
    "meaning": _is_text,
    "signed": lambda value: isinstance(value, bool),
    "source": _is_text,
    "images": _Optional(_is_whole),
    "labels": _Optional([_is_text]),
    "layers": [_LAYER],
}
_IMAGES = {
    "source": _is_text,
    "colours": _is_text,
    "hash": _is_text,
    "jpegs": _Optional([_JPEG]),
    "stored": _Optional(_is_whole),
}
CHECK_NUMBERS = ("plain", "covered", "covered_control", "donors", "pasted", "pasted_control")
"""Losses of a check, each a mean with its standard error."""

_CHECKED = {
    "name": _is_text,
    "images": _is_whole,
    "step": _is_whole,
    "region": _Optional(_is_text),
    "pictures": [{"label": _is_text, "image": _JPEG}],
    "area": _Optional(_is_number),
    "share": _Optional(_is_number),
    "share_control": _Optional(_is_number),
    "sentence": _Optional(_is_text),
    "verdict": _Optional(_is_text),
    "asked": _Optional(_is_number),
    "sure": _Optional(lambda value: isinstance(value, bool)),
    **{name: _Optional(_is_estimate) for name in CHECK_NUMBERS},
}
_CHECK = {"step": _is_whole, "sentence": _Optional(_is_text), "classes": [_CHECKED]}
_EVENT = {
    "step": _is_whole,
    "maps_step": _Optional(_is_whole),
    "images": [_IMAGES],
    "sets": [_SET],
    "classes": [_CLASS],
    "check": _Optional(_CHECK),
}
"""What a header holds: predicates for values, lists of one form, objects, and references to parts."""


class _Checker:
    """Compares a header with what it should hold.

    Args:
        sizes: lengths of the parts.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._forms: dict[str, Callable[[Any], bool]] = {_MAPS: self._are_maps, _JPEG: self._is_part}

    def check(self, value: Any, form: Any, where: str) -> None:
        """Raise a `_BadError` if the value does not have the form."""
        if isinstance(form, _Optional):
            if value is not None:
                self.check(value, form.of, where)
        elif isinstance(form, dict):
            if not isinstance(value, dict):
                raise _BadError(f"its `{where}` is not an object")
            for name, of in form.items():
                self.check(value.get(name), of, f"{where}.{name}")
        elif isinstance(form, list):
            if not isinstance(value, list) or len(value) > _MOST:
                raise _BadError(f"its `{where}` is not a list, or too long")
            for one in value:
                self.check(one, form[0], where)
        elif not (self._forms[form] if isinstance(form, str) else form)(value):
            raise _BadError(f"its `{where}` is not what it should be")

    def _is_part(self, value: Any) -> bool:
        return _is_whole(value) and value < len(self._sizes)

    def _are_maps(self, value: Any) -> bool:
        if not isinstance(value, dict) or not self._is_part(value.get("part")):
            return False
        shape, largest = value.get("shape"), value.get("max")
        if not isinstance(shape, list) or len(shape) != 3 or not all(_is_whole(side) for side in shape):
            return False
        if max(shape[1:]) > _LONGEST_SIDE or 0 in shape or 2 * math.prod(shape) != self._sizes[value["part"]]:
            return False
        return isinstance(largest, list) and len(largest) == shape[0] and all(map(_is_magnitude, largest))
