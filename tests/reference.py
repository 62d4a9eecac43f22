"""Slow float64 oracles for the maps, written from the formulas and sharing nothing with the package.

A patch is unfolded, an outer product is formed, a Frobenius norm is taken: everything the package avoids.
Where a pad comes from is not computed but observed: the numbers of the pixels are padded like the pixels.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODES = {"zeros": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"}


def per_axis(value: int | Sequence[int], axes: int) -> tuple[int, ...]:
    """Returns one number for each spatial axis."""
    return (value,) * axes if isinstance(value, int) else tuple(value)


def pad_sides(padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple]:
    """Returns (before, after) for each axis; "same" puts the odd pixel after, as torch does."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    return [(p, p) for p in per_axis(padding, len(kernel))]


def pad(x: Tensor, sides: Sequence[tuple[int, int]], mode: str) -> Tensor:
    """Returns x (N, C, *S) padded for real."""
    flat = [amount for side in reversed(sides) for amount in side]
    return F.pad(x, flat, mode=MODES[mode])


def output_size(
    size: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    sides: Sequence[tuple[int, int]],
) -> tuple[int, ...]:
    """Returns how many windows fit along each axis, by trying them one by one."""
    counts = []
    for s, k, step, d, (before, after) in zip(size, kernel, stride, dilation, sides, strict=True):
        starts = range(0, s + before + after, step)
        counts.append(sum(start + d * (k - 1) < s + before + after for start in starts))
    return tuple(counts)


def window_positions(
    count: Sequence[int], kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> list[list[tuple[int, ...]]]:
    """Returns, for each window u and each offset in it, the position it reads on the padded grid."""
    return [
        [
            tuple(i * s + o * d for i, s, o, d in zip(u, stride, offset, dilation, strict=True))
            for offset in itertools.product(*map(range, kernel))
        ]
        for u in itertools.product(*map(range, count))
    ]


def unfold(padded: Tensor, positions: list[list[tuple[int, ...]]]) -> Tensor:
    """Returns the patches (N, C, L, K) of a padded x (N, C, *P)."""
    return torch.stack([torch.stack([padded[(..., *position)] for position in window], -1) for window in positions], -2)


def source_pixels(
    size: Sequence[int], sides: Sequence[tuple[int, int]], mode: str, positions: list[list[tuple[int, ...]]]
) -> Tensor:
    """Returns (L, K): the flat number of the pixel that each entry of a patch was copied from, -1 for a zero."""
    numbers = torch.arange(1, math.prod(size) + 1, dtype=torch.float64).reshape(1, 1, *size)
    return unfold(pad(numbers, sides, mode), positions)[0, 0].long() - 1


def spread(m: Tensor, pixels: Tensor, size: Sequence[int]) -> Tensor:
    """Returns (N, *size): each m_u (N, L) given to every pixel its patch was copied from."""
    total = m.new_zeros(m.shape[0], math.prod(size))
    for u, window in enumerate(pixels.tolist()):
        for pixel in window:
            if pixel >= 0:
                total[:, pixel] += m[:, u]
    return total.reshape(m.shape[0], *size)


def outer_products(still: Tensor, patches: Tensor, groups: int) -> Tensor:
    """Returns (N, groups, L, A, B, K): at each u, each group's channels of `still` times its patch.

    still (N, groups·A, L) has one pixel at each u; patches (N, groups·B, L, K) has a window at each u.
    """
    n, _, length, taps = patches.shape
    blocks = []
    for a, b in zip(still.chunk(groups, 1), patches.chunk(groups, 1), strict=True):
        a = a.permute(0, 2, 1).reshape(n, length, -1, 1, 1)
        b = b.permute(0, 2, 1, 3).reshape(n, length, 1, -1, taps)
        blocks.append(a * b)
    return torch.stack(blocks, 1)


def frobenius(products: Tensor) -> Tensor:
    """Returns (N, L): the norm, at each u, of all the blocks of its outer product."""
    return products.square().sum(dim=(1, 3, 4, 5)).sqrt()


class Conv:
    """A convolution's outer products, their norms and their sum, from its input x and output gradient g.

    Attributes: `weight_grad` (Cout, Cin/groups, *K), `on_output` (N, *So) and `on_input` (N, *S).
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] | str = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        padding_mode: str = "zeros",
    ) -> None:
        x, g = x.detach().double(), g.detach().double()
        size, axes = x.shape[2:], x.ndim - 2
        kernel, stride, dilation = (per_axis(v, axes) for v in (kernel_size, stride, dilation))
        sides = pad_sides(padding, kernel, dilation)
        count = output_size(size, kernel, stride, dilation, sides)
        assert tuple(g.shape[2:]) == count, (g.shape, count)
        positions = window_positions(count, kernel, stride, dilation)
        self.pixels = source_pixels(size, sides, padding_mode, positions)
        self.patches = unfold(pad(x, sides, padding_mode), positions)
        products = outer_products(g.flatten(2), self.patches, groups)
        m = frobenius(products)
        self.weight_grad = products.sum(dim=(0, 2)).reshape(g.shape[1], x.shape[1] // groups, *kernel)
        self.on_output = m.reshape(-1, *count)
        self.on_input = spread(m, self.pixels, size)


class ConvTranspose:
    """A transposed convolution's: pixel u of the input x times the window of g (at the output) that u wrote.

    Attributes: `weight_grad` (Cin, Cout/groups, *K), `on_input` (N, *S) and `on_output` (N, *So).
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        *,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> None:
        x, g = x.detach().double(), g.detach().double()
        size, written, axes = x.shape[2:], g.shape[2:], x.ndim - 2
        kernel, stride, dilation = (per_axis(v, axes) for v in (kernel_size, stride, dilation))
        sides = pad_sides(padding, kernel, dilation)
        positions = window_positions(size, kernel, stride, dilation)
        pixels = source_pixels(written, sides, "zeros", positions)
        products = outer_products(x.flatten(2), unfold(pad(g, sides, "zeros"), positions), groups)
        m = frobenius(products)
        self.weight_grad = products.sum(dim=(0, 2)).reshape(x.shape[1], g.shape[1] // groups, *kernel)
        self.on_input = m.reshape(-1, *size)
        self.on_output = spread(m, pixels, written)


def point_products(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, L, D, C): g_u x_uᵀ at each location, of x (N, C, *S) and g (N, D, *S)."""
    x, g = x.detach().double().flatten(2), g.detach().double().flatten(2)
    return torch.einsum("ndl,ncl->nldc", g, x)


def normgrad(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, *S): ‖g_u x_uᵀ‖_F from the explicit matrices."""
    return point_products(x, g).square().sum(dim=(2, 3)).sqrt().reshape(x.shape[0], *x.shape[2:])


def normgrad_linear(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, *S): the same with the channels last, x (N, *S, C) and g (N, *S, D)."""
    return normgrad(x.movedim(-1, 1), g.movedim(-1, 1))


def grad_cam(x: Tensor, g: Tensor) -> Tensor:
    """Returns (N, *S): max(ḡᵀ x_u, 0), number by number."""
    locations = list(itertools.product(*map(range, x.shape[2:])))
    cam = torch.zeros(x.shape[0], *x.shape[2:], dtype=torch.float64)
    for n in range(x.shape[0]):
        means = [sum(g[(n, c, *u)].item() for u in locations) / len(locations) for c in range(x.shape[1])]
        for u in locations:
            cam[(n, *u)] = max(sum(mean * x[(n, c, *u)].item() for c, mean in enumerate(means)), 0.0)
    return cam


def combine(maps: Sequence[Tensor], size: Sequence[int]) -> Tensor:
    """Returns (N, *size): the geometric mean of the layers' maps over their means, number by number."""
    out = torch.zeros(len(maps[0]), *size, dtype=torch.float64)
    for n in range(len(out)):
        layers = [m[n].double() for m in maps if m[n].isfinite().all() and m[n].any()]
        for u in itertools.product(*map(range, size)) if layers else ():
            logs = [math.log(max(interpolated(m, u, size) / m.mean().item(), 1e-6)) for m in layers]
            out[(n, *u)] = math.exp(sum(logs) / len(logs))
    return out


def interpolated(m: Tensor, u: Sequence[int], size: Sequence[int]) -> float:
    """Returns the value of a map (*S) at place u of another grid, from the corners of the cell that u falls into."""
    total = 0.0
    corners = []
    for place, grid, wanted in zip(u, m.shape, size, strict=True):
        at = min(max((place + 0.5) * grid / wanted - 0.5, 0.0), grid - 1.0)
        low = math.floor(at)
        corners.append([(low, 1.0 - (at - low)), (min(low + 1, grid - 1), at - low)])
    for corner in itertools.product(*corners):
        total += m[tuple(place for place, _ in corner)].item() * math.prod(weight for _, weight in corner)
    return total


def normgrad_conv_by_unfold(x: Tensor, g: Tensor, *, kernel_size: int, padding: int) -> Tensor:
    """Returns the 2-d map on the output's grid the tempting way, with k² times the memory of x."""
    patches = F.unfold(x, kernel_size, padding=padding)
    return (patches.norm(dim=1) * g.flatten(2).norm(dim=1)).reshape(-1, *g.shape[2:])


# ---------------------------------------------------------------- order 1


class Pass:
    """One real forward and backward of a copy of the model, its weights moved in place.

    Attributes: `grads`, the gradient of each weight that learns, by name, and `uses`, for each layer the pairs (x, g)
    of its calls. The copies that the hooks hand on keep in-place operations away from what was taken.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[[nn.Module, Any], Tensor],
        batch: Any,
        layers: Sequence[str],
        target: str,
        moves: Mapping[str, Tensor],
    ) -> None:
        model = copy.deepcopy(model).eval()
        if not any(p.requires_grad for p in model.parameters()):
            model.requires_grad_(True)
        weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with torch.no_grad():
            for name, move in moves.items():
                weights[name] += move
        taken: dict[str, list[dict[str, Tensor]]] = {name: [] for name in layers}
        for name in layers:
            self._tap(model.get_submodule(name), taken[name])
        model.zero_grad()
        loss_fn(model, batch).backward()
        self.grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in weights.items()}
        x_end = "output" if target == "output" else "input"
        g_end = "input" if target == "input" else "output"
        self.uses = {
            name: [(use[x_end].detach().clone(), use[g_end].grad.clone()) for use in uses]
            for name, uses in taken.items()
        }

    @staticmethod
    def _tap(layer: nn.Module, uses: list[dict[str, Tensor]]) -> None:
        def take_input(_: nn.Module, args: tuple) -> tuple:
            x = args[0] if args[0].requires_grad else args[0].clone().requires_grad_()
            x.retain_grad()
            uses.append({"input": x})
            return (x.clone(), *args[1:])

        def take_output(_: nn.Module, args: tuple, output: Tensor) -> Tensor:
            uses[-1]["output"] = output
            output.retain_grad()
            return output.clone()

        layer.register_forward_pre_hook(take_input)
        layer.register_forward_hook(take_output)


Grid = Callable[[Tensor], Tensor]
"""How the norms (N, L) of the products make a map (N, *S)."""


def windows(layer: nn.Module, target: str, read: Tensor, count: Sequence[int]) -> tuple[Tensor, int, Grid]:
    """Returns the patches (N, C, L, K) that the products are made of, the number of groups, and the grid.

    At the layer's input or output, or in a linear layer, a patch is one pixel.
    """
    size = read.shape[2:]
    if target != "weight" or isinstance(layer, nn.Linear):
        return read.flatten(2)[..., None], 1, lambda m: m.reshape(len(m), *size)
    sides = pad_sides(layer.padding, layer.kernel_size, layer.dilation)
    mode = "zeros" if layer.transposed else layer.padding_mode
    positions = window_positions(count, layer.kernel_size, layer.stride, layer.dilation)
    pixels = source_pixels(size, sides, mode, positions)
    return unfold(pad(read, sides, mode), positions), layer.groups, lambda m: spread(m, pixels, size)


def layer_products(
    layer: nn.Module, target: str, x: Tensor, g: Tensor, channels_last: bool = False
) -> tuple[Tensor, Grid]:
    """Returns the outer products of a layer, as `outer_products` does, and the grid of their norms."""
    if channels_last or (target == "weight" and isinstance(layer, nn.Linear)):
        x, g = x.movedim(-1, 1), g.movedim(-1, 1)
    swapped = target == "weight" and getattr(layer, "transposed", False)
    still, read = (x, g) if swapped else (g, x)
    patches, groups, grid = windows(layer, target, read, still.shape[2:])
    return outer_products(still.flatten(2), patches, groups), grid


def order1(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: tuple[Tensor, ...],
    layers: Sequence[str],
    *,
    target: str = "output",
    epsilon: float = 0.0005,
    adversarial: bool = False,
    factorised: bool = True,
    second_order: bool = True,
    per_image: bool = True,
    scale: float = 0.5,
    channels_last: bool = False,
) -> dict[str, Tensor]:
    """Returns each layer's order-1 map (N, *S), from four real passes and explicit outer products.

    A layer that is used several times gets the sum of the maps of its uses.
    """
    options = dict(locals())
    if per_image:
        singles = [tuple(part[i : i + 1] for part in batch) for i in range(len(batch[0]))]
        rest = {key: options[key] for key in options if key not in ("model", "loss_fn", "batch", "layers", "per_image")}
        maps = [order1(model, loss_fn, single, layers, per_image=False, **rest) for single in singles]
        return {name: torch.cat([m[name] for m in maps]) for name in layers}

    def run(moves: Mapping[str, Tensor]) -> Pass:
        return Pass(model, loss_fn, batch, layers, target, moves)

    inner = run({}).grads
    stepped = run({name: (epsilon if adversarial else -epsilon) * grad for name, grad in inner.items()})
    v = stepped.grads
    length = math.sqrt(sum(float((grad**2).sum()) for grad in v.values()))
    passes, factors = [stepped], [1.0]
    if second_order and length > 0:
        h = scale / length
        factor = epsilon / (2 * h) if adversarial else -epsilon / (2 * h)
        passes += [run({n: h * grad for n, grad in v.items()}), run({n: -h * grad for n, grad in v.items()})]
        factors += [factor, -factor]

    maps = {}
    for name in layers:
        layer = model.get_submodule(name)
        of_uses = []
        for uses in zip(*(p.uses[name] for p in passes), strict=True):
            if factorised:
                gradient = torch.stack([factor * g for factor, (_, g) in zip(factors, uses, strict=True)]).sum(0)
                terms = [(1.0, uses[0][0], gradient)]
            else:
                terms = [(factor, x, g) for factor, (x, g) in zip(factors, uses, strict=True)]
            total = 0.0
            for factor, x, g in terms:
                products, grid = layer_products(layer, target, x, g, channels_last)
                total = total + factor * products
            of_uses.append(grid(frobenius(total)))
        maps[name] = torch.stack(of_uses).sum(0)
    return maps


def contrast(maps: Tensor, adversarial: Tensor) -> Tensor:
    """Returns (N, *S): m_u/Σm − m^adv_u/Σm^adv, number by number; zero where one of the two maps is zero."""
    result = torch.zeros_like(maps, dtype=torch.float64)
    for n in range(len(maps)):
        if maps[n].any() and adversarial[n].any():
            sums = [math.fsum(m[n].flatten().tolist()) for m in (maps, adversarial)]
            for u in itertools.product(*map(range, maps.shape[1:])):
                result[(n, *u)] = maps[(n, *u)].item() / sums[0] - adversarial[(n, *u)].item() / sums[1]
    return result


class WithLoss(nn.Module):
    """A model and its loss as one module, so that its weights can be swapped for functions of themselves."""

    def __init__(self, model: nn.Module, loss_fn: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss_fn = model, loss_fn

    def forward(self, batch: Any) -> Tensor:
        return self.loss_fn(self.model, batch)


def exact_order1(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], Tensor],
    batch: Any,
    name: str,
    *,
    target: str = "output",
    epsilon: float,
    adversarial: bool = False,
    factorised: bool = False,
) -> Tensor:
    """Returns the map (N, *S) of one layer and one batch without a difference: autograd goes through the inner step.

    Each image and location gets a weight D_u of its own: after the layer, where (1 + D_u) x_u is a convolution with
    identity weights as D is zero, or beside a convolution's own weight. D does not move in the inner step. The gradient
    by D_u of the loss after that step is the matrix whose norm the full form takes. The factorised form has a bias
    instead, and its gradient is multiplied with the activation of the stepped model.
    """
    whole = WithLoss(copy.deepcopy(model).eval(), loss_fn)
    layer = whole.model.get_submodule(name)
    inserted: list[Tensor] = []
    seen: list[tuple[Tensor, int, Grid]] = []

    def insert(_: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        patches, groups, grid = windows(layer, target, args[0] if target == "weight" else output, output.shape[2:])
        seen.append((patches.detach(), groups, grid))
        if not inserted:
            wanted = output if factorised else outer_products(output.flatten(2), patches, groups)
            inserted.append(torch.zeros_like(wanted, requires_grad=True))
        if factorised:
            return output + inserted[0]
        taught = torch.einsum("nglabk,ngblk->ngal", inserted[0], patches.unflatten(1, (groups, -1)))
        return output + taught.reshape(output.shape)

    layer.register_forward_hook(insert)
    weights = {name: p.detach().clone().requires_grad_() for name, p in whole.named_parameters()}
    loss = torch.func.functional_call(whole, weights, (batch,))
    inner = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    step = epsilon if adversarial else -epsilon
    stepped = {name: weights[name] + step * grad for name, grad in zip(weights, inner, strict=True)}
    (gradient,) = torch.autograd.grad(torch.func.functional_call(whole, stepped, (batch,)), inserted)
    patches, groups, grid = seen[1]
    return grid(frobenius(outer_products(gradient.flatten(2), patches, groups) if factorised else gradient))
