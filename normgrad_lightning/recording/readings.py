"""What is made of the activation and the gradient at a layer: a map of each kind that a training step gives.

A reading keeps of the activation only what its kind needs, because it waits for the gradient until backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from normgrad_lightning.checks import check_choices
from normgrad_lightning.functional import grad_cam
from normgrad_lightning.kinds import KINDS, READ_KINDS
from normgrad_lightning.maths.products import OuterProducts
from normgrad_lightning.maths.windows import Window
from normgrad_lightning.recording.layouts import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS

Reading = Callable[[Tensor], Any]
"""Takes the gradient when it comes; bound to what is kept of the activation."""


class Point(NamedTuple):
    """How the activation and the gradient at a layer make the products that a map is about.

    Attributes:
        products: the outer products.
        view: brings either tensor to `(N, C, *S)`.
    """

    products: OuterProducts
    view: Callable[[Tensor], Tensor]


def order0_reading(point: Point, x: Tensor) -> Reading:
    """Takes a gradient to the order-0 map `m_u = ‖x_u‖·‖g_u‖`; of the activation, only norms are kept."""
    products, view = point
    norms = products.x_norms(view(x))
    return lambda g: products.spread(products.norm(norms, products.g_norms(view(g))))


def grad_cam_reading(point: Point, x: Tensor) -> Reading:
    """Takes the gradient of a loss to the Grad-CAM map for lowering it: `m_u = max(-ḡᵀ x_u, 0)`."""
    kept = point.view(x.clone())  # layers after it may work in place
    return lambda g: grad_cam(kept, -point.view(g))


READINGS: dict[str, Callable[[Point, Tensor], Reading]] = {
    "order0": order0_reading,
    "grad_cam": grad_cam_reading,
}
"""How each kind of map that a training step gives is read."""


def check_kinds(kinds: Sequence[str], target: str) -> None:
    """Raise if `kinds` is no list of kinds that can be read at this target."""
    check_choices("kinds", kinds, READ_KINDS)
    for kind in kinds:
        if target == "weight" and not KINDS[kind].of_weights:
            raise ValueError(
                f'`{kind}`: expected `target="output"` or `target="input"`, but got `target="weight"`: it has no '
                f"meaning for a weight. Change the target, or do without {kind}."
            )


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
