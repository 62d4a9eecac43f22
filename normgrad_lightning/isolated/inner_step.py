"""Passes at moved weights: what order-1 maps are made of.

With θ for the weights and ε for the size of the inner step:

    θ' = θ ∓ ε∇ℓ(θ)        θ⁺ = θ + hv        θ⁻ = θ − hv        v = ∇ℓ(θ')        h = 0.5 / ‖v‖

Four passes: at θ, at θ', at θ⁺ and at θ⁻. The first two ask for the gradient of the weights, the other two only for
that at the hook points. The sandbox protects everything that they could disturb.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from normgrad_lightning import functional
from normgrad_lightning.checks import check_flag, check_positive
from normgrad_lightning.functional import hessian_factor
from normgrad_lightning.isolated.batchnorm_warmup import BatchNorm, collected, layers_warming_up
from normgrad_lightning.isolated.interrupts import failures_dropped
from normgrad_lightning.isolated.one_pass import (
    LAYERS,
    PARAMETERS,
    LossFunction,
    NotFinite,
    NothingToRead,
    check_finite,
    does_not_depend,
    graph_roots,
    loss_and_gradients,
    widened_batch,
)
from normgrad_lightning.isolated.pairs import (
    Keep,
    LayerMaps,
    PairRecorder,
    Pairs,
    copy,
    maps_read_from,
    maps_with_hessian,
    maps_without_hessian,
    norms,
    nothing,
)
from normgrad_lightning.isolated.sandbox import Sandbox, widened_copy
from normgrad_lightning.maps import EPSILON, KINDS, READ_KINDS, MapKind

DIFFERENCE = 0.5
"""`h‖v‖`, how far θ⁺ and θ⁻ are from θ: one length over all weights together."""

SAFE = torch.finfo(torch.float32).tiny ** 0.25
"""How long a gradient must be for its squares to keep their digits: 3e-10."""

Gradient = list[Tensor | None]
"""The gradient of each weight that learns; None for one that the loss does not depend on."""


@dataclass(frozen=True)
class InnerStep:
    """How order-1 maps are made; see `order1_maps`."""

    epsilon: float = EPSILON
    second_order: bool = True
    factorised: bool = True

    def __post_init__(self) -> None:
        check_positive("epsilon", self.epsilon)
        check_flag("second_order", self.second_order)
        check_flag("factorised", self.factorised)


class InnerStepPasses:
    """Runs the passes behind order-1 maps.

    Args:
        model: any module.
        loss_fn: see `order1_maps`.
        recorder: on the layers to read, switched off between passes.
        target: what the recorder reads.
        step: how to make the inner step.

    Attributes:
        losses: of passes since it was cleared, where nobody has looked whether they are finite.
    """

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, recorder: PairRecorder, target: str, step: InnerStep
    ) -> None:
        self._model = model
        self._layers = recorder.modules_read
        self._loss_fn = loss_fn
        self._recorder = recorder
        self._target = target
        self._step = step
        self._weights = _Weights(model)
        self._sandbox = Sandbox(model, exact=True)
        self.losses: list[Tensor] = []

    def maps(self, batch: Any, kinds: Sequence[str]) -> dict[str, LayerMaps]:
        """Return the maps of each kind, of one batch: those that are read at θ, and those after an inner step."""
        wanted = [KINDS[name] for name in kinds]
        needed = {part for kind in wanted for part in (kind.made_of or (kind.name,))}
        stepped = [kind for kind in KINDS.values() if kind.name in needed and kind.step]
        maps = self._read_kinds(batch, needed)
        if not stepped:
            return maps
        self._weights.move(None, 0.0)
        gradient = self._pass(batch, weights=True)
        for kind in stepped:
            self._weights.move(gradient, kind.step * self._step.epsilon)
            if kind is stepped[-1]:
                del gradient  # as large as the weights
            maps[kind.name] = self._maps_after_step(batch, adversarial=kind.step > 0)
        return maps | {kind.name: _combined(kind, maps) for kind in wanted if kind.made_of}

    def _read_kinds(self, batch: Any, kinds: Collection[str]) -> dict[str, LayerMaps]:
        """Return those that a training step would give, in one pass at θ."""
        wanted = [kind for kind in READ_KINDS if kind in kinds]
        if wanted == ["order0"]:
            return {"order0": self.order0(batch)}
        if not wanted:
            return {}
        self._weights.move(None, 0.0)
        pairs, _ = self._read(batch, copy, note=self.losses.append)
        return {kind: maps_read_from(pairs, kind) for kind in wanted}

    def order0(self, batch: Any) -> LayerMaps:
        """Return the order-0 maps of one batch."""
        self._weights.move(None, 0.0)
        return maps_without_hessian(self._read(batch, norms, note=self.losses.append)[0], factorised=True)

    @property
    def images(self) -> Tensor | None:
        """The images of the latest pass."""
        return self._recorder.images

    @cached_property
    def batchnorm_warmup(self) -> Mapping[BatchNorm, int]:
        """The BatchNorm layers that have hardly any statistics yet, and how often these have been updated."""
        return layers_warming_up(self._model)

    def use_statistics_of(self, batch: Any, layers: Iterable[BatchNorm]) -> bool:
        """Let these layers normalise with the statistics of a batch from now on; False if it has none."""
        self._weights.move(None, 0.0)
        parameters, _ = self._weights.stand_ins(learning=False)
        with failures_dropped():  # of one image, there may be too few values
            statistics = collected(
                layers,
                lambda function: self._sandbox.run(function, parameters),
                lambda model: self._loss_fn(model, widened_batch(batch)),
            )
            self._sandbox.replace(statistics)
            return True
        return False

    def _maps_after_step(self, batch: Any, adversarial: bool) -> LayerMaps:
        """Return the maps at θ', where the weights are now; with the Hessian term, if it is asked for."""
        factorised = self._step.factorised
        first, v = self._read(batch, norms if factorised else copy, weights=self._step.second_order)
        if not self._step.second_order or (length := _length(v)) < _least(v):
            return maps_without_hessian(first, factorised=factorised)
        h, keep = DIFFERENCE / length, nothing if factorised else copy
        self._weights.move(v, h)
        plus, _ = self._read(batch, keep)
        self._weights.move(v, -h)
        minus, _ = self._read(batch, keep)
        factor = hessian_factor(self._step.epsilon, h, adversarial)
        return maps_with_hessian(first, plus, minus, factor, factorised=factorised)

    def _read(
        self, batch: Any, keep: Keep, weights: bool = False, note: Callable[[Tensor], object] = check_finite
    ) -> tuple[Pairs, Gradient]:
        """Return what the hook points see in a pass with the weights of now, and the weights' gradient if wanted."""
        recorder, roots = self._recorder, list[Tensor]()
        recorder.clear()
        recorder.keep, recorder.enabled = keep, True
        try:
            with graph_roots(self._layers, self._target, roots, beside_weights=weights):
                gradient = self._pass(batch, weights, roots, note)
        finally:
            recorder.enabled = False
        pairs = recorder.pairs()
        if not pairs:
            why = "the loss depends on none of them. Choose layers that the forward pass uses."
            raise NothingToRead(f"`layers`: {' '.join(recorder.new_problems()) or why}")
        return pairs, gradient

    def _pass(
        self,
        batch: Any,
        weights: bool,
        roots: Sequence[Tensor] = (),
        note: Callable[[Tensor], object] = check_finite,
    ) -> Gradient:
        """Run forward and backward; the gradients of the weights that learn, if they are asked for."""
        parameters, learning = self._weights.stand_ins(weights)

        def forward_and_backward(model: nn.Module) -> Gradient:
            gradient = loss_and_gradients(
                self._loss_fn,
                model,
                widened_batch(batch),
                lambda: [*learning, *roots],
                PARAMETERS if weights else LAYERS,
                note,
            )
            if not roots and all(g is None for g in gradient):
                raise does_not_depend(self._loss_fn, PARAMETERS)
            return gradient[: len(learning)]

        with torch.enable_grad():
            gradient: Gradient = self._sandbox.run(forward_and_backward, parameters)
        return gradient


def _combined(kind: MapKind, maps: dict[str, LayerMaps]) -> LayerMaps:
    """Return maps that are made of those of other kinds, by the function of the kind's name."""
    combine: Callable[..., Tensor] = getattr(functional, kind.name)
    parts = [maps[part] for part in kind.made_of]
    return {name: combine(*(part[name] for part in parts)) for name in parts[0] if all(name in p for p in parts)}


class _Weights:
    """Copies of a model's weights, for passes to run on: they can be moved, and nothing writes to the real ones.

    Those of weights in half precision are in float32.
    """

    def __init__(self, model: nn.Module) -> None:
        self._real = {name: p.detach() for name, p in model.named_parameters()}
        self._learning = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self._learning:
            self._learning = [name for name, p in self._real.items() if p.is_floating_point()]
        self._copies = {name: widened_copy(p) for name, p in self._real.items()}

    def move(self, direction: Gradient | None, length: float) -> None:
        """Become `θ + length · direction`; without a direction, θ."""
        steps = dict(zip(self._learning, direction or [], strict=direction is not None))
        for name, real in self._real.items():
            step = steps.get(name)
            if step is None:
                self._copies[name].copy_(real)
            else:
                torch.add(real, step, alpha=length, out=self._copies[name])

    def stand_ins(self, learning: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Return the weights for one pass by name, and those of them that ask for a gradient."""
        stand_ins = {name: copy.detach() for name, copy in self._copies.items()}
        asking = [stand_ins[name].requires_grad_() for name in self._learning] if learning else []
        return stand_ins, asking


def _length(v: Gradient) -> float:
    """Return `‖v‖`, one norm over all weights; scaled by a power of two where squares would vanish or overflow."""
    parts = [part for part in v if part is not None]
    length = _norm(parts)
    if not SAFE < length < math.inf:
        largest = max(float(torch.linalg.vector_norm(part, math.inf)) for part in parts)
        _, exponent = math.frexp(largest)
        scale = 2.0 ** min(-exponent, 126)
        length = _norm([part * scale for part in parts]) / scale
    if not math.isfinite(length):
        raise NotFinite("`loss_fn`: expected a finite gradient of the weights, but it is not.")
    return length


def _least(v: Gradient) -> float:
    """Return the least length that can be stretched to `DIFFERENCE` with an `h` that is finite in the weights' type."""
    return max(2 * torch.finfo(part.dtype).tiny for part in v if part is not None)


def _norm(parts: Sequence[Tensor]) -> float:
    norms = [torch.linalg.vector_norm(part) for part in parts]
    return float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
