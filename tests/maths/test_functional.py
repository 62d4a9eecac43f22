"""The maps against explicit outer products, and the outer products against autograd's own weight gradients."""

from __future__ import annotations

import re

import pytest
import reference
import torch
from benchmarks.harness import peak_bytes
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import nn

from normgrad_lightning import functional as NF

CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CONV_TRANSPOSE = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
HALF = (torch.float16, torch.bfloat16)

examples = settings(derandomize=True, max_examples=200, suppress_health_check=list(HealthCheck))
few_examples = settings(examples, max_examples=80)


def close(actual, expected, rtol=1e-10, atol=1e-10):
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


def says(*fragments):
    """Returns a pattern that asks for every fragment, in any order."""
    return "(?s)" + "".join(f"(?=.*{re.escape(fragment)})" for fragment in fragments)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# ---------------------------------------------------------------- geometries


def maybe_int(draw, values):
    """Returns the tuple, or at times its one number when all its numbers are the same."""
    return values[0] if len(set(values)) == 1 and draw(st.booleans()) else values


def tuples(draw, axes, low, high):
    return tuple(draw(st.integers(low, high)) for _ in range(axes))


@st.composite
def channels(draw):
    """One group, several, depthwise (one channel a group) and channel multipliers."""
    groups = draw(st.integers(1, 4))
    return groups, groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3))


@st.composite
def convolutions(draw):
    """Returns (module, x) in float64: any convolution that torch itself accepts."""
    axes = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(PADDING_MODES))
    kernel = tuples(draw, axes, 1, {1: 5, 2: 4, 3: 3}[axes])
    dilation = tuples(draw, axes, 1, 3 if axes < 3 else 2)
    padding = draw(st.sampled_from(["same", "valid", "numbers", "numbers", "numbers"]))
    stride = (1,) * axes if padding == "same" else tuples(draw, axes, 1, 3)
    if padding == "numbers":
        padding = tuples(draw, axes, 0, 3)
    sides = reference.pad_sides(padding, kernel, dilation)
    size = []
    for k, d, side in zip(kernel, dilation, sides, strict=True):
        floor = max(1, d * (k - 1) + 1 - sum(side))
        copied = {"reflect": max(side) + 1, "circular": max(side)}.get(mode, 1)
        size.append(max(floor, copied) + draw(st.integers(0, 4 if axes < 3 else 2)))
    groups, c_in, c_out = draw(channels())
    module = CONV[axes](
        c_in,
        c_out,
        maybe_int(draw, kernel),
        stride=maybe_int(draw, stride),
        padding=padding if isinstance(padding, str) else maybe_int(draw, padding),
        dilation=maybe_int(draw, dilation),
        groups=groups,
        padding_mode=mode,
        dtype=torch.float64,
    )
    x = normal(draw(st.integers(1, 3)), c_in, *size, seed=draw(st.integers(0, 99)))
    return module, x


@st.composite
def transposed_convolutions(draw):
    """Returns (module, x) in float64, with every output_padding that torch itself accepts."""
    axes = draw(st.integers(1, 3))
    kernel = tuples(draw, axes, 1, {1: 5, 2: 4, 3: 3}[axes])
    stride = tuples(draw, axes, 1, 3)
    dilation = tuples(draw, axes, 1, 3 if axes < 3 else 2)
    padding = tuples(draw, axes, 0, 2)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    size = tuples(draw, axes, 1, 4 if axes < 3 else 3)
    geometry = zip(size, kernel, stride, dilation, padding, extra, strict=True)
    assume(all((n - 1) * s - 2 * p + d * (k - 1) + 1 + o >= 1 for n, k, s, d, p, o in geometry))
    groups, c_in, c_out = draw(channels())
    module = CONV_TRANSPOSE[axes](
        c_in,
        c_out,
        maybe_int(draw, kernel),
        stride=maybe_int(draw, stride),
        padding=maybe_int(draw, padding),
        output_padding=extra,
        dilation=maybe_int(draw, dilation),
        groups=groups,
        dtype=torch.float64,
    )
    x = normal(draw(st.integers(1, 3)), c_in, *size, seed=draw(st.integers(0, 99)))
    return module, x


def geometry_of(module):
    names = ["kernel_size", "stride", "padding", "dilation", "groups"]
    if not module.transposed:
        names.append("padding_mode")
    return {name: getattr(module, name) for name in names}


def backward(module, x):
    """Returns (weight.grad, g) of a loss that is not linear in the module's output."""
    y = module(x)
    g, weight = torch.autograd.grad((y.sin() * y).sum(), (y, module.weight))
    return weight, g


# ---------------------------------------------------------------- convolutions


@examples
@given(convolutions())
def test_conv_is_the_norm_of_the_terms_that_add_up_to_autograds_weight_gradient(case):
    module, x = case
    weight_grad, g = backward(module, x)
    oracle = reference.Conv(x, g, **geometry_of(module))
    close(oracle.weight_grad, weight_grad)  # ties the oracle to torch: same patches, same groups
    close(NF.normgrad_conv(x, g, **geometry_of(module), accumulate=False), oracle.on_output)
    close(NF.normgrad_conv(x, g, **geometry_of(module)), oracle.on_input)


def box_of(module):
    """Returns the module of torch itself that sums over the same windows: one channel, ones for weights."""
    geometry = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "padding_mode")}
    if module.transposed:
        geometry["output_padding"] = module.output_padding
    box = type(module)(1, 1, module.kernel_size, bias=False, dtype=torch.float64, **geometry)
    nn.init.ones_(box.weight)
    return box


@few_examples
@given(convolutions())
def test_conv_spreads_as_autograd_sends_back_through_torchs_own_box(case):
    module, x = case
    _, g = backward(module, x)
    m = NF.normgrad_conv(x, g, **geometry_of(module), accumulate=False)
    seed = torch.zeros_like(x[:, :1]).requires_grad_()
    (expected,) = torch.autograd.grad(box_of(module)(seed), seed, m[:, None])
    close(NF.normgrad_conv(x, g, **geometry_of(module)), expected[:, 0])


@few_examples
@given(convolutions())
def test_conv_spreads_by_the_adjoint_of_the_box_that_it_gathers_with(case):
    module, x = case
    geometry = geometry_of(module) | {"groups": 1}
    b = x[:, :1].abs() + 0.1
    ones = torch.ones_like(module(x)[:, :1]).detach()
    box_b = NF.normgrad_conv(b.sqrt(), ones, **geometry, accumulate=False).square()
    a = normal(*box_b.shape, seed=1).abs()
    g = torch.where(box_b > 0, a / box_b.sqrt(), 0.0)[:, None]  # makes m = a, where a patch holds any pixel
    spread_a = NF.normgrad_conv(b.sqrt(), g, **geometry)
    close((box_b * a).sum(), (b[:, 0] * spread_a).sum())


@pytest.mark.parametrize("mode", PADDING_MODES)
def test_each_share_of_a_pad_goes_to_the_pixel_it_was_copied_from(mode):
    """Four pixels, three taps, one pad a side, one unit at the first output: worked out by hand."""
    x, g = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]]).double(), torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]).double()
    patch, receivers = {
        "zeros": ([0, 1, 2], [1, 1, 0, 0]),
        "reflect": ([2, 1, 2], [1, 2, 0, 0]),
        "replicate": ([1, 1, 2], [2, 1, 0, 0]),
        "circular": ([4, 1, 2], [1, 1, 0, 1]),
    }[mode]
    m = torch.tensor(patch).double().norm()
    actual = NF.normgrad_conv(x, g, kernel_size=3, padding=1, padding_mode=mode)
    close(actual, m * torch.tensor([receivers]).double())


def test_same_puts_the_odd_pad_after():
    x, g = torch.tensor([[[1.0, 2.0, 4.0]]]).double(), torch.ones(1, 1, 3).double()
    actual = NF.normgrad_conv(x, g, kernel_size=2, padding="same", accumulate=False)
    close(actual, torch.tensor([[5.0, 20.0, 16.0]]).double().sqrt())


def test_groups_are_not_the_product_of_whole_norms():
    x, g = torch.tensor([3.0, 0.0]).double().view(1, 2, 1, 1), torch.tensor([0.0, 5.0]).double().view(1, 2, 1, 1)
    close(NF.normgrad_conv(x, g, kernel_size=1, groups=2), torch.zeros(1, 1, 1).double())
    close(NF.normgrad_conv(x, g, kernel_size=1), torch.full((1, 1, 1), 15.0).double())


def test_pixels_that_no_patch_reads_get_nothing():
    x, g = normal(2, 3, 8, 8), normal(2, 4, 3, 3, seed=1)
    actual = NF.normgrad_conv(x, g, kernel_size=2, stride=3)
    assert (actual[:, 2::3] == 0).all()
    assert (actual[:, :, 2::3] == 0).all()
    covered = actual[:, [0, 1, 3, 4, 6, 7]][:, :, [0, 1, 3, 4, 6, 7]]
    assert (covered > 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("groups", [1, 16])
def test_where_the_patch_is_zero_the_map_is_exactly_zero(dtype, groups):
    """Rounding in a fast convolution would give a tiny negative square here, and NaN as its root."""
    x, g = normal(2, 16, 48, 48, dtype=dtype) * 1e3, normal(2, 16, 48, 48, seed=1, dtype=dtype)
    x[..., 20:] = 0
    actual = NF.normgrad_conv(x, g, kernel_size=3, padding=1, groups=groups, accumulate=False)
    assert actual.isfinite().all()
    assert (actual[..., 21:] == 0).all()
    assert (actual[..., :21] > 0).all()


@examples
@given(transposed_convolutions())
def test_conv_transpose_is_the_norm_of_the_terms_that_add_up_to_autograds_weight_gradient(case):
    module, x = case
    weight_grad, g = backward(module, x)
    oracle = reference.ConvTranspose(x, g, **geometry_of(module))
    close(oracle.weight_grad, weight_grad)
    close(NF.normgrad_conv_transpose(x, g, **geometry_of(module), accumulate=False), oracle.on_input)
    close(NF.normgrad_conv_transpose(x, g, **geometry_of(module)), oracle.on_output)


@few_examples
@given(transposed_convolutions())
def test_conv_transpose_spreads_as_torch_itself_writes(case):
    module, x = case
    _, g = backward(module, x)
    m = NF.normgrad_conv_transpose(x, g, **geometry_of(module), accumulate=False)
    expected = box_of(module)(m[:, None])[:, 0].detach()
    close(NF.normgrad_conv_transpose(x, g, **geometry_of(module)), expected)


def test_conv_transpose_takes_an_output_padding_beyond_the_stride():
    """With dilation 3 torch allows output_padding 2 at stride 1: one more row than any window starts at."""
    module = nn.ConvTranspose2d(4, 6, 2, stride=1, dilation=3, output_padding=2, groups=2, dtype=torch.float64)
    x = normal(2, 4, 3, 4)
    weight_grad, g = backward(module, x)
    oracle = reference.ConvTranspose(x, g, **geometry_of(module))
    close(oracle.weight_grad, weight_grad)
    close(NF.normgrad_conv_transpose(x, g, **geometry_of(module), accumulate=False), oracle.on_input)
    on_output = NF.normgrad_conv_transpose(x, g, **geometry_of(module))
    close(on_output, oracle.on_output)
    assert (on_output[:, -2:] == 0).all()  # nothing is written there


def test_conv_transpose_is_the_conv_with_x_and_g_swapped():
    x, g = normal(2, 4, 5, 6), normal(2, 6, 11, 13, seed=1)
    geometry = {"kernel_size": 3, "stride": 2, "groups": 2}
    swapped = NF.normgrad_conv(g, x, **geometry)
    close(NF.normgrad_conv_transpose(x, g, **geometry), swapped)


# ---------------------------------------------------------------- any point, tokens


@few_examples
@given(
    size=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    n=st.integers(1, 3),
    c=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_normgrad_is_the_norm_of_the_terms_of_an_inserted_identity_convolution(size, n, c, seed):
    axes = len(size)
    before = nn.Sequential(CONV[axes](3, c, 1), nn.Tanh()).double()
    after = nn.Sequential(CONV[axes](c, 4, 3, padding=1), nn.Softplus()).double()
    identity = CONV[axes](c, c, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        identity.weight.copy_(torch.eye(c).reshape(identity.weight.shape))
    image = normal(n, 3, *size, seed=seed)

    x = before(image)
    y = after(x)
    (g,) = torch.autograd.grad(y.square().sum(), x)
    y_with = after(identity(before(image)))
    (weight_grad,) = torch.autograd.grad(y_with.square().sum(), identity.weight)

    close(y_with, y)
    close(reference.point_products(x, g).sum(dim=(0, 1)), weight_grad.reshape(c, c))
    close(NF.normgrad(x, g), reference.normgrad(x, g))


@few_examples
@given(
    size=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    c=st.integers(1, 5),
    d=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_linear_is_the_norm_of_the_terms_that_add_up_to_autograds_weight_gradient(size, c, d, seed):
    module = nn.Linear(c, d, dtype=torch.float64)
    x = normal(2, *size, c, seed=seed)
    weight_grad, g = backward(module, x)
    close(reference.point_products(x.movedim(-1, 1), g.movedim(-1, 1)).sum(dim=(0, 1)), weight_grad)
    close(NF.normgrad_linear(x, g), reference.normgrad_linear(x, g))


def test_linear_is_a_1x1_convolution_on_the_tokens():
    x, g = normal(2, 7, 4), normal(2, 7, 5, seed=1)
    close(NF.normgrad_linear(x, g), NF.normgrad_conv(x.mT, g.mT, kernel_size=1))


# ---------------------------------------------------------------- Grad-CAM


@few_examples
@given(
    size=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    n=st.integers(1, 3),
    c=st.integers(1, 4),
    seed=st.integers(0, 99),
)
def test_grad_cam_matches_plain_loops(size, n, c, seed):
    x, g = normal(n, c, *size, seed=seed), normal(n, c, *size, seed=seed + 100)
    close(NF.grad_cam(x, g), reference.grad_cam(x, g))


def classifier_at_its_pool(labels=(0, 1, 1)):
    """Returns (x, logits, labels) of a small network, x being the input of its global average pool."""
    torch.manual_seed(0)
    features = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.Tanh()).double()
    head = nn.Linear(6, 2).double()
    x = features(normal(len(labels), 3, 9, 8))
    return x, head(x.mean(dim=(2, 3))), torch.tensor(labels)


def test_grad_cam_before_a_global_average_pool_is_normgrad_times_the_cosine():
    x, logits, labels = classifier_at_its_pool()
    (g,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels), x)
    cosine = torch.nn.functional.cosine_similarity(-g, x, dim=1)
    cam = NF.grad_cam(x, -g)
    close(cam, cosine.clamp(min=0) * NF.normgrad(x, g), atol=1e-14)
    assert 0.1 < (cam > 0).double().mean() < 0.9  # both signs of the cosine are tried


def test_grad_cam_of_minus_a_losss_gradient_is_that_of_the_labels_score():
    """With two classes, −∂loss/∂x = (1 − p_label) · ∂(score of the label − score of the other)/∂x."""
    x, logits, labels = classifier_at_its_pool()
    picked = torch.nn.functional.one_hot(labels, 2).bool()
    margin = logits[picked] - logits[~picked]
    (of_loss,) = torch.autograd.grad(nn.functional.cross_entropy(logits, labels, reduction="sum"), x, retain_graph=True)
    (of_margin,) = torch.autograd.grad(margin.sum(), x)
    doubt = 1 - torch.sigmoid(margin.detach())
    close(NF.grad_cam(x, -of_loss), doubt[:, None, None] * NF.grad_cam(x, of_margin), atol=1e-14)


def test_grad_cam_shows_what_speaks_for_the_label_and_hides_what_speaks_against_it():
    x = torch.zeros(1, 2, 1, 4, dtype=torch.float64)
    x[0, 0, 0, :2], x[0, 1, 0, 2:] = 1.0, 1.0  # left: evidence for class 0; right: for class 1
    x.requires_grad_()
    loss = nn.functional.cross_entropy(x.mean(dim=(2, 3)), torch.tensor([0]))
    (g,) = torch.autograd.grad(loss, x)
    assert (NF.grad_cam(x, -g)[0, 0] > 0).tolist() == [True, True, False, False]
    assert (NF.grad_cam(x, g)[0, 0] > 0).tolist() == [False, False, True, True]


# ---------------------------------------------------------------- what tensors may come as

# Each entry: the function on (x, g), then the shapes of x and g.
CALLS = {
    "normgrad": (NF.normgrad, (2, 6, 7, 5), (2, 6, 7, 5)),
    "conv": (
        lambda x, g: NF.normgrad_conv(x, g, kernel_size=(3, 2), stride=2, padding=1),
        (2, 6, 7, 5),
        (2, 4, 4, 3),
    ),
    "conv, on the output": (
        lambda x, g: NF.normgrad_conv(x, g, kernel_size=(3, 2), stride=2, padding=1, accumulate=False),
        (2, 6, 7, 5),
        (2, 4, 4, 3),
    ),
    "conv, depthwise, circular": (
        lambda x, g: NF.normgrad_conv(x, g, kernel_size=3, padding="same", groups=6, padding_mode="circular"),
        (2, 6, 7, 5),
        (2, 6, 7, 5),
    ),
    "conv transpose": (
        lambda x, g: NF.normgrad_conv_transpose(x, g, kernel_size=3, stride=2, padding=1, groups=2),
        (2, 6, 4, 3),
        (2, 4, 8, 5),
    ),
    "linear": (NF.normgrad_linear, (2, 7, 5, 6), (2, 7, 5, 4)),
    "grad_cam": (NF.grad_cam, (2, 6, 7, 5), (2, 6, 7, 5)),
}
every_call = pytest.mark.parametrize(("call", "x_shape", "g_shape"), CALLS.values(), ids=CALLS)


def every_other(tensor):
    """Returns the same values as a view with a gap after each."""
    return torch.stack([tensor, tensor + 7], -1)[..., 0]


LAYOUTS = {
    "channels_last": lambda t: t.contiguous(memory_format=torch.channels_last),
    "transposed": lambda t: t.mT.contiguous().mT,
    "strided": every_other,
}


@every_call
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_layout_in_memory_does_not_matter(call, x_shape, g_shape, layout):
    x, g = normal(*x_shape), normal(*g_shape, seed=1)
    expected = call(x, g)
    assert layout(x).stride() != x.stride()
    close(call(layout(x), g), expected)
    close(call(x, layout(g)), expected)
    close(call(layout(x), layout(g)), expected)


@every_call
def test_expanded_tensors_are_read_and_not_written(call, x_shape, g_shape):
    """The gradient of a mean is one number expanded to a whole tensor."""
    x, g = normal(*x_shape[1:]).expand(x_shape), torch.tensor(0.25, dtype=torch.float64).expand(g_shape)
    close(call(x, g), call(x.contiguous(), g.contiguous()))
    close(g, torch.full(g_shape, 0.25, dtype=torch.float64))


@every_call
def test_images_of_a_batch_do_not_mix(call, x_shape, g_shape):
    x, g = normal(*x_shape), normal(*g_shape, seed=1)
    close(call(x, g), torch.cat([call(x[:1], g[:1]), call(x[1:], g[1:])]))


@every_call
def test_an_empty_batch_gives_an_empty_map(call, x_shape, g_shape):
    full = call(normal(*x_shape), normal(*g_shape))
    empty = call(normal(0, *x_shape[1:]), normal(0, *g_shape[1:]))
    assert (empty.shape, empty.dtype) == ((0, *full.shape[1:]), full.dtype)


@pytest.mark.parametrize("mode", PADDING_MODES)
def test_an_empty_batch_passes_every_padding_mode(mode):
    x, g = normal(0, 4, 6, 5), normal(0, 4, 6, 5)
    actual = NF.normgrad_conv(x, g, kernel_size=3, padding=1, padding_mode=mode)
    assert actual.shape == (0, 6, 5)


@every_call
def test_inputs_are_left_alone_and_no_graph_is_kept(call, x_shape, g_shape):
    x, g = normal(*x_shape), normal(*g_shape, seed=1)
    expected = call(x, g)
    leaf = x.clone().requires_grad_()
    on_graph, g_on_graph = leaf * 1.0, g.clone().requires_grad_() * 1.0
    actual = call(on_graph, g_on_graph)
    assert not actual.requires_grad
    close(actual, expected)
    assert (on_graph._version, g_on_graph._version) == (0, 0)
    close(on_graph.detach(), x)
    close(g_on_graph.detach(), g)
    on_graph.sum().backward()  # the graph that was there still is
    close(leaf.grad, torch.ones_like(x))


@every_call
def test_the_map_is_no_view_of_the_inputs(call, x_shape, g_shape):
    """A map outlives the step; in-place layers overwrite what it was made from."""
    x, g = normal(*x_shape), normal(*g_shape, seed=1)
    actual = call(x, g)
    kept = actual.clone()
    x.zero_()
    g.zero_()
    close(actual, kept)


@every_call
def test_inference_mode_and_no_grad_change_nothing(call, x_shape, g_shape):
    x, g = normal(*x_shape), normal(*g_shape, seed=1)
    expected = call(x, g)
    with torch.inference_mode():
        close(call(x.clone(), g.clone()).clone(), expected)
    with torch.no_grad():
        close(call(x, g), expected)


# ---------------------------------------------------------------- precision


@every_call
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_up_to_float32_the_map_is_float32_and_right(call, x_shape, g_shape, dtype):
    x, g = normal(*x_shape, dtype=dtype), normal(*g_shape, seed=1, dtype=dtype)
    actual = call(x, g)
    assert actual.dtype == torch.float32
    close(actual.double(), call(x.double(), g.double()), rtol=2e-6, atol=2e-6)


@every_call
def test_half_activations_may_come_with_float32_gradients(call, x_shape, g_shape):
    x, g = normal(*x_shape, dtype=torch.float16), normal(*g_shape, seed=1, dtype=torch.float32)
    actual = call(x, g)
    assert actual.dtype == torch.float32
    close(actual.double(), call(x.double(), g.double()), rtol=2e-6, atol=2e-6)


@every_call
def test_float64_stays_float64(call, x_shape, g_shape):
    assert call(normal(*x_shape), normal(*g_shape)).dtype == torch.float64


@every_call
@pytest.mark.parametrize("dtype", HALF)
def test_half_values_whose_squares_overflow(call, x_shape, g_shape, dtype):
    x, g = torch.full(x_shape, 300.0).to(dtype), torch.full(g_shape, 300.0).to(dtype)
    actual = call(x, g)
    assert actual.isfinite().all()
    close(actual.double(), call(x.double(), g.double()), rtol=2e-6, atol=0)


def test_half_by_hand():
    x = torch.full((1, 4, 2, 2), 300.0, dtype=torch.float16)
    close(NF.normgrad(x, x), torch.full((1, 2, 2), 360_000.0))
    close(NF.normgrad_conv(x[..., :1, :1], x[..., :1, :1], kernel_size=1), torch.full((1, 1, 1), 360_000.0))


@every_call
def test_half_gradients_whose_squares_vanish(call, x_shape, g_shape):
    """fp16 squares of gradients below 2e-4 are zero: the map must not be."""
    x, g = normal(*x_shape, dtype=torch.float16), torch.full(g_shape, 6e-8, dtype=torch.float16)
    expected = call(x.double(), g.double())
    assert expected.max() > 0
    close(call(x, g).double(), expected, rtol=2e-6, atol=1e-14)


@every_call
@pytest.mark.parametrize("dtype", HALF)
def test_autocast_does_not_reach_the_arithmetic(call, x_shape, g_shape, dtype):
    """Hooks run inside the user's autocast, which would send a float32 convolution back to half."""
    x, g = normal(*x_shape, dtype=torch.float32) * 300, normal(*g_shape, seed=1, dtype=torch.float32) * 300
    expected = call(x, g)
    with torch.autocast("cpu", dtype=dtype):
        actual = call(x, g)
    assert actual.dtype == torch.float32
    close(actual, expected, rtol=1e-6, atol=0)


# ---------------------------------------------------------------- memory


def peak_allocation(call):
    """Returns the most bytes that were live at once during the call, inside the operators too."""
    peak, result = peak_bytes(call), call()
    assert peak >= result.numel() * result.element_size()  # the profiler did see the call
    return peak


def test_peak_allocation_sees_what_comes_and_goes():
    megabyte = torch.zeros(2**18)
    assert 2 * 2**20 <= peak_allocation(lambda: (megabyte + 1) + 1) < 2.1 * 2**20
    assert 2**20 <= peak_allocation(lambda: (megabyte + 1).sum()) < 1.1 * 2**20


@pytest.mark.parametrize("groups", [1, 32], ids=["dense", "depthwise"])
@pytest.mark.parametrize("accumulate", [True, False])
def test_a_7x7_kernel_takes_no_more_than_twice_the_memory_of_a_1x1(accumulate, groups):
    x, g = normal(4, 32, 40, 40, dtype=torch.float32), normal(4, 32, 40, 40, seed=1, dtype=torch.float32)

    def of_kernel(k):
        return NF.normgrad_conv(x, g, kernel_size=k, padding=k // 2, groups=groups, accumulate=accumulate)

    limit = 2 * peak_allocation(lambda: of_kernel(1))
    assert peak_allocation(lambda: of_kernel(7)) <= limit


def test_unfolding_the_patches_would_break_the_limit_on_memory():
    x, g = normal(4, 32, 40, 40, dtype=torch.float32), normal(4, 32, 40, 40, seed=1, dtype=torch.float32)

    def unfolded():
        return reference.normgrad_conv_by_unfold(x, g, kernel_size=7, padding=3)

    def ours(k):
        return NF.normgrad_conv(x, g, kernel_size=k, padding=k // 2, accumulate=False)

    close(ours(7), unfolded(), rtol=1e-5, atol=1e-5)  # the same map, at 20 times the price
    assert peak_allocation(unfolded) > 20 * peak_allocation(lambda: ours(1))


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("call", [NF.normgrad, NF.grad_cam])
def test_another_batch_or_spatial_shape_is_refused(call):
    x = normal(2, 4, 5, 7)
    with pytest.raises(ValueError, match=says("`g`", "`x`", "5, 7", "5, 8")):
        call(x, normal(2, 4, 5, 8))
    with pytest.raises(ValueError, match=says("`g`", "`x`", "2", "3")):
        call(x, normal(3, 4, 5, 7))
    with pytest.raises(ValueError, match=says("`g`", "`x`", "5, 7")):
        call(x, normal(2, 4, 35))
    with pytest.raises(ValueError, match=says("`g`", "`x`", "5, 7", "1, 7")):
        call(x, normal(2, 4, 1, 7))  # would broadcast, silently
    with pytest.raises(ValueError, match=says("`g`", "`x`", "2", "1")):
        call(x, normal(1, 4, 5, 7))


def test_grad_cam_refuses_other_channels():
    with pytest.raises(ValueError, match=says("`g`", "`x`", "4", "1")):
        NF.grad_cam(normal(2, 4, 5, 7), normal(2, 1, 5, 7))


def test_linear_refuses_other_tokens():
    x = normal(2, 7, 4)
    with pytest.raises(ValueError, match=says("`g`", "`x`", "7", "8")):
        NF.normgrad_linear(x, normal(2, 8, 5))
    with pytest.raises(ValueError, match=says("`g`", "`x`", "2", "3")):
        NF.normgrad_linear(x, normal(3, 7, 5))
    with pytest.raises(ValueError, match=says("`g`", "`x`")):
        NF.normgrad_linear(x, normal(2, 1, 5))


@pytest.mark.parametrize("wrong", [(5, 6), (5, 8), (1, 1), (9, 13)])
def test_conv_refuses_a_gradient_that_does_not_fit_the_geometry(wrong):
    with pytest.raises(ValueError, match=says("`g`", "5, 7", "{}, {}".format(*wrong))):
        NF.normgrad_conv(normal(2, 4, 9, 13), normal(2, 3, *wrong), kernel_size=3, stride=2, padding=1)


@pytest.mark.parametrize("n", [1, 3])
def test_conv_refuses_another_batch(n):
    with pytest.raises(ValueError, match=says("`g`", "2, 4, 9, 9", f"{n}, 5, 7, 7")):
        NF.normgrad_conv(normal(2, 4, 9, 9), normal(n, 5, 7, 7), kernel_size=3)
    with pytest.raises(ValueError, match=says("`g`", "2, 4, 7, 7", f"{n}, 5, 9, 9")):
        NF.normgrad_conv_transpose(normal(2, 4, 7, 7), normal(n, 5, 9, 9), kernel_size=3)


def test_conv_transpose_takes_just_the_sizes_that_some_output_padding_gives():
    """(5−1)·2 − 2·1 + 3·(2−1) + 1 = 10, and up to max(stride, dilation) − 1 = 2 more."""
    x, geometry = normal(2, 4, 5), {"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 3}
    for size in (10, 11, 12):
        g = normal(2, 3, size, seed=1)
        close(NF.normgrad_conv_transpose(x, g, **geometry), reference.ConvTranspose(x, g, **geometry).on_output)
    for size in (9, 13):
        with pytest.raises(ValueError, match=says("`g`", "2, 4, 5", f"2, 3, {size}")):
            NF.normgrad_conv_transpose(x, normal(2, 3, size), **geometry)


@pytest.mark.parametrize("given", ["mirror", "zero", "constant"])
def test_unknown_padding_modes_are_refused(given):
    with pytest.raises(ValueError, match=says("`padding_mode`", *PADDING_MODES, given)):
        NF.normgrad_conv(normal(2, 4, 5, 5), normal(2, 4, 5, 5), kernel_size=3, padding=1, padding_mode=given)


def test_unknown_padding_words_are_refused():
    x, g = normal(2, 4, 5, 5), normal(2, 4, 5, 5)
    with pytest.raises(ValueError, match=says("`padding`", "same", "valid", "full")):
        NF.normgrad_conv(x, g, kernel_size=3, padding="full")


def test_a_setting_for_another_number_of_axes_is_refused():
    x, g = normal(2, 4, 5, 5), normal(2, 4, 3, 3)
    for name in ("kernel_size", "stride", "padding", "dilation"):
        setting = {"kernel_size": 3} | {name: (3, 3, 3)}
        with pytest.raises(ValueError, match=says(f"`{name}`", "2", "3, 3, 3")):
            NF.normgrad_conv(x, g, **setting)
        with pytest.raises(ValueError, match=says(f"`{name}`", "2", "3, 3, 3")):
            NF.normgrad_conv_transpose(g, x, **setting)


TOO_FLAT = {
    "normgrad": lambda x: NF.normgrad(x, x),
    "conv": lambda x: NF.normgrad_conv(x, x, kernel_size=1),
    "conv transpose": lambda x: NF.normgrad_conv_transpose(x, x, kernel_size=1),
    "grad_cam": lambda x: NF.grad_cam(x, x),
}


@pytest.mark.parametrize("call", TOO_FLAT.values(), ids=TOO_FLAT)
def test_fewer_than_three_dimensions_are_refused(call):
    with pytest.raises(ValueError, match=says("`x`", "spatial", "4, 6")):
        call(normal(4, 6))


@pytest.mark.parametrize("call", [NF.normgrad_conv, NF.normgrad_conv_transpose])
def test_channels_that_the_groups_do_not_divide_are_refused(call):
    with pytest.raises(ValueError, match=says("`x`", "`groups`", "5", "2")):
        call(normal(1, 5, 6, 6), normal(1, 4, 6, 6), kernel_size=1, groups=2)
    with pytest.raises(ValueError, match=says("`g`", "`groups`", "7", "2")):
        call(normal(1, 4, 6, 6), normal(1, 7, 6, 6), kernel_size=1, groups=2)


@every_call
def test_integer_tensors_are_refused(call, x_shape, g_shape):
    x, g = normal(*x_shape), normal(*g_shape)
    with pytest.raises(ValueError, match=says("`x`", "float", "int64")):
        call(x.long(), g)
    with pytest.raises(ValueError, match=says("`g`", "float", "uint8")):
        call(x, g.to(torch.uint8))
