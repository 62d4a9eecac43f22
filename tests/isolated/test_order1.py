"""Order-1 maps: against four real passes, against the exact meta-gradient, at their price, and without a trace."""

import copy
import importlib
import itertools
import math
import random
import re
import warnings

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from networks import ResNet, ViT, batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normgrad_lightning import functional as NF
from normgrad_lightning import order0_maps
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.one_pass import NotFinite
from normgrad_lightning.isolated.order1 import order1_maps, run_passes
from normgrad_lightning.layers.options import ReadOptions

module = importlib.import_module("normgrad_lightning.isolated.inner_step")

examples = settings(derandomize=True, max_examples=150, suppress_health_check=list(HealthCheck))
EPSILON = 0.05  # large enough for the Hessian term to be a good part of the map


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def sum_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def difference(actual, expected):
    """The largest error, relative to the largest value of the map."""
    assert actual.shape == expected.shape
    assert expected.max() > 0
    return float((actual - expected).abs().max() / expected.abs().max())


def close(actual, expected, tolerance=1e-10):
    assert set(actual) == set(expected)
    for name, m in expected.items():
        assert actual[name].dtype == torch.float64
        assert difference(actual[name], m) <= tolerance, name


def same_bits(actual, expected):
    assert list(actual) == list(expected)
    assert all(torch.equal(actual[name], m) and m.sum() > 0 for name, m in expected.items())


class SmoothNet(nn.Module):
    """Groups, strides, dilation, padding modes, a residual and a way up again, and no kink anywhere."""

    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1, padding_mode="reflect")
        self.norm = nn.BatchNorm2d(6)
        self.grouped = nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2)
        self.depthwise = nn.Conv2d(8, 8, (3, 2), padding="same", groups=8, padding_mode="circular", bias=False)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
        self.dilated = nn.Conv2d(6, 5, 3, padding=2, dilation=2, padding_mode="replicate")
        self.head = nn.Linear(5, classes)

    def forward(self, x):
        x = F.gelu(self.grouped(F.softplus(self.norm(self.stem(x)))))
        x = x + F.silu(self.depthwise(x))
        return self.head(F.softplus(self.dilated(torch.tanh(self.up(x)))).mean((2, 3)))


CONVS = ["stem", "grouped", "depthwise", "up", "dilated"]
LAYERS = [*CONVS, "norm"]


class SmoothViT(ViT):
    """A small transformer without kinks."""

    def __init__(self):
        super().__init__(image=(16, 24), extra=2, depth=0, width=8)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, activation="gelu", batch_first=True) for _ in range(2)
        )


class ChannelsLast(nn.Module):
    """A block as in ConvNeXt: its features are (N, H, W, C) between the convolutions."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 6, 2, stride=2)
        self.norm = nn.LayerNorm(6)
        self.wide = nn.Linear(6, 9)
        self.head = nn.Linear(9, 5)

    def forward(self, x):
        x = self.wide(self.norm(self.embed(x).permute(0, 2, 3, 1)))
        return self.head(F.gelu(x).square().mean((1, 2)))


def built(network, seed=0):
    """The network in float64, with statistics and affine weights that are not those it starts with."""
    torch.manual_seed(seed)
    model = network().double()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.running_mean.normal_(), m.running_var.uniform_(0.5, 2)
            nn.init.normal_(m.weight, 1, 0.2), nn.init.normal_(m.bias)
    return model.eval()


def smooth(n=2, size=(6, 8)):
    return built(SmoothNet), batch(n, size, dtype=torch.float64)


def tiny():
    """A small model for what does not depend on the architecture."""
    torch.manual_seed(0)
    convs = nn.Conv2d(3, 4, 3, padding=1), nn.Softplus(), nn.Conv2d(4, 4, 3)
    model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(4 * 4 * 5, 5)).double()
    return model, batch(2, (6, 7), dtype=torch.float64)


def singles(images_labels):
    return [tuple(part[i : i + 1] for part in images_labels) for i in range(len(images_labels[0]))]


# ---------------------------------------------------------------- four real passes

FORMS = [
    {"adversarial": adversarial, "factorised": factorised, "per_image": per_image}
    for adversarial, factorised, per_image in itertools.product([False, True], repeat=3)
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "-".join(k for k, v in form.items() if v) or "plain")
@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_maps_are_those_of_four_real_passes_and_explicit_outer_products(target, form):
    (model, images_labels), layers = smooth(), CONVS if target == "weight" else LAYERS
    options = dict(target=target, epsilon=EPSILON, **form)
    maps = order1_maps(model, loss_fn, images_labels, layers, **options)
    close(maps, reference.order1(model, loss_fn, images_labels, layers, **options))
    first_order = order1_maps(model, loss_fn, images_labels, layers, second_order=False, **options)
    assert all(difference(first_order[name], maps[name]) > 1e-4 for name in layers)  # or the rest would prove nothing


def test_maps_come_in_the_order_of_the_network_and_need_no_gradient():
    model, images_labels = smooth()
    maps = order1_maps(model, loss_fn, images_labels, ["dilated", "stem", "*ped"])
    assert list(maps) == ["stem", "grouped", "dilated"]
    assert not any(m.requires_grad for m in maps.values())


def test_the_defaults_are_those_of_the_paper():
    model, images_labels = smooth()
    maps = order1_maps(model, loss_fn, images_labels, LAYERS)
    explicit = dict(epsilon=0.0005, adversarial=False, factorised=True, per_image=True, scale=0.5, target="output")
    close(maps, reference.order1(model, loss_fn, images_labels, LAYERS, **explicit))


@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize("adversarial", [True, False])
def test_without_the_hessian_it_is_order_0_after_the_inner_step(adversarial, per_image):
    model, images_labels = smooth()
    options = dict(epsilon=EPSILON, adversarial=adversarial, per_image=per_image, second_order=False)
    expected = []
    for part in singles(images_labels) if per_image else [images_labels]:
        stepped = copy.deepcopy(model)
        loss_fn(stepped, part).backward()
        with torch.no_grad():
            for p in stepped.parameters():
                p += (EPSILON if adversarial else -EPSILON) * p.grad
        expected.append(order0_maps(stepped, loss_fn, part, LAYERS))
    expected = {name: torch.cat([maps[name] for maps in expected]) for name in LAYERS}
    for factorised in (True, False):
        close(order1_maps(model, loss_fn, images_labels, LAYERS, factorised=factorised, **options), expected)


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("per_image", [True, False])
def test_tokens_of_a_transformer_stand_on_their_grid(per_image, factorised):
    model, images_labels = built(SmoothViT), batch(2, (16, 24), dtype=torch.float64)
    options = dict(epsilon=EPSILON, per_image=per_image, factorised=factorised)
    for target, layers in (("output", ["blocks.0", "blocks.0.norm1"]), ("weight", ["blocks.0.linear1"])):
        maps = order1_maps(model, loss_fn, images_labels, layers, target=target, **options)
        tokens = reference.order1(
            model, loss_fn, images_labels, layers, target=target, channels_last=target == "output", **options
        )
        close(maps, {name: m[:, 2:].reshape(2, 2, 3) for name, m in tokens.items()})


@pytest.mark.parametrize("factorised", [True, False])
def test_features_with_their_channels_last(factorised):
    model, images_labels = built(ChannelsLast), batch(2, (6, 8), dtype=torch.float64)
    options = dict(epsilon=EPSILON, factorised=factorised, channels_last=True)
    for target in ("output", "input"):
        maps = order1_maps(model, loss_fn, images_labels, ["norm", "wide"], target=target, **options)
        close(maps, reference.order1(model, loss_fn, images_labels, ["norm", "wide"], target=target, **options))
    maps = order1_maps(model, loss_fn, images_labels, ["wide", "embed"], target="weight", epsilon=EPSILON)
    close(maps, reference.order1(model, loss_fn, images_labels, ["wide", "embed"], target="weight", epsilon=EPSILON))


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("axes", [1, 3])
def test_signals_and_volumes(axes, factorised):
    torch.manual_seed(0)
    conv = {1: nn.Conv1d, 3: nn.Conv3d}[axes]
    model = nn.Sequential(
        conv(2, 4, 3, padding=1),
        nn.Tanh(),
        conv(4, 4, 3, stride=2, padding=1, groups=2),
        nn.Flatten(),
        nn.LazyLinear(5),
    ).double()
    images_labels = torch.randn(2, 2, *(5, 4, 6)[:axes], dtype=torch.float64), torch.tensor([1, 3])
    model(images_labels[0])
    for target in ("output", "weight"):
        options = dict(target=target, epsilon=EPSILON, factorised=factorised)
        maps = order1_maps(model, loss_fn, images_labels, ["0", "2"], **options)
        close(maps, reference.order1(model, loss_fn, images_labels, ["0", "2"], **options))


# ---------------------------------------------------------------- the exact meta-gradient


@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize("adversarial", [False, True])
@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize(
    ("name", "target"), [("norm", "output"), ("depthwise", "output"), ("grouped", "weight"), ("depthwise", "weight")]
)
def test_the_difference_converges_to_the_exact_meta_gradient_as_h_squared(
    monkeypatch, name, target, factorised, adversarial, per_image
):
    model, images_labels = smooth()
    options = dict(target=target, epsilon=EPSILON, adversarial=adversarial, factorised=factorised)
    parts = singles(images_labels) if per_image else [images_labels]
    exact = torch.cat([reference.exact_order1(model, loss_fn, part, name, **options) for part in parts])
    errors = []
    for size in (0.5, 0.05, 0.005, 0.0005):
        monkeypatch.setattr(module, "DIFFERENCE", size)
        maps = order1_maps(model, loss_fn, images_labels, name, per_image=per_image, **options)
        errors.append(difference(maps[name], exact))
    slopes = [math.log10(a / b) for a, b in itertools.pairwise(errors)]
    assert slopes[0] > 1.4, errors
    assert all(1.9 < slope < 2.1 for slope in slopes[1:]), errors
    assert errors[-1] < 1e-6


def test_the_exact_meta_gradient_is_that_of_a_really_inserted_identity_convolution():
    """The oracle's own check: the matrices of all locations add up to the gradient of one weight for all of them."""
    model, images_labels = smooth()
    identity = nn.Conv2d(6, 6, 1, bias=False).double()
    nn.init.dirac_(identity.weight)
    inserted = copy.deepcopy(model)
    inserted.norm = nn.Sequential(inserted.norm, identity)
    weights = {name: p for name, p in inserted.named_parameters() if p is not identity.weight}
    loss = loss_fn(inserted, images_labels)
    inner = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    stepped = {f"model.{n}": p - EPSILON * g for (n, p), g in zip(weights.items(), inner, strict=True)}
    whole = reference.WithLoss(inserted, loss_fn)
    after = torch.func.functional_call(whole, stepped, (images_labels,))
    (expected,) = torch.autograd.grad(after, identity.weight)

    matrices = []
    frobenius = reference.frobenius
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "frobenius", lambda products: matrices.append(products) or frobenius(products))
        reference.exact_order1(model, loss_fn, images_labels, "norm", epsilon=EPSILON)
    torch.testing.assert_close(matrices[0].sum((0, 1, 2))[..., 0], expected[..., 0, 0], rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- laws


@pytest.mark.parametrize("adversarial", [True, False])
@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "weight"])
def test_as_epsilon_goes_to_zero_order_1_goes_to_order_0_linearly(target, factorised, adversarial):
    model, images_labels = smooth()
    expected = order0_maps(model, sum_loss, images_labels, CONVS, target=target)
    options = dict(target=target, factorised=factorised, adversarial=adversarial)
    errors = {name: [] for name in CONVS}
    for epsilon in (1e-3, 1e-4, 1e-5):
        maps = order1_maps(model, loss_fn, images_labels, CONVS, epsilon=epsilon, **options)
        for name in CONVS:
            errors[name].append(difference(maps[name], expected[name]))
    for name in CONVS:
        assert all(0.95 < math.log10(a / b) < 1.05 for a, b in itertools.pairwise(errors[name])), (name, errors)
        assert 0 < errors[name][-1] < 1e-3


@pytest.mark.parametrize("per_image", [True, False])
@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("factor", [3.0, 0.01])
def test_a_loss_times_s_is_a_step_times_s_and_a_map_times_s(factor, factorised, per_image):
    model, images_labels = smooth()
    options = dict(factorised=factorised, per_image=per_image)
    for adversarial in (True, False):
        options["adversarial"] = adversarial
        scaled = order1_maps(model, lambda m, b: factor * loss_fn(m, b), images_labels, LAYERS, epsilon=0.02, **options)
        plain = order1_maps(model, loss_fn, images_labels, LAYERS, epsilon=0.02 * factor, **options)
        close(scaled, {name: factor * m for name, m in plain.items()}, 1e-12)


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "weight"])
def test_adversarial_is_order_1_of_the_negated_loss(target, factorised):
    model, images_labels = smooth()
    options = dict(target=target, epsilon=EPSILON, factorised=factorised)
    adversarial = order1_maps(model, loss_fn, images_labels, CONVS, adversarial=True, **options)
    negated = order1_maps(model, lambda m, b: -loss_fn(m, b), images_labels, CONVS, **options)
    close(adversarial, negated, 1e-12)
    plain = order1_maps(model, loss_fn, images_labels, CONVS, **options)
    assert all(difference(plain[name], adversarial[name]) > 1e-3 for name in CONVS)


def test_a_mean_over_the_batch_takes_a_shorter_step_than_a_sum():
    model, images_labels = smooth(3)
    mean = order1_maps(model, loss_fn, images_labels, LAYERS, epsilon=3 * EPSILON, per_image=False)
    summed = order1_maps(model, sum_loss, images_labels, LAYERS, epsilon=EPSILON, per_image=False)
    close(summed, {name: 3 * m for name, m in mean.items()}, 1e-12)


def test_per_image_maps_do_not_depend_on_the_other_images():
    model, images_labels = smooth(3)
    maps = order1_maps(model, loss_fn, images_labels, LAYERS, epsilon=EPSILON)
    for i, single in enumerate(singles(images_labels)):
        alone = order1_maps(model, loss_fn, single, LAYERS, epsilon=EPSILON, per_image=False)
        close({name: m[i : i + 1] for name, m in maps.items()}, alone, 1e-12)
    together = order1_maps(model, loss_fn, images_labels, LAYERS, epsilon=EPSILON, per_image=False)
    assert all(difference(3 * together[name], maps[name]) > 1e-3 for name in LAYERS)


def test_in_float32_a_network_with_kinks_is_right_on_the_whole():
    torch.manual_seed(0)
    model, (images, labels) = ResNet().eval(), batch(3)
    exact = copy.deepcopy(model).double(), (images.double(), labels)
    for tolerance, maps_of in ((1e-5, order0_maps), (5e-2, order1_maps)):
        maps, expected = (
            maps_of(model, loss_fn, (images, labels), "stage*"),
            maps_of(exact[0], loss_fn, exact[1], "stage*"),
        )
        assert len(maps) == 3
        for name, m in maps.items():
            assert m.dtype == torch.float32
            assert (m.double() - expected[name]).norm() <= tolerance * expected[name].norm(), name


@pytest.mark.parametrize("factorised", [True, False])
def test_mixed_precision_changes_little(factorised):
    torch.manual_seed(0)
    model, images_labels = ResNet().eval(), batch(2)

    def mixed(model, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return loss_fn(model, batch)

    maps, expected = (order1_maps(model, f, images_labels, "stage*", factorised=factorised) for f in (mixed, loss_fn))
    for name, m in maps.items():
        assert m.dtype == torch.float32
        assert 0 < (m - expected[name]).norm() <= 0.1 * expected[name].norm(), name


# ---------------------------------------------------------------- the functions


def normal(*shape, seed, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def explicit(pairs, factors):
    """‖Σ a g_u x_uᵀ‖_F from the matrices themselves."""
    total = sum(a * reference.point_products(x, g) for a, (x, g) in zip(factors, pairs, strict=True))
    return total.square().sum((2, 3)).sqrt().reshape(pairs[0][0].shape[0], *pairs[0][0].shape[2:])


@st.composite
def three_pairs(draw):
    """(x, g) of three passes, the gradient with channels of its own, the later ones near the first or far from it."""
    n, grid = draw(st.integers(1, 3)), draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    c, d, seed = draw(st.integers(1, 5)), draw(st.integers(1, 5)), draw(st.integers(0, 999))
    apart = draw(st.sampled_from([0.0, 1e-3, 1.0, 30.0]))
    first = normal(n, c, *grid, seed=seed), normal(n, d, *grid, seed=seed + 1)
    return [
        tuple(t + apart * place * normal(*t.shape, seed=seed + 7 * place) for t in first) for place in range(3)
    ], draw(st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]))


@examples
@given(three_pairs(), st.floats(1e-4, 3), st.floats(1e-3, 3), st.booleans())
def test_the_function_is_the_norm_of_the_explicit_matrices(case, epsilon, h, adversarial):
    pairs, dtype = case
    pairs = [(x.to(dtype), g.to(dtype)) for x, g in pairs]
    factor = (1 if adversarial else -1) * epsilon / (2 * h)
    options = dict(epsilon=epsilon, h=h, adversarial=adversarial)
    g = pairs[0][1].double() + factor * (pairs[1][1].double() - pairs[2][1].double())
    arguments = list(itertools.chain(*pairs))
    whole, factorised = (NF.normgrad_order1(*arguments, factorised=f, **options) for f in (False, True))
    assert whole.dtype == factorised.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    size = max(1.0, abs(factor)) * max(float(reference.normgrad(x, g).max()) for x, g in pairs)
    rtol = 1e-9 if dtype == torch.float64 else 1e-5
    expected = explicit(pairs, [1.0, factor, -factor])
    torch.testing.assert_close(whole.double(), expected, rtol=rtol, atol=1e-7 * size)
    g_size = max(1.0, abs(factor)) * max(float(g.abs().max()) for _, g in pairs) * float(pairs[0][0].abs().max())
    torch.testing.assert_close(factorised.double(), reference.normgrad(pairs[0][0], g), rtol=rtol, atol=rtol * g_size)


def test_terms_that_nearly_cancel_keep_their_digits():
    x, g = normal(2, 4, 5, 5, seed=0, dtype=torch.float32), normal(2, 4, 5, 5, seed=1, dtype=torch.float32)
    x_minus, g_minus = 1e-2 * x.roll(1, 1), 1e-3 * g.roll(1, 1)
    actual = NF.normgrad_order1(x, g, x, g, x_minus, g_minus, epsilon=2.0, h=1.0, factorised=False)
    expected = reference.normgrad(x_minus, g_minus)
    assert expected.max() < 1e-3
    assert ((actual.double() - expected).abs() <= 1e-4 * expected).all()


@pytest.mark.parametrize("factorised", [True, False])
def test_terms_that_cancel_to_nothing_give_zero_and_not_nan(factorised):
    """But for rounding, which makes half of the squares negative."""
    x, g = normal(2, 4, 9, 9, seed=0), normal(2, 3, 9, 9, seed=1)
    scale = 1 if factorised else 3
    actual = NF.normgrad_order1(x, g, x * scale, g / scale, x, 0 * g, epsilon=2.0, h=1.0, factorised=factorised)
    assert actual.isfinite().all()
    assert actual.max() < 1e-6


@pytest.mark.parametrize("factorised", [True, False])
def test_with_an_infinite_h_the_function_is_order_0(factorised):
    x, g, x_plus, g_plus, x_minus, g_minus = (normal(2, 3, 4, 5, seed=seed) for seed in range(6))
    for adversarial in (True, False):
        actual = NF.normgrad_order1(
            *(x, g, x_plus, g_plus, x_minus, g_minus),
            epsilon=0.1,
            h=math.inf,
            adversarial=adversarial,
            factorised=factorised,
        )
        torch.testing.assert_close(actual, reference.normgrad(x, g), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(1, 3, 4, 5), (2, 3, 4, 1), (2, 3, 4, 6), (2, 1, 4, 5), (2, 3, 5)], ids=str)
@pytest.mark.parametrize(("factorised", "place"), [*((False, i) for i in range(6)), *((True, i) for i in (1, 3, 5))])
def test_tensors_that_do_not_fit_each_other_are_told(shape, factorised, place):
    """Also where they could be broadcast: that would be the map of no network."""
    arguments = [normal(2, 3, 4, 5, seed=seed) for seed in range(6)]
    arguments[place] = normal(*shape, seed=9)
    with pytest.raises(ValueError, match="expected"):
        NF.normgrad_order1(*arguments, epsilon=0.1, h=0.5, factorised=factorised)


def test_whole_numbers_are_told():
    arguments = [normal(2, 3, 4, seed=seed) for seed in range(6)]
    with pytest.raises(ValueError, match=re.escape("`x`: expected a floating-point tensor")):
        NF.normgrad_order1(arguments[0].int(), *arguments[1:], epsilon=0.1, h=0.5)


@examples
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(0, 999), st.booleans())
def test_contrast_is_the_difference_of_shares(grid, n, seed, with_zeros):
    order1, adversarial = normal(n, *grid, seed=seed).abs(), 7 * normal(n, *grid, seed=seed + 1).abs()
    if with_zeros:
        order1[0] = 0
    actual = NF.contrast(order1, adversarial)
    torch.testing.assert_close(actual, reference.contrast(order1, adversarial), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(actual.flatten(1).sum(1), torch.zeros(n, dtype=torch.float64), rtol=0, atol=1e-12)
    assert not with_zeros or not actual[0].any()


def test_contrast_of_zero_maps_is_zero():
    zeros = torch.zeros(2, 3, 4)
    assert torch.equal(NF.contrast(zeros, zeros), zeros)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_contrast_widens_half_types_before_it_adds(dtype):
    order1, adversarial = torch.full((1, 8, 8), 60000.0), torch.arange(1.0, 65.0).reshape(1, 8, 8)
    actual = NF.contrast(order1.to(dtype), adversarial.to(dtype))
    assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(actual.double(), reference.contrast(order1.to(dtype), adversarial.to(dtype)))


@pytest.mark.parametrize("shape", [(2, 3, 5), (1, 3, 4), (2, 3)])
def test_contrast_of_maps_of_two_shapes_is_told(shape):
    told = re.escape(f"`adversarial`: expected the shape of `order1`, (2, 3, 4), but got {shape}.")
    with pytest.raises(ValueError, match=told):
        NF.contrast(torch.ones(2, 3, 4), torch.ones(shape))


# ---------------------------------------------------------------- habits of real networks


class Twice(nn.Module):
    """One layer at two places."""

    def __init__(self):
        super().__init__()
        self.first, self.shared, self.head = (
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Linear(4, 5),
        )

    def forward(self, x):
        x = torch.tanh(self.shared(torch.tanh(self.first(x))))
        return self.head(F.softplus(self.shared(x)).mean((2, 3)))


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_a_layer_used_twice_gets_the_sum_over_its_uses(target, factorised):
    model, images_labels = built(Twice), batch(2, (5, 6), dtype=torch.float64)
    options = dict(target=target, epsilon=EPSILON, factorised=factorised)
    maps = order1_maps(model, loss_fn, images_labels, ["first", "shared"], **options)
    close(maps, reference.order1(model, loss_fn, images_labels, ["first", "shared"], **options))


@pytest.mark.parametrize("per_image", [True, False])
def test_two_layers_that_share_a_weight_take_one_step_with_it(per_image):
    class Tied(Twice):
        def __init__(self):
            super().__init__()
            self.other = nn.Conv2d(4, 4, 3, padding=1)
            self.other.weight = self.shared.weight

        def forward(self, x):
            x = torch.tanh(self.shared(torch.tanh(self.first(x))))
            return self.head(F.softplus(self.other(x)).mean((2, 3)))

    model, images_labels = built(Tied), batch(2, (5, 6), dtype=torch.float64)
    assert model.other.weight is model.shared.weight
    for target in ("output", "weight"):
        options = dict(target=target, epsilon=EPSILON, per_image=per_image)
        maps = order1_maps(model, loss_fn, images_labels, ["first", "shared", "other"], **options)
        close(maps, reference.order1(model, loss_fn, images_labels, ["first", "shared", "other"], **options))
    assert model.other.weight is model.shared.weight


@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_frozen_weights_take_no_part_in_the_inner_step(target):
    model, images_labels = smooth()
    options = dict(target=target, epsilon=EPSILON)
    free = order1_maps(model, loss_fn, images_labels, CONVS, **options)
    for part in (model.stem, model.norm, model.depthwise):
        part.requires_grad_(False)
    model.head.bias.requires_grad_(False)
    maps = order1_maps(model, loss_fn, images_labels, CONVS, **options)
    close(maps, reference.order1(model, loss_fn, images_labels, CONVS, **options))
    assert all(difference(maps[name], free[name]) > 1e-4 for name in CONVS)
    assert [name for name, p in model.named_parameters() if not p.requires_grad] == [
        *("stem.weight", "stem.bias", "norm.weight", "norm.bias", "depthwise.weight", "head.bias")
    ]


def test_of_a_frozen_backbone_only_the_head_steps():
    model, images_labels = smooth()
    for name in LAYERS:
        model.get_submodule(name).requires_grad_(False)
    maps = order1_maps(model, loss_fn, images_labels, LAYERS, epsilon=EPSILON)
    close(maps, reference.order1(model, loss_fn, images_labels, LAYERS, epsilon=EPSILON))


def test_a_wholly_frozen_model_steps_with_all_its_weights():
    model, images_labels = smooth()
    free = order1_maps(model, loss_fn, images_labels, LAYERS, epsilon=EPSILON)
    frozen = order1_maps(model.requires_grad_(False), loss_fn, images_labels, LAYERS, epsilon=EPSILON)
    same_bits(frozen, free)
    assert not any(p.requires_grad for p in model.parameters())


def test_weights_that_the_loss_does_not_use_change_nothing():
    model, images_labels = smooth()
    maps = order1_maps(model, loss_fn, images_labels, LAYERS)
    model.spare = nn.Linear(3, 3).double()
    same_bits(order1_maps(model, loss_fn, images_labels, LAYERS), maps)


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_networks_that_work_in_place_have_the_maps_of_their_twins(target, factorised):
    layers = {
        "output": ["stem", "stage*", "stage?.conv?", "stage?.bn?", "stage?.relu"],
        "input": ["stage*", "stage?.conv?", "stage?.bn?", "stage?.relu"],
        "weight": "**.conv?",
    }[target]
    images_labels = batch(2, (8, 12), dtype=torch.float64)
    options = dict(target=target, epsilon=EPSILON, factorised=factorised)
    inplace, plain = (built(lambda i=i: ResNet(inplace=i)) for i in (True, False))
    maps, expected = (order1_maps(m, loss_fn, images_labels, layers, **options) for m in (inplace, plain))
    assert len(maps) >= 6
    close(maps, expected, 1e-12)
    some = list(maps)[::3]
    slow = reference.order1(plain, loss_fn, images_labels, some, **options)
    close({name: maps[name] for name in some}, slow)


@pytest.mark.parametrize("cell", [nn.LSTM, nn.GRU])
def test_recurrent_weights_take_part_in_the_inner_step(cell):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.rnn, self.head = (
                nn.Conv2d(3, 4, 3),
                cell(4, 5, num_layers=2, batch_first=True),
                nn.Linear(5, 5),
            )

        def forward(self, x):
            steps = F.softplus(self.conv(x)).mean(2).transpose(1, 2)
            return self.head(self.rnn(steps)[0][:, -1])

    model, images_labels = built(Recurrent), batch(2, (5, 6), dtype=torch.float64)
    maps = order1_maps(model, loss_fn, images_labels, "conv", epsilon=0.5, factorised=False)
    close(maps, reference.order1(model, loss_fn, images_labels, ["conv"], epsilon=0.5, factorised=False))
    model.rnn.requires_grad_(False)
    without = order1_maps(model, loss_fn, images_labels, "conv", epsilon=0.5, factorised=False)
    assert difference(without["conv"], maps["conv"]) > 1e-3
    assert all(
        getattr(model.rnn, n) is w for n, w in zip(model.rnn._flat_weights_names, model.rnn._flat_weights, strict=True)
    )


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_activation_checkpointing_gives_the_same_maps(target, factorised):
    class Checkpointed(SmoothNet):
        def forward(self, x):
            x = checkpoint(lambda t: F.gelu(self.grouped(F.softplus(self.norm(self.stem(t))))), x, use_reentrant=False)
            x = checkpoint(lambda t: torch.tanh(self.up(t + F.silu(self.depthwise(t)))), x, use_reentrant=False)
            return self.head(F.softplus(self.dilated(x)).mean((2, 3)))

    plain, images_labels = smooth()
    options = dict(target=target, epsilon=EPSILON, factorised=factorised)
    maps = order1_maps(built(Checkpointed), loss_fn, images_labels, CONVS, **options)
    close(maps, order1_maps(plain, loss_fn, images_labels, CONVS, **options), 1e-12)


def test_all_passes_draw_the_same_random_numbers():
    model, images_labels = smooth()
    state = torch.get_rng_state()

    def noisy(model, batch):
        return loss_fn(model, (batch[0] + 0.3 * torch.randn(1, *batch[0].shape[1:], dtype=torch.float64), batch[1]))

    def the_same_noise(model, batch):
        torch.set_rng_state(state)
        return noisy(model, batch)

    maps = order1_maps(model, noisy, images_labels, LAYERS, epsilon=EPSILON)
    assert torch.equal(torch.get_rng_state(), state)
    close(maps, reference.order1(model, the_same_noise, images_labels, LAYERS, epsilon=EPSILON))


def test_batchnorm_and_dropout_are_in_eval_mode():
    torch.manual_seed(0)
    model, images_labels = ResNet(dropout=0.5).double(), batch(2, (8, 8), dtype=torch.float64)
    training = order1_maps(model.train(), loss_fn, images_labels, "stage*")
    same_bits(training, order1_maps(model.eval(), loss_fn, images_labels, "stage*"))


def test_a_loss_may_write_to_its_batch():
    model, images_labels = smooth()
    before = [t.clone() for t in images_labels]

    def writes(model, batch):
        batch[0].mul_(2)
        return loss_fn(model, batch)

    for per_image in (True, False):
        maps = order1_maps(model, writes, images_labels, LAYERS, per_image=per_image)
        doubled = (2 * images_labels[0], images_labels[1])
        same_bits(maps, order1_maps(model, loss_fn, doubled, LAYERS, per_image=per_image))
    assert all(torch.equal(a, b) for a, b in zip(images_labels, before, strict=True))


def test_it_works_where_gradients_are_off():
    model, images_labels = smooth()
    maps = order1_maps(model, loss_fn, images_labels, LAYERS)
    with torch.no_grad():
        same_bits(order1_maps(model, loss_fn, images_labels, LAYERS), maps)


def test_auto_takes_what_it_takes_for_order_0():
    torch.manual_seed(0)
    model, images_labels = ResNet().eval(), batch(2)
    maps = order1_maps(model, loss_fn, images_labels)
    assert list(maps) == list(order0_maps(model, loss_fn, images_labels)) == ["stage1", "stage2", "stage3"]
    same_bits(order1_maps(model, loss_fn, images_labels, "stage*"), maps)


def test_images_of_several_sizes_have_maps_padded_with_zeros():
    model = built(SmoothNet)
    images = [batch(1, size, dtype=torch.float64)[0] for size in ((6, 8), (4, 10))]

    def loss(model, batch):
        return sum(F.cross_entropy(model(image), batch["label"]) for image in batch["images"])

    together = order1_maps(model, loss, {"images": images, "label": torch.tensor([2, 2])}, LAYERS, epsilon=EPSILON)
    for i, image in enumerate(images):
        alone = order1_maps(model, loss_fn, (image, torch.tensor([2])), LAYERS, epsilon=EPSILON)
        h, w = image.shape[2:]
        for name in ("stem", "norm", "up", "dilated"):
            assert together[name].shape == (2, 6, 10)
            close({name: together[name][i : i + 1, :h, :w]}, {name: alone[name]}, 1e-12)
            assert together[name][i].count_nonzero() == h * w


# ---------------------------------------------------------------- the price


class Counted:
    """A loss that counts its calls, and can go wrong at one of them."""

    def __init__(self, fails_at=0, loss=loss_fn):
        self.calls, self.fails_at, self.loss = 0, fails_at, loss

    def __call__(self, model, batch):
        self.calls += 1
        loss = self.loss(model, batch)
        if self.calls == self.fails_at:
            raise RuntimeError("boom")
        return loss


@pytest.mark.parametrize(("second_order", "passes"), [(True, 4), (False, 2)])
@pytest.mark.parametrize("options", [{}, {"adversarial": True}, {"factorised": False}, {"target": "weight"}], ids=str)
def test_it_takes_four_passes_or_two(options, second_order, passes):
    model, images_labels = tiny()
    counted = Counted()
    order1_maps(model, counted, images_labels, "0", second_order=second_order, per_image=False, **options)
    assert counted.calls == passes
    order1_maps(model, counted, images_labels, "0", second_order=second_order, **options)
    assert counted.calls == 3 * passes


@pytest.mark.parametrize(("second_order", "passes"), [(True, 7), (False, 3)])
@pytest.mark.parametrize("factorised", [True, False])
def test_order_1_adversarial_and_contrast_share_the_first_pass(second_order, passes, factorised):
    model, images_labels = tiny()
    options = dict(epsilon=EPSILON, second_order=second_order, factorised=factorised)
    for kinds in (["order1", "adversarial"], ["order1", "adversarial", "contrast"], ["contrast"]):
        counted = Counted()
        step = InnerStep(**options)
        result = run_passes(model, counted, singles(images_labels), ["0", "2"], kinds, step, ReadOptions())
        assert counted.calls == 2 * passes
        assert list(result.maps) == kinds
        assert result.layers == ["0", "2"]
        assert torch.equal(result.images, images_labels[0])
        expected = {
            kind: order1_maps(model, loss_fn, images_labels, ["0", "2"], adversarial=kind == "adversarial", **options)
            for kind in ("order1", "adversarial")
        }
        expected["contrast"] = {n: NF.contrast(m, expected["adversarial"][n]) for n, m in expected["order1"].items()}
        for kind in kinds:
            close(result.maps[kind], expected[kind], 1e-12)


def test_maps_of_the_first_images_are_those_of_a_step_of_the_whole_batch():
    model, images_labels = tiny()
    whole = order1_maps(model, loss_fn, images_labels, "0", epsilon=EPSILON, per_image=False)
    some = run_passes(model, loss_fn, [images_labels], "0", ["order1"], InnerStep(EPSILON), ReadOptions(), num_images=1)
    close(some.maps["order1"], {"0": whole["0"][:1]}, 1e-12)
    assert torch.equal(some.images, images_labels[0][:1])


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "input", "weight"])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_last_two_passes_compute_no_weight_gradient_and_end_at_the_lowest_layer(frozen, target, factorised):
    passes = {"below": [], "above": []}

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, place):
            ctx.save_for_backward(x, weight)
            ctx.place = place
            return x * weight

        @staticmethod
        def backward(ctx, g):
            x, weight = ctx.saved_tensors
            passes[ctx.place][-1].append(ctx.needs_input_grad[1])
            return g * weight, (g * x).sum().reshape(1), None

    class Scale(nn.Module):
        def __init__(self, place):
            super().__init__()
            self.place, self.weight = place, nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, x):
            return Watched.apply(x, self.weight, self.place)

    model, images_labels = tiny()
    model = nn.Sequential(model[0], Scale("below"), nn.Tanh(), model[2], Scale("above"), *model[3:])
    if frozen:
        model.requires_grad_(False)

    def loss(model, batch):
        for log in passes.values():
            log.append([])
        return loss_fn(model, batch)

    order1_maps(model, loss, images_labels, "3", target=target, factorised=factorised, per_image=False)
    assert passes["above"] == [[True], [True], [False], [False]]
    assert passes["below"] == [[True], [True], [], []]
    passes["above"].clear(), passes["below"].clear()
    order1_maps(model, loss, images_labels, "3", target=target, second_order=False, per_image=False)
    assert passes == {"above": [[True], [False]], "below": [[True], []]}


# ---------------------------------------------------------------- what cannot be


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda m, b: m(b[0]), "`loss_fn`: expected a scalar tensor, but got a tensor of shape (1, 5). Reduce it"),
        (lambda m, b: 3.0, "`loss_fn`: expected a scalar tensor, but got 'float'"),
        (lambda m, b: torch.ones(()), "`loss_fn`: expected a loss that depends on the model's parameters"),
        (lambda m, b: m(b[0]).detach().sum(), "`loss_fn`: expected a loss that depends on the model's parameters"),
        (lambda m, b: b[0].requires_grad_().sum(), "`loss_fn`: expected a loss that depends on the model's parameters"),
        (torch.no_grad()(loss_fn), "Check that the model computes it, without `.detach()` and outside of"),
        (lambda m, b: m[-1].weight.sum(), "`layers`: the loss depends on none of them"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told(loss, told):
    model, images_labels = tiny()
    with pytest.raises(ValueError, match=re.escape(told)):
        order1_maps(model, loss, images_labels, "0")


@pytest.mark.parametrize("call", [1, 2, 3, 4])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_told_whenever_it_comes(value, call):
    model, images_labels = tiny()
    counted = Counted()

    def loss(model, batch):
        return counted(model, batch) * (value if counted.calls == call else 1)

    with pytest.raises(NotFinite, match=f"`loss_fn`: expected a finite loss, but got {value}"):
        order1_maps(model, loss, images_labels, "0", per_image=False)
    assert counted.calls == call
    assert issubclass(NotFinite, ValueError)


def test_a_loss_that_is_not_finite_is_told_without_a_warning_of_torchs_own():
    model, images_labels = tiny()
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # what torch says once, it may have said before
    try:
        with warnings.catch_warnings(), pytest.raises(NotFinite):  # noqa: PT012
            warnings.simplefilter("error")
            order1_maps(model, lambda m, b: loss_fn(m, b) * math.nan, images_labels, "0")
    finally:
        torch.set_warn_always(always)


class NoGradient(torch.autograd.Function):
    """Adds nothing, and has a gradient that is not a number."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * math.nan


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize(("call", "second_order"), [(1, True), (2, True), (3, True), (4, True), (1, False), (2, False)])
def test_a_gradient_that_is_not_finite_is_told_whenever_it_comes(call, second_order, factorised):
    model, images_labels = tiny()
    counted = Counted()

    def loss(model, batch):
        loss = counted(model, batch)
        return NoGradient.apply(loss) if counted.calls == call else loss

    with pytest.raises(NotFinite):
        order1_maps(model, loss, images_labels, "0", second_order=second_order, factorised=factorised, per_image=False)


def test_a_step_too_long_for_the_weights_is_told():
    model, (images, labels) = tiny()
    with pytest.raises(NotFinite):
        order1_maps(model.float(), loss_fn, (images.float(), labels), "0", epsilon=1e38)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        (torch.ones(3, 2), "`2` has shape (3, 2), which does not begin with 2"),
        (object(), "`2` is a 'object'"),
    ],
)
def test_a_batch_that_cannot_be_taken_apart_is_told_unless_it_need_not_be(extra, told):
    model, images_labels = tiny()
    with pytest.raises(ValueError, match="(?s)" + re.escape(told) + ".*" + re.escape("Set `per_image=False`")):
        order1_maps(model, loss_fn, (*images_labels, extra), "0")
    maps = order1_maps(model, loss_fn, (*images_labels, extra), "0", per_image=False)
    same_bits(maps, order1_maps(model, loss_fn, images_labels, "0", per_image=False))


@pytest.mark.parametrize("epsilon", [0, 0.0, -1, math.nan, math.inf, "a", None, True])
def test_a_step_that_is_no_positive_number_is_told(epsilon):
    model, images_labels = tiny()
    with pytest.raises(ValueError, match=re.escape(f"`epsilon`: expected a number above 0, but got {epsilon!r}.")):
        order1_maps(model, loss_fn, images_labels, "0", epsilon=epsilon)


@pytest.mark.parametrize("flag", ["adversarial", "factorised", "second_order", "per_image"])
@pytest.mark.parametrize("value", ["false", 1, None])
def test_a_flag_that_is_neither_true_nor_false_is_told(flag, value):
    model, images_labels = tiny()
    with pytest.raises(ValueError, match=re.escape(f"`{flag}`: expected True or False, but got {value!r}.")):
        order1_maps(model, loss_fn, images_labels, "0", **{flag: value})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layers": "nine"}, "`layers`: expected names or globs of the model's layers, but 'nine' matches none"),
        ({"layers": "0", "target": "weights"}, "`target`: expected one of 'output', 'input', 'weight'"),
        ({"layers": "1", "target": "weight"}, "'1': Softplus is neither a convolution nor a linear layer"),
    ],
)
def test_layers_and_targets_that_do_not_exist_are_told(options, told):
    model, images_labels = tiny()
    counted = Counted()
    with pytest.raises(ValueError, match=re.escape(told)):
        order1_maps(model, counted, images_labels, **options)
    assert counted.calls == 0


@pytest.mark.parametrize("call", [3, 4])
@pytest.mark.parametrize(
    "change",
    [lambda layer, x: layer(layer(x)), lambda layer, x: layer(x[..., 1:]), lambda layer, x: x],
    ids=["called twice", "another size", "not called"],
)
def test_a_layer_that_does_not_do_the_same_in_every_pass_is_told(change, call):
    class Fickle(Twice):
        changed = False

        def forward(self, x):
            x = torch.tanh(self.first(x))
            x = change(self.shared, x) if self.changed else self.shared(x)
            return self.head(x.mean((2, 3)))

    def loss(model, batch):  # the count is kept here: what the model reaches is put back after each pass
        model.changed = counted.calls == call
        return loss_fn(model, batch)

    model, images_labels, counted = built(Fickle), batch(2, (5, 6), dtype=torch.float64), Counted(loss=loss)
    with pytest.raises(ValueError, match="`layers`: expected 'shared' to do the same in every pass"):
        order1_maps(model, counted, images_labels, ["first", "shared"], per_image=False)
    assert counted.calls == 4


@pytest.mark.parametrize(
    ("layer", "why"),
    [("spare", "the forward pass does not call it"), ("head", r"its shape \(\d, 5\) has no spatial axis")],
)
def test_a_layer_that_cannot_be_read_is_named_as_for_order_0(layer, why):
    model, images_labels = smooth()
    model.spare = nn.Conv2d(3, 3, 1).double()
    for maps_of in (order0_maps, order1_maps):
        with pytest.warns(UserWarning, match=f"NormGrad cannot read the layer {layer!r}: {why}"):
            maps = maps_of(model, loss_fn, images_labels, ["stem", layer])
        assert list(maps) == ["stem"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("per_image", [True, False])
def test_a_model_in_half_precision_runs_in_float32(dtype, per_image):
    """In half precision a step of epsilon would be lost in rounding."""
    model = built(SmoothNet).to(dtype)
    images, labels = batch(2, (6, 8))
    images = images.to(dtype)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    expected = order1_maps(
        copy.deepcopy(model).float(), loss_fn, (images.float(), labels), LAYERS, epsilon=EPSILON, per_image=per_image
    )
    maps = order1_maps(model, loss_fn, (images, labels), LAYERS, epsilon=EPSILON, per_image=per_image)
    same_bits(maps, expected)
    assert all(t.dtype == before[name].dtype and torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("factorised", [True, False])
@pytest.mark.parametrize("target", ["output", "weight"])
@pytest.mark.parametrize(
    "loss", [lambda m, b: 0 * m(b[0]).sum(), lambda m, b: F.relu(m(b[0]) - 1e6).sum()], ids=["zero", "saturated"]
)
def test_where_nothing_is_learned_the_map_is_zero(loss, target, factorised):
    model, images_labels = tiny()
    maps = order1_maps(model, loss, images_labels, ["0", "2"], target=target, factorised=factorised)
    assert list(maps) == ["0", "2"]
    assert all(torch.equal(m, torch.zeros_like(m)) for m in maps.values())


def test_one_learned_image_does_not_spoil_the_maps_of_the_others():
    model, images_labels = tiny()

    def loss(model, batch):
        return loss_fn(model, batch) * float(batch[0].sum() == images_labels[0][1].sum())

    maps = order1_maps(model, loss, images_labels, "0", epsilon=EPSILON)["0"]
    assert torch.equal(maps[0], torch.zeros_like(maps[0]))
    alone = order1_maps(model, loss_fn, singles(images_labels)[1], "0", epsilon=EPSILON)["0"]
    assert torch.equal(maps[1:], alone)


# ---------------------------------------------------------------- no trace


class Habits(ResNet):
    """Keeps count of itself in every way there is."""

    def __init__(self):
        super().__init__(dropout=0.5)
        self.register_buffer("calls", torch.zeros(()))
        self.count, self.seen, self.table = 0, [], {"last": None}

    def forward(self, x):
        self.calls += 1
        self.count += 1
        self.seen.append(float(x.mean()))
        self.table["last"] = self.seen
        self.table[self.count] = x
        self.latest = x
        return super().forward(x)


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(getattr(m, kind)) for m in model.modules() for kind in kinds]


class Trace:
    """Everything that a pass could change, as it is now."""

    def __init__(self, model):
        self.model = model
        self.objects = [*model.parameters(), *model.buffers(), *(p.grad for p in model.parameters())]
        self.objects += [model.seen, model.table, *model.modules()]
        self.tensors = [t.clone() for t in self.objects if isinstance(t, torch.Tensor)]
        self.plain = self._plain()
        self.rng = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()

    def _plain(self):
        model = self.model
        return copy.deepcopy(
            [
                [m.training for m in model.modules()],
                [p.requires_grad for p in model.parameters()],
                [model.count, model.seen, list(model.table), model.table["last"] is model.seen, sorted(vars(model))],
                hooks(model),
                torch.is_grad_enabled(),
            ]
        )

    def check(self):
        now = Trace(self.model)
        assert all(a is b for a, b in zip(self.objects, now.objects, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(self.tensors, now.tensors, strict=True))
        assert self.plain == now.plain
        assert torch.equal(self.rng[0], now.rng[0])
        assert (self.rng[1] == now.rng[1]).all()
        assert self.rng[2] == now.rng[2]


def habits():
    torch.manual_seed(0)
    model, images_labels = Habits().train(), batch(2, (8, 8))
    model.stage2.eval()
    model.stage1.conv1.weight.requires_grad_(False)
    loss_fn(model, images_labels).backward()
    model.stage1.conv1.weight.grad = torch.ones_like(model.stage1.conv1.weight)
    fired = []
    model.stem.register_forward_hook(lambda *_: None)
    model.stem.weight.register_hook(lambda g: fired.append(g))
    return model, images_labels, fired


def noisy_loss(model, batch):
    torch.rand(3), np.random.rand(), random.random()
    return loss_fn(model, batch)


@pytest.mark.parametrize("fails_at", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("options", [{}, {"factorised": False, "target": "weight"}, {"target": "input"}], ids=str)
def test_it_leaves_no_trace_even_if_the_loss_raises(fails_at, options):
    model, images_labels, fired = habits()
    layers = ["stem", "stage2.conv1", "stage3.conv2"]
    trace = Trace(model)
    counted = Counted(fails_at, noisy_loss)
    if fails_at:
        with pytest.raises(RuntimeError, match="boom"):
            order1_maps(model, counted, images_labels, layers, epsilon=EPSILON, **options)
    else:
        order1_maps(model, counted, images_labels, layers, epsilon=EPSILON, **options)
    assert counted.calls == (fails_at or 8)
    assert fired == []
    trace.check()


def test_it_leaves_no_trace_in_a_batch_of_one_step():
    model, images_labels, fired = habits()
    trace = Trace(model)
    before = [t.clone() for t in images_labels]
    maps = order1_maps(model, noisy_loss, images_labels, per_image=False, factorised=False, adversarial=True)
    assert len(maps) == 3
    assert fired == []
    assert all(torch.equal(a, b) for a, b in zip(images_labels, before, strict=True))
    assert images_labels[0].grad is None
    trace.check()
