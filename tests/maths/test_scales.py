"""Values of any size: maps scale with activations and gradients, down to where squares vanish and up to overflows."""

from __future__ import annotations

import math

import pytest
import reference
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from normgrad_lightning import functional as NF
from normgrad_lightning import order0_maps, order1_maps
from normgrad_lightning.maths import products, scaling
from normgrad_lightning.maths.signal import signal
from normgrad_lightning.maths.windows import Window

examples = settings(derandomize=True, max_examples=150, suppress_health_check=list(HealthCheck))
EXPONENTS = st.integers(-30, 30)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, rtol=1e-5):
    torch.testing.assert_close(actual.double(), expected.double(), rtol=rtol, atol=0.0)


def conv(x, g, **options):
    return NF.normgrad_conv(x, g, kernel_size=3, padding=1, **options)


def transposed(x, g):
    return NF.normgrad_conv_transpose(x, g, kernel_size=3, padding=1)


def order1(x, g, factorised=True):
    others = [x * 0.9, g * 0.9, x * 1.1, g * 1.2]
    return NF.normgrad_order1(x, g, *others, epsilon=0.1, h=0.5, factorised=factorised)


CALLS = {
    "normgrad": (NF.normgrad, (3, 8, 6, 5)),
    "linear": (NF.normgrad_linear, (3, 6, 8)),
    "conv": (conv, (3, 8, 6, 5)),
    "grouped": (lambda x, g: conv(x, g, groups=4), (3, 8, 6, 5)),
    "depthwise": (lambda x, g: conv(x, g, groups=8, padding_mode="reflect"), (3, 8, 6, 5)),
    "transposed": (transposed, (3, 8, 6, 5)),
    "grad_cam": (NF.grad_cam, (3, 8, 6, 5)),
    "order1": (order1, (3, 8, 6, 5)),
    "order1, whole sum": (lambda x, g: order1(x, g, factorised=False), (3, 8, 6, 5)),
}
every_call = pytest.mark.parametrize(("call", "shape"), CALLS.values(), ids=CALLS)


@every_call
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@given(x_exponent=EXPONENTS, g_exponent=EXPONENTS, seed=st.integers(0, 5))
@examples
def test_maps_of_float32_values_of_any_size_are_those_of_float64(call, shape, memory, x_exponent, g_exponent, seed):
    if abs(x_exponent + g_exponent) > 34:  # the map itself would not be a float32
        return
    x = (normal(*shape, seed=seed) * 10.0**x_exponent).float()
    g = (normal(*shape, seed=seed + 1) * 10.0**g_exponent).float()
    if len(shape) == 4:
        x, g = x.contiguous(memory_format=memory), g.contiguous(memory_format=memory)
    expected, actual = call(x.double(), g.double()), call(x, g)
    # A sum of values of both signs has its error as a share of the largest.
    torch.testing.assert_close(actual.double() / expected.max(), expected / expected.max(), rtol=1e-5, atol=1e-6)
    assert actual.dtype == torch.float32


@every_call
def test_images_of_different_sizes_do_not_hide_each_other(call, shape):
    """A fitted image has gradients of 1e-25, and the one beside it of 1."""
    x, g = normal(*shape).float(), normal(*shape, seed=1)
    sizes = torch.tensor([1.0, 1e-25, 1e25], dtype=torch.float64)
    g = (g * sizes.reshape(-1, *(1,) * (g.dim() - 1))).float()
    actual, expected = call(x, g), call(x.double(), g.double())
    for one, other in zip(actual.double(), expected, strict=True):
        torch.testing.assert_close(one / other.max(), other / other.max(), rtol=1e-5, atol=1e-6)


@every_call
def test_a_power_of_two_scales_the_map_and_changes_no_other_bit(call, shape):
    x, g = normal(*shape).float(), normal(*shape, seed=1).float()
    plain = call(x, g)
    for exponent in (-100, -70, -20, 20, 60, 90):
        assert torch.equal(call(x, g * 2.0**exponent), plain * 2.0**exponent), exponent


def test_ordinary_values_have_the_bits_of_the_plain_formula():
    t = normal(4, 16, 9, 9).float()
    assert torch.equal(products.channel_norm(t), t.square().sum(1).sqrt())
    last = t.movedim(1, -1).contiguous()
    assert torch.equal(products.channel_norm(last, dim=-1), torch.linalg.vector_norm(last, dim=-1))
    window = Window.of((9, 9), 3, 1, 0, 1, "zeros")
    norms = products.channel_norm(t).unsqueeze(1)
    assert torch.equal(window.norm(norms), window.sum(norms.square()).sqrt())


@pytest.mark.parametrize("exponent", [-149, -127, -80, 0, 80, 127])
def test_the_form_for_other_devices_gives_the_same(exponent, monkeypatch):
    """There all images are scaled, as a look at values would wait for the device."""
    t = (normal(4, 16, 5, 5).clamp(-1, 1).float() + 1) * 2.0 ** (exponent - 1)
    on_cpu = products.channel_norm(t)
    monkeypatch.setattr(scaling, "can_look_at", lambda t: False)
    assert torch.equal(products.channel_norm(t), on_cpu)


@pytest.mark.parametrize("looks", [True, False])
def test_what_is_not_finite_stays_so_and_what_is_beside_it_stays_right(looks, monkeypatch):
    monkeypatch.setattr(scaling, "can_look_at", lambda t: looks)
    t = normal(3, 4, 2, 2).float()
    clean = products.channel_norm(t)
    t[0, 1, 0, 0], t[1, 2, 1, 1] = math.nan, -math.inf
    norms = products.channel_norm(t)
    assert norms[0, 0, 0].isnan()
    assert norms[1, 1, 1] == math.inf
    kept = torch.ones_like(norms, dtype=torch.bool)
    kept[0, 0, 0] = kept[1, 1, 1] = False
    assert torch.equal(norms[kept], clean[kept])


def test_zeros_are_zero():
    x, g = normal(2, 3, 4, 4).float(), torch.zeros(2, 3, 4, 4)
    assert not NF.normgrad(x, g).any()
    assert not conv(x, g).any()
    assert not NF.contrast(g[:, 0], x[:, 0].abs()).any()


def test_bfloat16_gradients_below_1e_19_do_not_vanish():
    x, g = normal(2, 8, 5, 5).bfloat16(), (normal(2, 8, 5, 5, seed=1) * 1e-28).bfloat16()
    close(NF.normgrad(x, g), reference.normgrad(x.double(), g.double()))


def test_large_tensors_in_pieces_are_right_at_any_scale():
    t = normal(5, 512, 32, 32)
    sizes = torch.tensor([1e-30, 1, 1e30, 0, 1e-22], dtype=torch.float64).reshape(-1, 1, 1, 1)
    close(products.channel_norm((t * sizes).float()), torch.linalg.vector_norm((t * sizes).float().double(), dim=1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dim", [1, 2])
def test_pieces_are_right_for_any_memory_order(dtype, dim, monkeypatch):
    """All pieces share the memory of their squares, and the last one is smaller; gradients may be stretched."""
    whole = normal(7, 3, 4, 5).to(dtype)
    monkeypatch.setattr(scaling, "CHUNK_VALUES", 2 * whole[0].numel())
    for t in (whole, whole.transpose(2, 3), whole[..., ::2], whole[..., :1].expand(7, 3, 4, 5)):
        close(products.channel_norm(t, dim), torch.linalg.vector_norm(t.double(), dim=dim))


def test_contrast_of_maps_whose_sums_overflow_or_nearly_vanish():
    helps, hurts = normal(2, 8, 8).abs(), normal(2, 8, 8, seed=1).abs()
    expected = NF.contrast(helps, hurts)
    for size in (1e37, 1e-37):
        torch.testing.assert_close(
            NF.contrast((helps * size).float(), (hurts * size).float()).double(), expected, rtol=1e-4, atol=1e-8
        )


def test_contrast_of_ordinary_maps_has_the_bits_of_its_formula():
    helps, hurts = normal(2, 8, 8).abs().float(), normal(2, 8, 8, seed=1).abs().float()
    shares = [maps / maps.sum((1, 2), keepdim=True) for maps in (helps, hurts)]
    assert torch.equal(NF.contrast(helps, hurts), shares[0] - shares[1])


def test_the_maths_can_be_compiled_and_vmapped():
    x, g = normal(3, 2, 4, 5, 5).float(), normal(3, 2, 4, 5, 5, seed=1).float() * 1e-25
    expected = torch.stack([NF.normgrad(*pair) for pair in zip(x, g, strict=True)])
    close(torch.vmap(NF.normgrad)(x, g), expected)
    compiled = torch.compile(NF.normgrad, backend="eager", fullgraph=True)
    close(compiled(x[0], g[0]), expected[0])


def test_the_hardest_images_are_found_where_gradients_are_tiny():
    sums = {"a": torch.tensor([1.0, 4.0, 2.0]) * 1e-40, "b": torch.zeros(3)}
    torch.testing.assert_close(
        signal(sums, 3),
        torch.tensor([1.0, 4.0, 2.0]) / 7,
        rtol=1e-3,
        atol=0.0,
    )


# ---------------------------------------------------------------- whole passes


class Smooth(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 4, 3, groups=2)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))).mean((2, 3))


def loss_of_size(size):
    return lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]) * size


@pytest.mark.parametrize("target", ["output", "weight"])
@pytest.mark.parametrize("size", [2.0**-90, 2.0**-70, 2.0**60])
def test_order_0_scales_as_the_loss_does(size, target):
    model, batch = Smooth(), (normal(3, 3, 8, 8).float(), torch.tensor([0, 1, 2]))
    maps = [order0_maps(model, loss_of_size(s), batch, ["first", "second"], target=target) for s in (1.0, size)]
    for name, plain in maps[0].items():
        assert plain.min() > 0
        close(maps[1][name], plain.double() * size)


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("size", [2.0**-80, 2.0**50])
def test_order_1_scales_as_the_loss_does(size, factorised):
    """`order1(s·loss, ε) = s · order1(loss, s·ε)`: also where no square of a gradient is a float32."""
    model, batch = Smooth(), (normal(3, 3, 8, 8).float(), torch.tensor([0, 1, 2]))
    plain = order1_maps(model, loss_of_size(1.0), batch, "first", epsilon=0.1, factorised=factorised)["first"]
    maps = order1_maps(model, loss_of_size(size), batch, "first", epsilon=0.1 / size, factorised=factorised)["first"]
    without = order1_maps(model, loss_of_size(1.0), batch, "first", epsilon=0.1, second_order=False)["first"]
    assert not torch.allclose(plain, without, rtol=1e-3)
    close(maps, plain.double() * size, rtol=1e-3)
