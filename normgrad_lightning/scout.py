"""Watching forward passes: where images enter a network, and which layers give features on which grid.

None of this can be known from the modules alone; it shows once an image has gone through.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.hooks import Hook, current_backward, first_tensor, floating_tensors, on_forward
from normgrad_lightning.isolation import current_pass
from normgrad_lightning.layers import Sighting, choose, named_layers, why_no_weight, with_fast_path
from normgrad_lightning.tokens import CONVOLUTIONS, Layout, infer_layout, patch_grid


class Entry:
    """Images that entered a network, and what of them tells the layout of its features.

    Args:
        number: counts the entries.
        t: what the network, or the part of it that was called, was given.
        layer: what it was given to.
        num_images: how many to keep.
    """

    def __init__(self, number: int, t: Tensor, layer: nn.Module, num_images: int | None) -> None:
        self.number = number
        self.wants_gradient = t.requires_grad
        self.take(t, layer, num_images)

    def take(self, t: Tensor, layer: nn.Module, num_images: int | None) -> None:
        """Take `t`, given to `layer`, for the images: the nearer to the weights, the better."""
        self.shape = t.shape
        self.images = t.detach()[:num_images]
        self.patch_grid = patch_grid(layer, t.shape)
        self.is_sure = _convolves(layer, t)


class Scout:
    """Watches forward passes: where images enter, and which layers give features on which grid.

    Images enter where a network is called from outside of any other: `training_step` may call several, or one several
    times. The image is what the first convolution inside reads (what the network saw, after every augmentation), or
    else what the network was given. A generator that is given noise sees none.

    Args:
        model: the model to watch.
        target: whether a layer's output or its input is the point to look at.
        num_images: how many images of a batch to keep; None: all.
        token_grid: see `infer_layout`.
        channels_last: see `infer_layout`.
        sights: whether to note what each layer gives, to choose among them.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        target: str = "output",
        num_images: int | None = None,
        token_grid: Sequence[int] | None = None,
        channels_last: bool | None = None,
        sights: bool = True,
    ) -> None:
        self.enabled = True
        self._sights = sights
        self.searching = True
        self.step = 0
        self.apart = with_fast_path(model)
        self.entry: Entry | None = None
        self.has_seen_image = False
        self.sightings: list[Sighting] = []
        self.failures: dict[str, Exception] = {}
        self._target = target
        self._num_images = num_images
        self._token_grid = token_grid
        self._channels_last = channels_last
        self._layers = {"": model, **named_layers(model)}
        self._mixes_batch_and_tokens = any(vars(m).get("batch_first", True) is False for m in model.modules())
        self._layouts: dict[nn.Module, tuple[Any, Layout]] = {}
        self._pass = current_pass()
        self._doors: set[str] = set()
        self._open: list[str] = []
        self._called: set[str] = set()
        self._awaits_images = True
        self._is_imageless = False
        self._entry_before: Entry | None = None
        self._entries = 0
        self._sighted_in: dict[str, int] = {}
        self._last_tensor: tuple[Callable[[], Tensor | None], int] = (lambda: None, -1)
        self._tensors = 0
        self._handles: list[RemovableHandle] = []
        self._stale = False

    def __enter__(self) -> Scout:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Put hooks on every layer while searching; after that, only where images were seen to enter."""
        if self._handles:
            return
        for name, layer in self._watched():
            if layer not in self.apart:
                # First of all hooks: whoever reads the layer needs to know the image.
                see_input = Hook(self._see_input, name)
                self._handles.append(layer.register_forward_pre_hook(see_input, with_kwargs=True, prepend=True))
            self._handles.append(on_forward(layer, Hook(self._see_output, name), apart=layer in self.apart))

    def _watched(self) -> list[tuple[str, nn.Module]]:
        return [(name, layer) for name, layer in self._layers.items() if self.searching or name in self._doors]

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules that hooks are put on."""
        return [layer for _, layer in self._watched()]

    def detach(self) -> None:
        """Take the hooks off again."""
        while self._handles:
            self._handles.pop().remove()

    def settle(self) -> None:
        """End the search once it has seen images: keep watching only where they enter."""
        if self.searching and self.has_seen_image:
            self.searching = False
            self.sightings.clear()
            if self._handles:
                self.detach()
                self.attach()

    def end_step(self) -> None:
        """A gradient has come: whatever is called next belongs to another step."""
        self._stale = True

    def clear(self) -> None:
        """Forget the steps before, and what was seen in them."""
        self._begin_step()
        self.sightings.clear()
        self._sighted_in.clear()

    def renew(self) -> bool:
        """Begin a new step if it is time to; False if what is called now counts for nothing.

        Switched off, nothing counts; nor do passes of ours while training is watched, nor what checkpointing repeats
        during a backward pass.
        """
        if not self.enabled or current_pass() is not self._pass or current_backward() >= 0:
            return False
        if self._stale:
            self._begin_step()
        return True

    def _begin_step(self) -> None:
        self.step += 1
        self._stale = False
        self.entry = None
        self._open.clear()
        self._called.clear()
        self._awaits_images = True
        self._is_imageless = False

    def failed(self, name: str, error: Exception) -> None:
        """Take note of an error in a hook."""
        self.failures.setdefault(name, error)

    def layout(self, layer: nn.Module, t: Tensor) -> Layout:
        """How to read `t`, a tensor of this layer, as features on a grid."""
        if self._mixes_batch_and_tokens and t.dim() == 3 and t.shape[0] == t.shape[1]:
            raise ValueError(
                f"its shape {tuple(t.shape)} does not tell tokens from images, as the model has parts with "
                "`batch_first=False`. Use another batch size"
            )
        image_shape, patches = (None, None) if self.entry is None else (self.entry.shape, self.entry.patch_grid)
        seen = t.shape, image_shape, patches
        before, layout = self._layouts.get(layer, (None, None))
        if layout is None or before != seen:
            layout = infer_layout(
                t.shape,
                image_shape,
                layer,
                patch_grid=patches,
                token_grid=self._token_grid,
                channels_last=self._channels_last,
                of_input=self._target == "input",
            )
            self._layouts[layer] = seen, layout
        return layout

    def point(self, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """The tensor to look at in a layer's call, input or output: of several, the first that can be on a grid."""
        candidates = list(floating_tensors((args, kwargs) if self._target == "input" else output))
        return next((t for t in candidates if t.dim() >= 3), candidates[0] if candidates else None)

    def choose(self, reached: Callable[[str], bool] = lambda _: True) -> list[str]:
        """The layers for `"auto"` among the sightings that `reached` accepts (for weights, among those with one)."""
        readable = [s for s in self.sightings if self._target != "weight" or why_no_weight(s.layer) is None]
        return choose([s for s in readable if reached(s.name)])

    def _see_input(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if not self.renew():
            return
        t = first_tensor((args, kwargs))
        if not self._open:
            self._awaits_images |= name in self._called or t is None or not t.requires_grad
            self._called.add(name)
            self._doors.add(name)
            self._begin_call(_is_noise((args, kwargs)))
        self._open.append(name)
        if t is not None and _is_spatial(t) and not self._is_imageless:
            self._consider(name, layer, t)

    def _begin_call(self, is_noise: bool) -> None:
        """A network is called from outside: what a generator makes of noise belongs to no image."""
        if self._is_imageless:
            self.entry = self._entry_before
        self._is_imageless = is_noise
        if is_noise:
            self._entry_before, self.entry = self.entry, None

    def _consider(self, name: str, layer: nn.Module, t: Tensor) -> None:
        """Take `t` for images that enter, if that is what it is."""
        entry = self.entry
        if self._awaits_images and (t.dim() >= 4 or _convolves(layer, t)) and self._may_follow(entry, t):
            self._awaits_images = False
            self._entries += 1
            self.entry = Entry(self._entries, t, layer, self._num_images)
        elif (
            entry is not None and not entry.is_sure and _convolves(layer, t) and entry.wants_gradient >= t.requires_grad
        ):
            entry.take(t, layer, self._num_images)
        else:
            return
        self.has_seen_image = True
        self._doors.add(name)

    def _may_follow(self, entry: Entry | None, t: Tensor) -> bool:
        """Features that a frozen part hands on are no new images: these have the channels of those before."""
        return entry is None or (t.dim() == len(entry.shape) and t.shape[1] == entry.shape[1])

    def _see_output(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self.renew():
            return
        if name in self._open:
            del self._open[self._open.index(name) :]
        if self.searching and self._sights:
            self._sight(name, layer, first_tensor((args, kwargs)) if self._target == "input" else _lone_tensor(output))

    def _sight(self, name: str, layer: nn.Module, t: Tensor | None) -> None:
        if t is None or t.is_nested or self._sighted_in.get(name, self._entries) != self._entries:
            return
        try:
            layout = self.layout(layer, t)
        except ValueError:
            return
        self._sighted_in[name] = self._entries
        seen, version = self._last_tensor
        now = 0 if t.is_inference() else t._version
        if seen() is not t or version != now:
            self._tensors += 1
            self._last_tensor = (weakref.ref(t), now)
        self.sightings.append(Sighting(name, layer, layout, self._tensors))


def _lone_tensor(output: Any) -> Tensor | None:
    """What a layer gives, if it is one tensor, or holds just one that can be on a grid."""
    if isinstance(output, Tensor):
        return output
    candidates = [t for t in floating_tensors(output) if t.dim() >= 3]
    return candidates[0] if len(candidates) == 1 else None


def _is_spatial(t: Tensor) -> bool:
    return t.dim() >= 3 and math.prod(t.shape[2:]) > 1


def _is_noise(nested: Any) -> bool:
    """Whether a network is given numbers that are neither images nor features of any."""
    tensors = list(floating_tensors(nested))
    return bool(tensors) and not any(t.requires_grad or _is_spatial(t) for t in tensors)


def _convolves(layer: nn.Module, t: Tensor) -> bool:
    return isinstance(layer, CONVOLUTIONS) and t.dim() == len(layer.kernel_size) + 2
