"""Passes of our own: the right maps at the lowest price, and no trace."""

import copy
import random
from dataclasses import dataclass

import numpy as np
import pytest
import reference
import torch
import torch.nn.functional as F
from networks import ResNet, UNet, ViT, batch
from torch import nn
from twice import tap

from normgrad_lightning import NormGrad, grad_cam_maps, order0_maps
from normgrad_lightning.isolated.sandbox import MIN_SHARED_VALUES


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("target", ["output", "input", "weight"])
@pytest.mark.parametrize("layers", ["stage*", ["stage1.conv2", "stage3.*"], "auto"])
def test_its_maps_are_those_of_a_recorded_backward(target, layers):
    torch.manual_seed(0)
    if target == "weight" and layers != "auto":
        layers = "**.conv?"
    model, images_labels = ResNet().double().eval(), batch(dtype=torch.float64)
    maps = order0_maps(model, loss_fn, images_labels, layers, target=target)
    with NormGrad(model, list(maps), target=target) as recorder:
        loss_fn(model, images_labels).backward()
    assert len(maps) >= 3
    assert list(maps) == list(recorder.maps)
    for name, m in maps.items():
        torch.testing.assert_close(m, recorder.maps[name], rtol=1e-10, atol=1e-12)
        assert m.sum() > 0


@pytest.mark.parametrize("write", [lambda t: t.mul_(2), lambda t: t.numpy().fill(1), lambda t: t.data.zero_()])
def test_a_loss_may_write_to_a_large_batch_which_stays_as_it_is(write):
    images_labels = batch(4, (48, 48))
    before, model = copy.deepcopy(images_labels), ResNet().eval()
    assert images_labels[0].numel() > MIN_SHARED_VALUES

    def writes(model, batch):
        write(batch[0])
        return loss_fn(model, batch)

    written = copy.deepcopy(images_labels)
    write(written[0])
    expected = order0_maps(model, loss_fn, written, "stage*")
    for _ in range(2):
        maps = order0_maps(model, writes, images_labels, "stage*")
        assert all(torch.equal(maps[name], m) for name, m in expected.items())
        assert all(map(torch.equal, images_labels, before))


def test_transformers_and_segmenters_too():
    vit, images_labels = ViT().eval(), batch(2, (32, 48))
    assert {m.shape for m in order0_maps(vit, loss_fn, images_labels).values()} == {(2, 4, 6)}
    masks = torch.zeros(2, 32, 48, dtype=torch.long)
    shapes = {n: tuple(m.shape) for n, m in order0_maps(UNet(), loss_fn, (images_labels[0], masks)).items()}
    assert shapes == {"bottom.2": (2, 8, 12), "merge2.1": (2, 16, 24), "merge1.1": (2, 32, 48)}


def test_it_leaves_no_trace():
    model, images_labels = ResNet(dropout=0.5).train(), batch()
    model.stage2.eval()
    model.register_buffer("calls", torch.zeros(()))

    def count(*_):
        model.calls += 1

    model.stem.register_forward_hook(count)
    loss_fn(model, images_labels).backward()
    before = copy.deepcopy([*model.state_dict().values(), *(p.grad for p in model.parameters())])
    modes = [m.training for m in model.modules()]
    states = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    fired = []
    model.stem.weight.register_hook(lambda g: fired.append(1))

    def noisy_loss(model, batch):
        torch.rand(3), np.random.rand(), random.random()
        return loss_fn(model, batch)

    order0_maps(model, noisy_loss, images_labels)
    after = [*model.state_dict().values(), *(p.grad for p in model.parameters())]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert modes == [m.training for m in model.modules()]
    assert torch.equal(states[0], torch.get_rng_state())
    assert (states[1] == np.random.get_state()[1]).all()
    assert states[2] == random.getstate()
    assert fired == []
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    assert hooks == 1


def test_it_leaves_no_trace_when_the_loss_raises():
    model, images_labels = ResNet().train(), batch()

    def broken(model, batch):
        model(batch[0])
        raise RuntimeError("boom")

    weights = [p for p in model.parameters()]
    with pytest.raises(RuntimeError, match="boom"):
        order0_maps(model, broken, images_labels, "stage*")
    assert model.training
    assert all(a is b for a, b in zip(weights, model.parameters(), strict=True))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_frozen_model_can_be_looked_at():
    model, images_labels = ResNet().eval(), batch()
    maps = order0_maps(model, loss_fn, images_labels, "stage*")
    frozen = order0_maps(model.requires_grad_(False), loss_fn, images_labels, "stage*")
    assert all(torch.equal(maps[name], frozen[name]) for name in maps)


def test_no_weight_gradient_is_computed_and_nothing_below_the_lowest_layer_is_kept():
    """Counted by autograd itself: what it saves, and which backward functions run."""
    model, images_labels = ResNet().eval(), batch()
    saved, ran = [], []

    def count(layers):
        saved.clear(), ran.clear()

        def loss_with_spies(model, batch):
            loss = loss_fn(model, batch)
            stack, seen = [loss.grad_fn], set()
            while stack:
                node = stack.pop()
                if node is None or node in seen:
                    continue
                seen.add(node)
                ran.append(type(node).__name__)
                stack.extend(parent for parent, _ in node.next_functions)
            return loss

        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            order0_maps(model, loss_with_spies, images_labels, layers)
        return ran.count("ConvolutionBackward0"), ran.count("AccumulateGrad")

    # Above stage2: stage3 has two convolutions and a shortcut. The leaf at stage2 is the only one there is.
    assert count("stage2") == (3, 1)
    assert not any(t.shape[1:] == (8, 16, 24) for t in saved)
    assert count("stage3") == (0, 1)
    assert count("stem") == (8, 1)


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (lambda m, b: m(b[0]), r"`loss_fn`: expected a scalar tensor, but got a tensor of shape \(4, 5\). Reduce it"),
        (lambda m, b: 3.0, "`loss_fn`: expected a scalar tensor, but got 'float'"),
        (lambda m, b: torch.ones(()), "expected a loss that depends on the chosen layers"),
        (lambda m, b: m(b[0]).detach().sum(), "expected a loss that depends on the chosen layers"),
    ],
)
def test_a_loss_that_cannot_be_used_is_told(loss, told):
    with pytest.raises(ValueError, match=told):
        order0_maps(ResNet(), loss, batch(), "stage1")


def test_a_loss_that_is_none_is_told_with_auto_too():
    with pytest.raises(ValueError, match="`loss_fn`: expected a scalar tensor, but got 'float'"):
        order0_maps(ResNet(), lambda m, b: 3.0, batch())


@dataclass
class Output:
    note: str
    map: torch.Tensor


def test_layers_may_give_dataclasses():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return Output("features", self.body(x))

    model, (images, _) = nn.ModuleDict({"net": Wrapped()}), batch()

    def loss(m, x):
        return m["net"](x).map.square().sum()

    maps = order0_maps(model, loss, images, "net")
    inner = order0_maps(model, loss, images, "net.body")
    assert torch.equal(maps["net"], inner["net.body"])


def test_auto_without_a_grid_is_told():
    model = nn.Sequential(nn.Linear(4, 2))
    with pytest.raises(ValueError, match='"auto" found no layer that gives features on a grid'):
        order0_maps(model, lambda m, x: m(x).sum(), torch.randn(2, 4))


def test_images_that_ask_for_gradients_change_nothing():
    model, (images, labels) = ResNet().eval(), batch()
    maps = order0_maps(model, loss_fn, (images, labels), "stage*")
    wanting = images.clone().requires_grad_()
    again = order0_maps(model, loss_fn, (wanting, labels), "stage*")
    assert all(torch.equal(maps[name], again[name]) for name in maps)
    assert wanting.grad is None


# ---------------------------------------------------------------- Grad-CAM beside them


def score_fn(model, batch):
    return model(batch[0]).gather(1, batch[1][:, None]).sum()


@pytest.mark.parametrize("layers", [["stem", "stage2.bn1", "stage3"], "auto"])
def test_grad_cam_is_that_of_plain_loops_over_a_real_backward(layers):
    torch.manual_seed(0)
    model, images_labels = ResNet().double().eval(), batch(3, (12, 16), dtype=torch.float64)
    before = copy.deepcopy(model.state_dict())
    maps = grad_cam_maps(model, images_labels, layers, score_fn=score_fn)
    assert list(maps) == (["stage1", "stage2", "stage3"] if layers == "auto" else layers)
    uses = {name: [] for name in maps}
    for name in maps:
        model.get_submodule(name).register_forward_hook(tap(uses[name]))
    score_fn(model, images_labels).backward()
    for name, m in maps.items():
        torch.testing.assert_close(m, reference.grad_cam(*uses[name][0]), rtol=1e-9, atol=1e-12)
        assert (m > 0).any()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])


def loss_fn_of_score(model, batch):
    return -score_fn(model, batch)


def test_a_loss_and_the_score_that_it_lowers_have_the_same_grad_cam():
    model, images_labels = ResNet().eval(), batch(3, (12, 16))
    of_score = grad_cam_maps(model, images_labels, score_fn=score_fn)
    of_loss = grad_cam_maps(model, images_labels, loss_fn=loss_fn_of_score)
    as_if_a_score = grad_cam_maps(model, images_labels, score_fn=loss_fn_of_score)
    for name, m in of_score.items():
        assert torch.equal(m, of_loss[name])
        assert not torch.equal(m, as_if_a_score[name])


@pytest.mark.parametrize(
    "call",
    [
        lambda model, batch: grad_cam_maps(model, score_fn, batch),
        lambda model, batch: grad_cam_maps(model, batch),
        lambda model, batch: grad_cam_maps(model, batch, "stem"),
        lambda model, batch: grad_cam_maps(model, batch, loss_fn=loss_fn_of_score, score_fn=score_fn),
    ],
)
def test_whether_a_function_is_a_loss_or_a_score_must_be_said(call):
    with pytest.raises(ValueError, match=r"`loss_fn`, `score_fn`: expected exactly one .*`loss_fn=` .*`score_fn=` "):
        call(ResNet(), batch(2))


def test_grad_cam_of_tokens_is_on_their_grid():
    maps = grad_cam_maps(ViT().eval(), batch(2, (32, 48)), score_fn=score_fn)
    assert {m.shape for m in maps.values()} == {(2, 4, 6)}
