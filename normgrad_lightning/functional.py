"""The maths of the maps: pure functions of an activation and the gradient of the loss at the same point.

Everywhere `x` is `(N, C, *S)`, an activation, `g` the gradient of the loss there, `u` a location of `S` (one, two or
three axes). What location `u` teaches a layer is an outer product, `g_u x_uᵀ`; a map holds the size of that product.
No product is ever formed and no patch ever unfolded: norms and window sums are enough.

Results are float32, or float64 for float64 inputs. Half types are widened before they are squared. Values of any size
are right, also where their squares would vanish or overflow; but what is smaller than 1e-10 of the largest value of its
image may count as zero.

Example:
    What the functions never form, formed: the product of each location. Its size is the map, and the sum of all is the
    gradient of the weights of a 1×1 convolution at this point.

    >>> import torch
    >>> from normgrad_lightning import functional as NF
    >>> x, g = torch.tensor([[[3.0, 1.0], [4.0, 0.0]]]), torch.tensor([[[0.0, 2.0], [2.0, 0.0]]])
    >>> products = torch.einsum("ndu,ncu->nudc", g, x)
    >>> NF.normgrad(x, g), products.norm(dim=(2, 3))
    (tensor([[10.,  2.]]), tensor([[10.,  2.]]))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from normgrad_lightning.maths.products import OuterProducts, wide_dtype
from normgrad_lightning.maths.scaling import unit_scale, unit_scales
from normgrad_lightning.maths.tensor_subclasses import plain
from normgrad_lightning.maths.windows import Window

__all__ = [
    "combine",
    "contrast",
    "grad_cam",
    "normgrad",
    "normgrad_conv",
    "normgrad_conv_transpose",
    "normgrad_linear",
    "normgrad_order1",
]


def normgrad(x: Tensor, g: Tensor) -> Tensor:
    """Return the order-0 map of an imaginary 1×1 identity convolution at the point where `x` lives.

    `m_u = ‖x_u‖ · ‖g_u‖`, the Frobenius norm of `g_u x_uᵀ`.

    Args:
        x: activation, `(N, C, *S)`.
        g: gradient of the loss with respect to `x`, `(N, C', *S)`.

    Returns:
        The map, `(N, *S)`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> x = torch.tensor([[[3.0, 1.0], [4.0, 0.0]]])  # one image, two channels, two locations: (3, 4) and (1, 0)
        >>> g = torch.tensor([[[0.0, 2.0], [2.0, 0.0]]])  # (0, 2) and (2, 0)
        >>> NF.normgrad(x, g)
        tensor([[10.,  2.]])
    """
    _check_spatial(x, g)
    _check_same_grid(x, g, (x.shape[0], *x.shape[2:]), (g.shape[0], *g.shape[2:]))
    return _map(OuterProducts(), x, g)


def normgrad_linear(x: Tensor, g: Tensor) -> Tensor:
    """Return the order-0 map of a linear layer's own weight, whose channels come last.

    Args:
        x: the layer's input, `(N, *S, C)`.
        g: gradient of the loss with respect to its output, `(N, *S, D)`.

    Returns:
        The map, `(N, *S)`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> tokens = torch.tensor([[[3.0, 4.0], [1.0, 0.0]]])  # one image, two tokens, two channels
        >>> g = torch.tensor([[[2.0], [-3.0]]])
        >>> NF.normgrad_linear(tokens, g)
        tensor([[10.,  3.]])
    """
    _check_spatial(x, g)
    _check_same_grid(x, g, x.shape[:-1], g.shape[:-1])
    return _map(OuterProducts(), x.movedim(-1, 1), g.movedim(-1, 1))


def normgrad_conv(
    x: Tensor,
    g: Tensor,
    *,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] | str = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    padding_mode: str = "zeros",
    accumulate: bool = True,
) -> Tensor:
    """Return the order-0 map of a convolution's own weight.

    Output location `u` read the patch `P_u(x)` and contributes `g_u ⊗ P_u(x)`, group by group (γ):

        m_u = sqrt( Σ_γ ‖g_{γ,u}‖² · ‖P_{γ,u}(x)‖² ),    ‖P_{γ,u}(x)‖² = box(Σ_{c∈γ} x_c²)_u

    where `box` sums over the convolution's window. With `accumulate`, each value is given to every input pixel of its
    patch, `M = boxᵀ(m)`: what a padded pixel was given goes to the pixel it was copied from, a zero's share nowhere.

    Args:
        x: the convolution's input, `(N, C, *S)`.
        g: gradient of the loss with respect to its output, `(N, D, *S_out)`.
        kernel_size: as in `torch.nn.Conv2d`.
        stride: as in `torch.nn.Conv2d`.
        padding: a number, one for each axis, `"same"` or `"valid"`.
        dilation: as in `torch.nn.Conv2d`.
        groups: as in `torch.nn.Conv2d`.
        padding_mode: `"zeros"`, `"reflect"`, `"replicate"` or `"circular"`.
        accumulate: spread the map over the input's grid, or leave it on the output's.

    Returns:
        The map, `(N, *S)`, or `(N, *S_out)` without `accumulate`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> x, g = torch.tensor([[[3.0, 4.0, 0.0, 12.0]]]), torch.ones(1, 1, 3)

        The norms of the patches (3, 4), (4, 0) and (0, 12); then each pixel gets those of the patches that it is in:

        >>> NF.normgrad_conv(x, g, kernel_size=2, accumulate=False)
        tensor([[ 5.,  4., 12.]])
        >>> NF.normgrad_conv(x, g, kernel_size=2)
        tensor([[ 5.,  9., 16., 12.]])
    """
    _check_spatial(x, g)
    window = Window.of(x.shape[2:], kernel_size, stride, padding, dilation, padding_mode)
    expected = (x.shape[0], *window.output_shape)
    if (g.shape[0], *g.shape[2:]) != expected:
        raise ValueError(
            f"`g`: expected a batch and grid of {expected} for an input of {tuple(x.shape)} and this geometry, "
            f"but got {tuple(g.shape)}. Pass the gradient at the convolution's output."
        )
    return _map(OuterProducts(groups, window), x, g, accumulate)


def normgrad_conv_transpose(
    x: Tensor,
    g: Tensor,
    *,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
    accumulate: bool = True,
) -> Tensor:
    """Return the order-0 map of a transposed convolution's own weight: `normgrad_conv`, `x` and `g` swapped.

    Input location `u` wrote to a patch of the output and contributes `x_u ⊗ P_u(g)`.

    Args:
        x: the layer's input, `(N, C, *S)`.
        g: gradient of the loss with respect to its output, `(N, D, *S_out)`; its size tells the output padding.
        kernel_size: as in `torch.nn.ConvTranspose2d`.
        stride: as in `torch.nn.ConvTranspose2d`.
        padding: as in `torch.nn.ConvTranspose2d`.
        dilation: as in `torch.nn.ConvTranspose2d`.
        groups: as in `torch.nn.ConvTranspose2d`.
        accumulate: spread the map over the output's grid, or leave it on the input's.

    Returns:
        The map, `(N, *S_out)`, or `(N, *S)` without `accumulate`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> x, g = torch.ones(1, 1, 3), torch.tensor([[[3.0, 4.0, 0.0, 12.0]]])
        >>> NF.normgrad_conv_transpose(x, g, kernel_size=2, accumulate=False)
        tensor([[ 5.,  4., 12.]])
    """
    _check_spatial(x, g)
    window = Window.of_transposed(x.shape, g.shape, kernel_size, stride, padding, dilation)
    return _map(OuterProducts(groups, window, transposed=True), x, g, accumulate)


def normgrad_order1(
    x: Tensor,
    g: Tensor,
    x_plus: Tensor,
    g_plus: Tensor,
    x_minus: Tensor,
    g_minus: Tensor,
    *,
    epsilon: float,
    h: float,
    adversarial: bool = False,
    factorised: bool = True,
) -> Tensor:
    """Return the order-1 map of an imaginary 1×1 identity convolution: what a location adds to learning from the image.

    It belongs to the loss after one inner step of SGD, `ℓ(θ − ε∇ℓ(θ))`, whose Hessian term is a centred difference:

        factorised:  m_u = ‖g_u − ε/(2h) (g⁺_u − g⁻_u)‖ · ‖x_u‖
        full:        m_u = ‖g_u x_uᵀ − ε/(2h) (g⁺_u x⁺_uᵀ − g⁻_u x⁻_uᵀ)‖_F

    Adversarial, after a step that raises the loss, `ℓ(θ + ε∇ℓ(θ))`: the sign before `ε/(2h)` is +. `order1_maps` runs
    the passes that this needs.

    Args:
        x: activation at the stepped weights `θ' = θ − ε∇ℓ(θ)` (adversarial: `θ + ε∇ℓ(θ)`), `(N, C, *S)`.
        g: gradient of the loss there, `(N, C', *S)`.
        x_plus: activation at `θ⁺ = θ + hv`, where `v = ∇ℓ(θ')`; not used by the factorised form, nor is `x_minus`.
        g_plus: gradient at `θ⁺`.
        x_minus: activation at `θ⁻ = θ − hv`.
        g_minus: gradient at `θ⁻`.
        epsilon: size of the inner step.
        h: size of the step of the difference; infinite where `v` is zero, and then there is no Hessian term.
        adversarial: whether the inner step raised the loss.
        factorised: the first form, which takes the activation to be the same in all passes, or the second.

    Returns:
        The map, `(N, *S)`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> x, g = torch.tensor([[[3.0], [4.0]]]), torch.tensor([[[1.0], [1.0]]])
        >>> g_plus, g_minus = torch.tensor([[[2.0], [1.0]]]), torch.tensor([[[0.0], [1.0]]])

        The gradient (1, 1) less ½ of the difference (2, 0) is (0, 1), of length 1; the activation has length 5.

        >>> NF.normgrad_order1(x, g, x, g_plus, x, g_minus, epsilon=0.5, h=0.5)
        tensor([[5.]])
    """
    _check_spatial(x, g)
    _check_same_grid(x, g, (x.shape[0], *x.shape[2:]), (g.shape[0], *g.shape[2:]))
    _check_same_shape("g", g, {"g_plus": g_plus, "g_minus": g_minus})
    if not factorised:
        _check_same_shape("x", x, {"x_plus": x_plus, "x_minus": x_minus})
    if not h > 0:
        raise ValueError(f"`h`: expected a number above 0, or infinity for no Hessian term, but got {h!r}.")
    products, factor = OuterProducts(), hessian_factor(epsilon, h, adversarial)
    if factorised:
        return _map(products, x, corrected_gradient(g, g_plus, g_minus, factor))
    return products.norm_of_sum([(1.0, x, g), (factor, x_plus, g_plus), (-factor, x_minus, g_minus)])


def hessian_factor(epsilon: float, h: float, adversarial: bool) -> float:
    """Return what the difference of the passes at `θ⁺` and `θ⁻` is multiplied by: `∓ε/(2h)`."""
    return (epsilon if adversarial else -epsilon) / (2 * h)


def corrected_gradient(g: Tensor, g_plus: Tensor, g_minus: Tensor, factor: float) -> Tensor:
    """Return the gradient at the stepped weights with its Hessian term, `g + factor · (g⁺ − g⁻)`."""
    dtype = wide_dtype(g)
    g, g_plus, g_minus = (plain(t).detach().to(dtype) for t in (g, g_plus, g_minus))
    return g + factor * (g_plus - g_minus)


def contrast(order1: Tensor, adversarial: Tensor) -> Tensor:
    """Return what an order-1 and an adversarial map do not share: `c_u = m_u/Σm − m^adv_u/Σm^adv`, image by image.

    Positive where learning from the image lives, negative where damage would; the sum over an image is zero.

    Args:
        order1: order-1 maps, `(N, *S)`.
        adversarial: adversarial maps, `(N, *S)`.

    Returns:
        The signed map, `(N, *S)`; zero for an image of which one of the maps is zero: then there is nothing to compare.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> NF.contrast(torch.tensor([[6.0, 2.0]]), torch.tensor([[1.0, 3.0]]))
        tensor([[ 0.5000, -0.5000]])
    """
    if order1.shape != adversarial.shape:
        raise ValueError(
            f"`adversarial`: expected the shape of `order1`, {tuple(order1.shape)}, but got {tuple(adversarial.shape)}."
        )
    # Scaled, so that no sum overflows.
    helps, hurts = (maps * unit_scale(maps) if maps.numel() else maps for maps in map(plain, (order1, adversarial)))
    totals = [maps.sum(tuple(range(1, maps.dim())), keepdim=True) for maps in (helps, hurts)]
    difference = helps / totals[0] - hurts / totals[1]
    return torch.where((totals[0] > 0) & (totals[1] > 0), difference, torch.zeros_like(difference))


def grad_cam(x: Tensor, g: Tensor) -> Tensor:
    """Return the Grad-CAM map, `m_u = max(ḡᵀ x_u, 0)`, where `ḡ` is the mean of `g` over locations.

    Args:
        x: activation, `(N, C, *S)`.
        g: gradient of a score *to be raised*, `(N, C, *S)`. For the gradient of a loss pass `-g`.

    Returns:
        The map, `(N, *S)`.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> x = torch.tensor([[[1.0, 2.0], [3.0, 1.0]]])
        >>> g = torch.tensor([[[2.0, 0.0], [-1.0, -1.0]]])  # its mean over the two locations is (1, -1)
        >>> NF.grad_cam(x, g)
        tensor([[0., 1.]])
    """
    _check_spatial(x, g)
    if x.shape != g.shape:
        raise ValueError(
            f"`g`: expected the shape of `x`, {tuple(x.shape)}, but got {tuple(g.shape)}. Pass the gradient at `x`."
        )
    return weighted_activation(x, g, 1.0)


def weighted_activation(x: Tensor, g: Tensor, sign: float) -> Tensor:
    """Return `max(sign · ḡᵀ x_u, 0)`, `(N, *S)`: 1 for the gradient of a score, -1 for that of a loss."""
    dtype = torch.promote_types(wide_dtype(x), wide_dtype(g))
    weights = sign * plain(g).detach().mean(tuple(range(2, g.dim())), keepdim=True, dtype=dtype)
    # Not a matrix product: autocast would take it in half precision.
    return torch.relu((plain(x).detach() * weights).sum(1, dtype=dtype))


_FLOOR = 1e-6  # of a map's mean: a layer that is dark at a location does not make the combined map dark there
_INTERPOLATIONS = {1: "linear", 2: "bilinear", 3: "trilinear"}


def combine(maps: Mapping[str, Tensor] | Iterable[Tensor], size: int | Sequence[int]) -> Tensor:
    """Return one map for all depths: as fine as those of early layers, as focused as those of late ones.

    The geometric mean, image by image, of the L layers' maps, each divided by its own mean:

        M_u = exp( 1/L · Σ_l log( max( up(m_l)_u / mean(m_l), 1e-6 ) ) )

    where `up` is linear interpolation to `size` (bilinear, trilinear; `align_corners=False`). A layer whose map of an
    image is zero everywhere, or not finite somewhere, is left out for that image; without any layer left, M is zero.

    Args:
        maps: `(N, *S)` of each layer, from 0 up, for the same images: `recorder.maps`, or a list. S has one, two or
            three axes, and may be another grid for each layer.
        size: the grid of the result, that of the images as a rule: a number for each axis, or one for all.

    Returns:
        The map, `(N, *size)`, in units of the means: 1 where each layer has the mean of its map.

    Example:
        >>> import torch
        >>> from normgrad_lightning import functional as NF
        >>> early, late = torch.tensor([[1.0, 3.0, 1.0, 3.0]]), torch.tensor([[1.0, 7.0]])
        >>> NF.combine([early, late], 4)
        tensor([[0.3536, 0.9682, 0.8292, 1.6202]])
    """
    layers = _checked_maps(list(maps.values() if isinstance(maps, Mapping) else maps))
    return geometric_mean(layers, _checked_size(size, layers[0].dim() - 1))


def geometric_mean(layers: Sequence[Tensor], grid: Sequence[int]) -> Tensor:
    """Return what `combine` does, of maps that are known to be from 0 up: nobody waits for a device to check that."""
    axes = layers[0].dim() - 1
    total = layers[0].new_zeros(len(layers[0]), *grid)
    count = layers[0].new_zeros(len(layers[0]), *(1,) * axes)
    for m, scale in zip(layers, unit_scales(layers), strict=True):
        scaled = m * scale  # so that no sum overflows
        mean = scaled.mean(tuple(range(1, m.dim())), keepdim=True)
        is_there = mean.isfinite() & (mean > 0)
        even = scaled.div_(mean)[:, None]
        at_size = F.interpolate(even, list(grid), mode=_INTERPOLATIONS[axes], align_corners=False)[:, 0]
        total += torch.where(is_there, at_size.clamp_min_(_FLOOR).log_(), 0.0)
        count += is_there
    return torch.where(count > 0, (total / count.clamp_min(1)).exp(), 0.0)


def _checked_maps(maps: list[Tensor]) -> list[Tensor]:
    """Return the maps in one wide type; raise if they cannot be of the same images."""
    if not maps:
        raise ValueError(
            "`maps`: expected the maps of at least one layer, but got none. Pass those of a step that ran."
        )
    for m in maps:
        if not isinstance(m, Tensor) or m.dim() - 1 not in _INTERPOLATIONS or not m.is_floating_point():
            came = f"{m.dtype} of shape {tuple(m.shape)}" if isinstance(m, Tensor) else repr(type(m).__name__)
            raise ValueError(
                "`maps`: expected floating-point tensors (N, *S) with one, two or three spatial axes, but got "
                f"{came}. Pass the maps of all layers as a dict or a list."
            )
    if len({(len(m), m.dim()) for m in maps}) > 1:
        shapes = ", ".join(str(tuple(m.shape)) for m in maps)
        raise ValueError(
            f"`maps`: expected as many images and as many axes at each layer, but got {shapes}. Pass maps of the same "
            "images."
        )
    if bool(torch.stack([(m < 0).any().to(maps[0].device) for m in maps]).any()):
        raise ValueError("`maps`: expected values from 0 up, but some are negative. Signed maps cannot be combined.")
    dtype = torch.float64 if any(m.dtype == torch.float64 for m in maps) else torch.float32
    return [plain(m).detach().to(dtype) for m in maps]


def _checked_size(size: int | Sequence[int], axes: int) -> list[int]:
    grid = [size] * axes if isinstance(size, int) else list(size)
    if len(grid) != axes or not all(isinstance(side, int) and side > 0 for side in grid):
        raise ValueError(
            f"`size`: expected a whole number from 1 up, or {axes} of them, one for each axis of the maps, but got "
            f"{size!r}. Pass the size of the images, `images.shape[2:]`."
        )
    return grid


def _map(products: OuterProducts, x: Tensor, g: Tensor, accumulate: bool = True) -> Tensor:
    m = products.norm(products.x_norms(x), products.g_norms(g))
    return products.spread(m) if accumulate else m


def _check_spatial(x: Tensor, g: Tensor) -> None:
    for name, t in (("x", x), ("g", g)):
        if not isinstance(t, Tensor) or t.dim() < 3 or not t.is_floating_point():
            came = f"{t.dtype} of shape {tuple(t.shape)}" if isinstance(t, Tensor) else repr(type(t).__name__)
            raise ValueError(
                f"`{name}`: expected a floating-point tensor with a batch, a channel and at least one spatial axis, "
                f"but got {came}."
            )
    if x.dim() != g.dim():
        raise ValueError(f"`g`: expected as many axes as `x`, {tuple(x.shape)}, but got {tuple(g.shape)}.")


def _check_same_shape(name: str, t: Tensor, others: dict[str, Tensor]) -> None:
    for other, value in others.items():
        if value.shape != t.shape:
            raise ValueError(
                f"`{other}`: expected the shape of `{name}`, {tuple(t.shape)}, but got {tuple(value.shape)}. "
                "Pass the same point in all passes."
            )


def _check_same_grid(x: Tensor, g: Tensor, x_grid: Sequence[int], g_grid: Sequence[int]) -> None:
    if tuple(x_grid) != tuple(g_grid):
        raise ValueError(
            f"`g`: expected the batch and grid of `x`, {tuple(x_grid)} of {tuple(x.shape)}, but got {tuple(g_grid)} "
            f"of {tuple(g.shape)}. Pass the activation and the gradient of one point."
        )
