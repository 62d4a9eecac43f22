"""In whatever precision training runs: the same bits with the callback and without, and the right maps."""

from functools import partial
from itertools import pairwise

import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import nn
from twice import NUM_IMAGES, Lit, assert_same, row, train, twice, watching

from normgrad_lightning import functional, order1_maps
from normgrad_lightning.maps import EPSILON


@row("Precision", '`precision="32-true"`, the default')
def test_32_true(tmp_path):
    twice(tmp_path)


@row("Precision", '`precision="64-true"`', "maps in float64")
def test_64_true(tmp_path):
    _, watched = twice(tmp_path, precision="64-true", tolerance=1e-12, order1_tolerance=1e-10)
    assert all(m.dtype == torch.float64 for m in watched.callback.maps.values())


@row("Precision", '`precision="bf16-mixed"`', "order 1 runs in float32, where an inner step is not lost in rounding")
def test_bf16_mixed(tmp_path):
    twice(tmp_path, precision="bf16-mixed", tolerance=2e-2, order1_tolerance=1e-4)


@row("Precision", '`precision="bf16-true"`', "as `bf16-mixed`")
def test_bf16_true(tmp_path):
    twice(tmp_path, precision="bf16-true", tolerance=5e-2, order1_tolerance=1e-4)


class AsksForItsPrecision(Lit):
    """Makes tensors of the precision that it says it has, and of torch's default."""

    def loss(self, batch):
        images, labels = batch
        ones = torch.ones(len(images), 1, 1, 1, dtype=self.dtype) * torch.ones(1)
        return super().loss(((images * ones).to(self.dtype), labels))


@row("Precision", '`precision="16-true"`', "as `bf16-mixed`")
def test_16_true(tmp_path):
    twice(tmp_path, AsksForItsPrecision, precision="16-true", tolerance=2e-2, order1_tolerance=1e-4)


class Overflows(Lit):
    """A loss that is too large for float16 now and then, as it is until a GradScaler has found its scale."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * (1e30 if batch_idx in (1, 3) else 1.0)


def scaled():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return [MixedPrecision("16-mixed", "cpu", scaler)]


@row(
    "Precision",
    '`precision="16-mixed"` with a `GradScaler`',
    "as `bf16-mixed`; raw values are unscaled; a step whose gradients overflow has no maps, and `callback.skipped` "
    "counts it",
)
def test_16_mixed_with_a_scaler_and_overflows(tmp_path):
    _, watched = twice(
        tmp_path,
        Overflows,
        plugins=scaled,
        steps=[0, 2, 4, 5],
        order1_steps=[0, 5],
        tolerance=1e-2,
        order1_tolerance=1e-4,
    )
    assert watched.callback.skipped == 3  # order 0 twice, and order 1 once
    assert [w for w in watched.warned if "not finite" in w] == watched.warned
    assert len(watched.warned) == 1
    assert watched.traces["scaler"]["scale"] != 2.0**10


def grown():
    """A scale that training over many batches has grown, as the mean over a batch has small gradients."""
    return [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))]


def small_cnn():
    """With kinks, and without BatchNorm, whose statistics a probe takes from its own images at first."""
    widths = [3, 8, 16, 24]
    stages = [nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.ReLU()) for a, b in pairwise(widths)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5))


CONVOLUTIONS = ["net.0", "net.1", "net.2"]


def contrast_in_float64(weights, images, labels):
    module = Lit(small_cnn).double()
    module.load_state_dict({name: t.double() for name, t in weights.items()})
    one_batch = images.double(), torch.as_tensor(labels)
    both = [
        order1_maps(module, lambda m, b: m.loss(b), one_batch, CONVOLUTIONS, adversarial=uphill)
        for uphill in (False, True)
    ]
    return {layer: functional.contrast(both[0][layer], both[1][layer]) for layer in CONVOLUTIONS}


@pytest.mark.parametrize("options", [{"precision": "bf16-mixed"}, {"plugins": grown}], ids=["bf16", "16, grown scale"])
def test_contrast_in_mixed_precision_is_that_of_float64(options, tmp_path):
    """At the paper's ε, order 1 differs from order 0 by less than half precision can tell."""
    callback = watching(layers=CONVOLUTIONS, epsilon=EPSILON, on_error="warn", probe="train")
    watched = train(partial(Lit, small_cnn), tmp_path / "watched", callback, **options)
    plain = train(partial(Lit, small_cnn), tmp_path / "plain", **options)
    assert_same(plain, watched)
    assert list(watched.history.order1) == [0, 3, 5]
    batches = {step: [t[:NUM_IMAGES] for t in plain.moments[step].batch] for step in (0, 3, 5)}
    seen = [(step, maps["contrast"], *batches[step]) for step, maps in watched.history.order1.items()]
    probe = callback.latest["probe_contrast"]
    for step, maps, images, labels in [*seen, (probe.step, probe.maps, probe.images, probe.labels)]:
        expected = contrast_in_float64(plain.moments[step].weights, images, labels)
        for layer in CONVOLUTIONS:
            both = torch.stack([maps[layer].double().flatten(), expected[layer].flatten()])
            assert torch.corrcoef(both)[0, 1] >= 0.98, (step, layer)


@row("Precision", "`detect_anomaly=True`")
def test_detect_anomaly(tmp_path):
    twice(tmp_path, detect_anomaly=True)
