"""Tab: what the NormGrad tab of TensorBoard shows, as one blob for each event.

The maps of the shown images in numbers, the images if they are others than before, the patches of each class with the
images that they are from, the atlas and the check. Nothing is drawn here: the tab draws.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from normgrad_lightning.maps import MapSet, numbered_tags
from normgrad_lightning.page import Page
from normgrad_lightning.tensorboard_tab import event
from normgrad_lightning.tensorboard_tab.stored import SUFFIX
from normgrad_lightning.tensorboard_tab.thinning import Thinning
from normgrad_lightning.views.atlas import Atlas
from normgrad_lightning.views.crops import Crop
from normgrad_lightning.views.drawing import Pixels, display_image, plane
from normgrad_lightning.views.patches import Patches
from normgrad_lightning.views.pooled_batch import PooledBatch
from normgrad_lightning.views.resampling import Floats
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tag_namer import TagNamer


@dataclass(frozen=True)
class _Event:
    """The latest event: what its blob was made of."""

    step: int
    images: Sequence[event.Images]
    maps: Sequence[event.Maps]
    classes: Sequence[event.ClassView]
    shown: Sequence[int]
    checked: Any
    is_stored: bool = False


class Tab:
    """Makes the blob of each event. Over a long run events are thinned out; see `Thinning`.

    Attributes:
        patches: the view that finds patches, and typical maps; it takes a batch, and makes its page, before this one.
        atlas: the view that knows where classes are learned; so does it.
        check: returns what the check found last, as pictures of a style.
    """

    def __init__(self) -> None:
        self.patches: Patches | None = None
        self.atlas: Atlas | None = None
        self.check: Callable[[Style], event.Check | None] = _no_check
        self._thinning = Thinning()
        self._group = ""
        self._stored_images: dict[str, tuple[str, int]] = {}
        self._seen = Counter[int]()
        self._namer: TagNamer | None = None
        self._last: _Event | None = None

    def add(self, batch: PooledBatch, style: Style, signal: Mapping[int, float]) -> None:
        """Count the images of a batch."""
        self._namer = batch.namer
        self._seen.update(batch.labels)

    def page(self, map_sets: Sequence[MapSet], style: Style, shown: Sequence[int]) -> Page | None:
        """Return a page with the blob of this event; None if there are no maps, or the event is not stored now."""
        sets = [one for one in map_sets if one.maps]
        if not sets:
            return None
        step, self._group, check = sets[0].step, sets[0].group, self.check(style)
        images = [_images(source, one, style, self._stored_images) for source, one in _sources(sets).items()]
        typical = {} if self.patches is None else self.patches.typical.planes()
        maps, classes = [_maps(one, typical) for one in sets], self._classes(shown)
        blob = event.encode_event(step, images, maps, classes, check)
        is_stored = self._thinning.takes(len(blob))
        if is_stored:
            self._stored_images |= {one.source: (one.hash, step) for one in images if one.pixels is not None}
        self._last = _Event(step, images, maps, classes, shown, _key(check), is_stored)
        self._seen.clear()
        return self._page_of(step, blob) if is_stored else None

    def last_page(self, style: Style) -> Page | None:
        """Return a page with the maps of the last event, and what patches and the check have shown since then.

        None if all of that is stored. TensorBoard keeps the first blob of a step, so this one has a step of its own.
        """
        last, check = self._last, self.check(style)
        if last is None or (last.is_stored and not self._seen and _key(check) == last.checked):
            return None
        classes, step = last.classes, max(last.step + last.is_stored, 0 if check is None else check.step)
        if self._seen and self._namer is not None:
            classes, step = self._classes(last.shown), max(step, self._namer.step)
        images = [_without_pixels(one, self._stored_images) for one in last.images]
        maps_step = None if step == last.step else last.step
        blob = event.encode_event(step, images, last.maps, classes, check, maps_step)
        self._last = replace(last, checked=_key(check), is_stored=True)
        self._seen.clear()
        return self._page_of(step, blob)

    def _page_of(self, step: int, blob: bytes) -> Page:
        return Page(step, blobs={f"{self._group}{SUFFIX}": blob})

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: how much is stored. Images and patches are collected, and stored, again."""
        return {"tab": self._thinning.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an earlier version has nothing of the tab."""
        if "tab" in state:
            self._thinning.load_state_dict(state["tab"])

    def _classes(self, shown: Sequence[int]) -> list[event.ClassView]:
        """Return what is known of the classes with the most signal."""
        if self._namer is None:
            return []
        return [self._class(label, name) for label, name in self._namer.names(shown).items()]

    def _class(self, label: int, name: str) -> event.ClassView:
        rows = {} if self.patches is None else self.patches.shown
        found = {of: rows[of][name] for of in rows if name in rows[of]}
        patches = {of: [_patch(crop) for crop in crops] for of, crops in found.items()}
        atlas = {} if self.atlas is None else _atlas(self.atlas, label)
        span = None if self.patches is None else self.patches.spans.get(label)
        seen, steps = (self._seen[label], None) if span is None else (span.images, (span.first, span.last))
        return event.ClassView(name, seen, patches, atlas=atlas, steps=steps)


def _no_check(style: Style) -> None:
    return None


def _key(check: event.Check | None) -> Any:
    """Return what tells the results of a check from earlier ones."""
    return None if check is None else [(one.name, one.step, one.images) for one in check.classes]


def _without_pixels(one: event.Images, stored: Mapping[str, tuple[str, int]]) -> event.Images:
    """Return images that were stored as a reference to where."""
    digest, step = stored.get(one.source, ("", 0))
    return replace(one, pixels=None, stored=step) if digest == one.hash else one


def _patch(crop: Crop) -> event.Patch:
    """Return a crop with its whole image and its map."""
    of_axes = zip(crop.box.starts, crop.box.lengths, crop.size, strict=True)
    (top, height), (left, width) = [(0.0, 1.0), *((start / n, length / n) for start, length, n in of_axes)][-2:]
    box = top, left, height, width
    return event.Patch(crop.ratio, crop.step, box, crop.pixels, crop.whole, crop.map, crop.layers)


def _shrunk(images: Tensor, style: Style, side: int) -> list[Pixels]:
    """Return images `(N, C, *S)` as pictures whose longer side has at most this many pixels."""
    flat = images.float()
    if flat.dim() == 5:
        flat = flat[:, :, flat.shape[2] // 2]
    zoom = side / max(flat.shape[2:])
    if zoom < 1.0 and flat.dim() == 4:
        flat = F.interpolate(flat, [max(1, round(zoom * length)) for length in flat.shape[2:]], mode="area")
    return [display_image(image, style.mean, style.std)[..., :3] for image in flat.cpu().numpy()]


def _sources(sets: Sequence[MapSet]) -> dict[str, MapSet]:
    """Return a set of each source of images that are known: two sets of one source may show other images."""
    found: dict[str, MapSet] = {}
    for one in sets:
        if _tensor(one) is not None:
            found.setdefault(_source(one), one)
    return found


def _source(one: MapSet) -> str:
    """Return what tells the images of a set from those of others of its event: order 1 may choose its own."""
    return one.source if one.kind.step == 0 and not one.kind.made_of else f"{one.source}, order 1"


def _tensor(one: MapSet) -> Tensor | None:
    return one.images_of[one.layers_of_one_input[0]]


def _images(source: str, one: MapSet, style: Style, stored: Mapping[str, tuple[str, int]]) -> event.Images:
    """Return the images of a source, or at which step they were stored."""
    tensor = _tensor(one)
    assert tensor is not None
    pixels = _shrunk(tensor, style, event.LARGEST_IMAGE)
    digest = hashlib.sha1(b"".join(image.tobytes() for image in pixels), usedforsecurity=False).hexdigest()
    colours = "stretched" if style.mean is None and style.std is None else "true"
    before, step = stored.get(source, ("", 0))
    if before == digest:
        return event.Images(source, colours, digest, stored=step)
    return event.Images(source, colours, digest, pixels)


def _maps(one: MapSet, typical: Mapping[str, Floats]) -> event.Maps:
    """Return the maps of a set; of layers of one input, those that are shown beside each other."""
    layers = [_layer(name, one, typical) for name in one.layers_of_one_input]
    kind = one.kind
    labels = one.class_names if one.labels is not None else None
    return event.Maps(f"{one.name}{one.variant}", kind.name, kind.meaning, kind.signed, _source(one), layers, labels)


def _layer(name: str, one: MapSet, typical: Mapping[str, Floats]) -> event.Layer:
    """Return the maps of a layer; the typical map is of order 0."""
    known = typical.get(numbered_tags("", one.layers)[name].removeprefix("/")) if one.kind.name == "order0" else None
    return event.Layer(name, plane(one.maps[name].float().numpy()), known)


def _atlas(atlas: Atlas, label: int) -> dict[str, event.Atlas]:
    """Return where a class is learned, by map."""
    found: dict[str, Any] = {}
    for name, (means, lifts) in atlas.shown.items():
        if label not in means:
            continue
        mean = plane(means[label][None])[0]
        if len(lifts) < 2:
            found[name] = event.Atlas(mean)
        else:
            found[name] = event.Atlas(mean, plane(lifts[label][None])[0], float(lifts[label].max()))
    return found
