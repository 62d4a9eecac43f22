"""What an order-1 pass keeps at each layer, and the maps that the passes make together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import starmap
from typing import NamedTuple

from torch import Tensor

from normgrad_lightning.functional import corrected_gradient
from normgrad_lightning.hooks.readings import READINGS, Point, Reading, add_up
from normgrad_lightning.hooks.recorder import NormGrad

LayerMaps = dict[str, Tensor]
"""The map `(N, *S)` of each layer, in the order of the network."""


class Pair(NamedTuple):
    """What is kept of one use of a layer in a pass: of its activation, as `Keep` says, and its gradient."""

    point: Point
    x: Tensor
    g: Tensor


Pairs = dict[str, list[Pair]]
"""The pairs of each layer, use by use."""

Keep = Callable[[Point, Tensor], Tensor]
"""What to keep of an activation."""


class PairRecorder(NormGrad):
    """Keeps what each use of a layer saw, instead of a map."""

    keep: Keep

    def _reading(self, point: Point, x: Tensor) -> Reading:
        kept = self.keep(point, x)
        return lambda g: Pair(point, kept, point.view(_without_rest(g.detach())))

    def pairs(self) -> Pairs:
        """Return those of the latest pass."""
        return self._parts()


def _without_rest(t: Tensor) -> Tensor:
    """Return `t` as a tensor that does not keep the images alive that it was cut from."""
    return t if t.untyped_storage().nbytes() == t.nbytes else t.clone()


def norms(point: Point, x: Tensor) -> Tensor:
    """Keep norms: enough for the factorised form."""
    return point.products.x_norms(point.view(x))


def copy(point: Point, x: Tensor) -> Tensor:
    """Keep the activation."""
    return point.view(x.detach().clone())


def nothing(point: Point, x: Tensor) -> Tensor:
    """Keep nothing: the factorised form takes the activation of another pass."""
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
    """Return the same use of a layer in the three passes, and the factor of the Hessian term."""
    passes = [first, plus.get(name, []), minus.get(name, [])]
    shapes = [[pair.g.shape for pair in pairs] for pairs in passes]
    if shapes[0] != shapes[1] or shapes[0] != shapes[2]:
        raise ValueError(
            f"`layers`: expected {name!r} to do the same in every pass, but a small step of the weights changes how "
            "often it is called or the size of what it gives. Choose other layers, or call `order1_maps` with "
            "`second_order=False`."
        )
    return [(*pairs, factor) for pairs in zip(*passes, strict=True)]


def maps_without_hessian(first: Pairs, *, factorised: bool) -> LayerMaps:
    """Return the order-0 maps of the pass at θ'."""
    return {name: add_up([_order0(pair, factorised) for pair in pairs]) for name, pairs in first.items()}


def maps_read_from(pairs: Pairs, kind: str) -> LayerMaps:
    """Return maps of a kind that a training step gives, of a pass that kept activations."""
    return {name: add_up([_read(kind, pair) for pair in of_layer]) for name, of_layer in pairs.items()}


def _read(kind: str, pair: Pair) -> Tensor:
    as_it_is = pair.point._replace(view=lambda t: t)  # both tensors are `(N, C, *S)` already
    return READINGS[kind](as_it_is, pair.x)(pair.g)  # type: ignore[no-any-return]


def maps_with_hessian(first: Pairs, plus: Pairs, minus: Pairs, factor: float, *, factorised: bool) -> LayerMaps:
    """Return the order-1 maps of the passes at θ', θ⁺ and θ⁻; `factor` is that of the Hessian term."""
    corrected = _corrected if factorised else _whole
    return {
        name: add_up(list(starmap(corrected, _side_by_side(name, pairs, plus, minus, factor))))
        for name, pairs in first.items()
    }
