"""Reading maps from a training step that runs anyway: hooks on a model, in any loop and with any loss.

When a layer is called, the norms of its activation are computed at once; order 0 keeps nothing else. A hook on the same
tensor multiplies them by the norms of the gradient in the backward pass. Nothing is added to the graph, so training
keeps its bits, and an in-place operation after the layer changes neither norm.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.checks import check_whole
from normgrad_lightning.hooks.gradients import Latest, LayerCall
from normgrad_lightning.hooks.observer import Observer, ReadCall
from normgrad_lightning.hooks.readings import READINGS, Point, Reading, add_up, check_kinds, layer_products
from normgrad_lightning.hooks.safe_hooks import WeakMethod
from normgrad_lightning.hooks.to_host import OnTheWay
from normgrad_lightning.layers.module_tree import is_compiled
from normgrad_lightning.layers.names import AUTO, check_model, check_spec, match_layers
from normgrad_lightning.layers.options import ReadOptions, Target
from normgrad_lightning.layers.own_passes import current_pass
from normgrad_lightning.views.map_dict import Maps

ORDER0 = "order0"


class NormGrad:
    """Records maps of a model while your own loop trains it: order 0, `m_u = ‖x_u‖·‖g_u‖`, unless `kinds` adds others.

    The first forward pass also shows where the images enter and, for `"auto"`, which layers to take. A layer that is
    used several times in one backward gets the sum of its maps (if they are on several grids, of those on the finest).
    Of several backwards, the latest that reached the layer counts.

    Args:
        model: any module that is called with images somewhere inside.
        layers: `"auto"`, a name, a glob or a list of these; see `select_layers`.
        num_images: how many images of each batch to read, from the first on; None: all.
        target: `"output"` or `"input"`: an imaginary identity convolution at the layer's output or input (where the
            input tensor feeds other layers too, their gradient counts as well); `"weight"`: the own weight of a
            convolution or linear layer, on the grid of its input (of its output, if transposed).
        token_grid: rows and columns of a transformer's patches, if they cannot be inferred. If tokens stand after the
            patches, too, how many stand before them is a third number.
        channels_last: whether features are `(N, *S, C)`, if that cannot be inferred.
        kinds: which maps to read. `"grad_cam"` is that of a loss: bright where features lower it. A layer has none if
            a later operation in place overwrites its activation.

    Example:
        >>> import torch
        >>> from normgrad_lightning import NormGrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1), torch.nn.ReLU())
        >>> _ = torch.nn.init.ones_(model[0].weight), torch.nn.init.zeros_(model[0].bias)
        >>> image = torch.tensor([[[[0.0, 1.0], [2.0, 3.0]]]])
        >>> with NormGrad(model, layers="0", target="weight") as recorder:
        ...     model(image).square().sum().backward()
        >>> recorder.maps["0"]
        tensor([[[ 0.,  2.],
                 [ 8., 18.]]])

        What each place adds to the gradient of the weight. Here all of it has one sign, so the map adds up to that:

        >>> model[0].weight.grad.item(), recorder.maps["0"].sum().item()
        (28.0, 28.0)
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] = AUTO,
        num_images: int | None = None,
        target: Target = "output",
        *,
        token_grid: Sequence[int] | None = None,
        channels_last: bool | None = None,
        kinds: Sequence[str] = (ORDER0,),
    ) -> None:
        check_model(model)
        check_spec(layers)
        options = ReadOptions(target, token_grid, channels_last)
        if num_images is not None:
            check_whole("num_images", num_images, 1, " None takes all.")
        check_kinds(kinds, target)
        if is_compiled(model) and current_pass() is None:
            raise ValueError(
                "`model`: expected a module that is not compiled, but got a compiled one, which hooks cannot read. "
                "Use `order0_maps`, which runs it eagerly in an extra pass."
            )
        self.read_kinds(kinds)
        self._num_images = num_images
        self._target = target
        self._observer = Observer(
            model,
            options,
            layers=None if layers == AUTO else match_layers(model, layers, target),
            on_call=self._await_gradient,
            num_images=num_images,
        )
        self._weak_take = WeakMethod(self._take)
        self._weak_failed = WeakMethod(self._observer.problems.reading_failed)
        self._latest: dict[str, Latest] = {}
        self._reached: set[str] = set()
        self._on_leaves: list[RemovableHandle] = []
        self._warned: set[str] = set()

    def __enter__(self) -> NormGrad:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Put the hooks on."""
        self._observer.attach()

    def detach(self) -> None:
        """Take all hooks off; the maps stay."""
        self._observer.detach()
        while self._on_leaves:
            self._on_leaves.pop().remove()

    def clear(self) -> None:
        """Forget the maps and images of earlier steps."""
        self._latest.clear()
        self._observer.clear()

    def read_kinds(self, kinds: Sequence[str]) -> None:
        """Read these kinds of maps from the next step on."""
        self.kinds = tuple(kinds)
        self._readings = [READINGS[kind] for kind in kinds]

    @property
    def enabled(self) -> bool:
        """Whether passes are recorded; when off, a hook returns at once."""
        return self._observer.steps.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._observer.steps.enabled = value

    @property
    def layers(self) -> list[str]:
        """The layers' names in the order in which the network runs them; for `"auto"`, empty before a backward."""
        self._observer.settle(self._reached, self._nonzero)
        return self._observer.layers

    def candidates(self) -> list[str]:
        """Return what `"auto"` would take by the forward pass alone, whether or not gradients come."""
        return self._observer.choose()

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules that hooks are put on."""
        return self._observer.hooked

    @property
    def modules_read(self) -> list[nn.Module]:
        """The layers themselves; all modules before `"auto"` is decided."""
        return self._observer.modules_read

    @property
    def maps(self) -> Maps:
        """The latest map `(N, *S)` of each layer that a backward has reached, in the order of the network.

        Of order 0, or of the first kind if order 0 is not recorded. Layers that cannot be read are named in a warning,
        once. A dict, which a notebook shows as a picture, as long as the recorder has the images.
        """
        return self._maps_and_warnings(ORDER0 if ORDER0 in self.kinds else self.kinds[0])

    def maps_of(self, kind: str) -> Maps:
        """Return the same as `maps`, of this kind."""
        return self._maps_and_warnings(kind)

    def latest_maps(self, kind: str = ORDER0) -> dict[str, Tensor]:
        """Return the same as `maps_of`, without a warning."""
        if kind not in self.kinds:
            recorded = ", ".join(map(repr, self.kinds))
            raise ValueError(
                f"`kind`: expected a kind that is recorded, {recorded}, but got {kind!r}. "
                "Name it in `NormGrad(kinds=...)`."
            )
        index = self.kinds.index(kind)
        maps = {
            name: self._of_one_device(name, [part[index] for part in parts]) for name, parts in self._parts().items()
        }
        return {name: add_up(parts) for name, parts in maps.items() if parts}

    @property
    def images(self) -> Tensor | None:
        """The images that the latest maps belong to, `(N, C, *S)`, as the network saw them."""
        newest = self._newest
        return None if newest is None else newest.images

    def images_of(self, name: str) -> Tensor | None:
        """Return the images of this layer's map: others than `images`, if another backward reached it last."""
        return self._latest[name].images

    @property
    def batch_size(self) -> int | None:
        """How many images entered the network for the latest maps, read or not; None if none was recognised."""
        newest = self._newest
        return None if newest is None else newest.batch_size

    @property
    def has_run(self) -> bool:
        """Whether any of the layers has been called since the beginning."""
        return self._observer.has_run

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has come since the last `clear`."""
        return bool(self._latest)

    def new_problems(self, *, after_backward: bool = False) -> list[str]:
        """Return a sentence for each layer that cannot be read, and for each failure in a hook; each is returned once.

        Args:
            after_backward: whether there has been a backward pass, even if it reached none of the layers.
        """
        self._observer.settle(self._reached, self._nonzero)
        problems = self._observer.describe_problems(self._reached, after_backward=after_backward or bool(self._reached))
        new = [problem for problem in problems if problem not in self._warned]
        self._warned.update(new)
        return new

    @property
    def _newest(self) -> Latest | None:
        return max(self._latest.values(), key=lambda latest: latest.backward, default=None)

    def _maps_and_warnings(self, kind: str) -> Maps:
        for problem in self.new_problems():
            warnings.warn(problem, stacklevel=3)
        maps = self.latest_maps(kind)
        return Maps(maps, kind=kind, images_of={name: self.images_of(name) for name in maps})

    def _await_gradient(self, call: ReadCall) -> None:
        """Bind what is needed of the activation to the gradient that will come."""
        point = call.point
        x = (point if call.layer_input is None else call.layer_input).detach()[: self._num_images]
        # In training, one pass over the values must do.
        products = layer_products(
            call.layer, self._target, x.shape, (len(x), *point.shape[1:]), rescale=self._observer.steps.is_own_pass
        )
        view = call.layout.view if products.window is None else _unchanged
        reading = self._reading(Point(products, view), x)
        use = LayerCall(call, reading, self._weak_take, self._weak_failed)
        handle = use.wait_at(point)
        if point.is_leaf:  # it outlives the step
            self._on_leaves.append(handle)

    def _reading(self, point: Point, x: Tensor) -> Reading:
        """Return what to make of a gradient at this activation: a map of each kind.

        Subclasses may make something else of it, and find that in `_parts`.
        """
        readings = [read(point, x) for read in self._readings]
        return lambda g: [reading(g) for reading in readings]

    def _take(self, use: LayerCall, backward: int, gradient: Tensor) -> None:
        """Read a gradient that has come: it makes a part of what this backward gives for the layer."""
        if not self._observer.counts_gradient(use.name):
            return
        latest = self._latest.get(use.name)
        if latest is None or latest.backward != backward or use.entry_number < latest.entry_number:
            latest = Latest(backward, use)
        if use.entry_number == latest.entry_number:
            part = use.reading(gradient[: self._num_images])
            latest.parts.append((use.number, part))
            self._latest[use.name] = latest  # not before: the reading may fail
            for kind, m in zip(self.kinds, part, strict=False):
                if m is None:
                    self._observer.problems.overwritten(use.name, kind)
        self._reached.add(use.name)

    def _nonzero(self) -> set[str]:
        """Return the layers whose latest maps are not zero everywhere."""
        if ORDER0 not in self.kinds:
            return set(self._latest)
        index = self.kinds.index(ORDER0)
        maps = [(name, part[index]) for name, latest in self._latest.items() for _, part in latest.parts]
        is_nonzero = OnTheWay([m.any() for _, m in maps]).arrived()
        return {name for (name, _), nonzero in zip(maps, is_nonzero, strict=True) if nonzero}

    def _of_one_device(self, name: str, maps: Sequence[Tensor | None]) -> list[Tensor]:
        """Return the maps of a layer's uses: of replicas, those on the images' device; none if any is lacking."""
        there = [m for m in maps if m is not None]
        if len(there) < len(maps):
            return []
        images = self.images_of(name)
        home = images.device if images is not None and images.device in {m.device for m in there} else there[0].device
        return [m for m in there if m.device == home]

    def _parts(self) -> dict[str, list[Any]]:
        """Return what was read at each layer in its latest backward, use by use."""
        latest = {name: self._latest[name].parts for name in self.layers if name in self._latest}
        return {name: [read for _, read in sorted(parts, key=itemgetter(0))] for name, parts in latest.items()}


def _unchanged(t: Tensor) -> Tensor:
    return t
