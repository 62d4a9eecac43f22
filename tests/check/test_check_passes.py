"""The five passes give what a slow reference gives, whatever surrounds the network, and leave no trace."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from networks import ResNet
from oracles import OnePlace, maps_at_the_place, marked_images, mean_loss, slow_losses
from torch import nn
from torchvision.models.detection import FCOS
from torchvision.models.detection.anchor_utils import AnchorGenerator

from normgrad_lightning.check import regions
from normgrad_lightning.check.network import Comparison, NetworkWatch
from normgrad_lightning.check.passes import CannotCheck, Changed, loss_pool, network_pool


def call_of(model, run, labels, loss=None):
    """The recognised call of a step."""
    watch = NetworkWatch(model)
    watch.attach()
    found = run()
    watch.detach()
    call, *_ = Comparison(watch.calls, labels.tolist(), found if loss is None else loss).result()
    return call


def changed_rows(images, rows, donors, maps):
    region = regions.peak_squares(maps[list(rows)], images.shape[2:])
    control = regions.moved_squares(region)
    return Changed.of(images[list(rows)], images[list(donors)], region, control), region, control


ROWS, DONORS = [1, 3, 0, 5], [0, 2, 1, 4]


def trained_resnet():
    """One whose BatchNorm has statistics."""
    network = ResNet(classes=2).eval()
    for module in network.modules():
        if hasattr(module, "num_batches_tracked"):
            module.num_batches_tracked += 1000
    return network


@pytest.mark.parametrize("network", [OnePlace(), trained_resnet()], ids=["one place", "resnet"])
def test_the_network_alone_gives_the_reference(network):
    images, labels = marked_images(8)
    call = call_of(network, lambda: mean_loss(network, (images, labels)), labels)
    maps = maps_at_the_place(8)
    changed, region, control = changed_rows(images, ROWS, DONORS, maps["early"])
    found = network_pool(call, images, maps, labels.tolist()).losses(changed, ROWS, DONORS)
    expected = slow_losses(network, images, labels, ROWS, DONORS, region, control)
    torch.testing.assert_close(torch.stack(found, 1), expected.float(), rtol=1e-5, atol=1e-5)


def test_the_training_loss_gives_the_reference():
    network = nn.Sequential(nn.Conv2d(3, 3, 1), OnePlace())
    images, labels = marked_images(6)
    changed, region, control = changed_rows(images, ROWS, DONORS, maps_at_the_place(6)["early"])
    pool = loss_pool(network, mean_loss, (images, labels), labels.tolist(), layers=["0"])
    torch.testing.assert_close(pool.images, images)
    found = torch.stack(pool.losses(changed, ROWS, DONORS), 1)
    expected = slow_losses(network, images, labels, ROWS, DONORS, region, control)
    torch.testing.assert_close(found[:, :5], expected[:, :5].float(), rtol=1e-5, atol=1e-5)
    assert found[:, 5:].isnan().all()


def test_it_leaves_no_trace():
    torch.manual_seed(0)
    network = ResNet(classes=2, dropout=0.5).train()
    images, labels = marked_images(8)
    mean_loss(network, (images, labels)).backward()
    call = call_of(network, lambda: mean_loss(network, (images, labels)), labels)
    before = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    changed, *_ = changed_rows(images, ROWS, DONORS, maps_at_the_place(8)["early"])
    network_pool(call, images, {}, labels.tolist()).losses(changed, ROWS, DONORS)
    pool = loss_pool(network, mean_loss, (images, labels), labels.tolist(), ["stage1"], [0, 1, 2, 3, 4, 5])
    pool.losses(changed, ROWS, DONORS)
    for name, value in network.state_dict().items():
        assert torch.equal(value, before[0][name])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert all(m.training for m in network.modules())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in network.modules())
    assert all(p.grad is not None for p in network.parameters())


def test_dropout_of_any_kind_is_off():
    class Functional(OnePlace):
        def forward(self, x):
            return super().forward(F.dropout(x, 0.5, self.training))

    network = Functional().train()
    images, labels = marked_images(8)
    call = call_of(network, lambda: mean_loss(network, (images, labels)), labels)
    changed, region, control = changed_rows(images, ROWS, DONORS, maps_at_the_place(8)["early"])
    found = network_pool(call, images, {}, labels.tolist()).losses(changed, ROWS, DONORS)
    expected = slow_losses(network.eval(), images, labels, ROWS, DONORS, region, control)
    torch.testing.assert_close(torch.stack(found, 1), expected.float(), rtol=1e-5, atol=1e-5)


def test_batchnorm_in_its_first_steps_uses_the_batch():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 3, 1), OnePlace()).train()
    nn.init.constant_(network[0].weight, 100.0)
    images, labels = marked_images(8)
    call = call_of(network, lambda: mean_loss(network, (images, labels)), labels)
    changed, *_ = changed_rows(images, ROWS, DONORS, maps_at_the_place(8)["early"])
    found = network_pool(call, images, {}, labels.tolist()).losses(changed, ROWS, DONORS)
    steady = copy.deepcopy(network)
    steady[1].momentum = None
    steady[1].reset_running_stats()
    steady(images)
    expected = F.cross_entropy(steady.eval()(images[ROWS]), labels[ROWS], reduction="none")
    torch.testing.assert_close(found.plain, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("kind", ["scores", "log-probabilities", "binary", "binary, flat", "dict"])
def test_networks_that_are_recognised(kind, smoothing):
    class Wrapped(OnePlace):
        def forward(self, x, flip=None):
            scores = super().forward(x)
            return {
                "scores": scores,
                "log-probabilities": scores.log_softmax(1),
                "binary": scores[:, 1:],
                "binary, flat": scores[:, 1],
                "dict": {"features": x, "logits": scores},
            }[kind]

    network = Wrapped()
    images, labels = marked_images(8)
    scores = OnePlace()(images)
    call = call_of(network, lambda: network(images), labels, F.cross_entropy(scores, labels, label_smoothing=smoothing))
    assert call is not None
    assert call.module is network
    torch.testing.assert_close(call.scores.log_softmax(1), scores.detach().log_softmax(1))


def test_the_outermost_that_gives_the_loss_is_taken():
    class Module(nn.Module):
        def __init__(self, last):
            super().__init__()
            self.net, self.last, self.other = OnePlace(), last, OnePlace(-1.0)

        def forward(self, x):
            self.other(x)
            return self.last(self.net(x))

    images, labels = marked_images(8)
    for last, expected in ((nn.Identity(), ""), (nn.Softmax(1), "net")):
        model = Module(last)
        call = call_of(model, lambda m=model: m(images), labels, mean_loss(model.net, (images, labels)))
        assert call.module is model.get_submodule(expected)


@pytest.mark.parametrize("what", ["another loss", "labels of others", "no images", "no scores"])
def test_networks_that_are_not(what):
    network, (images, labels) = OnePlace(), marked_images(8)
    loss = mean_loss(network, (images, labels)) + (0.1 if what == "another loss" else 0)
    labels = labels + 2 if what == "labels of others" else labels
    run = {"no images": lambda: nn.Linear(4, 2)(torch.rand(8, 4)), "no scores": lambda: nn.ReLU()(images)}.get(
        what, lambda: network(images)
    )
    assert call_of(network, run, labels, loss.detach()) is None


def test_images_that_change_by_chance_inside_are_refused():
    class Augmented(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = OnePlace()

        def forward(self, x):
            self.entered = (x + 0.3 * torch.randn_like(x)).detach()
            return self.inner(self.entered)

    network, (images, labels) = Augmented(), marked_images(8)
    call = call_of(network, lambda: mean_loss(network, (images, labels)), labels)
    entered = network.entered
    changed, *_ = changed_rows(entered, ROWS, DONORS, maps_at_the_place(8)["early"])
    with pytest.raises(CannotCheck, match="did not enter the network again"):
        network_pool(call, entered, {}, labels.tolist()).losses(changed, ROWS, DONORS)


def test_half_precision_runs_in_float32():
    network = OnePlace().to(torch.bfloat16)
    images, labels = marked_images(8)
    images = images.to(torch.bfloat16)
    call = call_of(network, lambda: mean_loss(network, (images, labels)), labels)
    changed, region, control = changed_rows(images.float(), ROWS, DONORS, maps_at_the_place(8)["early"])
    found = network_pool(call, images.float(), {}, labels.tolist()).losses(changed, ROWS, DONORS)
    expected = slow_losses(OnePlace(), images.float(), labels, ROWS, DONORS, region, control)
    torch.testing.assert_close(torch.stack(found, 1), expected.float(), rtol=1e-5, atol=1e-5)


@dataclass
class Sample:
    image: torch.Tensor
    label: torch.Tensor


class Augmenting(nn.Module):
    """A module whose loss draws random numbers, flips and normalises, before the images enter."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 3, 1), OnePlace())

    def loss(self, images, labels):
        images = (images - 0.1) / 0.5
        images = torch.where(torch.rand(len(images), 1, 1, 1) < 0.5, images, images + 0.5)
        return F.cross_entropy(self.net(images), labels)


@pytest.mark.parametrize("form", ["tuple", "dict", "dataclass", "list of images"])
def test_batches_of_any_form_and_augmentation_inside(form):
    torch.manual_seed(3)
    model, (images, labels) = Augmenting(), marked_images(6)
    batch = {
        "tuple": (images, labels),
        "dict": {"picture": images, "y": labels},
        "dataclass": Sample(images, labels),
        "list of images": (list(images), [{"labels": label[None]} for label in labels]),
    }[form]

    def loss_fn(module, batch):
        if form == "tuple":
            return module.loss(*batch)
        if form == "dict":
            return module.loss(batch["picture"], batch["y"])
        if form == "dataclass":
            return module.loss(batch.image, batch.label)
        return module.loss(torch.stack(batch[0]), torch.cat([one["labels"] for one in batch[1]]))

    pool = loss_pool(model, loss_fn, batch, labels.tolist(), layers=["net.0"])
    state = torch.get_rng_state()
    entered = []
    for image in images:  # each image alone, with the same random numbers
        torch.set_rng_state(state)
        one = ((image - 0.1) / 0.5)[None]
        entered.append(torch.where(torch.rand(1, 1, 1, 1) < 0.5, one, one + 0.5))
    torch.set_rng_state(state)
    torch.testing.assert_close(pool.images, torch.cat(entered))
    changed, region, control = changed_rows(pool.images, ROWS, DONORS, pool.maps["net.0"])
    found = torch.stack(pool.losses(changed, ROWS, DONORS), 1)
    expected = slow_losses(model.net, pool.images, labels, ROWS, DONORS, region, control)
    torch.testing.assert_close(found[:, :5], expected[:, :5].float(), rtol=1e-5, atol=1e-5)


def test_images_of_several_sizes_are_refused():
    network = nn.Sequential(nn.Conv2d(3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    batch = [torch.rand(3, 8, 8), torch.rand(3, 9, 9)], [{"label": 0}, {"label": 1}]

    def loss_fn(module, batch):
        return sum(module(image[None]).square().sum() for image in batch[0])

    with pytest.raises(CannotCheck, match="several sizes"):
        loss_pool(network, loss_fn, batch, layers=["0"])


def test_a_segmenter_is_checked_through_its_loss():
    network = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    images, _ = marked_images(4)
    masks = (images[:, 0] > 0).long()

    def loss_fn(module, batch):
        return F.cross_entropy(module(batch[0]), batch[1])

    pool = loss_pool(network, loss_fn, (images, masks), layers=["0", "2"])
    changed, *_ = changed_rows(pool.images, [0, 1], [1, 2], pool.maps["2"])
    found = pool.losses(changed, [0, 1], [1, 2])
    expected = torch.stack([loss_fn(network, (changed.covered[n : n + 1], masks[n : n + 1])) for n in range(2)])
    torch.testing.assert_close(found.covered, expected.detach(), rtol=1e-5, atol=1e-5)


def test_a_detector_of_torchvision_is_checked_through_its_losses():
    torch.manual_seed(0)
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4, 1), nn.ReLU(), nn.Conv2d(8, 32, 3, 2, 1), nn.ReLU())
    backbone.out_channels = 32
    anchors = AnchorGenerator(((16,),), ((1.0,),))
    network = FCOS(backbone, 3, anchor_generator=anchors, min_size=64, max_size=64).train()
    images = torch.rand(6, 3, 64, 64)
    targets = [{"boxes": torch.tensor([[9.0, 9.0, 30.0, 30.0]]), "labels": torch.tensor([1 + n % 2])} for n in range(6)]

    def loss_fn(module, batch):
        return sum(module(*batch).values())

    pool = loss_pool(network, loss_fn, (list(images), targets), [n % 2 for n in range(6)], layers=["backbone.2"])
    changed, region, control = changed_rows(pool.images, ROWS, DONORS, pool.maps["backbone.2"])
    found = pool.losses(changed, ROWS, DONORS)
    raw = Changed.of(images[ROWS], images[DONORS], region, control)
    for name, of in {"covered": ROWS, "covered_control": ROWS, "pasted": DONORS, "pasted_control": DONORS}.items():
        expected = [loss_fn(network, ([image], [targets[n]])) for image, n in zip(getattr(raw, name), of, strict=True)]
        torch.testing.assert_close(getattr(found, name), torch.stack(expected).detach(), rtol=1e-5, atol=1e-5)


def test_compiled_modules_are_not_watched_from_inside():
    network = nn.Sequential(torch.compile(OnePlace(), backend="eager"), nn.Identity())
    watch = NetworkWatch(network)
    watch.attach()
    assert not network[0]._orig_mod._forward_hooks
    watch.detach()
    assert not network._forward_hooks
