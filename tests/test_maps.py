"""The table of kinds: what its columns promise is so."""

import pytest
import torch
import torch.nn.functional as F
from networks import ResNet, batch

from normgrad_lightning import functional, order1_maps
from normgrad_lightning.hooks.readings import READINGS
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.order0 import maps_of_pass
from normgrad_lightning.isolated.order1 import run_passes
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.maps import EPSILON, KINDS, READ_KINDS


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def maps_of(kind, factor=1.0):
    torch.manual_seed(0)
    model, images_labels = ResNet(smooth=True).double().eval(), batch(3, (16, 16), dtype=torch.float64)

    def scaled(model, batch):
        return factor * loss_fn(model, batch)

    if kind in READINGS:
        return maps_of_pass(model, scaled, images_labels, ["stage2"], kind, ReadOptions())["stage2"]
    step = InnerStep(EPSILON / factor)
    return run_passes(model, scaled, [images_labels], ["stage2"], [kind], step, ReadOptions()).maps[kind]["stage2"]


def passes_of(kinds):
    torch.manual_seed(0)
    model, images_labels = ResNet(smooth=True).double().eval(), batch(3, (16, 16), dtype=torch.float64)
    step = InnerStep(EPSILON)
    return run_passes(model, loss_fn, [images_labels], ["stage2"], kinds, step, ReadOptions()).maps


def test_what_a_step_gives_can_be_read_in_passes_too():
    """As for a probe: all such kinds together, and each alone."""
    together = passes_of(READ_KINDS)
    for kind in READ_KINDS:
        for maps in (together, passes_of([kind])):
            torch.testing.assert_close(maps[kind]["stage2"], maps_of(kind), rtol=1e-9, atol=1e-15)


def test_passes_take_a_kind_from_the_table_of_readings(monkeypatch):
    def signed_sum(point, x):
        kept = point.view(x.clone())
        return lambda g: (kept * point.view(g)).sum(1)

    monkeypatch.setitem(READINGS, "grad_cam", signed_sum)
    torch.testing.assert_close(passes_of(["grad_cam"])["grad_cam"]["stage2"], maps_of("grad_cam"), rtol=1e-9, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_that_scales_with_the_loss_does_and_another_does_not(kind):
    """ε is divided by the factor: order1(s·loss, ε) = s·order1(loss, s·ε)."""
    once, twice = maps_of(kind), maps_of(kind, 2.0)
    factor = 2.0 if KINDS[kind].scales_with_loss else 1.0
    torch.testing.assert_close(twice, factor * once, rtol=1e-8, atol=1e-14)
    assert once.any()


@pytest.mark.parametrize("kind", KINDS)
def test_only_signed_kinds_have_negative_values(kind):
    assert (maps_of(kind) < 0).any() == KINDS[kind].signed


def test_every_kind_has_the_function_that_its_row_promises():
    assert tuple(READINGS) == READ_KINDS
    for name, kind in KINDS.items():
        assert kind.name == name
        assert len(kind.meaning.split()) <= 6
        assert not (kind.made_of and kind.step)
        if kind.made_of:
            assert callable(getattr(functional, name))
            assert all(KINDS[part].step for part in kind.made_of)


def test_the_direction_of_the_step_is_that_of_order1_maps():
    torch.manual_seed(0)
    model, images_labels = ResNet(smooth=True).double().eval(), batch(2, (16, 16), dtype=torch.float64)
    for name in (name for name, kind in KINDS.items() if kind.step):
        maps = order1_maps(model, loss_fn, images_labels, "stage2", per_image=False, adversarial=KINDS[name].step > 0)
        result = run_passes(model, loss_fn, [images_labels], ["stage2"], [name], InnerStep(), ReadOptions())
        assert torch.equal(maps["stage2"], result.maps[name]["stage2"])
