"""What passes set for the whole process is back afterwards."""

import pytest
import torch
from torch import nn

from normgrad_lightning.isolated.sandbox import Sandbox

CUDNN = torch.backends.cudnn


def settings():
    return [
        torch.get_float32_matmul_precision(),
        CUDNN.allow_tf32,
        CUDNN.benchmark,
        CUDNN.deterministic,
        torch.backends.mha.get_fastpath_enabled(),
        torch.is_autocast_cache_enabled(),
        torch.utils.checkpoint.CheckpointFunction,
    ]


@pytest.fixture
def restored():
    before = settings()
    yield
    torch.set_float32_matmul_precision(before[0])
    CUDNN.allow_tf32, CUDNN.benchmark, CUDNN.deterministic = before[1:4]


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("tuned", [False, True])
def test_a_pass_that_must_be_exact_computes_with_all_bits(precision, tuned, restored):
    torch.set_float32_matmul_precision(precision)
    CUDNN.benchmark = tuned
    before = settings()
    assert Sandbox(nn.Linear(1, 1), exact=True).run(lambda _: settings()[:2]) == ["highest", False]
    assert settings() == before


def test_by_default_a_pass_computes_as_training_does(restored):
    torch.set_float32_matmul_precision("medium")
    assert Sandbox(nn.Linear(1, 1)).run(lambda _: settings()[:2]) == ["medium", CUDNN.allow_tf32]


def test_convolutions_are_not_tuned_for_the_batches_of_a_pass(restored):
    """Nor may training find a plan, under the key of its own, that was never tuned."""
    CUDNN.benchmark = True
    before = settings()
    assert Sandbox(nn.Linear(1, 1)).run(lambda _: settings()[2:4]) == [False, True]
    assert settings() == before


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="before torch 2.9 there is only one way")
def test_a_precision_that_is_set_in_torchs_other_way_stays():
    conv = CUDNN.conv.fp32_precision
    CUDNN.conv.fp32_precision = "ieee"  # from now on, torch refuses to tell `allow_tf32`
    try:
        assert Sandbox(nn.Linear(1, 1), exact=True).run(lambda _: 1) == 1
        assert CUDNN.conv.fp32_precision == "ieee"
    finally:
        CUDNN.conv.fp32_precision = conv


def test_everything_is_back_after_an_error(restored):
    CUDNN.benchmark = True
    before = settings()
    with pytest.raises(ZeroDivisionError):
        Sandbox(nn.Linear(1, 1), exact=True).run(lambda _: 1 / 0)
    assert settings() == before
