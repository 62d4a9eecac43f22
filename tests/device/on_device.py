"""Training on another device than a CPU: the same bits, the same maps, and nobody waits.

Run by `test_stand_in.py` and `test_gpu.py`, each in a process of its own, as the stand-in registers for the process.
"""

from collections import Counter

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
import twice
from device import chosen
from networks import ResNet, ViT, batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from normgrad_lightning import NormGrad, NormGradCallback
from normgrad_lightning import functional as NF
from normgrad_lightning.hooks import to_host
from normgrad_lightning.hooks.to_host import OnTheWay

on_stand_in = pytest.mark.skipif(chosen.IS_REAL, reason="only the stand-in can do this")
if not chosen.IS_REAL:
    from device.stand_in import DEVICE, LAUNCHES_UNTIL_ARRIVAL, OfSteps

LAYERS = ["stem", "stage1", "stage2", "stage3"]


class Checkpointed(nn.Module):
    """A network whose middle is computed twice."""

    def __init__(self, reentrant):
        super().__init__()
        self.net, self.reentrant = ResNet(dropout=0.3), reentrant

    def forward(self, x):
        net = self.net
        x = checkpoint(net.stage2, net.stage1(net.stem(x)), use_reentrant=self.reentrant)
        return net.fc(net.drop(net.pool(net.stage3(x)).flatten(1)))


SET_UPS = {
    "defaults": ({}, None),
    "order 1": ({"order1_every_n_steps": 4, "num_images": 2}, None),
    "probe": ({"probe": "train"}, None),
    "Grad-CAM": ({"grad_cam": True}, None),
    "weights": ({"target": "weight"}, None),
    "checkpointing": ({}, lambda: Checkpointed(False)),
    "reentrant checkpointing": ({}, lambda: Checkpointed(True)),
}


def trained(folder, net=None, data=lambda: twice.loader(12), **flags):
    options = flags.pop("options", None) or chosen.trainer_options()
    callback = NormGradCallback(every_n_steps=2, read_every_n_steps=1, **flags) if flags.pop("watch", True) else None
    run = twice.train(
        lambda: twice.Lit(net),
        folder,
        callback,
        data=data,
        callbacks=lambda: [RandomState()],
        **options,
    )
    state = next(c for c in run.trainer.callbacks if isinstance(c, RandomState))
    return run, state.at_the_end, callback


class RandomState(pl.Callback):
    """Keeps the device's random state of the end of training."""

    def on_train_end(self, trainer, pl_module):
        self.at_the_end = chosen.random_state()


@pytest.mark.parametrize(("flags", "net"), SET_UPS.values(), ids=SET_UPS)
def test_training_keeps_its_bits_and_the_devices_random_numbers(tmp_path, flags, net):
    plain, random_numbers, _ = trained(tmp_path / "plain", net, watch=False)
    watched, others, callback = trained(tmp_path / "watched", net, **flags)
    twice.assert_same(plain, watched)
    assert torch.equal(random_numbers, others)
    assert watched.warned == []
    assert callback.maps
    kinds = {one.name for one in callback.latest.values()}
    assert ("order1" in kinds) == ("order1_every_n_steps" in flags)
    assert ("grad_cam" in kinds) == ("grad_cam" in flags)


def test_the_check_keeps_bits_and_measures_what_it_does_on_a_cpu(tmp_path):
    def data():
        return twice.loader(192, 64)

    plain, random_numbers, _ = trained(tmp_path / "plain", ResNet, data, watch=False)
    watched, others, callback = trained(tmp_path / "watched", ResNet, data, on_error="raise")
    twice.assert_same(plain, watched)
    assert torch.equal(random_numbers, others)
    assert watched.warned == []
    _, _, on_cpu = trained(tmp_path / "cpu", ResNet, data, on_error="raise", options={"accelerator": "cpu"})
    assert len(callback.check) == len(on_cpu.check) == 5
    for name, found in callback.check.items():
        expected = on_cpu.check[name]
        assert (found.n, found.form, found.step) == (expected.n, expected.form, 2)
        for of in ("plain", "covered", "covered_control", "pasted", "pasted_control"):
            assert getattr(found, of) == pytest.approx(getattr(expected, of), rel=1e-3)


class Split(nn.Module):
    """A network on two devices."""

    def __init__(self, first, second):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 3).to(first), nn.Conv2d(4, 4, 3, 2).to(second)

    def forward(self, x):
        return self.b(self.a(x).relu().to(self.b.weight.device)).relu().mean((2, 3))


def recorded(device, make=ResNet, size=(32, 32), images=3, **options):
    """The maps of one step on a device."""
    torch.manual_seed(0)
    model, (images, labels) = make().eval(), batch(images, size)
    model = model if isinstance(model, Split) else model.to(device)
    with NormGrad(model, **options) as recorder:
        output = model(images.to(device))
        F.cross_entropy(output, (labels % output.shape[1]).to(output.device)).backward()
    return recorder


CASES = {
    "auto": {},
    "inputs": {"layers": LAYERS[1:], "target": "input"},
    "weights": {"layers": ["stem", "stage1.conv1", "stage2.conv2"], "target": "weight"},
    "Grad-CAM": {"layers": LAYERS[1:], "kinds": ["order0", "grad_cam"]},
    "first images": {"layers": LAYERS, "num_images": 2},
    "tokens": {"make": ViT, "size": (32, 48)},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_maps_are_those_of_a_cpu(options):
    here, on_cpu = recorded(chosen.NAME, **options), recorded("cpu", **options)
    for kind in here.kinds:
        maps, expected = here.maps_of(kind), on_cpu.maps_of(kind)
        assert list(maps) == list(expected) != []
        for name, m in maps.items():
            assert m.device.type == chosen.NAME
            torch.testing.assert_close(m.cpu(), expected[name], rtol=1e-4, atol=1e-4 * float(expected[name].max()))


@pytest.mark.parametrize("layers", ["auto", ["a", "b"]], ids=str)
def test_layers_on_several_devices_each_have_their_map(layers):
    split = recorded("cpu", lambda: Split("cpu", chosen.NAME), layers=layers)
    on_cpu = recorded("cpu", lambda: Split("cpu", "cpu"), layers=layers)
    assert [m.device.type for m in split.maps.values()] == ["cpu", chosen.NAME]
    assert split.layers == on_cpu.layers
    for name, m in split.maps.items():
        torch.testing.assert_close(m.cpu(), on_cpu.maps[name], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(not chosen.counts_waits(), reason="this device does not tell who waits")
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_hooks_do_not_wait(options):
    with chosen.waits() as waits:
        recorder = recorded(chosen.NAME, **options)
    assert waits == Counter()
    with chosen.waits() as waits:
        assert recorder.layers  # "auto" must know which maps are zero
    assert sum(waits.values()) <= 1


@on_stand_in
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_maps_come_without_float64_and_frexp(options):
    with DEVICE.without("float64", "frexp"):
        test_maps_are_those_of_a_cpu(options)


@on_stand_in
@pytest.mark.parametrize("factorised", [True, False])
def test_functions_are_right_at_any_size_without_float64_and_frexp(factorised):
    x, g = torch.randn(3, 4, 5, 6), torch.randn(3, 4, 5, 6)
    g[1] *= 1e-25
    x[2] *= 1e25
    others = [x * 0.9, g * 0.9, x * 1.1, g * 1.2]
    calls = {
        "order 0": lambda t: NF.normgrad(*t[:2]),
        "window": lambda t: NF.normgrad_conv(*t[:2], kernel_size=3, padding=1, padding_mode="reflect"),
        "depthwise": lambda t: NF.normgrad_conv(*t[:2], kernel_size=3, padding=1, groups=4),
        "order 1": lambda t: NF.normgrad_order1(*t, epsilon=0.1, h=0.5, factorised=factorised),
        "contrast": lambda t: NF.contrast(NF.normgrad(*t[:2]), NF.normgrad(t[0].flip(2), t[1])),
    }
    for name, call in calls.items():
        expected = call([x, g, *others])
        with DEVICE.without("float64", "frexp"):
            m = call([t.to(chosen.NAME) for t in (x, g, *others)])
            assert m.device.type == chosen.NAME
        for image, wanted in zip(m.cpu(), expected, strict=True):
            assert wanted.any(), name
            torch.testing.assert_close(image / wanted.abs().max(), wanted / wanted.abs().max(), msg=name)


def test_tensors_arrive_on_the_host():
    tensors = [torch.randn(3, 4), torch.arange(5), torch.tensor(True), torch.randn(2, 2).half(), torch.zeros(0)]
    sent = OnTheWay([t.to(chosen.NAME) for t in tensors] + [tensors[0]])
    for t, expected in zip(sent.arrived(), [*tensors, tensors[0]], strict=True):
        assert t.device.type == "cpu"
        assert t.dtype == expected.dtype
        assert torch.equal(t, expected)


@on_stand_in
def test_what_has_arrived_is_not_waited_for():
    x = torch.randn(6).to(chosen.NAME)
    DEVICE.reset()
    early, late = OnTheWay([x, x.sum()]), OnTheWay([x])
    assert not DEVICE.waits
    assert torch.equal(early.arrived()[0], x.values_on_cpu)
    assert sum(DEVICE.waits.values()) == 1
    late = OnTheWay([x])
    for _ in range(LAUNCHES_UNTIL_ARRIVAL + 1):
        x + 1
    assert torch.equal(late.arrived()[0], x.values_on_cpu)
    assert sum(DEVICE.waits.values()) == 1


@on_stand_in
def test_without_pinned_memory_a_copy_waits_but_is_right(monkeypatch):
    def refuse(like):
        raise RuntimeError("out of pinned memory")

    monkeypatch.setattr(to_host, "_pinned", refuse)
    x = torch.randn(6).to(chosen.NAME)
    assert torch.equal(OnTheWay([x]).arrived()[0], x.values_on_cpu)


@on_stand_in
def test_the_stand_in_does_not_mix_devices():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(2, device=chosen.NAME) + torch.ones(2)


BUDGETS = {
    "no event": (0, 0, {"every_n_steps": 100, "read_every_n_steps": 100}),
    "a reading": (2, 40 * len(twice.LAYERS), {"every_n_steps": 100, "read_every_n_steps": 1}),
    "an event": (4, None, {"every_n_steps": 1}),
}


@on_stand_in
@pytest.mark.parametrize(("waits", "launches", "flags"), BUDGETS.values(), ids=BUDGETS)
def test_waits_and_launches_of_a_step(tmp_path, waits, launches, flags):
    """A step's maps are shown at the end of the next one: what both take is counted there."""
    callback, counted = NormGradCallback(layers=twice.LAYERS, on_error="raise", **flags), OfSteps()
    twice.train(twice.Lit, tmp_path, callback, callbacks=lambda: [counted], **chosen.trainer_options())
    for of_step in counted.steps[3:]:  # the first step is an event, shown with the second
        assert of_step.waits.total() <= waits, of_step.waits
        assert launches is None or of_step.launches.total() <= launches, of_step.launches


class Reports(pl.Callback):
    """Notes what came of the steps so far, without a wait: which have a frame of the probe or a piece of the check."""

    def __init__(self, callback):
        self.callback, self.probed, self.checked = callback, set(), set()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        state = self.callback._state
        self.probed |= {one.step for one in state.latest.values() if one.source == "probe"}
        self.checked |= {one.step for one in state.check._now.values()}


@on_stand_in
def test_waits_of_a_step_with_passes_of_our_own(tmp_path):
    """The probe at the first events, and the check, here near the end of the run; with `"auto"` in the first event."""
    callback, counted = NormGradCallback(budget=None, read_every_n_steps=1, on_error="raise"), OfSteps()
    options = {**chosen.trainer_options(), "data": lambda: twice.loader(15 * 64, 64)}
    reports = Reports(callback)
    twice.train(lambda: twice.Lit(ResNet), tmp_path, callback, callbacks=lambda: [counted, reports], **options)
    assert reports.probed >= {0, 10}
    assert reports.checked >= {12, 13}
    for step, of_step in enumerate(counted.steps[1:]):
        assert 0 < of_step.waits.total() <= (4 if step in (0, 10) else 2), (step, of_step.waits)


@on_stand_in
def test_waits_of_an_event_with_the_probe_and_the_check(tmp_path):
    callback, counted = NormGradCallback(budget=None, on_error="raise"), OfSteps()
    options = {**chosen.trainer_options(), "data": lambda: twice.loader(12 * 64, 64)}
    reports = Reports(callback)
    twice.train(lambda: twice.Lit(ResNet), tmp_path, callback, callbacks=lambda: [counted, reports], **options)
    assert reports.probed & reports.checked >= {10}
    assert 0 < counted.steps[11].waits.total() <= 4, counted.steps[11].waits


@on_stand_in
def test_a_run_without_float64_and_frexp_is_as_any_other(tmp_path):
    """As on Apple's GPUs."""
    plain, _, _ = trained(tmp_path / "plain", watch=False)
    flags = {"on_error": "raise", "grad_cam": True, "order1_every_n_steps": 4, "probe": "train", "num_images": 2}
    with DEVICE.without("float64", "frexp"):
        lacking, _, callback = trained(tmp_path / "lacking", **flags)
    twice.assert_same(plain, lacking)
    assert lacking.warned == []
    _, _, on_cpu = trained(tmp_path / "cpu", options={"accelerator": "cpu"}, **flags)
    assert set(callback.latest) == set(on_cpu.latest)
    assert callback.patches.keys() == on_cpu.patches.keys()
