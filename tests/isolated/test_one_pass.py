"""A pass costs no more than it must, no needless copies or gradients, and leaves no trace all the same."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from networks import ResNet, UNet, ViT, batch
from torch import nn

from normgrad_lightning import NormGrad, grad_cam_maps, order0_maps
from normgrad_lightning.isolated.one_pass import replayed
from normgrad_lightning.isolated.sandbox import MIN_SHARED_VALUES, read_only
from normgrad_lightning.layers.options import ReadOptions

WIDE = 48
"""Channels, so that a weight is large enough to be shared."""


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Plain(nn.Module):
    """Convolutions large enough for their weights to be shared with a pass, and places for a test to act."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, WIDE, 3)
        self.low = nn.Conv2d(WIDE, WIDE, 3)
        self.act = nn.ReLU(inplace=True)
        self.high = nn.Conv2d(WIDE, WIDE, 3)
        self.head = nn.Linear(WIDE, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        x = self.act(self.low(self.stem(x)))
        return self.head(self.high(x).mean((2, 3)))


def state(model):
    """All that a pass must leave alone: values, where they are in memory, and how often they were written to."""
    tensors = [*model.parameters(), *model.buffers()]
    return [(t.detach().clone(), t.data_ptr(), t._version, t.requires_grad) for t in tensors]


def assert_same(before, after):
    for (t, *rest), (u, *others) in zip(before, after, strict=True):
        assert torch.equal(t, u)
        assert rest == others


# ---------------------------------------------------------------------------------------------------------------------
# Weights that a pass shares with the model, and cannot write to

WAYS_TO_WRITE = {
    "in place": lambda t: t.add_(1),
    "fill": lambda t: t.zero_(),
    "data": lambda t: t.data.mul_(2),
    "detach": lambda t: t.detach().clamp_(-0.1, 0.1),
    "item": lambda t: t.__setitem__(0, 1),
    "view": lambda t: t.view(-1)[3:].zero_(),
    "transposed": lambda t: t.t().zero_(),
    "copy": lambda t: t.copy_(torch.ones_like(t)),
    "out": lambda t: torch.add(t, 1, out=t),
    "matrix product": lambda t: torch.mm(torch.ones(t.shape), torch.ones(t.shape), out=t),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
    "init": lambda t: nn.init.normal_(t),
    "orthogonal": lambda t: nn.init.orthogonal_(t),
    "max_norm": lambda t: F.embedding(torch.tensor([0]), t, max_norm=0.01),
    "numpy": lambda t: t.numpy().fill(1),
    "array": lambda t: np.asarray(t).fill(1),
    "pointer": lambda t: t.data_ptr(),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "of a deep copy's memo": lambda t: t.index_put_((torch.tensor([0]),), torch.tensor(5.0)),
    "optimizer": lambda t: step_with(torch.optim.SGD, t),
    "fused optimizer": lambda t: step_with(torch.optim.AdamW, t, fused=True),
}


def step_with(optimizer, t, **options):
    t.requires_grad_().grad = torch.ones(t.shape)
    optimizer([t], lr=1.0, **options).step()


@pytest.mark.parametrize("way", WAYS_TO_WRITE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_only_cannot_be_written_to(way, dtype):
    t = torch.randn(256, 256).to(dtype)
    before, version = t.clone(), t._version
    alias = read_only(t)
    with pytest.raises((RuntimeError, TypeError)):
        WAYS_TO_WRITE[way](alias)
    assert torch.equal(t, before)
    assert t._version == version


def test_what_is_read_only_has_the_values_of_the_tensor_which_stays_writable():
    t = torch.randn(256, 256)
    alias = read_only(t)
    assert torch.equal(alias, t)
    t.add_(1)
    assert torch.equal(alias, t)  # no copy: it is the same memory
    del alias
    gc.collect()
    t.data.mul_(2)
    assert t.numpy().sum() == pytest.approx(t.sum().item(), rel=1e-3)


@pytest.mark.parametrize(
    "t",
    [
        torch.randn(8),
        torch.randn(MIN_SHARED_VALUES).to_sparse(),
        torch.randn(MIN_SHARED_VALUES, dtype=torch.complex64).conj(),
        torch.randn(MIN_SHARED_VALUES).as_subclass(type("Meta", (torch.Tensor,), {})),
        torch.empty(0),
    ],
    ids=["small", "sparse", "conjugate", "subclass", "empty"],
)
def test_what_cannot_be_shared_is_copied(t):
    copied = read_only(t)
    assert type(copied) is type(t)
    assert torch.equal(copied.to_dense() if t.is_sparse else copied, t.to_dense() if t.is_sparse else t)
    copied.mul_(2)
    assert t.is_sparse or not t.numel() or not torch.equal(copied, t)


# ---------------------------------------------------------------------------------------------------------------------
# A pass of its own: no copies where none are needed, the same maps where they are


@pytest.mark.parametrize("network", [Plain, ResNet, UNet, ViT])
def test_a_network_that_does_not_write_to_its_weights_runs_once(network):
    model, (images, _) = network().eval(), batch(2, (32, 48))
    passes = []

    def loss(model, images):
        passes.append(1)
        return model(images).square().mean()

    names = list(order0_maps(model, loss, images))
    passes.clear()
    before = state(model)
    assert list(order0_maps(model, loss, images, names)) == names
    assert passes == [1]
    assert_same(before, state(model))


def test_a_pass_runs_on_the_weights_themselves():
    model, images_labels, refused = Plain().eval(), batch(2, (16, 16)), []

    def loss(model, batch):
        for layer in (model.low, model.high):
            with pytest.raises(RuntimeError, match="data pointer"):
                layer.weight.mul_(2)
            refused.append(layer)
        return loss_fn(model, batch)

    before = state(model)
    maps = order0_maps(model, loss, images_labels, "low")
    assert refused == [model.low, model.high]
    assert_same(before, state(model))
    torch.testing.assert_close(maps, order0_maps(model, loss_fn, images_labels, "low"))


def updated(model, fraction):
    """What `MovesWeights` does to its weights in a forward pass, by hand."""
    anew = copy.deepcopy(model)
    anew.fraction = 0.0
    with torch.no_grad():
        for p in anew.parameters():
            p.mul_(1 - fraction)
    return anew


class MovesWeights(Plain):
    """Weight decay in the forward pass, as momentum encoders and clipped critics do."""

    def __init__(self, way):
        super().__init__()
        self.way, self.fraction = way, 0.25

    def forward(self, x):
        for p in self.parameters() if self.fraction else ():
            if self.way == "in place":
                with torch.no_grad():
                    p.mul_(1 - self.fraction)
            elif self.way == "data":
                p.data.mul_(1 - self.fraction)
            elif self.way == "numpy":
                array = p.detach().numpy()
                array *= 1 - self.fraction
            else:
                p.data = p.data * (1 - self.fraction)
        return super().forward(x)


@pytest.mark.parametrize("way", ["in place", "data", "numpy", "replaced"])
@pytest.mark.parametrize("layers", [["low"], ["stem", "high"]])
def test_a_network_that_writes_to_its_weights_has_its_maps_and_keeps_its_bits(way, layers):
    torch.manual_seed(0)
    model, images_labels = MovesWeights(way).eval(), batch(2, (16, 16))
    before = state(model)
    expected = order0_maps(updated(model, 0.25), loss_fn, images_labels, layers)
    for _ in range(2):
        maps = order0_maps(model, loss_fn, images_labels, layers)
        assert_same(before, state(model))
        for name in layers:
            torch.testing.assert_close(maps[name], expected[name])
            assert maps[name].sum() > 0


def test_a_network_that_needs_copies_is_tried_without_them_once():
    model, images_labels, passes = MovesWeights("data").eval(), batch(2, (16, 16)), []

    def loss(model, batch):
        passes.append(1)
        return loss_fn(model, batch)

    counts = []
    for _ in range(3):
        order0_maps(model, loss, images_labels, "low")
        counts.append(len(passes))
    assert counts == [2, 3, 4]
    assert model.calls == 0


def test_a_recurrent_network_has_its_maps():
    """The kernels of torch's LSTM take pointers to write with, though they only read."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 64, 3)
            self.lstm = nn.LSTM(64, 96, batch_first=True)

        def forward(self, x):
            return self.lstm(self.conv(x).mean(2).mT)[0]

    torch.manual_seed(0)
    model, (images, _) = Reader().double().eval(), batch(2, (12, 16), dtype=torch.float64)
    with NormGrad(model, "conv") as recorder:
        model(images).square().sum().backward()
    for own in (model, model.float()):
        before = state(own)
        dtype = next(own.parameters()).dtype
        maps = order0_maps(own, lambda m, x: m(x).square().sum(), images.to(dtype), "conv")
        assert_same(before, state(own))
        torch.testing.assert_close(maps["conv"].double(), recorder.maps["conv"], rtol=1e-3, atol=1e-6)


def test_an_error_of_the_loss_is_the_only_one():
    def broken(model, batch):
        model(batch[0])
        raise KeyError("boom")

    with pytest.raises(KeyError, match="boom") as caught:
        order0_maps(Plain(), broken, batch(2, (16, 16)), "low")
    assert caught.value.__context__ is None


def test_ctrl_c_ends_it_at_once():
    passes = []

    def interrupted(model, batch):
        passes.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        order0_maps(Plain(), interrupted, batch(2, (16, 16)), "low")
    assert passes == [1]


def test_a_graph_of_the_user_is_still_good_afterwards():
    model, images_labels = Plain(), batch(2, (16, 16))
    expected = torch.autograd.grad(loss_fn(model, images_labels), list(model.parameters()))
    loss = loss_fn(model, images_labels)
    order0_maps(model, loss_fn, images_labels, ["low", "high"])
    order0_maps(model, loss_fn, images_labels)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


def test_a_second_network_is_read_with_the_images_that_it_was_given():
    """Hooks that look for images are taken off where these are found, and only there."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"small": ResNet(), "large": ViT()}).double().eval()
    name = "large.blocks.0"
    small, large = (batch(2, size, dtype=torch.float64)[0] for size in ((24, 24), (32, 48)))

    def loss(model, images):
        return model["small"](images[0]).square().sum() + model["large"](images[1]).square().sum()

    with NormGrad(model, ["small.stage2", name]) as recorder:
        loss(model, (small, large)).backward()
    for _ in range(2):
        maps = order0_maps(model, loss, (small, large), ["small.stage2", name])
        assert maps[name].shape == (2, 4, 6)
        torch.testing.assert_close(maps[name], recorder.maps[name])
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# ---------------------------------------------------------------------------------------------------------------------
# The lowest layer: its features are not copied


@pytest.mark.parametrize("kind", ["order0", "grad_cam"])
@pytest.mark.parametrize("lowest", ["stem", "low", "act", "high"])
def test_layers_in_place_after_the_lowest_one_change_no_map(lowest, kind):
    torch.manual_seed(0)
    model, images_labels = Plain().double().eval(), batch(2, (16, 16), dtype=torch.float64)
    twin = copy.deepcopy(model)
    twin.act.inplace = False  # a training step has no Grad-CAM map of what is overwritten
    with NormGrad(twin, lowest, kinds=[kind]) as recorder:
        loss_fn(twin, images_labels).backward()
    if kind == "order0":
        maps = order0_maps(model, loss_fn, images_labels, lowest)
    else:
        maps = grad_cam_maps(model, images_labels, lowest, loss_fn=loss_fn)
    torch.testing.assert_close(maps, recorder.maps, rtol=1e-9, atol=1e-12)
    assert maps[lowest].sum() > 0


def test_the_lowest_features_are_not_copied():
    model, images_labels, given, taken = Plain().eval(), batch(2, (16, 16)), [], []

    def loss(model, batch):
        model.stem.register_forward_hook(lambda m, args, output: given.append(output), prepend=True)
        model.low.register_forward_pre_hook(lambda m, args: taken.append(args[0]))
        return loss_fn(model, batch)

    order0_maps(model, loss, images_labels, "stem")
    assert not given[0].requires_grad
    assert taken[0].requires_grad
    assert given[0].data_ptr() == taken[0].data_ptr()


def test_features_that_are_written_to_behind_the_layers_back_give_the_right_map():
    """Without a graph this is allowed: the layer's input changes after the layer has read it."""

    class Square(nn.Module):
        def forward(self, x):
            return x * x

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.square = nn.Conv2d(3, 4, 3), Square()

        def forward(self, x):
            features = self.stem(x)
            squares = self.square(features)
            with torch.no_grad():
                features.add_(10)
            return squares.sum() + 0 * features.sum()

    torch.manual_seed(0)
    model, (images, _) = Net().requires_grad_(False), batch(2, (12, 12))
    maps = order0_maps(model, lambda m, x: m(x), images, "square", target="input")
    features = model.stem(images)
    torch.testing.assert_close(maps["square"], features.norm(dim=1) * (2 * features).norm(dim=1))


# ---------------------------------------------------------------------------------------------------------------------
# A replayed step: only what the layers need


def spied(loss_of, ran):
    """The loss, whose backward pass notes for each convolution whether its weight gets a gradient."""

    def loss(model, batch):
        value = loss_of(model, batch)
        stack, seen = [value.grad_fn], set()
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            stack.extend(parent for parent, _ in node.next_functions)
            if node.name() == "ConvolutionBackward0":
                node.register_hook(lambda inputs, _: ran.append(inputs[1] is not None))
        return value

    return loss


@pytest.mark.parametrize(("layers", "convolutions"), [("stage3", 0), ("stage2", 3), (["stage1", "stage3"], 6)])
def test_a_replay_asks_for_named_layers_only(layers, convolutions):
    model, images_labels, ran = ResNet(), batch(), []
    recorder = replayed(model, spied(loss_fn, ran), images_labels, layers, ReadOptions())
    assert ran == [False] * convolutions
    assert recorder.maps
    assert recorder.edges == []


def test_a_replay_that_has_yet_to_choose_asks_for_what_training_asks_for():
    model, images_labels, ran = ResNet(), batch(), []
    recorder = replayed(model, spied(loss_fn, ran), images_labels, "auto", ReadOptions())
    assert ran == [True] * 9
    assert len(recorder.layers) == 3


class Reshaped(nn.Module):
    """Gives a view, which the next layer changes in place."""

    def forward(self, x):
        return x.flatten(2).unflatten(2, x.shape[2:])


NETWORKS = {
    "in place after it": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)),
    "twice in place": lambda: nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.Hardtanh(inplace=True), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)
    ),
    "a view, in place": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), Reshaped()), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)
    ),
    "batch norm": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3)
    ),
    "frozen below": lambda: nn.Sequential(
        nn.Sequential(nn.Conv2d(3, 3, 3).requires_grad_(False), nn.Conv2d(3, 4, 1)), nn.ReLU(), nn.Conv2d(4, 4, 3)
    ),
}


@pytest.mark.parametrize("target", ["output", "input"])
@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("layers", [["0"], ["1"], ["0", "1", "2"]])
def test_the_maps_of_a_replay_are_those_of_the_step(network, layers, target):
    torch.manual_seed(0)
    model, (images, _) = NETWORKS[network]().double(), batch(2, (12, 12), dtype=torch.float64)

    def loss(model, images):
        return model(images).pow(3).mean()

    twin = copy.deepcopy(model)
    with NormGrad(twin, layers, target=target) as live:
        loss(twin, images).backward()
    problems = live.new_problems()
    assert len(live.latest_maps()) == len(layers) - len(problems)
    assert len(problems) == (target == "input" and "0" in layers)  # images ask for no gradient
    before = state(model)
    recorder = replayed(model, loss, images, layers, ReadOptions(target))
    torch.testing.assert_close(recorder.latest_maps(), live.latest_maps(), rtol=1e-9, atol=1e-15)
    assert recorder.new_problems() == problems
    assert_same(before, state(model))


@pytest.mark.parametrize("way", ["in place", "data", "numpy", "replaced"])
def test_a_step_that_writes_to_its_weights_is_replayed_without_a_trace(way):
    torch.manual_seed(0)
    model, images_labels = MovesWeights(way), batch(2, (16, 16))
    before = state(model)
    expected = replayed(updated(model, 0.25), loss_fn, images_labels, ["low"], ReadOptions()).latest_maps()
    for _ in range(2):
        recorder = replayed(model, loss_fn, images_labels, ["low"], ReadOptions())
        assert_same(before, state(model))
        torch.testing.assert_close(recorder.latest_maps(), expected)


def test_a_replay_runs_on_the_weights_themselves():
    model, images_labels, refused = Plain(), batch(2, (16, 16)), []

    def loss(model, batch):
        with pytest.raises(RuntimeError, match="data pointer"):
            model.low.weight.data.mul_(2)
        refused.append(1)
        return loss_fn(model, batch)

    before = state(model)
    assert replayed(model, loss, images_labels, ["low"], ReadOptions()).maps["low"].sum() > 0
    assert refused == [1]
    assert_same(before, state(model))


def test_a_frozen_layer_has_no_map_in_a_replay_as_in_training():
    model, images_labels = ResNet(), batch()
    model.stem.requires_grad_(False)
    recorder = replayed(model, loss_fn, images_labels, ["stem", "stage2"], ReadOptions())
    assert list(recorder.latest_maps()) == ["stage2"]
    assert any("'stem'" in problem and "frozen" in problem for problem in recorder.new_problems())


def test_a_replay_keeps_no_graph():
    model, images_labels, kept = ResNet(), batch(), []

    def loss(model, batch):
        features = model.stem(batch[0])
        kept.append(weakref.ref(features))
        return model(batch[0]).square().mean() + features.mean()

    recorder = replayed(model, loss, images_labels, ["stem", "stage1"], ReadOptions())
    gc.collect()
    assert kept[0]() is None
    assert list(recorder.latest_maps()) == ["stem", "stage1"]
