"""Grad-CAM beside order 0, from the same activation and gradient."""

import pytest
import reference
import torch
from twice import LAYERS, Lit, assert_close, order0, panels, train, twice

from normgrad_lightning import NormGrad, NormGradCallback
from normgrad_lightning.hooks.readings import READINGS


def of_a_loss(x, g):
    """Training lowers its loss; Grad-CAM is for a score to be raised."""
    return reference.grad_cam(x[:2], -g[:2])


@pytest.mark.parametrize(
    "options",
    [{}, {"accumulate_grad_batches": 3}, {"precision": "bf16-mixed"}],
    ids=["plain", "accumulated", "bf16-mixed"],
)
def test_its_maps_are_those_of_plain_loops_and_no_bit_of_training_changes(tmp_path, options):
    every = {"accumulate_grad_batches": {"steps": (0, 1), "order1_steps": (0, 1)}}
    expected = every.get(next(iter(options), ""), {})
    tolerance = {"tolerance": 0.1, "order1_tolerance": 0.1} if "precision" in options else {}
    plain, watched = twice(tmp_path, flags={"grad_cam": True}, **expected, **tolerance, **options)
    shown = watched.callback.latest["grad_cam"]
    assert list(shown.maps) == LAYERS
    wanted = order0(plain.moments[shown.step], Lit, LAYERS, of_a_loss)
    with_signal = {name: m for name, m in wanted.items() if m.any()}
    assert with_signal
    assert_close(shown.maps, with_signal, 0.1 if "precision" in options else 1e-5)
    assert all(not shown.maps[name].any() for name in wanted.keys() - with_signal)
    steps = panels(watched.trainer)["normgrad_order0/00_net.stage1"]
    assert panels(watched.trainer)["normgrad_grad_cam/02_net.stage3"] == steps


def test_steps_that_are_only_read_make_none(tmp_path, monkeypatch):
    calls, read = [], READINGS["grad_cam"]

    def counted(point, x):
        calls.append(x.shape)
        return read(point, x)

    monkeypatch.setitem(READINGS, "grad_cam", counted)
    callback = NormGradCallback(
        grad_cam=True, layers=["net.stage1"], every_n_steps=3, read_every_n_steps=1, probe=False
    )
    train(Lit, tmp_path, callback)
    assert callback.latest["grad_cam"].step == 5
    assert callback.latest["grad_cam"].maps["net.stage1"].any()
    assert len(calls) == 3  # steps 0, 3 and 5, the last


def test_without_the_flag_there_is_none(tmp_path):
    _, watched = twice(tmp_path)
    assert "grad_cam" not in watched.callback.latest
    assert not [tag for tag in panels(watched.trainer) if "grad_cam" in tag]


def test_the_features_that_lower_the_loss_are_bright():
    """The sign: training raises the features' mean, so the positive ones count and the negative ones do not."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 1, 1, bias=False))
    torch.nn.init.ones_(model[0].weight)
    image = torch.zeros(1, 1, 4, 4)
    image[..., 0, 0], image[..., 3, 3] = 1.0, -1.0
    with NormGrad(model, "0", kinds=["order0", "grad_cam"]) as recorder:
        (-model(image).mean()).backward()
    bright = recorder.maps_of("grad_cam")["0"][0] > 0
    assert bright.nonzero().tolist() == [[0, 0]]
    assert (recorder.maps["0"][0] > 0).nonzero().tolist() == [[0, 0], [3, 3]]


def test_a_weight_has_no_grad_cam():
    with pytest.raises(ValueError, match=r'`grad_cam`: expected `target="output"` .* but got `target="weight"`'):
        NormGradCallback(grad_cam=True, target="weight")
