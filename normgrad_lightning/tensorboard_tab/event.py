"""From plain data of one event, arrays and numbers, to the blob that the tab shows."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

from normgrad_lightning.tensorboard_tab.stored import Parts

Pixels: TypeAlias = npt.NDArray[np.uint8]
Floats: TypeAlias = npt.NDArray[np.floating[Any]]

LARGEST_IMAGE = 320
"""Pixels of the longer side of a shown image."""

LARGEST_WHOLE = 224
"""Pixels of the longer side of an image that a patch is from, if there are few patches."""

MANY = 96
"""Patches of an event that are stored in less detail."""

FINEST = 128
"""Cells of the longer side of a map: finer ones are averaged."""

_QUALITY = 78
_BLOCK = 8  # pixels of a JPEG's blocks: tiles of a sprite begin at multiples


@dataclass(frozen=True)
class Images:
    """The images of a source.

    Attributes:
        source: `batch`, `probe`.
        colours: `true` or `stretched`: whether the normalisation was undone or each image brought to its full range.
        hash: tells these images from others.
        pixels: `(H, W, 3)` each; None if they were stored before.
        stored: the step that they were stored at, in that case.
    """

    source: str
    colours: str
    hash: str
    pixels: Sequence[Pixels] | None = None
    stored: int | None = None


@dataclass(frozen=True)
class Layer:
    """The maps of a layer.

    Attributes:
        name: of the layer.
        maps: `(N, H, W)`.
        typical: `(H, W)`: the mean over many images of maps that were divided by their mean.
    """

    name: str
    maps: Floats
    typical: Floats | None = None


@dataclass(frozen=True)
class Maps:
    """The maps of one kind.

    Attributes:
        name: `order0`, `probe_order0`.
        kind: `order0`.
        meaning: what a bright place means.
        signed: whether zero is in the middle.
        source: whose images they are of.
        layers: in the order of the network.
        labels: the name of each image's class.
    """

    name: str
    kind: str
    meaning: str
    signed: bool
    source: str
    layers: Sequence[Layer]
    labels: Sequence[str] | None = None


@dataclass(frozen=True)
class Patch:
    """A place that a class is learned from.

    Attributes:
        strength: how much it stands out.
        step: at which it was seen.
        box: top, left, height and width, as shares of the image's sides.
        crop: its pixels `(h, w, 3)`.
        image: the whole image `(H, W, 3)`, if it was kept.
        map: the map `(h, w)` of the whole image, if it was kept.
        layers: those of some layers, in the order of the network.
    """

    strength: float
    step: int
    box: tuple[float, float, float, float]
    crop: Pixels
    image: Pixels | None = None
    map: Floats | None = None
    layers: Mapping[str, Floats] = field(default_factory=dict)


@dataclass(frozen=True)
class Atlas:
    """Where a class is learned.

    Attributes:
        mean: `(H, W)`: the mean of its maps, in units of their means.
        lift: that divided by the other classes'.
        spot: the largest lift.
    """

    mean: Floats
    lift: Floats | None = None
    spot: float | None = None


@dataclass(frozen=True)
class ClassView:
    """What is shown of a class.

    Attributes:
        name: its name, which tells it from others.
        seen: images since the event before.
        patches: by the map that they are from, strongest first.
        atlas: by map.
    """

    name: str
    seen: int = 0
    patches: Mapping[str, Sequence[Patch]] = field(default_factory=dict)
    atlas: Mapping[str, Atlas] = field(default_factory=dict)


Estimate: TypeAlias = tuple[float, float]
"""A mean and its standard error; 0 if that is not known."""


@dataclass(frozen=True)
class ClassCheck:
    """What the check found of a class. Losses are means over images.

    Attributes:
        name: its name.
        images: how many were measured.
        step: at which.
        plain: loss of its images as they are.
        covered: with the region covered.
        covered_control: with another place covered.
        donors: loss of other classes' images as they are.
        pasted: with the region pasted into them.
        pasted_control: with another part pasted into them.
        share: of these that are called this class with the region pasted in.
        share_control: with another part pasted in.
        region: what to call it, as in "rests on one small place".
        area: of the region, as a share of the image.
        sentence: on this class alone.
        sure: whether the class rests on the region.
        pictures: of one image, with what they show: as it is, covered, pasted.
    """

    name: str
    images: int
    step: int
    plain: Estimate | None = None
    covered: Estimate | None = None
    covered_control: Estimate | None = None
    donors: Estimate | None = None
    pasted: Estimate | None = None
    pasted_control: Estimate | None = None
    share: float | None = None
    share_control: float | None = None
    region: str | None = None
    area: float | None = None
    sentence: str | None = None
    sure: bool = False
    pictures: Sequence[tuple[str, Pixels]] = ()


@dataclass(frozen=True)
class Check:
    """What the check found last.

    Attributes:
        step: at which.
        classes: in any order.
        sentence: on the whole run.
    """

    step: int
    classes: Sequence[ClassCheck]
    sentence: str | None = None


class _Detail(NamedTuple):
    """How patches are stored: pixels of the longer side of an image and of a crop, cells of a map, of a layer's map."""

    whole: int
    crop: int
    cells: int
    cells_of_layer: int


_FEW, _MANY = _Detail(LARGEST_WHOLE, 72, 28, 14), _Detail(112, 56, 16, 10)


def encode_event(
    step: int,
    images: Sequence[Images] = (),
    maps: Sequence[Maps] = (),
    classes: Sequence[ClassView] = (),
    check: Check | None = None,
    maps_step: int | None = None,
) -> bytes:
    """Return the blob of an event.

    Args:
        step: of training.
        images: one for each source.
        maps: one for each kind and source.
        classes: in the order to show.
        check: what it found last, if it ran.
        maps_step: of which step the maps are, if not of this one.
    """
    parts = Parts()
    sources = [one.source for one in images]
    patches = sum(len(row) for one in classes for row in one.patches.values())
    detail = _FEW if patches <= MANY else _MANY
    header = {
        "step": step,
        "maps_step": maps_step,
        "images": [_images(one, parts) for one in images],
        "sets": [_set(one, sources, parts) for one in maps],
        "classes": [_class(one, detail, parts) for one in classes],
        "check": None if check is None else _check(check, parts),
    }
    return parts.encode(header)


def _images(one: Images, parts: Parts) -> dict[str, Any]:
    jpegs = None if one.pixels is None else [parts.add(jpeg(pixels, LARGEST_IMAGE)) for pixels in one.pixels]
    return {"source": one.source, "colours": one.colours, "hash": one.hash, "jpegs": jpegs, "stored": one.stored}


def _set(one: Maps, sources: Sequence[str], parts: Parts) -> dict[str, Any]:
    layers = [
        {
            "name": layer.name,
            "maps": parts.add_maps(coarse(layer.maps)),
            "typical": None if layer.typical is None else parts.add_maps(coarse(layer.typical[None])),
        }
        for layer in one.layers
    ]
    return {
        "name": one.name,
        "kind": one.kind,
        "meaning": one.meaning,
        "signed": one.signed,
        "source": one.source,
        "images": sources.index(one.source) if one.source in sources else None,
        "labels": None if one.labels is None else list(one.labels),
        "layers": layers,
    }


def _class(one: ClassView, detail: _Detail, parts: Parts) -> dict[str, Any]:
    patches = [_patches(name, row, detail, parts) for name, row in one.patches.items() if row]
    atlas = [
        {
            "map": name,
            "mean": parts.add_maps(atlas.mean[None]),
            "lift": None if atlas.lift is None else parts.add_maps(atlas.lift[None]),
            "spot": atlas.spot,
        }
        for name, atlas in one.atlas.items()
    ]
    return {"name": one.name, "seen": one.seen, "patches": patches, "atlas": atlas}


def _check(check: Check, parts: Parts) -> dict[str, Any]:
    return {"step": check.step, "sentence": check.sentence, "classes": [_checked(one, parts) for one in check.classes]}


def _checked(one: ClassCheck, parts: Parts) -> dict[str, Any]:
    pictures = [{"label": label, "image": parts.add(jpeg(pixels, LARGEST_WHOLE))} for label, pixels in one.pictures]
    fields = {name: _known(value) for name, value in vars(one).items() if name != "pictures"}
    return {**fields, "pictures": pictures}


def _known(value: Any) -> Any:
    """Return the value as JSON has it; None if it is not finite. A standard error that is not finite is left out."""
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if isinstance(value, tuple):
        mean, error = map(_known, value)
        return None if mean is None else [mean, error or 0.0]
    return value


def _patches(name: str, row: Sequence[Patch], detail: _Detail, parts: Parts) -> dict[str, Any]:
    zoom = min(1.0, detail.crop / max(max(patch.crop.shape[:2]) for patch in row))
    height, width = (max(1, round(zoom * max(patch.crop.shape[axis] for patch in row))) for axis in (0, 1))
    items = [
        {
            "strength": float(f"{patch.strength:.4g}"),
            "step": patch.step,
            "box": [float(value) for value in patch.box],
            "image": None if patch.image is None else parts.add(jpeg(patch.image, detail.whole, _QUALITY)),
            "map": None if patch.map is None else parts.add_maps(coarse(patch.map[None], detail.cells)),
            "layers": [
                {"name": of, "maps": parts.add_maps(coarse(plane[None], detail.cells_of_layer))}
                for of, plane in patch.layers.items()
            ],
        }
        for patch in row
    ]
    sprite = parts.add(_sprite([patch.crop for patch in row], height, width))
    return {
        "map": name,
        "tile": [height, width],
        "sprite": sprite,
        "items": items,
    }


def _sprite(crops: Sequence[Pixels], height: int, width: int) -> bytes:
    """Return one JPEG with all crops side by side, each from a multiple of 8 pixels on: none bleeds into another."""
    pitch = width + -width % _BLOCK
    sheet = np.zeros((height, pitch * len(crops), 3), np.uint8)
    for number, crop in enumerate(crops):
        pixels = crop[..., :3]
        if pixels.shape[:2] != (height, width):
            pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.HAMMING))
        left = number * pitch
        sheet[:, left : left + width] = pixels
        sheet[:, left + width : left + pitch] = pixels[:, -1:]
    return _encoded(Image.fromarray(sheet), 84, subsampling=0)


def jpeg(pixels: Pixels, side: int, quality_if_small: int = 92) -> bytes:
    """Return an image `(H, W, 3)` as JPEG; its longer side has at most this many pixels."""
    image = Image.fromarray(np.ascontiguousarray(pixels[..., :3]))
    zoom = side / max(image.size)
    if zoom < 1.0:
        width, height = (max(1, round(length * zoom)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BOX if zoom < 0.5 else Image.Resampling.HAMMING)
    is_small = max(image.size) <= 64
    return _encoded(image, quality_if_small if is_small else _QUALITY, subsampling=0 if is_small else 2)


def _encoded(image: Image.Image, quality: int, subsampling: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality, subsampling=subsampling)
    return buffer.getvalue()


def coarse(maps: Floats, cells: int = FINEST) -> Floats:
    """Return maps `(N, H, W)` with at most this many cells a side, averaged over whole blocks of cells."""
    block = -(-max(maps.shape[1:]) // cells)
    if block == 1:
        return maps
    for axis in (1, 2):
        starts = np.arange(0, maps.shape[axis], block)
        counts = np.diff([*starts, maps.shape[axis]])
        shape = (1, -1, 1) if axis == 1 else (1, 1, -1)
        maps = np.add.reduceat(maps, starts, axis=axis) / counts.reshape(shape)
    return maps
