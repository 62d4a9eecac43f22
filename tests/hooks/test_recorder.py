"""The recorder: right tensors, nothing kept, nothing changed, whatever the model does."""

import copy
import functools
import gc
import io
import pickle
import warnings
import weakref
from dataclasses import dataclass
from functools import partial

import pytest
import reference
import torch
import torch.nn.functional as F
from networks import ResNet, UNet, ViT, batch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from normgrad_lightning import NormGrad, order0_maps
from normgrad_lightning.layers.own_passes import own_pass


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * float(b.abs().max()))


def recorded(model, images, labels, **options):
    with NormGrad(model, **options) as recorder:
        F.cross_entropy(model(images), labels).backward()
    return recorder


class Identity1x1(nn.Module):
    """A layer with a real 1×1 identity convolution after (or before) it, that keeps what went in."""

    def __init__(self, layer, channels, before=False):
        super().__init__()
        self.layer, self.before = layer, before
        self.weight = nn.Parameter(torch.eye(channels, dtype=torch.float64)[..., None, None])

    def forward(self, x):
        return self.layer(self.identity(x)) if self.before else self.identity(self.layer(x))

    def identity(self, x):
        self.x = x.clone()
        out = F.conv2d(self.x, self.weight)
        out.register_hook(lambda g: setattr(self, "g", g.clone()))
        return out.clone()


@pytest.mark.parametrize("target", ["output", "input"])
@pytest.mark.parametrize("name", ["stem", "stage1", "stage2", "stage3", "stage2.bn1", "stage2.conv2"])
def test_maps_are_those_of_a_really_inserted_identity_convolution(name, target):
    if (name, target) == ("stem", "input"):
        pytest.skip("the image has no gradient")
    torch.manual_seed(0)
    model = ResNet().double()
    images, labels = batch(1, dtype=torch.float64)
    plain = model(images).detach()
    recorder = recorded(model, images, labels, layers=name, target=target)

    inserted = copy.deepcopy(model)
    layer = inserted.get_submodule(name)
    channels = {"stem": 8, "stage1": 8, "stage3": 24}.get(name, 16)
    if target == "input":
        channels = {"stage1": 8, "stage2": 8, "stage3": 16}.get(name, 16)
    parent, _, child = name.rpartition(".")
    wrapper = Identity1x1(layer, channels, before=target == "input")
    setattr(inserted.get_submodule(parent), child, wrapper)
    output = inserted(images)
    F.cross_entropy(output, labels).backward()

    close(output.detach(), plain)
    products = reference.point_products(wrapper.x, wrapper.g)
    close(products.sum((0, 1)), wrapper.weight.grad[..., 0, 0])
    close(recorder.maps[name], reference.normgrad(wrapper.x, wrapper.g))
    assert recorder.maps[name].abs().sum() > 0


def spy(layer):
    """The layer's input and the gradient at its output, by means of its own."""
    seen = {}

    def keep(_, args, output):
        seen["x"] = args[0].detach().clone()
        output.register_hook(lambda g: seen.update(g=g.clone()))

    layer.register_forward_hook(keep)
    return seen


CONVOLUTIONS = {
    "1x1": nn.Conv2d(4, 6, 1),
    "3x3": nn.Conv2d(4, 6, 3, padding=1),
    "strided": nn.Conv2d(4, 6, (3, 5), stride=(2, 3), padding=(1, 2), bias=False),
    "dilated": nn.Conv2d(4, 6, 3, dilation=2, padding="same"),
    "depthwise": nn.Conv2d(4, 8, 3, padding=1, groups=4),
    "grouped": nn.Conv2d(4, 6, 3, groups=2),
    "reflect": nn.Conv2d(4, 6, 3, padding=2, padding_mode="reflect"),
    "circular same": nn.Conv2d(4, 6, (4, 3), padding="same", padding_mode="circular"),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
    "transposed grouped": nn.ConvTranspose2d(4, 6, (2, 3), stride=(2, 1), groups=2),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_weight_maps_are_norms_of_the_products_that_sum_to_weight_grad(kind):
    torch.manual_seed(1)
    layer = copy.deepcopy(CONVOLUTIONS[kind])
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Softplus(), layer, nn.ReLU(inplace=True), nn.Flatten()).double()
    images, _ = batch(1, (9, 11), dtype=torch.float64)
    seen = spy(layer)
    with NormGrad(model, layers="2", target="weight") as recorder:
        model(images).square().mean().backward()

    geometry = dict(kernel_size=layer.kernel_size, stride=layer.stride, padding=layer.padding, groups=layer.groups)
    if isinstance(layer, nn.ConvTranspose2d):
        oracle = reference.ConvTranspose(seen["x"], seen["g"], dilation=layer.dilation, **geometry)
        expected = oracle.on_output
    else:
        oracle = reference.Conv(
            seen["x"], seen["g"], dilation=layer.dilation, padding_mode=layer.padding_mode, **geometry
        )
        expected = oracle.on_input
    close(oracle.weight_grad, layer.weight.grad)
    close(recorder.maps["2"], expected)


@pytest.mark.parametrize("extra", [0, 1, 5])
def test_weight_maps_of_a_linear_layer_on_tokens(extra):
    torch.manual_seed(2)
    model = ViT(extra=extra, depth=2).double()
    images, labels = batch(1, (32, 48), dtype=torch.float64)
    layer = model.blocks[0].linear1
    seen = spy(layer)
    recorder = recorded(model, images, labels, layers="blocks.0.linear1", target="weight")
    x, g = seen["x"], seen["g"]
    close(torch.einsum("ntd,ntc->dc", g, x), layer.weight.grad)
    expected = reference.normgrad_linear(x, g)[:, extra:].reshape(1, 4, 6)
    close(recorder.maps["blocks.0.linear1"], expected)


@pytest.mark.parametrize("target", ["output", "weight"])
def test_in_place_relu_after_the_layer_changes_nothing(target):
    images, labels = batch()
    maps = []
    for inplace in (True, False):
        torch.manual_seed(3)
        model = ResNet(inplace=inplace)
        maps.append(
            recorded(
                model, images, labels, layers=["stage*.conv1", "stage*.bn?"][target == "output"], target=target
            ).maps
        )
    assert len(maps[0]) in (3, 6)
    for name, m in maps[0].items():
        assert torch.equal(m, maps[1][name]), name
        assert m.sum() > 0


def storages_alive_after_forward(model, images, labels, watch):
    """For each module's output: whether its memory is still held once the forward pass is over."""
    outputs = []

    def keep(_, args, output):
        outputs.append(StorageWeakRef(output.untyped_storage()))

    handles = [layer.register_forward_hook(keep) for layer in model.modules()]
    recorder = NormGrad(model, watch)
    recorder.attach()
    recorder.enabled = bool(watch != "stem")
    loss = F.cross_entropy(model(images), labels)
    gc.collect()
    alive = [not ref.expired() for ref in outputs]
    recorder.detach()
    for handle in handles:
        handle.remove()
    assert loss.requires_grad
    return alive


def test_nothing_of_the_forward_pass_is_alive_because_of_us():
    model, (images, labels) = ResNet(inplace=False), batch()
    without = storages_alive_after_forward(model, images, labels, watch="stem")
    assert len(without) > 20
    assert not all(without)
    for watch in ("auto", ["*.conv?", "*.bn?", "stage?"]):
        assert storages_alive_after_forward(model, images, labels, watch) == without


def test_between_forward_and_backward_only_norms_are_kept():
    """Where autograd itself saves nothing of the output, its memory is free before the forward pass is over."""

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            return 2 * self.inner(x)

    model = nn.Sequential(Doubled(), nn.Flatten())
    outputs = []
    model[0].inner.register_forward_hook(lambda _, a, out: outputs.append(StorageWeakRef(out.untyped_storage())))
    with NormGrad(model, layers="0.inner") as recorder:
        loss = model(torch.randn(2, 3, 8, 8)).sum()
        gc.collect()
        assert outputs[0].expired()
        loss.backward()
    # The norm of a gradient of 2 in each of 4 channels is 4: the map is 4‖x‖.
    assert recorder.maps["0.inner"].min() > 0


def test_a_hundred_captured_steps_leave_memory_flat():
    model, (images, labels) = ResNet(), batch()

    def tensors():
        gc.collect()
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    with NormGrad(model) as recorder:
        counts = []
        for step in range(101):
            model.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            assert recorder.maps
            if step in (1, 100):
                counts.append(tensors())
    assert counts[0] == counts[1]


@pytest.mark.parametrize("layers", ["auto", ["stage1", "stage3.*"]])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_no_tensor_of_a_step_has_a_weak_reference_that_calls_us(layers, is_checkpointed):
    """Such a call would come in the backward pass, which frees the tensor, and Python drops a Ctrl-C in it."""
    model, (images, labels) = ResNet(inplace=False), batch()
    if is_checkpointed:
        model.stage2.forward = partial(checkpoint, model.stage2.forward, use_reentrant=True)
    tensors = []
    for layer in model.modules():
        layer.register_forward_hook(lambda _, args, output: tensors.extend([*args, output]))
    with NormGrad(model, layers) as recorder:
        for _ in range(3):
            F.cross_entropy(model(images), labels).backward()
            assert recorder.maps
    references = [reference for t in tensors for reference in weakref.getweakrefs(t)]
    assert len(tensors) > 100
    assert references
    assert [reference for reference in references if reference.__callback__ is not None] == []


@pytest.mark.parametrize("layers", ["auto", ["stage1", "stage3.*"]])
@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_gradients_buffers_and_rng_keep_their_bits(layers, target):
    images, labels = batch()
    runs = []
    for watched in (False, True):
        torch.manual_seed(4)
        model = ResNet(dropout=0.5)
        layers = "stage*.conv?" if target == "weight" and layers != "auto" else layers
        recorder = NormGrad(model, layers, target=target)
        if watched:
            recorder.attach()
        for _ in range(2):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert bool(recorder.maps) == watched
        recorder.detach()
        runs.append([loss, *(p.grad for p in model.parameters()), *model.buffers(), torch.get_rng_state()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_the_gradient_at_an_input_is_that_of_the_tensor_also_where_it_feeds_other_layers():
    torch.manual_seed(0)

    class Skip(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            self.x = self.first(x)
            self.x.retain_grad()
            return (self.x + self.second(self.x)).square().sum()

    model, (images, _) = Skip().double(), batch(2, dtype=torch.float64)
    with NormGrad(model, "second", target="input") as recorder:
        model(images).backward()
    close(recorder.maps["second"], reference.normgrad(model.x.detach(), model.x.grad))


def test_num_images_reads_the_first_ones_only():
    model, (images, labels) = ResNet().eval(), batch(6)
    whole = recorded(model, images, labels, layers="stage2")
    some = recorded(model, images, labels, layers="stage2", num_images=2)
    torch.testing.assert_close(some.maps["stage2"], whole.maps["stage2"][:2])
    assert torch.equal(some.images, images[:2])


def test_auto_works_from_the_first_forward_on_and_stays():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model) as recorder:
        for _ in range(3):
            F.cross_entropy(model(images), labels).backward()
            assert list(recorder.maps) == ["stage1", "stage2", "stage3"]
        hooked = [name for name, m in model.named_modules() if m._forward_hooks]
        # Beside these, where the image enters: the model itself and its first convolution.
        assert sorted(hooked) == ["", "stage1", "stage2", "stage3", "stem"]
    assert _hooks(model) == 0


def test_each_step_has_its_own_maps_and_images():
    model = ResNet().eval()
    with NormGrad(model, layers="stage2") as recorder:
        for seed in range(3):
            images, labels = batch(seed=seed)
            F.cross_entropy(model(images), labels).backward()
            alone = recorded(copy.deepcopy(model), images, labels, layers="stage2")
            torch.testing.assert_close(recorder.maps["stage2"], alone.maps["stage2"])
            assert torch.equal(recorder.images, images)


def test_a_shared_layer_gets_the_sum_over_its_uses():
    torch.manual_seed(0)
    shared = nn.Conv2d(3, 3, 3, padding=1).double()
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Flatten())
    parts = []

    def keep(_, args, output):
        x = output.detach().clone()
        output.register_hook(lambda g: parts.append(reference.normgrad(x, g)))

    shared.register_forward_hook(keep)
    images, _ = batch(2, (6, 7), dtype=torch.float64)
    with NormGrad(model, layers="0") as recorder:
        model(images).square().sum().backward()
    assert len(parts) == 2
    close(recorder.maps["0"], sum(parts))


def test_of_several_backwards_the_last_counts():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten()).double()
    images, _ = batch(2, (6, 7), dtype=torch.float64)
    with NormGrad(model, layers="0") as recorder:
        out = model(images)
        out.sum().backward(retain_graph=True)
        first = recorder.maps["0"]
        (3 * out.sum()).backward()
        close(recorder.maps["0"], 3 * first)


@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_maps(reentrant):
    images, labels = batch()

    class Checkpointed(ResNet):
        def forward(self, x):
            x = self.stage1(self.stem(x))
            x = checkpoint(lambda t: self.stage3(self.stage2(t)), x, use_reentrant=reentrant)
            return self.fc(self.pool(x).flatten(1))

    maps = []
    for kind in (ResNet, Checkpointed):
        torch.manual_seed(0)
        model = kind()
        with NormGrad(model, "stage*") as recorder:
            for _ in range(2):
                F.cross_entropy(model(images), labels).backward()
                assert torch.equal(recorder.images, images)
        maps.append(recorder.maps)
    assert list(maps[0]) == list(maps[1]) == ["stage1", "stage2", "stage3"]
    for name in maps[0]:
        torch.testing.assert_close(maps[0][name], maps[1][name])


@dataclass
class Features:
    note: str
    map: torch.Tensor


@pytest.mark.parametrize("wrap", [lambda t: (None, t), lambda t: {"a": [t]}, lambda t: Features("x", t)])
def test_outputs_may_be_nested(wrap):
    class Body(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)

        def forward(self, x):
            self.out = self.conv(x)
            return wrap(self.out)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Body()

        def forward(self, x):
            self.body(x)
            return self.body.out.sum()

    model, (images, _) = Net(), batch()
    with NormGrad(model, ["body", "body.conv"]) as recorder:
        model(images).backward()
    assert torch.equal(recorder.maps["body"], recorder.maps["body.conv"])


def test_images_given_by_keyword_are_found():
    class Keyword(ResNet):
        def forward(self, *, pixels):
            return super().forward(pixels)

    model, (images, labels) = Keyword(), batch()
    with NormGrad(model, "stage1") as recorder:
        F.cross_entropy(model(pixels=images), labels).backward()
    assert torch.equal(recorder.images, images)


def test_copies_and_pickles_of_a_watched_model_are_free_of_us():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model) as recorder:
        F.cross_entropy(model(images), labels).backward()
        before = recorder.maps["stage2"].clone()
        copied = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        buffer = io.BytesIO()
        torch.save(model, buffer)
        for other in (copied, pickled):
            F.cross_entropy(other(2 * images), labels).backward()
            assert torch.equal(recorder.maps["stage2"], before)
        assert torch.equal(copied(images), pickled(images))


def _hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for m in model.modules())


def test_hooks_are_gone_after_an_exception():
    model = ResNet()

    def watched_and_broken():
        with NormGrad(model):
            assert _hooks(model) > 10
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        watched_and_broken()
    assert _hooks(model) == 0


def test_a_lost_recorder_leaves_hooks_that_do_nothing():
    model, (images, labels) = ResNet(), batch()
    recorder = NormGrad(model)
    recorder.attach()
    del recorder
    gc.collect()
    F.cross_entropy(model(images), labels).backward()


def test_disabled_it_records_nothing():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model, "stage1") as recorder:
        recorder.enabled = False
        F.cross_entropy(model(images), labels).backward()
        assert recorder.maps == {}
        assert recorder.images is None


def test_inference_between_steps_disturbs_nothing():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model) as recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            model(images)
        with torch.inference_mode():
            model(images)
        F.cross_entropy(model(images), labels).backward()
        assert list(recorder.maps) == ["stage1", "stage2", "stage3"]


@pytest.mark.parametrize(
    ("layers", "change", "told"),
    [
        ("fc", None, r"cannot read the layer 'fc': its shape \(4, 5\) has no spatial axis\. Choose a layer before"),
        ("stage1", "freeze", "the layer 'stage1': it gets no gradient: it and all layers before it are frozen"),
        ("stage2.relu", "skip", "cannot read the layer 'stage2.relu': the forward pass does not call it"),
        ("stage2.bn2", "detach", "cannot read the layer 'stage2.bn2': the loss does not depend on it"),
    ],
)
def test_a_layer_that_cannot_be_read_is_named_once(layers, change, told):
    model, (images, labels) = ResNet(inplace=False), batch()
    if change == "freeze":
        model.stem.requires_grad_(False)
        model.stage1.requires_grad_(False)
    if change == "skip":
        model.stage2.forward = lambda x: model.stage2.bn1(model.stage2.conv1(x))
    if change == "detach":
        model.stage2.bn2.forward = lambda x: (nn.BatchNorm2d.forward(model.stage2.bn2, x) + 0).detach()
        model.stage2.bn2.register_forward_hook(lambda m, a, o: model.stage2.short.weight.sum() * 0 + o, prepend=True)
        model.stage3.forward = lambda x: nn.functional.interpolate(model.stage1_out, (4, 6)).repeat(1, 3, 1, 1)
        model.stage1.register_forward_hook(lambda m, a, o: setattr(model, "stage1_out", o))
    with NormGrad(model, [layers, "stage3" if change != "detach" else "stage1"]) as recorder:
        F.cross_entropy(model(images), labels).backward()
        with pytest.warns(UserWarning, match=told):
            assert len(recorder.maps) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(recorder.maps) == 1


def test_a_batch_without_an_image_is_told():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with NormGrad(model) as recorder:
        model(torch.randn(3, 4)).sum().backward()
        with pytest.warns(UserWarning, match="found no layer to read: no module was given an image"):
            assert recorder.maps == {}


def test_a_model_without_gradient_is_told():
    model, (images, _) = ResNet().requires_grad_(False), batch()
    with NormGrad(model) as recorder:
        model(images)
        with pytest.warns(UserWarning, match="no layer that gives features on a grid gets a gradient"):
            assert recorder.maps == {}


def test_a_frozen_backbone_leaves_auto_the_layers_above():
    model, (images, labels) = ResNet(), batch()
    model.stem.requires_grad_(False)
    model.stage1.requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(recorded(model, images, labels).maps) == ["stage2", "stage3"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"target": "outputs"}, "`target`: expected one of 'output', 'input', 'weight', but got 'outputs'"),
        ({"num_images": 0}, "`num_images`: expected a whole number of at least 1, but got 0. None takes all"),
        ({"layers": []}, '`layers`: expected "auto", a layer\'s name'),
        ({"layers": "stage2", "target": "weight"}, "Residual is neither a convolution nor a linear layer"),
    ],
)
def test_bad_options_are_told_at_once(options, told):
    with pytest.raises(ValueError, match=told):
        NormGrad(ResNet(), **options)


def test_a_convolution_that_pads_by_itself_is_refused():
    class SamePadded(nn.Conv2d):
        def forward(self, x):
            return super().forward(F.pad(x, (1, 1, 1, 1)))

    model = nn.Sequential(SamePadded(3, 4, 3))
    with pytest.raises(
        ValueError, match=r"SamePadded overrides `Conv2d.forward`, so the patches it reads are not known"
    ):
        NormGrad(model, "0", target="weight")


def test_an_error_of_ours_never_reaches_the_pass(monkeypatch):
    model, (images, labels) = ResNet(), batch()
    calls = []

    def broken(*args, **kwargs):
        calls.append(1)
        raise RuntimeError("we are broken")

    monkeypatch.setattr("normgrad_lightning.maths.products.channel_norm", broken)
    with NormGrad(model, "stage1") as recorder:
        F.cross_entropy(model(images), labels).backward()
        with pytest.warns(UserWarning, match="cannot read the layer 'stage1': RuntimeError: we are broken"):
            assert recorder.maps == {}
    assert len(calls) == 1


def test_an_error_at_watching_never_reaches_the_pass(monkeypatch):
    model, (images, labels) = ResNet(), batch()

    def broken(*args, **kwargs):
        raise RuntimeError("we are broken")

    monkeypatch.setattr("normgrad_lightning.hooks.image_inputs.patch_grid", broken)
    with NormGrad(model, "stage1") as recorder:
        F.cross_entropy(model(images), labels).backward()
        with pytest.warns(UserWarning, match="failed at watching the model: RuntimeError: we are broken"):
            assert list(recorder.maps) == ["stage1"]


@pytest.mark.parametrize("at", ["watching", "the call", "the gradient"])
def test_after_a_failure_in_a_hook_the_batch_and_the_activations_are_freed(monkeypatch, at):
    """What is kept of an exception is a sentence: its traceback would hold the tensors of all frames."""

    def broken(*args, **kwargs):
        raise RuntimeError("we are broken")

    place = {
        "watching": "hooks.image_inputs.patch_grid",
        "the call": "maths.products.OuterProducts.x_norms",
        "the gradient": "maths.products.OuterProducts.g_norms",
    }[at]
    monkeypatch.setattr(f"normgrad_lightning.{place}", broken)
    model, (images, labels) = ResNet(), batch()
    storages = [StorageWeakRef(images.untyped_storage())]

    def keep(_, args, output):
        storages.append(StorageWeakRef(output.untyped_storage()))

    handles = [layer.register_forward_hook(keep) for layer in (model.stem, model.stage1, model.stage2)]
    gc.collect()
    gc.disable()
    try:
        with NormGrad(model, ["stage1", "stage2"]) as recorder:
            F.cross_entropy(model(images), labels).backward()
        recorder.clear()
        del images
        alive = [not storage.expired() for storage in storages]
    finally:
        gc.enable()
    assert alive == [False] * 4
    assert all("RuntimeError: we are broken." in problem for problem in recorder.new_problems())
    for handle in handles:
        handle.remove()


def test_the_unet_is_read_on_its_way_up():
    model, (images, _) = UNet(), batch()
    with NormGrad(model) as recorder:
        F.cross_entropy(model(images), torch.zeros(4, 16, 24, dtype=torch.long)).backward()
    assert {name: tuple(m.shape[1:]) for name, m in recorder.maps.items()} == {
        "bottom.2": (4, 6),
        "merge2.1": (8, 12),
        "merge1.1": (16, 24),
    }


def test_of_two_views_in_one_step_the_first_is_shown_with_its_own_maps():
    model, (one, _), (other, _) = (
        ResNet().double().eval(),
        batch(dtype=torch.float64),
        batch(dtype=torch.float64, seed=1),
    )
    with NormGrad(model) as recorder:
        for _ in range(2):
            (model(one) * model(other).detach()).sum().backward()
            first = recorder.maps
            (model(one) * model(other)).sum().backward()
            assert torch.equal(recorder.images, one)
            for name, m in recorder.maps.items():
                close(m, first[name])


def test_crops_of_several_sizes_in_one_step_do_not_confuse_auto():
    model, (large, _), (small, _) = ResNet(), batch(), batch(size=(8, 12))
    with NormGrad(model) as recorder:
        (model(large).sum() + model(small).sum()).backward()
    assert {n: tuple(m.shape[1:]) for n, m in recorder.maps.items()} == {
        "stage1": (16, 24),
        "stage2": (8, 12),
        "stage3": (4, 6),
    }
    assert torch.equal(recorder.images, large)


def test_layers_before_the_image_are_read_for_batches_of_any_size():
    """A generator runs before the discriminator sees the picture; the last batch is smaller."""
    generator = nn.Sequential(nn.Unflatten(1, (4, 3, 3)), nn.ConvTranspose2d(4, 3, 2, 2))
    model = nn.ModuleDict({"g": generator, "d": nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten())})
    with NormGrad(model, ["g.1", "d.0"]) as recorder:
        for n in (8, 3, 5):
            model["d"](model["g"](torch.randn(n, 36))).square().sum().backward()
            assert {len(m) for m in recorder.maps.values()} == {n}
            assert len(recorder.maps) == 2


def test_a_module_that_gives_a_parameter_is_refused_and_left_alone():
    class Place(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(1, 4, 8, 8))

        def forward(self):
            return self.table

    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.place = nn.Conv2d(3, 4, 1), Place()

        def forward(self, x):
            return (self.conv(x) * self.place()).square().sum()

    model = Placed()
    with NormGrad(model, ["conv", "place"]) as recorder:
        model(torch.randn(1, 3, 8, 8)).backward()
    with pytest.warns(UserWarning, match="'place': it gives a parameter, not features of the images"):
        assert list(recorder.maps) == ["conv"]
    assert not model.place.table._backward_hooks


def test_what_is_seen_does_not_pile_up_in_a_loop_that_reads_no_map():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model) as recorder:
        for _ in range(5):
            F.cross_entropy(model(images), labels).backward()
            seen = len(recorder._observer.candidates)
        frozen = ResNet().requires_grad_(False)
        with NormGrad(frozen) as idle:
            for _ in range(5):
                frozen(images)
        assert len(idle._observer.candidates) == seen > 10


def test_attaching_that_fails_half_way_leaves_nothing(monkeypatch):
    model, calls = ResNet(), []
    register = nn.Module.register_forward_hook

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) == 30:
            raise RuntimeError("no more")
        return register(*args, **kwargs)

    monkeypatch.setattr(nn.Module, "register_forward_hook", failing)
    with pytest.raises(RuntimeError, match="no more"):
        NormGrad(model).attach()
    assert _hooks(model) == 0


def test_a_compiled_model_is_refused():
    with pytest.raises(ValueError, match="expected a module that is not compiled"):
        NormGrad(torch.compile(ResNet(), backend="eager"))


def test_a_model_whose_parts_are_compiled_says_so_if_nothing_can_be_read():
    model = nn.Sequential(torch.compile(ResNet(), backend="eager"))
    images, labels = batch()
    with NormGrad(model) as recorder:
        F.cross_entropy(model(images), labels).backward()
        with pytest.warns(
            UserWarning, match="Parts of the model are compiled, and hooks see only what goes in and out of these"
        ):
            assert recorder.maps == {}


# Several networks, several calls: each map belongs to the images of its own call.


def two_networks():
    """A student and a teacher, and batches of different sizes for them."""
    torch.manual_seed(0)
    return nn.ModuleDict({"net": ResNet(), "other": ResNet()}), batch(4)[0], batch(3, seed=1)[0]


@pytest.mark.parametrize("layers", ["auto", ["net.stage1", "net.stage3"]])
@pytest.mark.parametrize("order", ["before", "after", "after the backward"])
@pytest.mark.parametrize("mode", ["no_grad", "frozen"])
def test_a_teacher_does_not_take_the_students_place(layers, order, mode):
    model, images, others = two_networks()
    model["other"].requires_grad_(mode == "no_grad")

    def teach():
        with torch.set_grad_enabled(mode == "frozen"):
            model["other"](others)

    with NormGrad(model, layers) as recorder, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            if order == "before":
                teach()
            loss = model["net"](images).square().sum()
            if order == "after":
                teach()
            loss.backward()
            if order == "after the backward":
                teach()
            assert {name.split(".")[0] for name in recorder.maps} == {"net"}
            assert len(recorder.maps) >= 2
            assert {len(m) for m in recorder.maps.values()} == {4}
            assert torch.equal(recorder.images, images)


class Generator(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 48), nn.Unflatten(1, (8, 2, 3)), nn.ConvTranspose2d(8, 8, 4, 4), nn.ReLU())
        self.append(nn.ConvTranspose2d(8, 3, 2, 2))


@pytest.mark.parametrize("first", ["real", "fake"])
def test_what_a_generator_makes_of_noise_belongs_to_no_image(first):
    """Neither to the discriminator's images nor to features of its own, whichever network is called first."""
    model = nn.ModuleDict({"maker": Generator(), "judge": nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())})
    images, noise = torch.randn(2, 3, 16, 24), torch.randn(2, 6)
    with NormGrad(model, ["maker.3", "judge.0"]) as recorder:
        for _ in range(2):
            parts = [lambda: model.judge(images).mean(), lambda: -model.judge(model.maker(noise)).mean()]
            sum(part() for part in (parts if first == "real" else parts[::-1])).backward()
            maps = recorder.maps
            fake = model.maker(noise).detach()
            assert {name: m.shape for name, m in maps.items()} == {"maker.3": (2, 8, 12), "judge.0": (2, 14, 22)}
            assert recorder.images_of("maker.3") is None
            assert torch.equal(recorder.images_of("judge.0"), images if first == "real" else fake)


def test_two_networks_in_one_backward_keep_to_their_own_images():
    model, images, others = two_networks()
    with NormGrad(model, ["net.stage2", "other.stage2"]) as recorder:
        for _ in range(2):
            (model["net"](images).sum() + model["other"](others).sum()).backward()
            assert torch.equal(recorder.images_of("net.stage2"), images)
            assert torch.equal(recorder.images_of("other.stage2"), others)
            assert [len(m) for m in recorder.maps.values()] == [4, 3]


def test_two_backwards_keep_to_their_own_images():
    model, images, others = two_networks()
    with NormGrad(model, ["net.stage2", "other.stage2"]) as recorder:
        for _ in range(2):
            model["net"](images).sum().backward()
            model["other"](others).sum().backward()
            assert torch.equal(recorder.images_of("net.stage2"), images)
            assert torch.equal(recorder.images, others)


@pytest.mark.parametrize("wants", ["none", "second", "both"])
def test_two_views_are_told_apart_also_if_they_ask_for_gradients(wants):
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.Flatten()).double().eval()
    one, other = batch(2, dtype=torch.float64)[0], batch(2, dtype=torch.float64, seed=1)[0]
    with NormGrad(model, "1") as alone:
        model(one).square().sum().backward()
    one.requires_grad_(wants == "both")
    other.requires_grad_(wants != "none")
    with NormGrad(model, "1") as recorder:
        for _ in range(2):
            (model(one).square().sum() + model(other).square().sum()).backward()
            close(recorder.maps["1"], alone.maps["1"])
            close(recorder.images, one.detach(), 1e-4)  # as the first convolution reads it, maybe


def test_the_image_is_found_before_a_first_convolution_that_takes_no_hook():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))

        def forward(self, x):
            return F.conv2d(x, self.weight)

    images, _ = batch()
    for first in (
        Functional(),
        torch.jit.script(nn.Conv2d(3, 8, 3)),
        torch.compile(nn.Conv2d(3, 8, 3), backend="eager"),
    ):
        model = nn.Sequential(first, nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten())
        with NormGrad(model, "2") as recorder:
            for _ in range(2):
                model(images).sum().backward()
                assert torch.equal(recorder.images, images)
                assert recorder.maps["2"].sum() > 0


def test_an_augmentation_layer_before_the_network_is_behind_the_image():
    class Flip(nn.Module):
        def forward(self, x):
            return x.flip(3)

    model, (images, _) = nn.ModuleDict({"augment": Flip(), "net": ResNet()}), batch()
    with NormGrad(model, "net.stage1") as recorder:
        for _ in range(2):
            model["net"](model["augment"](images)).sum().backward()
            assert torch.equal(recorder.images, images.flip(3))


def test_a_frozen_backbone_and_a_head_called_one_by_one_show_the_image():
    backbone, head = nn.Conv2d(3, 8, 3).requires_grad_(False), nn.Conv2d(8, 4, 3)
    model, (images, _) = nn.ModuleDict({"backbone": backbone, "head": head}), batch()
    with NormGrad(model, "head") as recorder:
        for _ in range(2):
            model["head"](model["backbone"](images)).sum().backward()
            assert torch.equal(recorder.images, images)


MASK = torch.tensor([False] * 20 + [True] * 5).repeat(2, 1)


class Masked(nn.Module):
    """In eval mode, torch's encoder gives other bits for a mask, unless there are hooks on its layers."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 16, 4, 4)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True), 3)

    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        return self.encoder(tokens, src_key_padding_mask=MASK)


def test_encoders_have_no_hooks_that_would_take_their_fast_path():
    torch.manual_seed(0)
    model, images = Masked(), torch.randn(2, 3, 20, 20)

    def in_eval_mode():
        with torch.no_grad():
            return model.eval()(images)

    plain = in_eval_mode()
    for layers in ("auto", "encoder.layers.*"):
        with NormGrad(model, layers) as recorder:
            assert sum(map(_hooks, model.encoder.layers)) == 0
            assert torch.equal(in_eval_mode(), plain)
            model.train()(images)[:, :20].square().sum().backward()
        assert len(recorder.maps) == 3
        for name, m in recorder.maps.items():
            assert m.shape == (2, 5, 5), name
            assert m.any()


@pytest.mark.parametrize("target", ["output", "input", "weight"])
def test_encoders_are_read_like_any_other_block(target):
    """Against the same layers under another name, which take hooks of their own."""

    class Encoder(nn.TransformerEncoderLayer):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    model, images = ViT(), torch.randn(2, 3, 32, 48)
    other = copy.deepcopy(model)
    for block in other.blocks:
        block.__class__ = Encoder
    maps, layers = [], ["blocks.1.linear2"] if target == "weight" else ["blocks.1", "blocks.4"]
    for net in (model, other):
        with NormGrad(net, layers, target=target) as r:
            net(images).square().sum().backward()
        maps.append(r.maps)
    assert maps[0].keys() == maps[1].keys()
    assert all(torch.equal(m, maps[1][name]) and m.any() for name, m in maps[0].items())


def test_a_whole_model_in_eval_mode_that_learns_is_read():
    model = ViT().eval()
    with NormGrad(model) as recorder:
        model(torch.randn(2, 3, 32, 48)).sum().backward()
    assert len(recorder.maps) == 5


def test_a_pass_of_our_own_in_between_is_not_recorded():
    model, (images, labels), (others, _) = ResNet(), batch(), batch(seed=1)
    with NormGrad(model, "stage2") as recorder:
        F.cross_entropy(model(images), labels).backward()
        before = recorder.maps["stage2"]
        order0_maps(model, lambda m, x: m(x).sum(), others, ["stem", "stage2"])
        assert torch.equal(recorder.maps["stage2"], before)
        assert torch.equal(recorder.images, images)


def test_what_a_pass_of_our_own_recomputes_is_not_recorded():
    """Reentrant checkpointing calls layers within the backward of another pass, too."""
    model, images = nn.ModuleDict({"net": nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU())}), torch.randn(2, 3, 6, 6)

    def loss_fn(m, x):
        return checkpoint(m["net"], x.requires_grad_(), use_reentrant=True).square().sum()

    with NormGrad(model, "net.1") as recorder:
        loss_fn(model, images).backward()
        before = recorder.maps["net.1"]
        with own_pass():
            loss_fn(model, 2 * images.detach()).backward()
        assert torch.equal(recorder.maps["net.1"], before)
        assert torch.equal(recorder.images, images)


def test_auto_waits_for_images_also_if_gradients_came_before():
    """A generator learns from noise alone in the first step."""
    model = nn.ModuleDict({"maker": Generator(), "judge": ResNet()})
    images, labels = batch()
    with NormGrad(model) as recorder:
        model.maker(torch.randn(2, 6)).square().sum().backward()
        assert recorder.layers == []
        F.cross_entropy(model.judge(images), labels).backward()
        assert {"judge.stage1", "judge.stage2", "judge.stage3"} & set(recorder.layers)
        assert set(recorder.maps) >= {name for name in recorder.layers if name.startswith("judge")}


# What fuzzing and attacks found.


def test_parametrised_weights_are_no_features():
    """With as many rows as the batch has images, a weight looks like features."""
    net = nn.Sequential(weight_norm(nn.Conv2d(3, 8, 3)), nn.ReLU(), nn.Conv2d(8, 8, 3, 2))
    with NormGrad(net) as recorder:
        net(torch.randn(8, 3, 12, 12)).square().sum().backward()
    assert list(recorder.maps) == ["1", "2"]


class NormTwice(nn.Module):
    """InstanceNorm gives a view, which is then changed in place; it is used twice."""

    def __init__(self, inplace):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.LeakyReLU(0.1, inplace)

    def forward(self, x):
        return self.act(self.norm(self.act(self.norm(self.conv(x)))))


def test_views_that_are_changed_in_place_are_read():
    images, maps = torch.randn(2, 3, 8, 8), []
    for inplace in (True, False):
        torch.manual_seed(0)
        net = NormTwice(inplace)
        with NormGrad(net, "norm") as recorder:
            (net(images) * torch.arange(36.0).reshape(6, 6)).sum().backward()
        maps.append(recorder.maps["norm"])
    torch.testing.assert_close(*maps)
    assert maps[0].any()


@pytest.mark.parametrize("target", ["input", "output"])
@pytest.mark.parametrize("kind", ["reentrant", "nested"])
def test_what_goes_through_checkpoints_counts_once(kind, target):
    """The input of the first layer is read in both passes of a checkpoint, and so is what a layer hands on."""
    torch.manual_seed(0)
    before, inner = nn.Conv2d(3, 4, 1), nn.Sequential(nn.Dropout(0.0), nn.Conv2d(4, 4, 1), nn.ReLU())
    images, maps = torch.randn(2, 3, 6, 6), []
    for checkpointed in (True, False):
        model = nn.ModuleDict({"before": before, "inner": inner})
        with NormGrad(model, "inner.0", target=target) as recorder:
            for _ in range(2):
                x = before(images)
                if not checkpointed:
                    y = inner(x)
                elif kind == "nested":
                    again = functools.partial(checkpoint, inner, use_reentrant=False)
                    y = checkpoint(again, x, use_reentrant=False)
                else:
                    y = checkpoint(inner, x, use_reentrant=True)
                y.square().sum().backward()
        maps.append(recorder.maps["inner.0"])
    torch.testing.assert_close(*maps)


def test_a_linear_layer_that_pools_first_says_nothing_about_axes():
    """Squeeze and excitation, with as many channels as columns."""

    class Excite(nn.Module):
        def __init__(self):
            super().__init__()
            self.squeeze, self.excite = nn.Linear(16, 4), nn.Linear(4, 16)

        def forward(self, x):
            return x * self.excite(self.squeeze(x.mean((2, 3))).relu()).sigmoid()[:, :, None, None]

    net = nn.Sequential(nn.Conv2d(3, 16, 3, 1, 1), Excite())
    with NormGrad(net, "1") as recorder:
        out = net(torch.randn(2, 3, 16, 16))
        out.retain_grad()
        out.square().sum().backward()
    torch.testing.assert_close(recorder.maps["1"], out.detach().norm(dim=1) * out.grad.norm(dim=1))


def test_a_teacher_in_inference_mode_disturbs_nothing():
    model = nn.ModuleDict({"net": ResNet(), "teacher": ResNet().eval()})
    images, _ = batch()
    with NormGrad(model) as recorder:
        with torch.inference_mode():
            wanted = model.teacher(images)
        F.mse_loss(model.net(images), wanted.clone()).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(recorder.maps) == ["net.stage1", "net.stage2", "net.stage3"]


def test_leaves_keep_no_hook_of_ours():
    model = nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 3))
    image = torch.randn(2, 3, 8, 8, requires_grad=True)
    with NormGrad(model, "0") as recorder:
        model(image).sum().backward()
    assert recorder.maps["0"].any()
    assert not image._backward_hooks


def test_an_output_that_gets_no_gradient_is_told_as_such():
    class Halves(nn.Module):
        def forward(self, x):
            return x.chunk(2, 1)

    model = nn.Sequential(nn.Conv2d(3, 4, 3), Halves(), nn.Identity())
    with NormGrad(model, ["0", "1"]) as recorder:
        model[1](model[0](torch.randn(2, 3, 8, 8)))[1].sum().backward()
    with pytest.warns(UserWarning, match="'1': the loss does not depend on it"):
        assert list(recorder.maps) == ["0"]


# ---------------------------------------------------------------- what attackers found


OPS = torch.ops.aten


@pytest.mark.parametrize("kinds", [["order0"], ["order0", "grad_cam"]])
@pytest.mark.parametrize("op", [OPS.pow.Tensor_Scalar, OPS.sum.dim_IntList, OPS.clone.default, OPS.sqrt.default])
def test_selective_checkpointing_does_not_take_our_tensors_for_the_models(op, kinds):
    """It keeps the outputs of some operations, in the order of their calls, and uses them in the backward pass."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 8, 8)

    def loss(x):
        return (model(x).sin().pow(2).sum((2, 3)).clone() + 1).log().mean()

    def gradient():
        model.zero_grad()
        contexts = partial(create_selective_checkpoint_contexts, [op])
        checkpoint(loss, x, use_reentrant=False, context_fn=contexts).backward()
        return model[0].weight.grad.clone()

    plain = gradient()
    with NormGrad(model, "0", kinds=kinds) as recorder:
        watched = gradient()
    assert torch.equal(plain, watched)
    assert recorder.maps["0"].any()


def test_a_recorder_can_be_copied_with_its_model():
    """As EMA does with a module that holds one."""
    model = ResNet()
    model.recorder = NormGrad(model.stage2, "conv1")
    twin = copy.deepcopy(model)
    with twin.recorder:
        twin(batch()[0]).sum().backward()
    assert twin.recorder.maps["conv1"].any()
    assert not model.recorder.latest_maps()
