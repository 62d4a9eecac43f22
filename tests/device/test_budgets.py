"""What a reading costs an accelerator, counted without one: launches on meta tensors, and bytes that hooks keep."""

import pytest
from device.counting import GRAD_CAM, NETWORKS, bytes_kept, launches, on_meta
from torch import nn
from torchvision import models

from normgrad_lightning.settings import MOST_READ

LAUNCHES_PER_LAYER = 40
SHARE_OF_BYTES = 0.01
each_network = pytest.mark.parametrize(("make", "layers"), NETWORKS.values(), ids=NETWORKS)


@each_network
@pytest.mark.parametrize("batch_size", [32, 256])
@pytest.mark.parametrize("options", [{}, {"kinds": GRAD_CAM}], ids=["order 0", "Grad-CAM"])
def test_a_reading_takes_few_launches_whatever_the_batch(make, layers, batch_size, options):
    counted = launches(on_meta(make), batch_size, layers, MOST_READ, **options)
    assert counted.others > 100
    assert 0 < counted.ours.total() <= LAUNCHES_PER_LAYER * len(layers), counted.ours


@pytest.mark.parametrize("make", [models.resnet18, models.resnet50], ids=["ResNet-18", "ResNet-50"])
def test_a_reading_of_weights_takes_few_launches(make):
    layers = ["conv1", "layer1.0.conv1", "layer2.0.conv1", "layer4.1.conv2"]
    counted = launches(on_meta(make), 256, layers, MOST_READ, target="weight")
    assert 0 < counted.ours.total() <= LAUNCHES_PER_LAYER * len(layers)


@each_network
def test_the_search_for_layers_takes_few_launches(make, layers):
    model = on_meta(make)
    assert 0 < launches(model, 32, "auto", MOST_READ).ours.total() <= LAUNCHES_PER_LAYER * len(list(model.modules()))


@each_network
@pytest.mark.parametrize("batch_size", [32, 256])
def test_hooks_keep_a_hundredth_of_what_autograd_keeps(make, layers, batch_size):
    autograd, ours = bytes_kept(on_meta(make), batch_size, layers, MOST_READ)
    assert 0 < ours <= SHARE_OF_BYTES * autograd


@each_network
def test_grad_cam_with_auto_keeps_no_copies_of_activations(make, layers):
    """In the first event, every layer is read: copies of all were twice what autograd keeps."""
    autograd, ours = bytes_kept(on_meta(make), 32, "auto", MOST_READ, kinds=GRAD_CAM)
    assert ours <= 0.25 * autograd


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


def test_what_hooks_keep_is_counted():
    """Norms alone for order 0; Grad-CAM also keeps an activation, here one that nothing else needs."""
    model, numbers = nn.Sequential(nn.Conv2d(3, 8, 3), Doubled(), nn.Tanh()).to("meta"), 2 * 222 * 222
    assert bytes_kept(model, 2, "0") == (4 * (2 * 3 * 224 * 224 + 8 * numbers), 4 * numbers)
    assert bytes_kept(model, 2, "0", kinds=GRAD_CAM)[1] == 4 * (numbers + 8 * numbers)
