"""The maths of the maps: pure functions of an activation and the gradient of the loss at the same point.

Everywhere `x` is `(N, C, *S)`, an activation, `g` the gradient of the loss there, `u` a location of `S` (one, two or
three axes). What location `u` teaches a layer is an outer product, `g_u x_uᵀ`; a map holds the size of that product.
No product is ever formed and no patch ever unfolded: norms and window sums are enough.

Results are float32, or float64 for float64 inputs. Half types are widened before they are squared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["grad_cam", "normgrad", "normgrad_conv", "normgrad_conv_transpose", "normgrad_linear"]

PADDING_MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def normgrad(x: Tensor, g: Tensor) -> Tensor:
    """Order-0 map of an imaginary 1×1 identity convolution at the point where `x` lives.

    `m_u = ‖x_u‖ · ‖g_u‖`, the Frobenius norm of `g_u x_uᵀ`.

    Args:
        x: activation, `(N, C, *S)`.
        g: gradient of the loss with respect to `x`, `(N, C', *S)`.

    Returns:
        The map, `(N, *S)`.
    """
    _check_spatial(x, g)
    _check_same_grid(x, g, (x.shape[0], *x.shape[2:]), (g.shape[0], *g.shape[2:]))
    return channel_norm(x) * channel_norm(g)


def normgrad_linear(x: Tensor, g: Tensor) -> Tensor:
    """Order-0 map of a linear layer's own weight, whose channels come last.

    Args:
        x: the layer's input, `(N, *S, C)`.
        g: gradient of the loss with respect to its output, `(N, *S, D)`.

    Returns:
        The map, `(N, *S)`.
    """
    _check_spatial(x, g)
    _check_same_grid(x, g, x.shape[:-1], g.shape[:-1])
    return channel_norm(x, dim=-1) * channel_norm(g, dim=-1)


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
    """Order-0 map of a convolution's own weight.

    Output location `u` read the patch `P_u(x)` and contributes `g_u ⊗ P_u(x)`, group by group (γ):

        m_u = sqrt( Σ_γ ‖g_{γ,u}‖² · ‖P_{γ,u}(x)‖² ),    ‖P_{γ,u}(x)‖² = box(Σ_{c∈γ} x_c²)_u

    where `box` sums over the convolution's window. With `accumulate`, each value is given to every input pixel of its
    patch, `M = boxᵀ(m)`: what a padded pixel was given goes to the pixel it was copied from, a zero's share nowhere.

    Args:
        x: the convolution's input, `(N, C, *S)`.
        g: gradient of the loss with respect to its output, `(N, D, *S_out)`.
        kernel_size: as in `torch.nn.Conv2d`; likewise the next five.
        stride: see there.
        padding: a number, one for each axis, `"same"` or `"valid"`.
        dilation: see there.
        groups: see there.
        padding_mode: `"zeros"`, `"reflect"`, `"replicate"` or `"circular"`.
        accumulate: spread the map over the input's grid, or leave it on the output's.

    Returns:
        The map, `(N, *S)`, or `(N, *S_out)` without `accumulate`.
    """
    _check_spatial(x, g)
    window = Window.of(x.shape[2:], kernel_size, stride, padding, dilation, padding_mode)
    expected = (x.shape[0], *window.output_shape)
    if (g.shape[0], *g.shape[2:]) != expected:
        raise ValueError(
            f"`g`: expected a batch and grid of {expected} for an input of {tuple(x.shape)} and this geometry, "
            f"but got {tuple(g.shape)}. Pass the gradient at the convolution's output."
        )
    contribution = group_product(window.norm(group_norms(x, groups, "x")), group_norms(g, groups, "g"))
    return window.spread(contribution) if accumulate else contribution


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
    """Order-0 map of a transposed convolution's own weight: `normgrad_conv` with `x` and `g` in swapped roles.

    Input location `u` wrote to a patch of the output and contributes `x_u ⊗ P_u(g)`.

    Args:
        x: the layer's input, `(N, C, *S)`.
        g: gradient of the loss with respect to its output, `(N, D, *S_out)`; its size tells the output padding.
        kernel_size: as in `torch.nn.ConvTranspose2d`; likewise the next four.
        stride: see there.
        padding: see there.
        dilation: see there.
        groups: see there.
        accumulate: spread the map over the output's grid, or leave it on the input's.

    Returns:
        The map, `(N, *S_out)`, or `(N, *S)` without `accumulate`.
    """
    _check_spatial(x, g)
    window = Window.of_transposed(x.shape, g.shape, kernel_size, stride, padding, dilation)
    contribution = group_product(window.norm(group_norms(g, groups, "g")), group_norms(x, groups, "x"))
    return window.spread(contribution) if accumulate else contribution


def grad_cam(x: Tensor, g: Tensor) -> Tensor:
    """Grad-CAM: `m_u = max(ḡᵀ x_u, 0)`, where `ḡ` is the mean of `g` over locations.

    Args:
        x: activation, `(N, C, *S)`.
        g: gradient of a score *to be raised*, `(N, C, *S)`. For the gradient of a loss pass `-g`.

    Returns:
        The map, `(N, *S)`.
    """
    _check_spatial(x, g)
    if x.shape != g.shape:
        raise ValueError(
            f"`g`: expected the shape of `x`, {tuple(x.shape)}, but got {tuple(g.shape)}. Pass the gradient at `x`."
        )
    dtype = torch.promote_types(_wide_dtype(x), _wide_dtype(g))
    x, g = x.detach().to(dtype), g.detach().to(dtype)
    locations = tuple(range(2, g.dim()))
    # Not a matrix product: autocast would take it in half precision.
    return torch.relu((x * g.mean(locations, keepdim=True)).sum(1))


def channel_norm(t: Tensor, dim: int = 1) -> Tensor:
    """The norm over channels at every location, in float32 or wider, without a widened copy of the whole of `t`."""
    t, dtype, dim = t.detach(), _wide_dtype(t), dim % t.dim()
    norm: Tensor
    if t.is_cpu and t.numel() and t.stride(dim) != 1:
        # A CPU adds whole planes several times faster than it reduces along an axis with gaps; some images at a time,
        # for the squares of all would take as much memory as `t`.
        some = max(1, 2**18 * len(t) // t.numel())
        norm = torch.cat([images.to(dtype).square().sum(dim) for images in torch.split(t, some)]).sqrt_()
    else:
        norm = torch.linalg.vector_norm(t, dim=dim, dtype=dtype)
    return norm


def group_norms(t: Tensor, groups: int, name: str) -> Tensor:
    """The norm over the channels of each group, `(N, groups, *S)` of a `(N, C, *S)` tensor."""
    channels = t.shape[1]
    if groups < 1 or channels % groups:
        raise ValueError(f"`groups`: expected a divisor of the {channels} channels of `{name}`, but got {groups}.")
    if groups == 1:
        return channel_norm(t).unsqueeze(1)
    return channel_norm(t.reshape(len(t), groups, channels // groups, *t.shape[2:]), dim=2)


def group_product(a: Tensor, b: Tensor) -> Tensor:
    """`sqrt(Σ_γ a_γ² b_γ²)`, the norm over the blocks that are really weights, of norms `(N, groups, *S)`."""
    product = a * b
    return product.squeeze(1) if product.shape[1] == 1 else channel_norm(product)


class Window:
    """The sliding window of a convolution on one grid: sums over it, and the adjoint of that sum.

    The sum over a box is a sum along each axis in turn, and each of these a sum of `kernel` shifted slices. So neither
    direction needs memory for more than the grid itself, whatever the kernel.
    """

    def __init__(
        self,
        shape: Sequence[int],
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        padding_mode: str,
        output_shape: Sequence[int],
    ) -> None:
        self.shape = tuple(shape)
        self.kernel = tuple(kernel)
        self.stride = tuple(stride)
        self.padding = tuple(padding)
        self.dilation = tuple(dilation)
        self.padding_mode = padding_mode
        self.output_shape = tuple(output_shape)

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int] | str,
        dilation: int | Sequence[int],
        padding_mode: str,
    ) -> Window:
        """The window of a convolution with these arguments on a grid of this shape."""
        if padding_mode not in PADDING_MODES:
            raise ValueError(f"`padding_mode`: expected one of {sorted(PADDING_MODES)}, but got {padding_mode!r}.")
        axes = len(shape)
        kernel = _per_axis("kernel_size", kernel_size, axes)
        steps = _per_axis("stride", stride, axes)
        dilations = _per_axis("dilation", dilation, axes)
        pads = _pad_pairs(padding, kernel, dilations)
        output_shape = [
            (size + sum(pad) - d * (k - 1) - 1) // s + 1
            for size, k, s, pad, d in zip(shape, kernel, steps, pads, dilations, strict=True)
        ]
        if min(output_shape) < 1:
            raise ValueError(
                f"`kernel_size`: expected a window that fits the grid {tuple(shape)}, but got {kernel} with "
                f"dilation {dilations} and padding {pads}."
            )
        return cls(shape, kernel, steps, pads, dilations, padding_mode, output_shape)

    @classmethod
    def of_transposed(
        cls,
        x_shape: Sequence[int],
        g_shape: Sequence[int],
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int],
        padding: int | Sequence[int],
        dilation: int | Sequence[int],
    ) -> Window:
        """The window that each location of a transposed convolution's input `x` writes to, on its output's grid."""
        window = cls.of(g_shape[2:], kernel_size, stride, padding, dilation, "zeros")
        least = [
            (size - 1) * s - sum(pad) + d * (k - 1) + 1
            for size, k, s, pad, d in zip(
                x_shape[2:], window.kernel, window.stride, window.padding, window.dilation, strict=True
            )
        ]
        most = [low + max(s, d) - 1 for low, s, d in zip(least, window.stride, window.dilation, strict=True)]
        fits = all(low <= size <= high for low, size, high in zip(least, g_shape[2:], most, strict=True))
        if x_shape[0] != g_shape[0] or not fits:
            raise ValueError(
                f"`g`: expected a batch of {x_shape[0]} and a grid from {tuple(least)} to {tuple(most)} for an input "
                f"of {tuple(x_shape)} and this geometry, but got {tuple(g_shape)}. "
                "Pass the gradient at the transposed convolution's output."
            )
        # Output padding of a stride or more leaves room for windows that no input location has: they are left out.
        window.output_shape = tuple(x_shape[2:])
        return window

    def norm(self, norms: Tensor) -> Tensor:
        """The norm of each patch, `sqrt(box(norms²))`."""
        return self.sum(norms.square()).sqrt()

    def sum(self, t: Tensor) -> Tensor:
        """`box(t)`: `(N, G, *S)` to `(N, G, *S_out)`."""
        t = self._pad(t)
        for axis in range(len(self.shape)):
            slices = [t[index] for index in self._slices(axis)]
            t = slices[0] if len(slices) == 1 else slices[0] + slices[1]
            for further in slices[2:]:
                t += further
        return t

    def spread(self, t: Tensor) -> Tensor:
        """`boxᵀ(t)`: `(N, *S_out)` to `(N, *S)`, the exact adjoint of `sum`, padding included."""
        t = t.unsqueeze(1)
        for axis in reversed(range(len(self.shape))):
            shape = list(t.shape)
            shape[axis + 2] = self.shape[axis] + sum(self.padding[axis])
            wide = t.new_zeros(shape)
            for index in self._slices(axis):
                wide[index] += t
            t = self._unpad(wide, axis)
        return t.squeeze(1)

    def _slices(self, axis: int) -> list[tuple[slice, ...]]:
        """Where the k-th element of every window stands along one axis, for k in order."""
        step, size = self.stride[axis], self.output_shape[axis]
        before = (slice(None),) * (axis + 2)
        starts = (k * self.dilation[axis] for k in range(self.kernel[axis]))
        return [(*before, slice(start, start + (size - 1) * step + 1, step)) for start in starts]

    def _pad(self, t: Tensor) -> Tensor:
        if not any(map(sum, self.padding)):
            return t
        pads = [amount for pair in reversed(self.padding) for amount in pair]
        return F.pad(t, pads, mode=PADDING_MODES[self.padding_mode])

    def _unpad(self, t: Tensor, axis: int) -> Tensor:
        """The adjoint of padding along one axis."""
        before, after = self.padding[axis]
        size, dim = self.shape[axis], axis + 2
        if before == after == 0:
            return t
        if self.padding_mode == "zeros":
            return t.narrow(dim, before, size)
        places = torch.arange(size, dtype=torch.float64, device=t.device)
        source = F.pad(places[None, None], (before, after), mode=PADDING_MODES[self.padding_mode]).flatten().long()
        shape = list(t.shape)
        shape[dim] = size
        return t.new_zeros(shape).index_add_(dim, source, t)


def _per_axis(name: str, value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """One number for each axis, as torch's convolutions take them."""
    values = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= axes
    least = 0 if name == "padding" else 1
    if len(values) != axes or min(values) < least:
        raise ValueError(f"`{name}`: expected a number of at least {least}, or {axes} of them, but got {value!r}.")
    return values


def _pad_pairs(
    padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]
) -> list[tuple[int, int]]:
    """What is added before and after each axis."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if isinstance(padding, str):
        raise ValueError(f"`padding`: expected a number, one for each axis, 'same' or 'valid', but got {padding!r}.")
    return [(p, p) for p in _per_axis("padding", padding, len(kernel))]


def _wide_dtype(t: Tensor) -> torch.dtype:
    return torch.float64 if t.dtype == torch.float64 else torch.float32


def _check_spatial(x: Tensor, g: Tensor) -> None:
    for name, t in (("x", x), ("g", g)):
        if t.dim() < 3 or not t.is_floating_point():
            raise ValueError(
                f"`{name}`: expected a floating-point tensor with a batch, a channel and at least one spatial axis, "
                f"but got {t.dtype} of shape {tuple(t.shape)}."
            )
    if x.dim() != g.dim():
        raise ValueError(f"`g`: expected as many axes as `x`, {tuple(x.shape)}, but got {tuple(g.shape)}.")


def _check_same_grid(x: Tensor, g: Tensor, x_grid: Sequence[int], g_grid: Sequence[int]) -> None:
    if tuple(x_grid) != tuple(g_grid):
        raise ValueError(
            f"`g`: expected the batch and grid of `x`, {tuple(x_grid)} of {tuple(x.shape)}, but got {tuple(g_grid)} "
            f"of {tuple(g.shape)}. Pass the activation and the gradient of one point."
        )
