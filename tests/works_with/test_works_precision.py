"""In whatever precision training runs: the same bits with the callback and without, and the right maps."""

import torch
from pytorch_lightning.plugins import MixedPrecision
from twice import Lit, row, twice


@row("Precision", '`precision="32-true"`, the default')
def test_32_true(tmp_path):
    twice(tmp_path)


@row("Precision", '`precision="64-true"`', "maps in float64")
def test_64_true(tmp_path):
    _, watched = twice(tmp_path, precision="64-true", tolerance=1e-12, order1_tolerance=1e-10)
    assert all(m.dtype == torch.float64 for m in watched.callback.maps.values())


@row("Precision", '`precision="bf16-mixed"`')
def test_bf16_mixed(tmp_path):
    twice(tmp_path, precision="bf16-mixed", tolerance=2e-2, order1_tolerance=5e-2)


@row("Precision", '`precision="bf16-true"`', "order 1 runs in float32, where an inner step is not lost in rounding")
def test_bf16_true(tmp_path):
    twice(tmp_path, precision="bf16-true", tolerance=5e-2, order1_tolerance=1e-4)


class AsksForItsPrecision(Lit):
    """Makes tensors of the precision that it says it has, and of torch's default."""

    def loss(self, batch):
        images, labels = batch
        ones = torch.ones(len(images), 1, 1, 1, dtype=self.dtype) * torch.ones(1)
        return super().loss(((images * ones).to(self.dtype), labels))


@row("Precision", '`precision="16-true"`', "as `bf16-true`")
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
    "raw values are unscaled; a step whose gradients overflow has no maps, and `callback.skipped` counts it",
)
def test_16_mixed_with_a_scaler_and_overflows(tmp_path):
    _, watched = twice(
        tmp_path,
        Overflows,
        plugins=scaled,
        steps=[0, 2, 4, 5],
        order1_steps=[0, 5],
        tolerance=1e-2,
        order1_tolerance=2e-2,
    )
    assert watched.callback.skipped == 3  # order 0 twice, and order 1 once
    assert [w for w in watched.warned if "not finite" in w] == watched.warned
    assert len(watched.warned) == 1
    assert watched.traces["scaler"]["scale"] != 2.0**10


@row("Precision", "`detect_anomaly=True`")
def test_detect_anomaly(tmp_path):
    twice(tmp_path, detect_anomaly=True)
