"""Too little memory for a pass of our own: one warning with a remedy that works, and training goes on."""

import gc
import weakref
from typing import get_type_hints

import pytest
import torch
from networks import ResNet, batch
from torch.nn import functional as F
from twice import Lit, assert_same, train, watching

from normgrad_lightning import NormGradCallback, order0_maps, order1_maps
from normgrad_lightning.env_activation.environment_callback import in_variables
from normgrad_lightning.environment import flags
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.interrupts import failures_dropped, is_out_of_memory
from normgrad_lightning.isolated.one_pass import _need_copies
from normgrad_lightning.isolated.order1 import run_passes
from normgrad_lightning.isolated.retry import WholeBatch
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.layers.own_passes import current_pass


def lack_on_the_cpu():
    torch.empty(2**50)


def lack_on_a_gpu():
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 1 GiB free.\nAnd so on")


def lack_in_python():
    raise MemoryError


LACKS = [lack_on_the_cpu, lack_on_a_gpu, lack_in_python]


class NeedsMuch(Lit):
    """Runs out of memory in passes of our own, from one number of images on.

    Args:
        lack: raises.
        enough_for: how many images there is memory for.
    """

    def __init__(self, lack, enough_for=0):
        super().__init__()
        self.lack, self.enough_for, self.features = lack, enough_for, []

    def loss(self, batch):
        scores = self.net(batch[0])
        if current_pass() is not None and len(scores) > self.enough_for:
            FEATURES.append(weakref.ref(scores))
            self.lack()
        return 2 * F.cross_entropy(scores, batch[1])  # of no network that could run alone


FEATURES = []


PROBE_ALONE = {"probe": "train", "order1_every_n_steps": None, "num_images": 2}


@pytest.mark.parametrize(
    ("lack", "given", "remedy"),
    [
        *((lack, {}, "`order1_every_n_steps=None`") for lack in LACKS),
        (lack_on_the_cpu, {"per_image": False}, "`per_image=True`"),
        (lack_on_the_cpu, PROBE_ALONE, "`num_images=1`"),
        (lack_on_the_cpu, PROBE_ALONE, "`probe=False`"),
        (lack_on_the_cpu, {"check": True, "order1_every_n_steps": None}, "`check=False`"),
    ],
)
def test_training_goes_on_after_one_warning_and_the_remedy_works(lack, given, remedy, tmp_path, monkeypatch):
    FEATURES.clear()
    # Without order 1, probe and check there are no passes; else there is memory for one image.
    make = lambda: NeedsMuch(lack, enough_for=0 if remedy.endswith(("None`", "False`")) else 1)  # noqa: E731
    plain = train(make, tmp_path / "plain")
    gc.disable()
    try:
        watched = train(make, tmp_path / "watched", watching(on_error="warn", **given))
        assert FEATURES, "no pass has run out of memory"
        assert not any(features() is not None for features in FEATURES)
    finally:
        gc.enable()
    assert_same(plain, watched)
    assert len(watched.warned) == 1
    assert "too little memory" in watched.warned[0]
    assert remedy in watched.warned[0]
    variable, _, value = in_variables(remedy).strip("`").partition("=")
    monkeypatch.setenv(variable, value)
    advised = flags(get_type_hints(NormGradCallback.__init__))
    assert train(make, tmp_path / "advised", watching(on_error="warn", **{**given, **advised})).warned == []


@pytest.mark.parametrize("lack", LACKS)
@pytest.mark.parametrize("maps", [order0_maps, order1_maps])
def test_the_functions_raise_what_was_raised(lack, maps):
    def loss_fn(model, images):
        model(images)
        lack()

    with pytest.raises((RuntimeError, MemoryError)) as caught:
        maps(ResNet(), loss_fn, batch(2)[0], "stage1")
    assert is_out_of_memory(caught.value)


def test_a_model_that_once_had_too_little_memory_needs_no_copies_from_then_on():
    model, lacking = ResNet(), [lack_on_a_gpu]

    def loss_fn(model, images):
        scores = model(images)
        if lacking:
            lacking.pop()()
        return scores.square().sum()

    with pytest.raises(torch.OutOfMemoryError):
        order0_maps(model, loss_fn, batch(2)[0], "stage1")
    order0_maps(model, loss_fn, batch(2)[0], "stage1")
    assert model not in _need_copies


def test_other_errors_are_other_errors():
    assert not is_out_of_memory(RuntimeError("boom"))
    assert not is_out_of_memory(ValueError("out of memory"))
    with failures_dropped():
        raise RuntimeError("boom")
    with pytest.raises(MemoryError), failures_dropped():
        raise MemoryError


def test_a_lack_of_memory_is_not_tried_on_the_whole_batch():
    """Which needs even more."""
    sizes = []

    def loss_fn(model, images):
        sizes.append(len(images))
        raise MemoryError

    images = batch(4)[0]
    whole = WholeBatch(images, range(4), explains_errors=True)
    with pytest.raises(MemoryError):
        run_passes(ResNet(), loss_fn, images.split(1), "stage1", ["order1"], InnerStep(), ReadOptions(), whole=whole)
    assert sizes == [1]
