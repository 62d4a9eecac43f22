"""The zoo's location test must fail for a wrong grid: what it says of right ones would be worth nothing otherwise."""

import pytest
import torch
from networks import ResNet, ViT
from zoo.location import HERE, SHIFTED, displacement, ratio, verdict
from zoo.look import Recorder, build, changes, look, step
from zoo.member import Member, classify

NETWORKS = {
    "ResNet": Member("tests/ResNet", ResNet, (32, 48), classify),
    "ViT": Member("tests/ViT", lambda: ViT((64, 96)), (64, 96), classify),
}


def transposed(change):
    """Rows and columns swapped, as a grid of tokens that is read column by column."""
    return change.flatten().reshape(*reversed(change.shape)).t()


def shuffled(change):
    order = torch.randperm(change.numel(), generator=torch.Generator().manual_seed(0))
    return change.flatten()[order].reshape(change.shape)


def in_windows(change):
    """Windows of 2 × 2 cells one after the other, as Hiera unrolls its tokens."""
    rows, columns = change.shape
    return change.reshape(rows // 2, 2, columns // 2, 2).permute(0, 2, 1, 3).reshape(rows, columns)


WRONG = {
    "transposed": transposed,
    "upside down": lambda change: change.flip(0),
    "mirrored": lambda change: change.flip(1),
    "rotated": lambda change: change.flip(0, 1),
    "shuffled": shuffled,
    "in windows": in_windows,
}


@pytest.fixture(scope="module", params=NETWORKS)
def found(request):
    """The changes of each layer's features."""
    member = NETWORKS[request.param]
    model = build(member)
    with Recorder(model) as recorder:
        step(member, model, member.images())
        features, _ = changes(member, model, recorder)
    assert features
    return features


def test_right_grids_pass(found):
    for name, of_layer in found.items():
        assert verdict(ratio(of_layer)) == HERE, name


@pytest.mark.parametrize("way", WRONG)
def test_wrong_grids_fail(found, way):
    for name, of_layer in found.items():
        wrong = {corner: WRONG[way](change) for corner, change in of_layer.items()}
        assert verdict(ratio(wrong)) != HERE, name


@pytest.mark.parametrize("tokens", [-1, 1, 2])
def test_tokens_that_are_read_too_early_or_too_late_are_shifted(tokens):
    member = NETWORKS["ViT"]
    model = build(member)
    with Recorder(model) as recorder:
        step(member, model, member.images())
        features, _ = changes(member, model, recorder)
        assert recorder.tokens
    for name in recorder.tokens & features.keys():
        rolled = {
            corner: change.flatten().roll(tokens).reshape(change.shape) for corner, change in features[name].items()
        }
        grid = next(iter(rolled.values())).shape
        assert verdict(ratio(features[name]), displacement(features[name]), grid) == HERE
        assert verdict(ratio(rolled), displacement(rolled), grid) == SHIFTED


def test_a_look_says_all_of_it():
    seen = look(NETWORKS["ResNet"])
    assert not seen.error
    assert seen.same_bits
    assert [layer.verdict for layer in seen.layers] == [HERE] * len(seen.layers)
    assert not any(layer.is_zero for layer in seen.layers)
    assert seen.map_location > 1
