"""Every classification model of torchvision under 100 M parameters: the layers that `"auto"` takes, and the same bits.

An architecture is where guesses about layouts, blocks and grids go wrong, so all of them are tried, and what they give
is kept in `torchvision_models.md` for everybody to look at. To write that table anew:

    python tests/test_torchvision_models.py
"""

import copy
import warnings
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from twice import row, same

from normgrad_lightning import NormGrad

models = pytest.importorskip("torchvision").models

TABLE = Path(__file__).with_name("torchvision_models.md")
HEADER = """\
<!-- Written by `python tests/recording/test_torchvision_models.py`, checked by `pytest -m slow tests/recording`.
-->

# What `layers="auto"` takes of torchvision's classification models

One training step on two square images, with random weights. "Same bits": the gradient of every parameter, every buffer
and the random numbers are those of a step without the recorder.

| model | parameters | image | layers and their grids | same bits |
|---|--:|--:|---|---|
"""
MOST_PARAMETERS = 100_000_000
CLASSES = 7
SIZES = {"inception_v3": 299, "maxvit_t": 224}
"""Images are 64 pixels wide, but for models whose pools or windows need more in training."""
OPTIONS = {
    "googlenet": {"init_weights": False},
    "inception_v3": {"init_weights": False},
    **{f"vgg{depth}{bn}": {"init_weights": False} for depth in (11, 13, 16, 19) for bn in ("", "_bn")},
    **{f"vit_b_{patch}": {"image_size": 64} for patch in (16, 32)},
}


def is_small(name):
    return models.get_model_weights(name).DEFAULT.meta["num_params"] < MOST_PARAMETERS


NAMES = [name for name in models.list_models(module=models) if is_small(name)]


@pytest.fixture(autouse=True)
def _quick_init(monkeypatch):
    """Initialising the weights of large networks takes longer than a step with them."""
    monkeypatch.setattr(nn.init, "trunc_normal_", _normal)


def _normal(t, mean=0.0, std=1.0, a=-2.0, b=2.0, generator=None):
    return nn.init.normal_(t, mean, std)


def build(name):
    """A model that learns from its first step on: heads of zeros (those of vision transformers) send nothing back."""
    torch.manual_seed(0)
    model = models.get_model(name, weights=None, num_classes=CLASSES, **OPTIONS.get(name, {})).train()
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and not layer.weight.any():
            nn.init.normal_(layer.weight)
    return model


def step(model, images):
    """One forward and backward; returns all that it leaves behind."""
    torch.manual_seed(1)
    output = model(images)
    logits = output if isinstance(output, torch.Tensor) else output.logits
    F.cross_entropy(logits, torch.arange(len(images)) % CLASSES).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return [gradients, dict(model.named_buffers()), torch.get_rng_state()]


def measure(name):
    """The table's row of a model, and the warnings and maps of its recorder."""
    model = build(name)
    size = SIZES.get(name, 64)
    images = torch.rand(2, 3, size, size)
    plain = step(copy.deepcopy(model), images)
    with NormGrad(model) as recorder:
        watched = step(model, images)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        maps = recorder.maps
    parameters = models.get_model_weights(name).DEFAULT.meta["num_params"] / 1e6
    layers = ", ".join(f"`{layer}` {'×'.join(map(str, m.shape[1:]))}" for layer, m in maps.items())
    told = [str(w.message) for w in caught]
    is_same = "yes" if same(plain, watched) else "**no**"
    line = f"| {name} | {parameters:.1f} M | {size} | {layers or ' '.join(told)} | {is_same} |"
    return line, told, maps


def committed():
    """The table's rows by model."""
    rows = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")][1:] if TABLE.exists() else []
    return {line.split(" ")[1]: line for line in rows}


def count():
    rows = committed().values()
    return f"{sum('×' in line for line in rows)} of {len(rows)}"


@pytest.mark.slow
def test_the_table_has_every_model():
    assert list(committed()) == NAMES
    assert TABLE.read_text().startswith(HEADER)


@pytest.mark.slow
@row(
    "Models",
    "every classification model of torchvision under 100 M parameters",
    f"{count()} have maps at up to five depths; table in `tests/recording/torchvision_models.md`",
)
@pytest.mark.parametrize("name", NAMES)
def test_auto_takes_what_the_table_says_and_changes_no_bit(name):
    line, told, maps = measure(name)
    print(line)
    assert line == committed()[name]
    assert line.endswith("| yes |")
    assert maps or told
    for layer, m in maps.items():
        assert m.isfinite().all(), layer
        assert m.any(), f"{layer}: a map of zeros"


if __name__ == "__main__":
    nn.init.trunc_normal_ = _normal
    with TABLE.open("w") as table:
        table.write(HEADER)
        for name in NAMES:
            line, told, _ = measure(name)
            print(line, *told, sep="\n", flush=True)
            table.write(f"{line}\n")
