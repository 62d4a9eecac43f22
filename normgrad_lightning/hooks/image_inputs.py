"""Where images enter a network: the modules do not say, their calls show it."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from normgrad_lightning.layers.layouts import CONVOLUTIONS, patch_grid
from normgrad_lightning.layers.nested import first_tensor, floating_tensors


class ImageInput:
    """Images that entered a network, and what they say about the layout of its features.

    Args:
        number: counts the entries.
        t: what the network, or the part of it that was called, was given.
        layer: the module that was given `t`.
        num_images: how many images to keep.
    """

    def __init__(self, number: int, t: Tensor, layer: nn.Module, num_images: int | None) -> None:
        self.number = number
        self.wants_gradient = t.requires_grad
        self.take(t, layer, num_images)

    def take(self, t: Tensor, layer: nn.Module, num_images: int | None) -> None:
        """Use `t`, given to `layer`, as the images: what the first weights read is what the network saw."""
        self.layer = layer
        self.shape = t.shape
        self.images = t.detach()[:num_images]
        self.patch_grid = patch_grid(layer, t.shape)
        self.is_sure = _convolves(layer, t)

    def may_hold_patches(self, t: Tensor) -> bool:
        """Return whether a tensor may be the patches together with other tokens, at most as many as patches.

        The images may be the frames of clips, whose patches stand in one row.
        """
        if self.patch_grid is None or t.dim() != 3 or not len(t) or self.shape[0] % len(t):
            return False
        patches = math.prod(self.patch_grid) * (self.shape[0] // len(t))
        return patches < t.shape[1] <= 2 * patches

    def may_begin_at(self, layer: nn.Module) -> bool:
        """Return whether the layer may give the first features: the one that reads the images, where that is known."""
        return layer is self.layer if self.is_sure else next(layer.parameters(), None) is not None


class ImageInputs:
    """Finds the images in the calls of modules.

    Images enter where a network is called from outside of any other: `training_step` may call several networks, or one
    network several times. The image is what the first convolution inside reads (what the network saw, after every
    augmentation), or else what the network was given. A generator that is given noise sees no image.

    Args:
        num_images: how many images of a batch to keep; None: all.

    Attributes:
        latest: the images that entered last in this step; None if none did, or if the network was given noise.
        count: how many entries there have been.
        has_seen_image: whether there has been any image.
        entry_modules: names of the modules that are called from outside, and of those that were given images.
    """

    def __init__(self, num_images: int | None) -> None:
        self.count = 0
        self.has_seen_image = False
        self.entry_modules: set[str] = set()
        self._num_images = num_images
        self._open: list[str] = []
        self._called: set[str] = set()
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the images and calls of the step before."""
        self.latest: ImageInput | None = None
        self._before_noise: ImageInput | None = None
        self._is_noise = False
        self._awaits_images = True
        self._open.clear()
        self._called.clear()

    def enter(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module is called."""
        if self.found_inside is not None:
            self._open.append(name)  # most calls end here, and must cost little
            return
        t = first_tensor((args, kwargs))
        if not self._open:
            self._awaits_images |= name in self._called or t is None or not t.requires_grad
            self._called.add(name)
            self.entry_modules.add(name)
            self._begin_call(_is_noise((args, kwargs)))
        self._open.append(name)
        if t is not None and _is_spatial(t) and not self._is_noise:
            self._consider(name, layer, t)

    @property
    def found_inside(self) -> str | None:
        """The module called from outside that is running, once it is sure which images it reads; None before."""
        found = self._open and self.latest is not None and self.latest.is_sure and not self._awaits_images
        return self._open[0] if found else None

    def leave(self, name: str) -> bool:
        """Note that a module returns, and calls inside it that raised; return whether it was called from outside."""
        if name in self._open:
            del self._open[self._open.index(name) :]
        return not self._open

    def _begin_call(self, is_noise: bool) -> None:
        """Note that a network is called from outside: what a generator makes of noise belongs to no image."""
        if self._is_noise:
            self.latest = self._before_noise
        self._is_noise = is_noise
        if is_noise:
            self._before_noise, self.latest = self.latest, None

    def _consider(self, name: str, layer: nn.Module, t: Tensor) -> None:
        """Use `t` as the images, if it is new images or nearer to the weights than those before."""
        entry = self.latest
        if self._awaits_images and (t.dim() >= 4 or _convolves(layer, t)) and _may_follow(entry, t):
            self._awaits_images = False
            self.count += 1
            self.latest = ImageInput(self.count, t, layer, self._num_images)
        elif (
            entry is not None and not entry.is_sure and _convolves(layer, t) and entry.wants_gradient >= t.requires_grad
        ):
            entry.take(t, layer, self._num_images)
        else:
            return
        self.has_seen_image = True
        self.entry_modules.add(name)


def _may_follow(entry: ImageInput | None, t: Tensor) -> bool:
    """Return whether `t` may be new images after these: features that a frozen part hands on have other channels."""
    return entry is None or (t.dim() == len(entry.shape) and t.shape[1] == entry.shape[1])


def _is_spatial(t: Tensor) -> bool:
    return t.dim() >= 3 and math.prod(t.shape[2:]) > 1


def _is_noise(nested: Any) -> bool:
    """Return whether a network is given numbers that are neither images nor features of any."""
    tensors = list(floating_tensors(nested))
    return bool(tensors) and not any(t.requires_grad or _is_spatial(t) for t in tensors)


def _convolves(layer: nn.Module, t: Tensor) -> bool:
    return isinstance(layer, CONVOLUTIONS) and t.dim() == len(layer.kernel_size) + 2
