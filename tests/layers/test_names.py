"""Names, globs, and what auto takes."""

import copy

import pytest
import torch
from networks import ResNet, UNet, ViT, batch
from torch import nn

from normgrad_lightning import NormGrad, select_layers
from normgrad_lightning.layers.module_tree import all_modules, clean_name, ways_to
from normgrad_lightning.layers.names import named_layers


def test_exact_names_globs_and_lists_come_in_the_models_order():
    model = ResNet()
    assert select_layers(model, "stage2") == ["stage2"]
    assert select_layers(model, "stage*") == ["stage1", "stage2", "stage3"]
    assert select_layers(model, "stage?.bn[12]") == [f"stage{i}.bn{j}" for i in (1, 2, 3) for j in (1, 2)]
    assert select_layers(model, ["stage3", "stem", "stage*"]) == ["stem", "stage1", "stage2", "stage3"]
    assert select_layers(model, "**.conv1") == ["stage1.conv1", "stage2.conv1", "stage3.conv1"]
    assert select_layers(nn.Sequential(model), "**.conv1") == [f"0.stage{i}.conv1" for i in (1, 2, 3)]


def test_a_name_with_glob_characters_is_taken_literally_first():
    model = nn.ModuleDict({"a[1]": nn.ReLU(), "a1": nn.ReLU()})
    assert select_layers(model, "a[1]") == ["a[1]"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("stage4", "'stage4' matches none. Nearest names: stage3"),
        ("conv2", "'conv2' matches none. Nearest names: stage1.conv2, stage2.conv2"),
        ("Auto", "'Auto' matches none. Nearest names: auto"),
        ("Stage1.conv1", "'Stage1.conv1' matches none. Nearest names: stage1.conv1"),
        (["stage1", "layer*"], r"'layer\*' matches none. (Nearest names:|The first names are)"),
        ("", "expected \"auto\", a layer's name, a glob or a list of these, but got ''"),
        ([], r"but got \[\]"),
        (3, "but got 3"),
        ([None], r"but got \[None\]"),
        ("auto", '"auto" decides from what the network does with real inputs, but got None'),
    ],
)
def test_what_names_no_layer_is_an_error_that_helps(spec, told):
    with pytest.raises(ValueError, match=told):
        select_layers(ResNet(), spec)


def test_wrappers_do_not_show_in_names():
    assert clean_name("_orig_mod.net._fsdp_wrapped_module.layer1.0") == "net.layer1.0"
    assert clean_name("net._orig_mod") == "net"


def test_compiled_modules_are_seen_from_outside_and_scripted_ones_not_at_all():
    def net():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Sequential(nn.ReLU()))

    wrapped, in_place = torch.compile(net(), backend="eager"), net()
    in_place.compile(backend="eager")
    model = nn.ModuleDict({"a": net(), "b": wrapped, "c": in_place, "d": torch.jit.script(net()), "e": nn.ReLU()})
    assert list(named_layers(model)) == ["a", "a.0", "a.1", "a.1.0", "b", "e"]


def test_a_shared_layer_answers_to_each_of_its_names():
    shared = nn.Conv2d(3, 3, 3)
    model = nn.ModuleDict({"first": nn.Sequential(shared), "second": nn.Sequential(shared)})
    assert select_layers(model, "second.0") == select_layers(model, "*.0") == ["first.0"]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ResNet(), ["stage1", "stage2", "stage3"]),
        (UNet(), ["bottom.2", "merge2.1", "merge1.1"]),
        (ViT(extra=1, depth=7), [f"blocks.{i}" for i in (0, 1, 2, 4, 5)]),
        (ViT(extra=0, depth=7), [f"blocks.{i}" for i in (0, 2, 3, 4, 6)]),
        (ViT(extra=5, depth=3), ["blocks.0", "blocks.1"]),
        (nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)), ["0", "2"]),
        (nn.ModuleDict({"net": UNet()})["net"], ["bottom.2", "merge2.1", "merge1.1"]),
    ],
)
def test_auto_takes_the_last_layer_of_each_resolution_or_spaced_blocks(model, expected):
    images, _ = batch(2, (32, 48))
    assert select_layers(model, "auto", images) == expected


def test_auto_takes_five_at_the_most_and_the_deepest():
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, 2, 1) for _ in range(6)))
    assert select_layers(model, "auto", torch.randn(2, 3, 128, 128)) == ["1", "2", "3", "4", "5"]


def test_auto_leaves_out_what_sees_several_resolutions_and_what_mixes_images():
    class Pyramid(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 4, 3, 2, 1)
            self.head, self.crops = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x):
            a = self.a(x)
            b = self.b(a)
            self.crops(torch.cat([a, a]))
            return self.head(a).sum() + self.head(b).sum()

    assert select_layers(Pyramid(), "auto", torch.randn(2, 3, 16, 16)) == ["a", "b"]


def test_deciding_auto_leaves_no_trace():
    model, (images, _) = ResNet(dropout=0.5).train(), batch()
    model.stage2.eval()
    before, rng = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    select_layers(model, "auto", images)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(rng, torch.get_rng_state())
    assert model.training
    assert not model.stage2.training
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: (x,), lambda x: {"x": x}])
def test_inputs_may_be_a_tensor_arguments_or_keywords(pack):
    assert select_layers(ResNet(), "auto", pack(batch()[0])) == ["stage1", "stage2", "stage3"]


def test_auto_for_weights_takes_layers_that_have_one():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model, target="weight") as recorder:
        nn.functional.cross_entropy(model(images), labels).backward()
    assert list(recorder.maps) == ["stage1.conv2", "stage2.short", "stage3.short"]


def test_auto_for_inputs_takes_the_last_reader_of_each_resolution():
    model, (images, labels) = ResNet(), batch()
    with NormGrad(model, target="input") as recorder:
        nn.functional.cross_entropy(model(images), labels).backward()
    assert [tuple(m.shape[1:]) for m in recorder.maps.values()] == [(16, 24), (8, 12), (4, 6)]


def shared_and_empty():
    layer = nn.Conv2d(3, 3, 1)
    model = nn.Sequential(layer, nn.Sequential(layer, nn.ReLU()))
    model.register_module("nothing", None)
    return model


@pytest.mark.parametrize("make", [ResNet, UNet, ViT, shared_and_empty, nn.ReLU])
def test_all_modules_are_those_of_torch_each_once(make):
    model = make()
    found = all_modules(model)
    assert len(found) == len(set(found))
    assert set(found) == set(model.modules())


def exchange(model):
    model.stage2.conv1 = nn.Conv2d(*model.stage2.conv1.weight.shape[1::-1], 3)


def exchange_above(model):
    model.stage2 = copy.deepcopy(model.stage2)


def add_beside(model):
    model.stage4 = nn.ReLU()


def take_away(model):
    model.stage3 = nn.Identity()


def compile_above(model):
    model.stage2.compile(backend="eager")


def compile_a_method(model):
    model.forward = torch.compile(model.forward, backend="eager")


def exchange_elsewhere(model):
    model.stage3.conv1 = nn.Conv2d(8, 8, 3)


def compile_elsewhere(model):
    model.stage3.compile(backend="eager")


def put_itself_back(model):
    model.stage2.conv1 = model.stage2.conv1


@pytest.mark.parametrize(
    ("change", "is_seen"),
    [
        (exchange, True),
        (exchange_above, True),
        (add_beside, True),
        (take_away, True),
        (compile_above, True),
        (compile_a_method, True),
        (exchange_elsewhere, False),
        (compile_elsewhere, False),
        (put_itself_back, False),
    ],
)
def test_a_change_on_the_way_to_a_layer_is_seen(change, is_seen):
    model = ResNet()
    ways = ways_to(model, [model.stage2.conv1, model.stem])
    assert {waypoint.module for waypoint in ways} == {model, model.stem, model.stage2, model.stage2.conv1}
    assert all(waypoint.is_as_it_was() for waypoint in ways)
    change(model)
    assert all(waypoint.is_as_it_was() for waypoint in ways) is not is_seen
