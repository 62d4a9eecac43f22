"""Reading maps out of a training step that runs anyway: hook points on a model, in any loop and with any loss.

A forward hook computes the norms of the activation at once and keeps nothing else; a hook on the same tensor multiplies
them by the norms of its gradient when backward comes by. Nothing is added to the graph, so training keeps its bits, and
an in-place operation after the layer changes neither of the two.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from normgrad_lightning.checks import check_choice, check_flag, check_grid, check_whole
from normgrad_lightning.hooks import Hook, current_backward, first_tensor, on_forward
from normgrad_lightning.isolation import runs_eagerly
from normgrad_lightning.layers import (
    AUTO,
    TARGETS,
    check_model,
    check_spec,
    is_compiled,
    match_layers,
    named_layers,
)
from normgrad_lightning.products import OuterProducts
from normgrad_lightning.scout import Entry, Scout
from normgrad_lightning.tokens import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from normgrad_lightning.windows import Window

Reading = Callable[[Tensor], Any]
"""What is made of a gradient when it comes; what it needs of the activation is bound in."""


class Point(NamedTuple):
    """How the activation and the gradient at a layer make the products that a map is about.

    Attributes:
        products: the products.
        view: brings either tensor to `(N, C, *S)`.
    """

    products: OuterProducts
    view: Callable[[Tensor], Tensor]


class NormGrad:
    """Records order-0 maps `m_u = ‖x_u‖·‖g_u‖` of a model while a loop of yours trains it.

    The first forward pass also shows where the image enters and, for `"auto"`, which layers to take. A layer used
    several times in one backward gets the sum of its maps (if on several grids, those on the finest); of several
    backwards, the latest that reached the layer counts.

    Args:
        model: any module that is called with images somewhere inside.
        layers: `"auto"`, a name, a glob or a list of these; see `select_layers`.
        num_images: how many images of each batch to read, from the first on; None: all.
        target: `"output"` or `"input"`: an imaginary identity convolution at the layer's output or input (where the
            input tensor feeds other layers too, their gradient counts as well); `"weight"`: the own weight of a
            convolution or linear layer, on the grid of its input (of its output, if transposed).
        token_grid: rows and columns of a transformer's patches, if they cannot be inferred.
        channels_last: whether features are `(N, *S, C)`, if that cannot be inferred.

    Example:
        >>> import torch
        >>> from normgrad_lightning import NormGrad
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
        >>> with NormGrad(model, layers="0") as recorder:
        ...     model(torch.randn(2, 3, 8, 8)).square().mean().backward()
        >>> recorder.maps["0"].shape
        torch.Size([2, 6, 6])
    """

    def __init__(
        self,
        model: nn.Module,
        layers: str | Sequence[str] = AUTO,
        num_images: int | None = None,
        target: str = "output",
        *,
        token_grid: Sequence[int] | None = None,
        channels_last: bool | None = None,
    ) -> None:
        check_model(model)
        check_spec(layers)
        check_choice("target", target, TARGETS)
        if num_images is not None:
            check_whole("num_images", num_images, 1, " None takes all.")
        check_grid(token_grid)
        check_flag("channels_last", channels_last, or_none=True)
        if is_compiled(model) and not runs_eagerly():
            raise ValueError(
                "`model`: expected a module that is not compiled, for nothing can be read inside of compiled code. "
                "`order0_maps` runs it eagerly, in a pass of its own."
            )
        self._layers = named_layers(model)
        self._has_compiled_parts = not runs_eagerly() and any(map(is_compiled, model.modules()))
        self._auto = layers == AUTO
        self._names = list(self._layers) if self._auto else match_layers(model, layers, target)
        self._target = target
        self._num_images = num_images
        self._scout = Scout(
            model,
            target=target,
            num_images=num_images,
            token_grid=token_grid,
            channels_last=channels_last,
            sights=self._auto,
        )
        self._latest: dict[str, _Latest] = {}
        self._uses = 0
        self._hooked: MutableMapping[Tensor, set[str]] = WeakIdKeyDictionary()
        self._ran: dict[str, None] = {}
        self._without_graph: set[str] = set()
        self._step = 0
        self._reached: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._errors: dict[str, str] = {}
        self._told: set[str] = set()
        self._handles: dict[str, RemovableHandle] = {}
        self._on_leaves: list[RemovableHandle] = []

    def __enter__(self) -> NormGrad:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Put the hooks on."""
        if self._handles:
            return
        try:
            self._scout.attach()
            for name in self._names:
                layer, apart = self._layers[name], self._layers[name] in self._scout.apart
                if self._target == "input" and not apart:
                    handle = layer.register_forward_pre_hook(Hook(self._see_input, name), with_kwargs=True)
                else:
                    handle = on_forward(layer, Hook(self._see_output, name), apart=apart)
                self._handles[name] = handle
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take all hooks off; the maps stay."""
        self._scout.detach()
        while self._on_leaves:
            self._on_leaves.pop().remove()
        while self._handles:
            self._handles.popitem()[1].remove()

    def clear(self) -> None:
        """Forget the maps and images of earlier steps."""
        self._latest.clear()
        self._scout.clear()

    @property
    def enabled(self) -> bool:
        """Whether passes are recorded; when off, a hook returns at once."""
        return self._scout.enabled

    @enabled.setter
    def enabled(self, value: bool) -> None:
        self._scout.enabled = value

    @property
    def layers(self) -> list[str]:
        """The layers' names in the order in which the network runs them; for `"auto"`, empty before a backward."""
        self._settle()
        if self._auto and self._scout.searching:
            return []
        return sorted(self._names, key=[*self._ran, *self._names].index)

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules that hooks are put on."""
        return [*self._scout.hooked, *(self._layers[name] for name in self._names)]

    @property
    def maps(self) -> dict[str, Tensor]:
        """The latest map `(N, *S)` of each layer that a backward has reached, in the order of the network.

        Layers that cannot be read are named in a warning, once.
        """
        for problem in self.new_problems():
            warnings.warn(problem, stacklevel=2)
        return self.latest_maps()

    @property
    def images(self) -> Tensor | None:
        """The images that the latest maps belong to, `(N, C, *S)`, as the network saw them."""
        latest = max(self._latest.values(), key=lambda latest: latest.backward, default=None)
        return None if latest is None else latest.images

    def images_of(self, name: str) -> Tensor | None:
        """The images that this layer's map belongs to: others than `images`, if another backward reached it last."""
        return self._latest[name].images

    @property
    def has_run(self) -> bool:
        """Whether any of the layers has been called since the beginning."""
        return bool(self._ran)

    @property
    def has_gradients(self) -> bool:
        """Whether a gradient has come since the last `clear`."""
        return bool(self._latest)

    def latest_maps(self) -> dict[str, Tensor]:
        """The same as `maps`, without a warning."""
        return {name: add_up(parts) for name, parts in self._parts().items()}

    def _parts(self) -> dict[str, list[Any]]:
        """What was read at each layer in its latest backward, use by use."""
        latest = {
            name: sorted(self._latest[name].parts, key=itemgetter(0)) for name in self.layers if name in self._latest
        }
        return {name: [reading for _, reading in parts] for name, parts in latest.items()}

    def new_problems(self, *, after_backward: bool = False) -> list[str]:
        """A sentence for each layer that cannot be read, and for each error of ours; none is told twice.

        Args:
            after_backward: whether there has been a backward pass, even if it reached none of the layers.
        """
        self._settle()
        problems = [problem for problem in self._problems(after_backward) if problem not in self._told]
        self._told.update(problems)
        return problems

    def failed(self, name: str, error: Exception) -> None:
        """Take note of an error in a hook: a refusal of ours, or something nobody expected."""
        if isinstance(error, ValueError):
            self._reasons.setdefault(name, str(error))
        else:
            self._errors.setdefault(name, f"{type(error).__name__}: {error}")

    def _see_input(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if self.enabled:
            self._read(name, layer, self._scout.point(args, kwargs, None), None)

    def _see_output(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if self.enabled:
            layer_input = first_tensor((args, kwargs)) if self._target == "weight" else None
            self._read(name, layer, self._scout.point(args, kwargs, output), layer_input)

    def _read(self, name: str, layer: nn.Module, point: Tensor | None, layer_input: Tensor | None) -> None:
        """Bind the norms of the activation to the gradient that will come."""
        if not self._scout.renew() and not self._is_recomputed(name, point):
            return
        self._ran.setdefault(name)
        if not torch.is_grad_enabled():
            self._note_without_graph(name)
            return
        if point is None:
            raise ValueError("it gives no floating-point tensor")
        if isinstance(point, nn.Parameter):
            raise ValueError("it gives a parameter, not features of the images")
        if not point.requires_grad:
            if torch.is_grad_enabled():
                why = "it gets no gradient, for it and all before it are frozen, or what it gives is detached"
                self._reasons.setdefault(name, why)
            return
        layout = self._scout.layout(layer, point)
        x = (point if layer_input is None else layer_input).detach()[: self._num_images]
        products = (
            OuterProducts() if layer_input is None else weight_products(layer, x.shape, (len(x), *point.shape[1:]))
        )
        view = layout.view if products.window is None else _as_it_is
        self._uses += 1
        use = _Use(self, name, self._uses, self._reading(Point(products, view), x), self._scout.entry)
        handle = point.register_hook(use)  # type: ignore[no-untyped-call]
        if point.is_leaf:  # it outlives the step
            self._on_leaves.append(handle)
        base = point._base
        if base is not None and base.grad_fn is not None and base.numel() == point.numel():
            base.register_hook(_OfBase(use, base, point))  # type: ignore[no-untyped-call]
        self._hooked.setdefault(point, set()).add(name)

    def _note_without_graph(self, name: str) -> None:
        """Remember for this step that the layer ran without a graph: reentrant checkpointing will call it again."""
        if self._step != self._scout.step:
            self._step = self._scout.step
            self._without_graph.clear()
        self._without_graph.add(name)

    def _is_recomputed(self, name: str, point: Tensor | None) -> bool:
        """Whether a checkpoint calls the layer in a backward pass to get its graph, and gradients will come by there.

        If it had one before, they come by that; and a tensor that is waited for already is not to be counted again.
        """
        is_hooked = point is not None and name in self._hooked.get(point, ())
        return self.enabled and current_backward() >= 0 and name in self._without_graph and not is_hooked

    def _reading(self, point: Point, x: Tensor) -> Reading:
        """Take the norms of the activation, to be multiplied by those of the gradient."""
        products, view = point
        norms = products.x_norms(view(x))
        return lambda g: products.spread(products.norm(norms, products.g_norms(view(g))))

    def _take(self, use: _Use, backward: int, gradient: Tensor) -> None:
        """Turn a gradient that has come into (a part of) the map of this backward.

        If the network was called with several batches before the backward (two views, real and fake), the first one's
        images are shown, and the maps of that call.
        """
        if not self.enabled or use.name not in self._handles:
            return
        latest = self._latest.get(use.name)
        if latest is None or latest.backward != backward or use.entry_number < latest.entry_number:
            latest = _Latest(backward, use)
        if use.entry_number == latest.entry_number:
            latest.parts.append((use.number, use.reading(gradient[: self._num_images])))
            self._latest[use.name] = latest  # not before: the reading may fail
        self._reached.add(use.name)
        self._scout.end_step()

    def _settle(self) -> None:
        """After the first backward: decide `"auto"`, and keep only the hooks that are needed from now on."""
        if not self._scout.searching or not self._reached:
            return
        if self._auto:
            chosen = self._scout.choose(self._reached.__contains__)
            if not chosen:
                return
            self._names = chosen
            for name in self._handles.keys() - set(chosen):
                self._handles.pop(name).remove()
        self._scout.settle()

    def _problems(self, after_backward: bool) -> Iterator[str]:
        after_backward |= bool(self._reached)
        for name, error in self._scout.failures.items():
            what = f"the layer {name!r}" if name else "the model"
            yield f"NormGrad failed at watching {what}: {type(error).__name__}: {str(error).rstrip('.')}."
        if self._auto and self._scout.searching:
            if self._ran:
                yield f"NormGrad found no layer to read: {self._why_nothing()}."
            return
        for name in self._names:
            if name in self._errors:
                yield f"NormGrad cannot read the layer {name!r}: {self._errors[name].rstrip('.')}."
            elif name in self._reached:
                continue
            elif name in self._reasons:
                yield f"NormGrad cannot read the layer {name!r}: {self._reasons[name]}."
            elif after_backward and name not in self._ran:
                yield f"NormGrad cannot read the layer {name!r}: the forward pass does not call it."
            elif after_backward:
                yield f"NormGrad cannot read the layer {name!r}: the loss does not depend on it."

    def _why_nothing(self) -> str:
        if not self._scout.has_seen_image:
            return (
                "no module was given an image, a floating-point tensor (N, C, H, W). "
                "It needs a model that is trained on images, signals or volumes"
            )
        if self._errors:
            return next(iter(self._errors.values()))
        reason = "no layer that gives features on a grid gets a gradient"
        if self._has_compiled_parts:
            return f"{reason}. Parts of the model are compiled, and those are read at their border only"
        return f"{reason}. Check that the model is not frozen as a whole and that the loss depends on it"


class _Latest:
    """What one layer's latest backward gave, for the images that entered first: a part for each use of the layer."""

    def __init__(self, backward: int, use: _Use) -> None:
        self.backward = backward
        self.entry_number = use.entry_number
        self.images = use.images
        self.parts: list[tuple[int, Any]] = []


class _Use:
    """One use of a layer in a forward pass, waiting for its gradient."""

    def __init__(self, owner: NormGrad, name: str, number: int, reading: Reading, entry: Entry | None) -> None:
        self.name = name
        self.number = number
        self.reading = reading
        self.entry_number = 0 if entry is None else entry.number
        self._entry = entry
        self._owner = weakref.ref(owner)
        self._born_in = current_backward()
        self.came_in = -1

    @property
    def images(self) -> Tensor | None:
        return None if self._entry is None else self._entry.images

    def __call__(self, gradient: Tensor | None) -> None:
        owner = self._owner()
        if owner is None or gradient is None or torch.compiler.is_compiling():
            return
        self.came_in = current_backward()
        try:
            # What reentrant checkpointing recomputes belongs to the backward that asked for it, not to its inner one.
            backward = current_backward() if self._born_in < 0 else self._born_in
            owner._take(self, backward, gradient)
        except Exception as error:
            owner.failed(self.name, error)


class _OfBase:
    """Gives a use the gradient of its base: a view that is changed in place later gets none of its own."""

    def __init__(self, use: _Use, base: Tensor, view: Tensor) -> None:
        self._use = use
        self._base = base.shape, base.stride()
        self._view = view.shape, view.stride(), view.storage_offset() - base.storage_offset()

    def __call__(self, gradient: Tensor) -> None:
        if self._use.came_in != current_backward():
            self._use(gradient.new_empty_strided(*self._base).copy_(gradient).as_strided(*self._view))


def _as_it_is(t: Tensor) -> Tensor:
    return t


def weight_products(layer: nn.Module, x_shape: Sequence[int], g_shape: Sequence[int]) -> OuterProducts:
    """The products of the layer's own weight, for an input and an output gradient of these shapes."""
    if isinstance(layer, TRANSPOSED_CONVOLUTIONS):
        window = Window.of_transposed(x_shape, g_shape, layer.kernel_size, layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
        return OuterProducts(layer.groups, window, transposed=True)
    if isinstance(layer, CONVOLUTIONS):
        window = Window.of(
            x_shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode
        )
        if window.output_shape != tuple(g_shape[2:]):
            raise ValueError(f"its output {tuple(g_shape)} does not have the size that its own geometry gives")
        return OuterProducts(layer.groups, window)
    return OuterProducts()


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """The sum of maps; of maps on several grids, the sum of those on the finest."""
    finest = max(parts, key=Tensor.numel).shape
    first, *others = [part for part in parts if part.shape == finest]
    return sum(others, first)
