"""The forward side of recording: hooks on modules, which step a call belongs to, and what a layer's tensor is.

Where images enter and which layers give features on a grid cannot be known from the modules alone; both show once an
image has gone through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from normgrad_lightning.recording.auto import choose
from normgrad_lightning.recording.entries import Entries, Entry
from normgrad_lightning.recording.graph import Graph, value_of
from normgrad_lightning.recording.hooks import Hook, WeakMethod, current_backward, on_forward
from normgrad_lightning.recording.layer_names import named_layers, why_no_weight
from normgrad_lightning.recording.layouts import Layout, Layouts
from normgrad_lightning.recording.module_tree import is_compiled, with_fast_path
from normgrad_lightning.recording.nested import first_tensor, floating_tensors
from normgrad_lightning.recording.options import ReadOptions
from normgrad_lightning.recording.own_passes import current_pass, runs_eagerly
from normgrad_lightning.recording.problems import OUT_OF_ORDER, Problems
from normgrad_lightning.recording.recomputation import Recomputation
from normgrad_lightning.recording.sightings import Sightings, has_weights


class Call(NamedTuple):
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
    entry: Entry | None
    number: int


class Observer:
    """Watches forward passes, and hands over the calls of layers that are to be read.

    While it searches, it has hooks on every layer; after `settle`, only where images enter and on the layers to read.

    Args:
        model: the model to watch.
        options: how to read layers.
        layers: names of the layers to read; None: `"auto"`, all of them until `settle` chooses.
        on_call: a method that gets each `Call` of these layers; it is held weakly. None: no layer is read.
        num_images: how many images of a batch to keep; None: all.

    Attributes:
        enabled: whether calls count; when off, a hook returns at once.
        sightings: for `"auto"`, the layers seen to give features on a grid, in the order of their calls.
        problems: what went wrong, as sentences.
    """

    def __init__(
        self,
        model: nn.Module,
        options: ReadOptions | None = None,
        *,
        layers: Sequence[str] | None = None,
        on_call: Callable[[Call], None] | None = None,
        num_images: int | None = None,
    ) -> None:
        self.enabled = True
        self.sightings = Sightings()
        self.problems = Problems()
        self._options = options or ReadOptions()
        self._modules = {"": model, **named_layers(model)}
        self._auto = layers is None
        self._on_call = None if on_call is None else WeakMethod(on_call)
        names = [name for name in self._modules if name] if layers is None else list(layers)
        self._read_layers = names if on_call is not None else []
        self._apart = with_fast_path(model)
        self._has_compiled_parts = not runs_eagerly() and any(map(is_compiled, model.modules()))
        self._pass = current_pass()
        self._entries = Entries(num_images)
        self._layouts = Layouts(model, self._options)
        self._searching = True
        self._has_seen_grid = False
        self._step = 0
        self._step_is_over = False
        self._called: dict[str, None] = {}
        self._order: dict[str, bool] = {}
        self._fit_no_grid: dict[str, dict[str, None]] = {}
        self._calls = 0
        self._recomputation = Recomputation()
        self._weak_enter = WeakMethod(self._enter)
        self._weak_leave = WeakMethod(self._leave)
        self._weak_read = WeakMethod(self._read)
        self._weak_watching_failed = WeakMethod(self.problems.watching_failed)
        self._weak_reading_failed = WeakMethod(self.problems.reading_failed)
        self._watching: dict[str, list[RemovableHandle]] = {}
        self._reading: dict[str, RemovableHandle] = {}

    def __enter__(self) -> Observer:
        self.attach()
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()

    def attach(self) -> None:
        """Put the hooks on."""
        if self._watching or self._reading:
            return
        try:
            for name in self._watched_layers():
                self._watch(name, self._modules[name], self._watching.setdefault(name, []))
            for name in self._read_layers:
                self._reading[name] = self._read_hook(name, self._modules[name])
        except BaseException:
            self.detach()
            raise

    def detach(self) -> None:
        """Take all hooks off."""
        self._keep_hooks((), ())
        self.sightings.let_go()

    @property
    def hooked(self) -> list[nn.Module]:
        """The modules that hooks are put on."""
        return [self._modules[name] for name in (*self._watched_layers(), *self._read_layers)]

    @property
    def layers(self) -> list[str]:
        """The layers that are read, in the order in which the network runs them; none before `"auto"` is decided."""
        if self._is_undecided:
            return []
        return sorted(self._read_layers, key=[*self._called, *self._read_layers].index)

    @property
    def has_run(self) -> bool:
        """Whether any of the layers to read has been called since the beginning."""
        return bool(self._called)

    def clear(self) -> None:
        """Forget the steps before, and what was seen in them."""
        self._begin_step()
        self.sightings.clear()

    def counts_gradient(self, name: str) -> bool:
        """Whether a gradient at this layer counts; if so, the next call belongs to another step."""
        counts = self.enabled and name in self._reading
        self._step_is_over |= counts
        return counts

    def choose(self, among: Container[str] | None = None, lit: Container[str] | None = None) -> list[str]:
        """The layers that `"auto"` takes of the sightings, or of those in `among`; for weights, of those with one.

        Args:
            among: names of layers; None: of all.
            lit: names of the layers whose maps are not zero everywhere; None: unknown.
        """
        of_weights = self._options.target == "weight"
        sightings = [
            sighting
            for sighting in self.sightings
            if (not of_weights or why_no_weight(sighting.layer) is None) and (among is None or sighting.name in among)
        ]
        return choose(sightings, lit, in_branches=of_weights)

    def settle(self, reached: Collection[str], lit: Callable[[], Container[str]] | None = None) -> None:
        """Decide `"auto"` among the layers reached by gradients, and keep only the hooks needed from now on.

        Does nothing before images and gradients were seen.

        Args:
            reached: names of the layers that gradients have reached.
            lit: gives the names of those whose maps are not zero everywhere.
        """
        if not self._searching or not self._entries.has_seen_image or not reached:
            return
        if self._auto:
            chosen = self.choose(reached, None if lit is None else lit())
            if not chosen:
                return
            self._read_layers = chosen
            scrambled = [s.name for s in self.sightings if s.name in reached and s.is_out_of_order]
            self.problems.leave_out(scrambled, OUT_OF_ORDER)
            for why, names in self._fit_no_grid.items():
                self.problems.leave_out(list(names), why)
        self._searching = False
        self.sightings.clear()
        self._keep_hooks(self._entries.doors, self._read_layers)

    def describe_problems(self, reached: Collection[str], *, after_backward: bool) -> Iterator[str]:
        """A sentence for each problem.

        Args:
            reached: the layers that gradients have reached.
            after_backward: whether there has been a backward pass.
        """
        yield from self.problems.of_watching()
        yield from self.problems.of_order()
        if self._is_undecided:
            if self.has_run:
                yield self.problems.of_auto(
                    has_seen_image=self._entries.has_seen_image,
                    has_seen_grid=self._has_seen_grid,
                    reached=bool(reached),
                    has_compiled_parts=self._has_compiled_parts,
                )
            return
        for name in self._read_layers:
            problem = self.problems.of_layer(
                name, called=name in self._called, reached=name in reached, after_backward=after_backward
            )
            if problem is not None:
                yield problem

    @property
    def _is_undecided(self) -> bool:
        return self._auto and self._searching

    def _watched_layers(self) -> list[str]:
        return [name for name in self._modules if self._searching or name in self._entries.doors]

    def _watch(self, name: str, layer: nn.Module, handles: list[RemovableHandle]) -> None:
        apart, failed = layer in self._apart, self._weak_watching_failed
        if not apart:
            # Before all other hooks: those that read the layer need to know the images.
            enter = Hook(self._weak_enter, failed, name)
            handles.append(layer.register_forward_pre_hook(enter, with_kwargs=True, prepend=True))
        handles.append(on_forward(layer, Hook(self._weak_leave, failed, name), apart=apart))

    def _read_hook(self, name: str, layer: nn.Module) -> RemovableHandle:
        hook, apart = Hook(self._weak_read, self._weak_reading_failed, name), layer in self._apart
        if self._options.target == "input" and not apart:
            return layer.register_forward_pre_hook(hook, with_kwargs=True)
        return on_forward(layer, hook, apart=apart)

    def _keep_hooks(self, watching: Container[str], reading: Container[str]) -> None:
        """Take all hooks off but those on these layers."""
        for name in [name for name in self._watching if name not in watching]:
            for handle in self._watching[name]:
                handle.remove()
            del self._watching[name]  # not before: Ctrl-C may come in between
        for name in [name for name in self._reading if name not in reading]:
            self._reading[name].remove()
            del self._reading[name]

    def _begin_step(self) -> None:
        self._step += 1
        self._step_is_over = False
        self._entries.begin_step()

    def _counts(self) -> bool:
        """Whether a call counts; if so, a new step begins if the one before is over.

        It does not while disabled, in another pass than the one that is watched, or in a backward pass, where
        checkpointing repeats calls.
        """
        if not self.enabled or current_pass() is not self._pass or current_backward() >= 0:
            return False
        if self._step_is_over:
            self._begin_step()
        return True

    def _counts_again(self, name: str, point: Tensor | None) -> bool:
        """Whether a call in a backward pass counts: gradients will go through the graph that it builds."""
        if not self.enabled or current_pass() is not self._pass or current_backward() < 0:
            return False
        return self._recomputation.builds_graph(name, point)

    def _enter(self, name: str, layer: nn.Module, args: Any, kwargs: Any) -> None:
        if self._counts():
            self._entries.enter(name, layer, args, kwargs)
            found = self._entries.found_inside
            if found is not None and not self._auto and self._pass is not None:
                self._watch_doors_only(f"{found}." if found else "")

    def _watch_doors_only(self, prefix: str) -> None:
        """Spare an own pass the hooks inside a module whose images are known; `detach` still knows of them."""
        for name, handles in self._watching.items():
            if name.startswith(prefix) and name not in self._entries.doors:
                for handle in handles:
                    handle.remove()

    def _leave(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not self._counts():
            return
        is_door = self._entries.leave(name)
        given, entry = _lone_tensor(output), self._entries.latest
        if self._searching and given is not None and entry is not None and entry.may_begin_at(layer):
            self.sightings.note_source(self._entries.count, given, is_sure=entry.is_sure)
        if self._is_undecided:
            t = first_tensor((args, kwargs)) if self._options.target == "input" else given
            self._sight(name, layer, t, returns=_same_places(_lone_tensor((args, kwargs)), given))
            if is_door:
                self.sightings.place(floating_tensors(output), has_weights=has_weights(layer))

    def _read(self, name: str, layer: nn.Module, args: Any, kwargs: Any, output: Any = None) -> None:
        """Hand the call over if it counts and can be read."""
        if not self.enabled:
            return
        point = self._point(args, kwargs, output)
        if not self._counts() and not self._counts_again(name, point):
            return
        self._called.setdefault(name)
        if not torch.is_grad_enabled():
            self._recomputation.note_without_graph(name, self._step)
            return
        if point is None:
            raise ValueError("it gives no floating-point tensor")
        if isinstance(point, nn.Parameter):
            raise ValueError("it gives a parameter, not features of the images")
        if not point.requires_grad:
            raise ValueError(
                "it gets no gradient: it and all layers before it are frozen, or what it gives is detached"
            )
        layer_input = first_tensor((args, kwargs)) if self._options.target == "weight" else None
        layout = self._layout(layer, point)
        if layout.is_tokens and self._options.token_grid is None:
            self._check_order(name, point)
        on_call = None if self._on_call is None else self._on_call()
        if on_call is not None:
            self._calls += 1
            on_call(Call(name, layer, point, layer_input, layout, self._entries.latest, self._calls))
            self._recomputation.note_read(name, point)

    def _check_order(self, name: str, point: Tensor) -> None:
        """Raise if a layer that the user has named has its tokens out of order; `"auto"` does not take such layers."""
        if self._searching and not self._auto and name not in self._order:
            place = Graph([point], self.sightings.first_features()).place(value_of(point))
            self._order[name] = place is None or place.keeps_order
        if not self._order.get(name, True):
            raise ValueError(OUT_OF_ORDER)

    def _point(self, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        """The tensor to read in a layer's call: of several, the first that can be on a grid."""
        candidates = list(floating_tensors((args, kwargs) if self._options.target == "input" else output))
        return next((t for t in candidates if t.dim() >= 3), candidates[0] if candidates else None)

    def _layout(self, layer: nn.Module, t: Tensor) -> Layout:
        entry = self._entries.latest
        image_shape, patches = (None, None) if entry is None else (entry.shape, entry.patch_grid)
        return self._layouts.of(layer, t, image_shape, patches)

    def _sight(self, name: str, layer: nn.Module, t: Tensor | None, *, returns: bool) -> None:
        """Note what the layer gives, if it is on a grid."""
        latest, entry = self._entries.latest, self._entries.count
        if t is not None and not t.is_nested and self.sightings.wants(name, entry):
            image_grid = None if latest is None else tuple(latest.shape[2:])
            try:
                layout = self._layout(layer, t)
            except ValueError as error:
                if latest is not None and latest.may_hold_patches(t) and has_weights(layer):
                    self._fit_no_grid.setdefault(str(error), {})[name] = None
                return
            self.sightings.add(entry, t, name, layer, layout, image_grid=image_grid, returns=returns)
            self._has_seen_grid |= t.requires_grad or has_weights(layer)


def _same_places(taken: Tensor | None, given: Tensor | None) -> bool:
    """Whether two tensors have the same axes; channels, first or last, may differ."""
    if taken is None or given is None or taken.is_nested or given.is_nested:
        return False
    if taken.dim() != given.dim() or taken.dim() < 3:
        return False
    return taken.shape[2:] == given.shape[2:] or taken.shape[1:-1] == given.shape[1:-1]


def _lone_tensor(output: Any) -> Tensor | None:
    """What a layer gives, if it is one tensor, or holds just one that can be on a grid."""
    if isinstance(output, Tensor):
        return output
    candidates = [t for t in floating_tensors(output) if t.dim() >= 3]
    return candidates[0] if len(candidates) == 1 else None
