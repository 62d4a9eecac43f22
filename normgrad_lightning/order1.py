"""Order-1 maps: what of an image matters for *training on it*, or would degrade the model.

Order 0 is the same for raising and for lowering the loss. Order 1 looks at the loss after one inner step of SGD,
`ℓ(θ − ε∇ℓ(θ))`, and adversarial maps at the loss after a step uphill. With θ' for the stepped weights, the gradient of
that is `∇ℓ(θ') − ε∇²ℓ(θ)∇ℓ(θ')`, and the Hessian term a centred difference along `v = ∇ℓ(θ')`:

    θ' = θ ∓ ε∇ℓ(θ)        θ⁺ = θ + hv        θ⁻ = θ − hv        h = 0.5 / ‖v‖

So there are four passes: at θ, at θ', at θ⁺ and at θ⁻. The first two ask for the gradient of the weights, the other two
for that at the hook points only. What any of them could disturb is kept out of its way by `isolation`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from normgrad_lightning.batches import copied, map_tensors, single_images
from normgrad_lightning.capture import NormGrad, Point, Reading, add_up
from normgrad_lightning.checks import check_flag, check_positive
from normgrad_lightning.functional import contrast, corrected_gradient, hessian_factor
from normgrad_lightning.isolation import HALF, Sandbox, own_pass, widened_copy
from normgrad_lightning.layers import AUTO, check_model, check_spec, match_layers, named_layers
from normgrad_lightning.passes import (
    LossFunction,
    NothingToRead,
    auto_layers,
    check_depends,
    check_scalar,
    graph_roots,
)

KINDS = {
    "order1": "what matters for training on the image",
    "adversarial": "what would degrade the model",
    "contrast": "the one minus the other, each as shares of its sum: signed",
}
EPSILON = 5e-4
DIFFERENCE = 0.5
"""`h‖v‖`, how far θ⁺ and θ⁻ are from θ: one length over all weights together."""

Maps = dict[str, Tensor]
"""The map `(N, *S)` of each layer, in the order of the network."""


class NotFinite(ValueError):
    """A loss or a gradient that is infinite or not a number."""


class Order1(NamedTuple):
    """Maps of each kind, and what they are maps of.

    Attributes:
        maps: by kind.
        images: as the network saw them, `(N, C, *S)`; None if none was recognised.
        layers: the names of all layers asked for, in the order of the network.
        problems: a sentence for each of them that cannot be read.
    """

    maps: dict[str, Maps]
    images: Tensor | None
    layers: list[str]
    problems: list[str]


def order1_maps(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    layers: str | Sequence[str] = AUTO,
    *,
    epsilon: float = EPSILON,
    adversarial: bool = False,
    factorised: bool = True,
    second_order: bool = True,
    per_image: bool = True,
    target: str = "output",
    token_grid: Sequence[int] | None = None,
    channels_last: bool | None = None,
) -> Maps:
    """Order-1 (or adversarial) maps of a model for a batch, in passes that leave no trace in the model.

    Weights that do not ask for a gradient take no part in the inner step, unless none does. BatchNorm, dropout and
    other modules without children run in eval mode. A model in half precision, where an inner step would be lost in
    rounding, runs in float32, and its batch too.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)`, a scalar.
        batch: whatever `loss_fn` takes; with `per_image`, it must be possible to take single images out of it.
        layers: see `select_layers`. `"auto"` takes one more forward pass, to decide.
        epsilon: size of the inner step. The paper's 0.0005 moves the maps a little; ten times as much shows the
            difference plainly, and at a hundred times the step has fitted the image and the gradients vanish. As
            `order1(s·loss, ε) = s · order1(loss, s·ε)`, a loss that is a sum over images instead of a mean takes a
            step as many times longer.
        adversarial: what would degrade the model, instead of what training on the image needs.
        factorised: takes the activation to be the same in all passes; False: the norm of the whole sum of products.
        second_order: False leaves the Hessian term out, which halves the passes: it is small at the default `epsilon`,
            and grows with it. The map is then that of order 0 after the inner step.
        per_image: each image takes an inner step of its own, as in the paper; False: the batch takes one together,
            which is the step that training is about to take, at a fraction of the cost. Raw values of the two scale
            differently: a mean over N images divides those of the batch by N.
        target: see `NormGrad`.
        token_grid: see `NormGrad`.
        channels_last: see `NormGrad`.

    Returns:
        The map `(N, *S)` of each layer, in the order of the network. Images that differ in size have maps padded with
        zeros at the end of each axis.

    Raises:
        ValueError: a loss that is no finite scalar or does not depend on the weights, a batch that cannot be taken
            apart, or a wrong option.

    Example:
        >>> import torch
        >>> from torch.nn import functional as F
        >>> from normgrad_lightning import order1_maps
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Conv2d(4, 2, 3))
        >>> def loss_fn(model, batch):
        ...     return F.cross_entropy(model(batch[0]).mean((2, 3)), batch[1])
        >>> order1_maps(model, loss_fn, (torch.randn(2, 3, 8, 8), torch.tensor([0, 1])), "0")["0"].shape
        torch.Size([2, 6, 6])
    """
    check_flag("adversarial", adversarial)
    check_flag("per_image", per_image)
    check_model(model)
    check_spec(layers)
    kind = "adversarial" if adversarial else "order1"
    options: dict[str, Any] = {"target": target, "token_grid": token_grid, "channels_last": channels_last}
    settings = Settings(epsilon, second_order, factorised)
    batches = single_images(batch) if per_image else [batch]
    if layers == AUTO:
        layers = auto_layers(model, loss_fn, batch, **options)
    result = run_passes(model, loss_fn, batches, layers, [kind], settings, **options)
    for problem in result.problems:
        warnings.warn(problem, stacklevel=2)
    return result.maps[kind]


class Settings:
    """How order-1 maps are made; see `order1_maps`."""

    def __init__(self, epsilon: float = EPSILON, second_order: bool = True, factorised: bool = True) -> None:
        check_positive("epsilon", epsilon)
        check_flag("second_order", second_order)
        check_flag("factorised", factorised)
        self.epsilon = epsilon
        self.second_order = second_order
        self.factorised = factorised


def run_passes(
    model: nn.Module,
    loss_fn: LossFunction,
    batches: Iterable[Any],
    layers: str | Sequence[str],
    kinds: Sequence[str],
    settings: Settings,
    *,
    num_images: int | None = None,
    target: str = "output",
    **options: Any,
) -> Order1:
    """The maps of these kinds, of all images of all batches; each batch takes an inner step of its own.

    Args:
        model: see `order1_maps`, as for all that is not described here.
        loss_fn: see there.
        batches: one after the other.
        layers: names or globs.
        kinds: of `KINDS`. Order 1 and adversarial share the pass at θ.
        settings: how.
        num_images: how many images of each batch to make maps of, from the first on; None: all.
        target: see `NormGrad`.
        options: of `NormGrad`.
    """
    results, images = [], []
    with own_pass():
        recorder = _PairRecorder(model, match_layers(model, layers, target), num_images, target, **options)
        recorder.enabled = False
        with recorder:
            passes = _Passes(model, loss_fn, recorder, target, settings)
            for batch in batches:
                results.append(passes.maps(batch, kinds))
                images.append(recorder.images)
    maps = {kind: _joined([result[kind] for result in results]) for kind in kinds}
    seen = None if any(i is None for i in images) else _stacked(images)
    if not all(m.isfinite().all() for of_layers in maps.values() for m in of_layers.values()):
        raise NotFinite("`loss_fn`: expected finite gradients at the layers, but they are not.")
    return Order1(maps, seen, recorder.layers, recorder.new_problems())


class _Passes:
    """The passes behind order-1 maps."""

    def __init__(
        self, model: nn.Module, loss_fn: LossFunction, recorder: _PairRecorder, target: str, settings: Settings
    ) -> None:
        known = named_layers(model)
        self._layers = [known[name] for name in recorder.layers]
        self._loss_fn = loss_fn
        self._recorder = recorder
        self._target = target
        self._settings = settings
        self._weights = _Weights(model)
        self._sandbox = Sandbox(model, widened=self._weights.are_widened)
        self._copied = _widened if self._weights.are_widened else copied

    def maps(self, batch: Any, kinds: Sequence[str]) -> dict[str, Maps]:
        """The maps of each kind, of one batch."""
        signs = {"order1": -1.0, "adversarial": 1.0}
        wanted = [kind for kind in signs if kind in kinds or "contrast" in kinds]
        self._weights.move(None, 0.0)
        gradient = self._pass(batch, weights=True)
        maps = {}
        for kind in wanted:
            self._weights.move(gradient, signs[kind] * self._settings.epsilon)
            if kind == wanted[-1]:
                del gradient  # as large as the weights
            maps[kind] = self._maps_after_step(batch, adversarial=kind == "adversarial")
        if "contrast" in kinds:
            both = [name for name in maps["order1"] if name in maps["adversarial"]]
            maps["contrast"] = {name: contrast(maps["order1"][name], maps["adversarial"][name]) for name in both}
        return maps

    def _maps_after_step(self, batch: Any, adversarial: bool) -> Maps:
        """The maps at θ', where the weights are now; with the Hessian term, if it is asked for."""
        keep = _norms if self._settings.factorised else _copy
        first, v = self._read(batch, keep, weights=self._settings.second_order)
        length = _length(v) if self._settings.second_order else 0.0
        if length == 0:
            return {
                name: add_up([_order0(pair, self._settings.factorised) for pair in pairs])
                for name, pairs in first.items()
            }
        h = DIFFERENCE / length
        keep = _nothing if self._settings.factorised else _copy
        self._weights.move(v, h)
        plus, _ = self._read(batch, keep)
        self._weights.move(v, -h)
        minus, _ = self._read(batch, keep)
        factor = hessian_factor(self._settings.epsilon, h, adversarial)
        corrected = _corrected if self._settings.factorised else _whole
        return {
            name: add_up(list(starmap(corrected, _side_by_side(name, pairs, plus, minus, factor))))
            for name, pairs in first.items()
        }

    def _read(self, batch: Any, keep: Keep, weights: bool = False) -> tuple[Pairs, _Gradient]:
        """What the hook points see in a pass with the weights as they are now, and the weights' gradient if wanted."""
        recorder, roots = self._recorder, list[Tensor]()
        recorder.clear()
        recorder.keep, recorder.enabled = keep, True
        try:
            with graph_roots(self._layers, self._target, roots, beside_weights=weights):
                gradient = self._pass(batch, weights, roots)
        finally:
            recorder.enabled = False
        pairs = recorder.pairs()
        if not pairs:
            why = "the loss depends on none of them. Choose layers that the forward pass uses."
            raise NothingToRead(f"`layers`: {' '.join(recorder.new_problems()) or why}")
        return pairs, gradient

    def _pass(self, batch: Any, weights: bool, roots: Sequence[Tensor] = ()) -> _Gradient:
        """Run forward and backward; the gradients of the weights that learn, if they are asked for."""
        parameters, learning = self._weights.stand_ins(weights)

        def forward_and_backward(model: nn.Module) -> _Gradient:
            loss = self._loss_fn(model, self._copied(batch))
            check_scalar(loss)
            if not loss.isfinite():
                raise NotFinite(f"`loss_fn`: expected a finite loss, but got {loss.item()}.")
            what = "the model's parameters" if weights else "the chosen layers"
            check_depends(loss, [*learning, *roots], self._loss_fn, what)
            gradient = torch.autograd.grad(loss, [*learning, *roots], allow_unused=True)[: len(learning)]
            reached = [g for g in gradient if g is not None] or roots
            check_depends(loss, reached, self._loss_fn, "the model's parameters")
            return list(gradient)

        with torch.enable_grad():
            gradient: _Gradient = self._sandbox.run(forward_and_backward, parameters)
        return gradient


def _widened(batch: Any) -> Any:
    return map_tensors(widened_copy, copied(batch))


_Gradient = list[Tensor | None]
"""The gradient of each weight that learns; None for one that the loss does not depend on."""


class _Weights:
    """Copies of a model's weights, for passes to run on: they can be moved, and nothing writes to the real ones.

    Attributes:
        are_widened: whether some of the weights are in half precision; the copies are in float32 then.
    """

    def __init__(self, model: nn.Module) -> None:
        self._real = {name: p.detach() for name, p in model.named_parameters()}
        self._learning = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self._learning:
            self._learning = [name for name, p in self._real.items() if p.is_floating_point()]
        self.are_widened = any(p.dtype in HALF for p in self._real.values())
        self._copies = {name: widened_copy(p) for name, p in self._real.items()}

    def move(self, direction: _Gradient | None, length: float) -> None:
        """Be `θ + length · direction`; without a direction, θ."""
        steps = dict(zip(self._learning, direction or [], strict=direction is not None))
        for name, real in self._real.items():
            step = steps.get(name)
            if step is None:
                self._copies[name].copy_(real)
            else:
                torch.add(real, step, alpha=length, out=self._copies[name])

    def stand_ins(self, learning: bool) -> tuple[dict[str, Tensor], list[Tensor]]:
        """The weights for one pass by name, and those of them that ask for a gradient."""
        stand_ins = {name: copy.detach() for name, copy in self._copies.items()}
        asking = [stand_ins[name].requires_grad_() for name in self._learning] if learning else []
        return stand_ins, asking


class Pair(NamedTuple):
    """The activation (or its norms, or nothing, as was kept of it) and the gradient of one use of a layer in a pass."""

    point: Point
    x: Tensor
    g: Tensor


Pairs = dict[str, list[Pair]]
"""The pairs of each layer, use by use."""

Keep = Callable[[Point, Tensor], Tensor]
"""What to keep of an activation."""


class _PairRecorder(NormGrad):
    """Keeps what each use of a layer saw, instead of a map."""

    keep: Keep

    def _reading(self, point: Point, x: Tensor) -> Reading:
        kept = self.keep(point, x)
        return lambda g: Pair(point, kept, point.view(_without_rest(g.detach())))

    def pairs(self) -> Pairs:
        """Of the latest pass."""
        return self._parts()


def _without_rest(t: Tensor) -> Tensor:
    """`t` as a tensor that does not keep the images alive that it was cut from."""
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


def _norms(point: Point, x: Tensor) -> Tensor:
    return point.products.x_norms(point.view(x))


def _copy(point: Point, x: Tensor) -> Tensor:
    return point.view(x.detach().clone())


def _nothing(point: Point, x: Tensor) -> Tensor:
    return x.new_empty(0)


def _order0(pair: Pair, factorised: bool) -> Tensor:
    (products, _), x, g = pair
    norms = x if factorised else products.x_norms(x)
    return products.spread(products.norm(norms, products.g_norms(g)))


def _corrected(first: Pair, plus: Pair, minus: Pair, factor: float) -> Tensor:
    return _order0(first._replace(g=corrected_gradient(first.g, plus.g, minus.g, factor)), factorised=True)


def _whole(first: Pair, plus: Pair, minus: Pair, factor: float) -> Tensor:
    terms = [(1.0, first.x, first.g), (factor, plus.x, plus.g), (-factor, minus.x, minus.g)]
    products = first.point.products
    return products.spread(products.norm_of_sum(terms))


def _side_by_side(
    name: str, first: list[Pair], plus: Pairs, minus: Pairs, factor: float
) -> list[tuple[Pair, Pair, Pair, float]]:
    """The same use of a layer in the three passes, and the factor of the Hessian term."""
    passes = [first, plus.get(name, []), minus.get(name, [])]
    shapes = [[pair.g.shape for pair in pairs] for pairs in passes]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise ValueError(
            f"`layers`: expected {name!r} to do the same in every pass, but a small step of the weights changes how "
            "often it is called or the size of what it gives. Choose other layers, or set `second_order=False`."
        )
    return [(*pairs, factor) for pairs in zip(*passes, strict=True)]


def _length(v: _Gradient) -> float:
    """`‖v‖`, one norm over all weights."""
    norms = [torch.linalg.vector_norm(part) for part in v if part is not None]
    length = float(torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms])))
    if not math.isfinite(length):
        raise NotFinite("`loss_fn`: expected a finite gradient of the weights, but it is not.")
    return length


def _joined(maps: Sequence[Maps]) -> Maps:
    """The maps of all images, of the layers that have one for each."""
    return {name: _stacked([m[name] for m in maps]) for name in maps[0] if all(name in m for m in maps)}


def _stacked(parts: Sequence[Any]) -> Tensor:
    """Tensors `(n, …)` one after the other; where they differ in size, padded with zeros at the end of each axis."""
    sizes = [max(sizes) for sizes in zip(*(part.shape[1:] for part in parts), strict=True)]
    padded = [F.pad(part, _pads(part.shape[1:], sizes)) for part in parts]
    return torch.cat(padded)


def _pads(shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    return [pad for size, wanted in reversed(list(zip(shape, sizes, strict=True))) for pad in (0, wanted - size)]
