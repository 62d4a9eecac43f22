"""Maps of several kinds from the same two tensors."""

import pytest
import reference
import torch
import torch.nn.functional as F
from networks import ResNet, ViT, batch
from torch import nn

from normgrad_lightning import NormGrad, grad_cam_maps
from normgrad_lightning import functional as NF
from normgrad_lightning.hooks.readings import READINGS
from normgrad_lightning.maps import READ_KINDS

LAYERS = ["stem", "stage1.bn1", "stage2.conv1", "stage3"]


def recorded(model, images, labels, **options):
    with NormGrad(model, **options) as recorder:
        F.cross_entropy(model(images), labels).backward()
    return recorder


def plain_grad_cam(model, images, labels, name):
    """By a hook and loops of its own: what lowers the loss is bright."""
    seen = {}

    def keep(_, args, output):
        seen["x"] = output.detach().clone()
        output.register_hook(lambda g: seen.update(g=g.clone()))

    handle = model.get_submodule(name).register_forward_hook(keep)
    F.cross_entropy(model(images), labels).backward()
    handle.remove()
    return reference.grad_cam(seen["x"], -seen["g"])


def test_there_is_a_reading_for_each_kind_that_a_training_step_gives():
    assert tuple(READINGS) == READ_KINDS


@pytest.mark.parametrize("inplace", [True, False])
@pytest.mark.parametrize("name", LAYERS)
def test_grad_cam_is_that_of_plain_loops_for_the_negative_loss(name, inplace):
    torch.manual_seed(0)
    model, (images, labels) = ResNet(inplace=inplace).double().eval(), batch(3, dtype=torch.float64)
    if inplace and name == "stage1.bn1":
        pytest.skip("the next layer overwrites what it gives, see below")
    recorder = recorded(model, images, labels, layers=name, kinds=["grad_cam"])
    expected = plain_grad_cam(model, images, labels, name)
    torch.testing.assert_close(recorder.maps[name], expected, rtol=1e-10, atol=1e-14)
    assert expected.any()


def test_an_activation_that_is_overwritten_has_no_grad_cam_and_the_reason_is_said():
    model, (images, labels) = ResNet(inplace=True), batch(2)
    recorder = recorded(model, images, labels, layers=["stage1.bn1", "stage1"], kinds=READ_KINDS)
    with pytest.warns(UserWarning, match="no grad_cam map of the layer 'stage1.bn1': an operation in place"):
        assert list(recorder.maps_of("grad_cam")) == ["stage1"]
    assert list(recorder.maps) == ["stage1.bn1", "stage1"]


def test_a_pass_for_grad_cam_alone_reads_activations_that_are_overwritten():
    torch.manual_seed(0)
    model, (images, labels) = ResNet(inplace=True).double().eval(), batch(3, dtype=torch.float64)
    maps = grad_cam_maps(model, images, "stage1.bn1", loss_fn=lambda m, x: F.cross_entropy(m(x), labels))
    torch.testing.assert_close(maps["stage1.bn1"], plain_grad_cam(model, images, labels, "stage1.bn1"))


def test_grad_cam_of_a_loss_is_bright_where_features_lower_it():
    """A loss that one place lowers and another one raises."""
    model = nn.Sequential(nn.Conv2d(1, 1, 1), nn.Identity())
    nn.init.ones_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    image = torch.zeros(1, 1, 4, 4)
    image[..., 0, 0], image[..., 3, 3] = 1, -1
    with NormGrad(model, "0", kinds=["grad_cam"]) as recorder:
        (-model(image)).sum().backward()
    assert recorder.maps["0"].nonzero().tolist() == [[0, 0, 0]]


@pytest.mark.parametrize("target", ["output", "input"])
def test_kinds_beside_each_other_are_those_of_each_alone(target):
    torch.manual_seed(0)
    model, (images, labels) = ResNet().eval(), batch()
    layers = ["stage1", "stage2.conv1", "stage3"]
    options = {"layers": layers, "num_images": 2, "target": target}
    both = recorded(model, images, labels, kinds=READ_KINDS, **options)
    alone = {kind: recorded(model, images, labels, kinds=[kind], **options) for kind in READ_KINDS}
    default = recorded(model, images, labels, **options)
    for kind, recorder in alone.items():
        maps = both.maps_of(kind)
        assert list(maps) == layers
        for name, m in maps.items():
            assert len(m) == 2
            assert m.any()
            assert torch.equal(m, recorder.maps[name])
            assert torch.equal(m, both.latest_maps(kind)[name])
    for name, m in default.maps.items():
        assert torch.equal(m, both.maps[name])
        assert torch.equal(m, both.latest_maps()[name])


def test_grad_cam_of_tokens_is_on_their_grid():
    model, (images, labels) = ViT(), batch(2, (32, 48))
    recorder = recorded(model, images, labels, kinds=["order0", "grad_cam"])
    assert {m.shape for m in recorder.maps_of("grad_cam").values()} == {(2, 4, 6)}
    assert recorder.maps_of("grad_cam").keys() == recorder.maps.keys()


def test_a_layer_used_twice_gets_the_sum_of_each_kind():
    torch.manual_seed(0)
    shared = nn.Conv2d(3, 3, 3, padding=1).double()
    model = nn.Sequential(shared, nn.Tanh(), shared)
    parts = []

    def keep(_, args, output):
        x = output.detach().clone()
        output.register_hook(lambda g: parts.append(NF.grad_cam(x, -g)))

    shared.register_forward_hook(keep)
    with NormGrad(model, "0", kinds=["grad_cam", "order0"]) as recorder:
        model(torch.randn(2, 3, 6, 7, dtype=torch.float64)).square().sum().backward()
    assert len(parts) == 2
    torch.testing.assert_close(recorder.maps_of("grad_cam")["0"], sum(parts))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"kinds": ["order1"]}, "`kinds`: expected some of 'order0', 'grad_cam'.*, but got 'order1'"),
        ({"kinds": []}, "`kinds`: expected a list of 'order0', 'grad_cam'.*, each once"),
        ({"kinds": "order0"}, "`kinds`: expected a list of"),
        ({"kinds": ["order0", "order0"]}, "`kinds`: expected a list of"),
        ({"kinds": ["order0", "grad_cam"], "target": "weight"}, '`grad_cam`: expected .*but got `target="weight"`'),
    ],
)
def test_kinds_that_cannot_be_read_are_refused_at_once(options, told):
    with pytest.raises(ValueError, match=told):
        NormGrad(ResNet(), **options)


def test_a_kind_that_is_not_recorded_is_refused():
    recorder = NormGrad(ResNet())
    for ask in (recorder.maps_of, recorder.latest_maps):
        with pytest.raises(ValueError, match="`kind`: expected a kind that is recorded, 'order0', but got 'grad_cam'"):
            ask("grad_cam")


def test_replicas_on_several_devices_are_not_mixed():
    """Each replica of `nn.DataParallel` sees other images: those of one device have maps, whose images are shown."""
    model, (images, labels) = ResNet(), batch(2)
    with NormGrad(model, "stage1") as recorder:
        F.cross_entropy(model(images), labels).backward()
    (only,) = recorder._latest.values()
    number, (m,) = only.parts[0]
    only.parts = [(number - 1, [m.to("meta")]), (number, [m])]
    assert recorder.maps["stage1"] is m
    only.images = images.to("meta")
    assert recorder.latest_maps()["stage1"].device.type == "meta"
