"""What is made of the activation and the gradient at a layer: a map of each kind that a training step gives.

A reading keeps of the activation only what its kind needs, because it waits for the gradient until backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from normgrad_lightning.checks import check_choices
from normgrad_lightning.functional import weighted_activation
from normgrad_lightning.layers.layouts import CONVOLUTIONS, TRANSPOSED_CONVOLUTIONS
from normgrad_lightning.maps import KINDS, READ_KINDS
from normgrad_lightning.maths.products import OuterProducts
from normgrad_lightning.maths.windows import Window

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
    """Take a gradient to the order-0 map `m_u = ‖x_u‖·‖g_u‖`; of the activation, only norms are kept."""
    products, view = point
    norms = products.x_norms(view(x))
    return lambda g: products.spread(products.norm(norms, products.g_norms(view(g))))


def grad_cam_reading(point: Point, x: Tensor) -> Reading:
    """Take the gradient of a loss to the Grad-CAM map for lowering it: `m_u = max(-ḡᵀ x_u, 0)`.

    The activation is kept as it is, as a copy of each would take more memory than training. There is no map (None) if a
    layer after it has overwritten it.
    """
    version = x._version

    def read(g: Tensor) -> Tensor | None:
        if x._version != version:
            return None
        return weighted_activation(point.view(x), point.view(g), -1.0)

    return read


READINGS: dict[str, Callable[[Point, Tensor], Reading]] = {
    "order0": order0_reading,
    "grad_cam": grad_cam_reading,
}
"""How each kind of map that a training step gives is read."""


def check_kinds(kinds: Sequence[str], target: str) -> None:
    """Raise if `kinds` is not a list of kinds that can be read at this target."""
    check_choices("kinds", kinds, READ_KINDS)
    for kind in kinds:
        if target == "weight" and not KINDS[kind].of_weights:
            raise ValueError(
                f'`{kind}`: expected `target="output"` or `target="input"`, but got `target="weight"`: it has no '
                f"meaning for a weight. Change the target, or do without {kind}."
            )


def layer_products(
    layer: nn.Module, target: str, x_shape: Sequence[int], g_shape: Sequence[int], *, rescale: bool
) -> OuterProducts:
    """Return the products that a map of the layer is about.

    Args:
        layer: the layer.
        target: `"weight"` for those of its own weight; else those of an imaginary identity convolution.
        x_shape: the shape of its input, `(N, C, *S)`.
        g_shape: the shape of its output's gradient, `(N, D, *S_out)`.
        rescale: see `OuterProducts`.
    """
    if target == "weight" and isinstance(layer, TRANSPOSED_CONVOLUTIONS):
        window = Window.of_transposed(x_shape, g_shape, layer.kernel_size, layer.stride, layer.padding, layer.dilation)  # type: ignore[arg-type]
        return OuterProducts(layer.groups, window, transposed=True, rescale=rescale)
    if target == "weight" and isinstance(layer, CONVOLUTIONS):
        window = Window.of(
            x_shape[2:], layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.padding_mode
        )
        if window.output_shape != tuple(g_shape[2:]):
            raise ValueError(f"its output {tuple(g_shape)} does not have the size that its own geometry gives")
        return OuterProducts(layer.groups, window, rescale=rescale)
    return OuterProducts(rescale=rescale)


def add_up(parts: Sequence[Tensor]) -> Tensor:
    """Return the sum of maps; of maps on several grids, the sum of those on the finest."""
    finest = max(parts, key=Tensor.numel).shape
    first, *others = [part for part in parts if part.shape == finest]
    return sum(others, first)
