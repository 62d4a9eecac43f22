"""The forward side of recording: which calls of layers are to be read, and how.

Where images enter and which layers give features on a grid cannot be known from the modules alone; both show once an
image has gone through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgrad_lightning.auto_layers.candidates import CandidateLayers
from normgrad_lightning.hooks.auto_search import AutoSearch, lone_tensor
from normgrad_lightning.hooks.image_inputs import ImageInput, ImageInputs
from normgrad_lightning.hooks.problems import IN_FUNC, OUT_OF_ORDER, Problems
from normgrad_lightning.hooks.safe_hooks import ModuleHooks, WeakMethod
from normgrad_lightning.hooks.steps import Steps
from normgrad_lightning.layers.layouts import Layout, Layouts
from normgrad_lightning.layers.module_tree import is_compiled, with_fast_path
from normgrad_lightning.layers.names import named_layers
from normgrad_lightning.layers.nested import first_tensor, floating_tensors
from normgrad_lightning.layers.options import ReadOptions


class ReadCall(NamedTuple):
    """A call of a layer whose gradient is going to be read.

    Attributes:
        name: the layer's.
        layer: the layer.
        point: the tensor whose gradient to read: its output or its input.
        layer_input: what the layer was given, if its own weight is the target; else None.
        layout: how to read `point` as channels on a grid.
        entry: the images that entered the network; None if none were recognised.
        number: counts such calls.
    """

    name: str
    layer: nn.Module
    point: Tensor
    layer_input: Tensor | None
    layout: Layout
    entry: ImageInput | None
    number: int


class Observer:
    """Watches forward passes, and hands over the calls of layers that are to be read.

    While it searches, it has hooks on every layer; after `settle`, only where images enter and on the layers to read.

    Args:
        model: the model to watch.
        options: how to read layers.
        layers: names of the layers to read; None: `"auto"`, all of them until `settle` chooses.
        on_call: a method that gets each `ReadCall` of these layers; it is held weakly. None: no layer is read.
        num_images: how many images of a batch to keep; None: all.

    Attributes:
        problems: what went wrong, as sentences.
        steps: which calls count.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ReadOptions | None = None,
        *,
        layers: Sequence[str] | None = None,
        on_call: Callable[[ReadCall], None] | None = None,
        num_images: int | None = None,
    ) -> None:
        self.problems = Problems()
        self._options = options or ReadOptions()
        self._modules = {"": model, **named_layers(model)}
        self._auto = layers is None
        self._searching = True
        names = [name for name in self._modules if name] if layers is None else list(layers)
        self._read_layers = names if on_call is not None else []
        self._on_call = None if on_call is None else WeakMethod(on_call)
        self._images = ImageInputs(num_images)
        self._layouts = Layouts(model, self._options)
        self.steps = Steps(self._images)
        self._search = AutoSearch(self._options.target, self._layouts, self._images)
        self._hooks = ModuleHooks(self._modules, with_fast_path(model))
        self._calls: dict[str, int] = {}
        self._in_order: dict[str, bool] = {}

    def __enter__(self) -> Observer:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Put the hooks on."""
        if self._hooks:
            return
        before = self._options.target == "input"
        try:
            self._hooks.watch(self._watched_layers(), self._enter, self._leave, self.problems.watching_failed)
            self._hooks.read(self._read_layers, self._read, self.problems.reading_failed, before=before)
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take all hooks off."""
        self._hooks.keep((), ())
        self.candidates.let_go()

    def clear(self) -> None:
        """Forget the steps before, and what was seen in them."""
        self.steps.begin()
        self.candidates.clear()

    @property
    def candidates(self) -> CandidateLayers:
        """For `"auto"`, the layers seen to give features on a grid, in the order of their calls."""
        return self._search.candidates

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules that hooks are put on."""
        return [*(self._modules[name] for name in self._watched_layers()), *self.modules_read]

    @property
    def modules_read(self) -> list[nn.Module]:
        """The layers to read themselves."""
        return [self._modules[name] for name in self._read_layers]

    @property
    def layers(self) -> list[str]:
        """The layers that are read, in the order in which the network runs them; none before `"auto"` is decided."""
        if self._is_undecided:
            return []
        return sorted(self._read_layers, key=[*self._calls, *self._read_layers].index)

    @property
    def has_run(self) -> bool:
        """Whether any of the layers to read has been called since the beginning."""
        return bool(self._calls)

    def counts_gradient(self, name: str) -> bool:
        """Return whether a gradient at this layer counts; if so, the next call belongs to another step."""
        counts = self.steps.enabled and self._hooks.is_reading(name)
        if counts:
            self.steps.end()
        return counts

    def choose(self) -> list[str]:
        """Return the layers that `"auto"` takes by the forward pass alone."""
        return self._search.choose()

    def settle(self, reached: Collection[str], nonzero: Callable[[], Container[str]] | None = None) -> None:
        """Decide `"auto"` among the layers reached by gradients, and keep only the hooks needed from now on.

        Does nothing before images and gradients were seen.

        Args:
            reached: names of the layers that gradients have reached.
            nonzero: gives the names of those whose maps are not zero everywhere.
        """
        if not self._searching or not self._images.has_seen_image or not reached:
            return
        if self._auto:
            chosen = self._search.choose(reached, None if nonzero is None else nonzero())
            if not chosen:
                return
            self._read_layers = chosen
            for names, why in self._search.left_out(reached):
                self.problems.leave_out(names, why)
        self._searching = False
        self.candidates.clear()
        self._hooks.keep(self._images.entry_modules, self._read_layers)

    def describe_problems(self, reached: Collection[str], *, after_backward: bool) -> Iterator[str]:
        """Yield a sentence for each problem.

        Args:
            reached: the layers that gradients have reached.
            after_backward: whether there has been a backward pass.
        """
        yield from self.problems.of_watching()
        yield from self.problems.of_order()
        if self._is_undecided:
            if self.has_run:
                yield self._why_auto_found_nothing(reached)
            return
        for name in self._read_layers:
            problem = self.problems.of_layer(
                name, called=name in self._calls, reached=name in reached, after_backward=after_backward
            )
            yield from filter(None, (problem, self.problems.of_overwriting(name)))

    def _why_auto_found_nothing(self, reached: Collection[str]) -> str:
        return self.problems.of_auto(
            has_seen_image=self._images.has_seen_image,
            has_seen_grid=self._search.has_seen_grid,
            has_seen_complex=self._search.has_seen_complex,
            reached=bool(reached),
            has_compiled_parts=not self.steps.is_own_pass and any(map(is_compiled, self._modules[""].modules())),
        )

    @property
    def _is_undecided(self) -> bool:
        return self._auto and self._searching

    def _watched_layers(self) -> list[str]:
        return [name for name in self._modules if self._searching or name in self._images.entry_modules]

    def _enter(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        """Note that a module is called."""
        if not self.steps.counts():
            return
        self._images.enter(name, layer, args, kwargs)
        found = self._images.found_inside
        if found is not None and not self._auto and self.steps.is_own_pass:
            self._hooks.silence_inside(found, self._images.entry_modules)

    def _leave(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Note that a module returns."""
        if not self.steps.counts():
            return
        is_entry_module = self._images.leave(name)
        if self._searching:
            self._search.note_features(layer, lone_tensor(output))
        if self._is_undecided:
            self._search.note_call(name, layer, (args, kwargs), output, is_entry_module=is_entry_module)

    def _read(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Hand the call over if it counts and can be read."""
        if not self.steps.enabled:
            return
        point = self._point(args, kwargs, output)
        if not self.steps.counts() and not self.steps.counts_in_backward(name, point):
            return
        self._calls.setdefault(name, 0)
        if not torch.is_grad_enabled():
            self.steps.note_without_graph(name)
            return
        readable = _checked(point)
        layer_input = first_tensor((args, kwargs)) if self._options.target == "weight" else None
        layout = self._layout(layer, readable)
        if layout.is_guessed:
            self._check_order(name, readable)
        on_call = None if self._on_call is None else self._on_call()
        if on_call is not None:
            self._calls[name] += 1
            number = sum(self._calls.values())
            on_call(ReadCall(name, layer, readable, layer_input, layout, self._images.latest, number))
            self.steps.note_read(name, readable)

    def _check_order(self, name: str, point: Tensor) -> None:
        """Raise if a layer that the user has named has its tokens out of order; `"auto"` does not take such layers."""
        if self._searching and not self._auto and name not in self._in_order:
            self._in_order[name] = self._search.keeps_order(point)
        if not self._in_order.get(name, True):
            raise ValueError(OUT_OF_ORDER)

    def _point(self, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """Return the tensor to read in a layer's call: of several, the first that can be on a grid."""
        candidates = list(floating_tensors((args, kwargs) if self._options.target == "input" else output))
        return next((t for t in candidates if t.dim() >= 3), candidates[0] if candidates else None)

    def _layout(self, layer: nn.Module, t: Tensor) -> Layout:
        images = self._images.latest
        image_shape, patches = (None, None) if images is None else (images.shape, images.patch_grid)
        return self._layouts.of(layer, t, image_shape, patches)


def _checked(point: Tensor | None) -> Tensor:
    """Return the tensor, or raise if it has no gradient to read."""
    if point is None:
        raise ValueError("it gives no floating-point tensor")
    if torch._C._functorch.is_functorch_wrapped_tensor(point):
        raise ValueError(IN_FUNC)
    if isinstance(point, nn.Parameter):
        raise ValueError("it gives a parameter, not features of the images")
    if not point.requires_grad:
        raise ValueError("it gets no gradient: it and all layers before it are frozen, or what it gives is detached")
    return point
