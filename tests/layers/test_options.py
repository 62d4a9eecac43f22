"""The options of reading are checked in one place, and are keywords of the recorder."""

import inspect
from dataclasses import FrozenInstanceError, fields

import pytest
import torch
from networks import ResNet, batch

from normgrad_lightning import NormGrad
from normgrad_lightning.layers.options import ReadOptions


def test_the_fields_are_keywords_of_the_recorder_with_the_same_defaults():
    parameters = inspect.signature(NormGrad).parameters
    assert {field.name: field.default for field in fields(ReadOptions)} == {
        name: parameters[name].default for name in vars(ReadOptions())
    }
    model, (images, _) = ResNet(), batch()
    with NormGrad(model, "stage2.conv1", **vars(ReadOptions("weight", channels_last=False))) as recorder:
        model(images).sum().backward()
    assert recorder.maps["stage2.conv1"].shape == (4, 16, 24)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"target": "outputs"}, "`target`: expected one of 'output', 'input', 'weight', but got 'outputs'"),
        ({"target": None}, "`target`: expected one of"),
        ({"token_grid": 4}, r"`token_grid`: expected None or the sizes \(rows, columns\), .* but got 4"),
        ({"token_grid": (4, 0)}, "`token_grid`: expected"),
        ({"token_grid": (4, 4, -1)}, "`token_grid`: expected"),
        ({"channels_last": "false"}, "`channels_last`: expected True, False or None, but got 'false'"),
    ],
)
def test_wrong_options_are_refused_by_both(values, told):
    with pytest.raises(ValueError, match=told):
        ReadOptions(**values)
    with pytest.raises(ValueError, match=told):
        NormGrad(torch.nn.ReLU(), **values)


def test_options_cannot_be_changed():
    with pytest.raises(FrozenInstanceError):
        ReadOptions().target = "input"
