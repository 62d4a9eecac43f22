"""What a reading costs an accelerator, counted without one: launches on meta tensors, and bytes that hooks keep."""

from contextlib import nullcontext

import pytest
import torch
from device.counting import Launches
from torch import nn
from torchvision import models

from normgrad_lightning import NormGrad
from normgrad_lightning.hooks import safe_hooks

LAUNCHES_PER_LAYER = 40
SHARE_OF_BYTES = 0.01
READ = 64
NETWORKS = {
    "ResNet-18": (models.resnet18, [f"layer{i}" for i in range(1, 5)]),
    "ResNet-50": (models.resnet50, [f"layer{i}" for i in range(1, 5)]),
    "ViT-B": (models.vit_b_16, [f"encoder.layers.encoder_layer_{i}" for i in (2, 5, 8, 11)]),
}
each_network = pytest.mark.parametrize(("make", "layers"), NETWORKS.values(), ids=NETWORKS)
GRAD_CAM = ["order0", "grad_cam"]


@pytest.fixture(autouse=True)
def seen(monkeypatch):
    """Dispatch modes see what hooks do: it is hidden from those of users."""
    monkeypatch.setattr(safe_hooks, "unseen", nullcontext)


def on_meta(make):
    with torch.device("meta"):
        return make()


def launches(model, batch_size, layers="auto", **options):
    """What a step launches, ours by line and others, with hooks on these layers."""
    images = torch.empty(batch_size, 3, 224, 224, device="meta")
    with Launches() as counted, NormGrad(model, layers, READ, **options):
        model(images).sum().backward()
    return counted


@each_network
@pytest.mark.parametrize("batch_size", [32, 256])
@pytest.mark.parametrize("options", [{}, {"kinds": GRAD_CAM}], ids=["order 0", "Grad-CAM"])
def test_a_reading_takes_few_launches_whatever_the_batch(make, layers, batch_size, options):
    counted = launches(on_meta(make), batch_size, layers, **options)
    assert counted.others > 100
    assert 0 < counted.ours.total() <= LAUNCHES_PER_LAYER * len(layers), counted.ours


@pytest.mark.parametrize("make", [models.resnet18, models.resnet50], ids=["ResNet-18", "ResNet-50"])
def test_a_reading_of_weights_takes_few_launches(make):
    layers = ["conv1", "layer1.0.conv1", "layer2.0.conv1", "layer4.1.conv2"]
    assert launches(on_meta(make), 256, layers, target="weight").ours.total() <= LAUNCHES_PER_LAYER * len(layers)


@each_network
def test_the_search_for_layers_takes_few_launches(make, layers):
    model = on_meta(make)
    counted = launches(model, 32)
    assert counted.ours.total() <= LAUNCHES_PER_LAYER * len(list(model.modules()))


def kept(model, batch_size, read, **options):
    """The bytes that autograd keeps for the backward pass, and those that hooks keep beside them."""
    storages = {}

    def keep(t):
        storages[t.untyped_storage()._cdata] = t.untyped_storage()
        return t

    weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    held = []

    class Recorder(NormGrad):
        def _await_gradient(self, call):
            super()._await_gradient(call)
            (use,) = [h for h in call.point._backward_hooks.values() if hasattr(h, "reading")]
            held.extend(_tensors_of(use.reading))

    images = torch.empty(batch_size, 3, 224, 224, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t), Recorder(model, **read, **options):
        model(images).sum()
    ours = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in held}
    autograd = {key: storage.nbytes() for key, storage in storages.items() if key not in weights}
    return sum(autograd.values()), sum(size for key, size in ours.items() if key not in autograd)


def _tensors_of(value, seen=None):
    """The tensors that a closure holds."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [t for part in value for t in _tensors_of(part, seen)]
    cells = getattr(value, "__closure__", None) or ()
    return [t for cell in cells for t in _tensors_of(cell.cell_contents, seen)]


@each_network
@pytest.mark.parametrize("batch_size", [32, 256])
def test_hooks_keep_a_hundredth_of_what_autograd_keeps(make, layers, batch_size):
    autograd, ours = kept(on_meta(make), batch_size, {"layers": layers, "num_images": READ})
    assert 0 < ours <= SHARE_OF_BYTES * autograd


@each_network
def test_grad_cam_with_auto_keeps_no_copies_of_activations(make, layers):
    """In the first event, every layer is read: copies of all were twice what autograd keeps."""
    autograd, ours = kept(on_meta(make), 32, {"num_images": READ}, kinds=GRAD_CAM)
    assert ours <= 0.25 * autograd


def test_tensors_that_a_reading_holds_are_found():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh())
    _, ours = kept(model.to("meta"), 2, {"layers": "1"})
    assert ours == 2 * 222 * 222 * 4  # the norms alone
