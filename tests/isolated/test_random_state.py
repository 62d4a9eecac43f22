"""Random numbers go on as if none had been drawn, on whatever devices a model is."""

import random
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from normgrad_lightning.isolated.random_state import devices_of, preserved_rng, seed
from normgrad_lightning.isolated.sandbox import Sandbox


class Accelerator:
    """A part of torch for a type of device, with a random state for each of its devices.

    Args:
        takes_devices: whether its functions take a device, as those of MPS need not.
    """

    def __init__(self, takes_devices: bool) -> None:
        self.takes_devices = takes_devices
        self.generators = [random.Random(number) for number in range(2)]
        self.current = 0

    def _of(self, device):
        assert len(device) == self.takes_devices
        return self.generators[device[0].index or 0] if device else self.generators[0]

    def get_rng_state(self, *device):
        return self._of(device).getstate()

    def set_rng_state(self, state, *device):
        self._of(device).setstate(state)

    def manual_seed(self, number):
        self.generators[self.current].seed(number)

    @contextmanager
    def device(self, device):
        self.current, before = device.index or 0, self.current
        yield
        self.current = before

    def draw(self):
        return [generator.random() for generator in self.generators]


def tensors_on(*devices):
    """What say that they are there."""
    return [SimpleNamespace(device=torch.device(device)) for device in devices]


@pytest.mark.parametrize("kind", ["cuda", "xpu", "mps"])
def test_every_device_of_a_model_goes_on_where_it_was(kind, monkeypatch):
    accelerator, twin = (Accelerator(takes_devices=kind != "mps") for _ in range(2))
    monkeypatch.setattr(torch, kind, accelerator)
    names = [kind] if kind == "mps" else [f"{kind}:0", f"{kind}:1"]
    devices = devices_of(tensors_on("cpu", *names))
    assert devices == [torch.device(name) for name in names]
    with preserved_rng(devices):
        seed(3, devices)
        accelerator.generators[0].random()
    assert accelerator.draw() == twin.draw()


def test_a_seed_is_for_the_devices_of_the_model_alone(monkeypatch):
    accelerator, twin = Accelerator(True), Accelerator(True)
    monkeypatch.setattr(torch, "xpu", accelerator)
    with preserved_rng([]):
        seed(5, [torch.device("xpu:1")])
        assert random.random() == random.Random(5).random()
        assert np.random.rand() == np.random.RandomState(5).rand()
        assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(5))
    assert accelerator.draw() == [twin.draw()[0], random.Random(5).random()]


def test_a_device_without_random_numbers_is_no_obstacle():
    with preserved_rng([torch.device("vulkan")]):
        seed(0, [torch.device("vulkan")])


def test_a_pass_puts_back_what_it_draws_on_the_devices_of_the_model(monkeypatch):
    accelerator, twin = Accelerator(True), Accelerator(True)
    monkeypatch.setattr(torch, "xpu", accelerator)
    monkeypatch.setattr("normgrad_lightning.isolated.sandbox.devices_of", lambda _: [torch.device("xpu", 0)])
    Sandbox(nn.Linear(1, 1)).run(lambda _: accelerator.generators[0].random())
    assert accelerator.draw() == twin.draw()
