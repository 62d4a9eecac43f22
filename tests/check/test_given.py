"""The check of a finished model: what it rests on, by the loss of single images."""

import pytest
import torch
from oracles import OnePlace, marked_images, mean_loss
from torch import nn

from normgrad_lightning import check_maps
from normgrad_lightning.check.rule import rests


def network():
    """A convolution that passes the image on, then the one place."""
    conv = nn.Conv2d(3, 3, 1, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.eye(3)[..., None, None])
    return nn.Sequential(conv, OnePlace())


def test_it_tells_what_the_classes_rest_on():
    images, labels = marked_images(48)
    found = check_maps(network(), mean_loss, (images, labels), labels=labels.tolist(), classes=["cat", "dog"])
    assert list(found) == ["cat", "dog"]
    assert all(map(rests, found.values()))
    assert found["dog"].n == 24
    assert found["dog"].plain == pytest.approx(mean_loss(network(), (images[1::2], labels[1::2])).item(), abs=1e-5)


def test_without_labels_there_is_one_row():
    images, labels = marked_images(12)
    (found,) = check_maps(network(), mean_loss, (images, labels), "0").values()
    assert found.name == "all"
    assert found.pasted is None


def test_few_images_say_nothing():
    images, labels = marked_images(10)
    assert check_maps(network(), mean_loss, (images, labels), "0", labels=labels.tolist()) == {}


def test_what_is_wrong_is_said():
    with pytest.raises(ValueError, match="loss_fn"):
        check_maps(network(), nn.CrossEntropyLoss(), marked_images(8))
    with pytest.raises(ValueError, match="batch"):
        check_maps(network(), mean_loss, (torch.rand(3, 3, 32, 32), torch.zeros(2)), "0")
