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
        seen: images that the patches were chosen from.
        patches: by the map that they are from, strongest first.
        atlas: by map.
        steps: the first and the last that those images were seen at.
    """

    name: str
    seen: int = 0
    patches: Mapping[str, Sequence[Patch]] = field(default_factory=dict)
    atlas: Mapping[str, Atlas] = field(default_factory=dict)
    steps: tuple[int, int] | None = None


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
        verdict: that in words, also where it does not.
        asked: by how much the region must raise both losses, more than the control.
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
    verdict: str | None = None
    asked: float | None = None
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
    patches = [patch for one in classes for row in one.patches.values() for patch in row]
    detail = _FEW if len(patches) <= MANY else _MANY
    items = _items(patches, detail, parts)
    header = {
        "step": step,
        "maps_step": maps_step,
        "images": [_images(one, parts) for one in images],
        "sets": [_set(one, sources, parts) for one in maps],
        "classes": [_class(one, items, detail, parts) for one in classes],
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


def _class(one: ClassView, items: Mapping[int, Any], detail: _Detail, parts: Parts) -> dict[str, Any]:
    patches = [
        {"map": name, **_sprite(row, detail.crop, parts), "items": [items[id(patch)] for patch in row]}
        for name, row in one.patches.items()
        if row
    ]
    atlas = [
        {
            "map": name,
            "mean": parts.add_maps(atlas.mean[None]),
            "lift": None if atlas.lift is None else parts.add_maps(atlas.lift[None]),
            "spot": atlas.spot,
        }
        for name, atlas in one.atlas.items()
    ]
    steps = None if one.steps is None else list(one.steps)
    return {"name": one.name, "seen": one.seen, "steps": steps, "patches": patches, "atlas": atlas}


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


def _items(patches: Sequence[Patch], detail: _Detail, parts: Parts) -> dict[int, dict[str, Any]]:
    """Return what is stored of each patch, by its `id`. What several share is encoded once."""
    wholes = {id(patch.image): patch.image for patch in patches if patch.image is not None}
    jpegs = {key: parts.add(jpeg(image, detail.whole, _QUALITY)) for key, image in wholes.items()}
    maps = _each([patch.map for patch in patches], detail.cells, parts)
    names = dict.fromkeys(name for patch in patches for name in patch.layers)
    layers = {
        name: _each([patch.layers.get(name) for patch in patches], detail.cells_of_layer, parts) for name in names
    }
    return {
        id(patch): {
            "strength": float(f"{patch.strength:.4g}"),
            "step": patch.step,
            "box": [float(value) for value in patch.box],
            "image": jpegs.get(id(patch.image)),
            "map": maps[number],
            "layers": [{"name": name, "maps": layers[name][number]} for name in patch.layers],
        }
        for number, patch in enumerate(patches)
    }


def _each(planes: Sequence[Floats | None], cells: int, parts: Parts) -> list[dict[str, Any] | None]:
    """Return what refers to each of these maps `(h, w)`, if it is there. Those of one grid are stored in one go."""
    by_grid: dict[tuple[int, ...], dict[int, Floats]] = {}
    for number, plane in enumerate(planes):
        if plane is not None:
            by_grid.setdefault(plane.shape, {})[number] = plane
    found: dict[int, dict[str, Any]] = {}
    for of_grid in by_grid.values():
        maps = np.stack(list(of_grid.values())).astype(np.float32)
        found |= zip(of_grid, parts.add_each(coarse(maps, cells)), strict=True)
    return [found.get(number) for number in range(len(planes))]


def _sprite(row: Sequence[Patch], side: int, parts: Parts) -> dict[str, Any]:
    """Return one JPEG with all crops side by side, each from a multiple of 8 pixels on: none bleeds into another."""
    zoom = min(1.0, side / max(max(patch.crop.shape[:2]) for patch in row))
    height, width = (max(1, round(zoom * max(patch.crop.shape[axis] for patch in row))) for axis in (0, 1))
    pitch = width + -width % _BLOCK
    sheet = np.zeros((height, pitch * len(row), 4), np.uint8)
    for number, patch in enumerate(row):
        crop = patch.crop
        if crop.shape[:2] != (height, width):
            crop = np.asarray(_image(crop).resize((width, height), Image.Resampling.HAMMING))
        left = number * pitch
        sheet[:, left : left + width, :3] = crop[..., :3]
        sheet[:, left + width : left + pitch, :3] = crop[:, -1:, :3]
    return {"tile": [height, width], "sprite": parts.add(_encoded(_image(sheet), 84, subsampling=0))}


def jpeg(pixels: Pixels, side: int, quality_if_small: int = 92) -> bytes:
    """Return an image `(H, W, 3)` as JPEG; its longer side has at most this many pixels."""
    image = _image(pixels)
    zoom = side / max(image.size)
    if zoom < 1.0:
        width, height = (max(1, round(length * zoom)) for length in image.size)
        image = image.resize((width, height), Image.Resampling.BOX if zoom < 0.5 else Image.Resampling.HAMMING)
    is_small = max(image.size) <= 64
    return _encoded(image, quality_if_small if is_small else _QUALITY, subsampling=0 if is_small else 2)


def _image(pixels: Pixels) -> Image.Image:
    """Return pixels `(H, W, 3)` as a picture of Pillow's; with an unused fourth channel, without a copy."""
    if pixels.shape[2] == 4 and pixels.flags.c_contiguous:
        return Image.frombuffer("RGBX", pixels.shape[1::-1], pixels, "raw", "RGBX", 0, 1)
    return Image.fromarray(np.ascontiguousarray(pixels[..., :3]))


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
        before, count = (slice(None),) * axis, -(-maps.shape[axis] // block)
        total = maps[(*before, slice(0, None, block))].copy()
        for shift in range(1, min(block, maps.shape[axis])):
            part = maps[(*before, slice(shift, None, block))]
            total[(*before, slice(part.shape[axis]))] += part
        lengths = np.full(count, block, maps.dtype)
        lengths[-1] = maps.shape[axis] - block * (count - 1)
        maps = total / lengths.reshape(-1, *(1,) * (2 - axis))
    return maps
