"""What a user gets wrong: the message names the argument, what came and what to do instead.

The first part is a table of arguments. The second provokes messages in real runs. Both look for names, values and
remedies only, so that sentences can be mended.
"""

from __future__ import annotations

import logging
import warnings
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader

from normgrad_lightning import (
    NormGrad,
    NormGradCallback,
    grad_cam_maps,
    log_maps,
    order0_maps,
    order1_maps,
    select_layers,
)
from normgrad_lightning.env_activation.environment_callback import in_variables

Rows = list[tuple[Any, ...]]
Runs = dict[str, tuple[Any, ...]]


def missing(words: tuple[str, ...], text: str) -> list[str]:
    """Those of these words that are not in a text."""
    return [word for word in words if word.lower() not in text.lower()]


# ---------------------------------------------------------------- a table of arguments


def network() -> nn.Sequential:
    """A convolution and a classifier."""
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 4, 3, padding=1), "act": nn.Tanh(), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), head=nn.Linear(4, 5)))


IMAGES, LABELS = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(2)
BATCH = IMAGES, LABELS


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def loader(batch: Any = BATCH) -> DataLoader:
    """The same batch three times."""
    return DataLoader([batch] * 3, batch_size=None)


FLAGS: Rows = [
    ({"layers": 5}, "named_modules()", "5"),
    ({"images": "last"}, "'balanced'", "'hardest'", "'last'"),
    ({"name": "a/b"}, "'a/b'"),
    ({"classes": "cat"}, "list", "'cat'"),
    ({"views": ["overview", "patch"]}, "'overview'", "'patches'", "'patch'"),
    ({"read_every_n_steps": 0}, "1", "0"),
    ({"order1_maps": ["order1", "order2"]}, "'adversarial'", "'order2'"),
    ({"order1_maps": 1}, "'contrast'", "1"),
    ({"every_n_steps": 0}, "1", "0", "`enabled=False`"),
    ({"order1_every_n_steps": 0}, "1", "0", "None"),
    ({"num_images": True}, "1", "True"),
    ({"probe": "test"}, "'train'", "'val'", "'test'"),
    ({"probe": loader()}, "DataLoader", "`probe=next(iter(loader))`"),
    ({"epsilon": 0}, "0"),
    ({"enabled": "false"}, "True", "False", "'false'"),
    ({"channels_last": "no"}, "True", "False", "None", "'no'"),
    ({"mean": "imagenet"}, "'imagenet'"),
    ({"std": [0.2, 0.0, 0.2]}, "[0.2, 0.0, 0.2]"),
    ({"std": [0.2, 0.2, 0.2], "mean": [0.5, 0.5]}, "`mean`", "2", "3"),
    ({"opacity": 1.5}, "0", "1", "1.5"),
    ({"token_grid": (0, 3)}, "(rows, columns)", "0, 3"),
    ({"colormap": "infrno"}, "'infrno'", "'inferno'"),
    ({"colormap": "12345678"}, "'12345678'", "'viridis'"),
    ({"colormap": ["inferno"]}, "['inferno']"),
    ({"scale": "global"}, "'robust'", "'shared'", "'global'"),
    ({"target": "inputs"}, "'output'", "'weight'", "'inputs'"),
    ({"grad_cam": True, "target": "weight"}, '`target="output"`'),
    ({"on_error": "ignore"}, "'warn'", "'raise'", "'ignore'"),
]
"""Flags of the callback with a wrong value, and what the error says besides the first flag's name."""
NAMES = [next(iter(flags)) for flags, *_ in FLAGS]


@pytest.mark.parametrize(("flags", "words"), [(flags, words) for flags, *words in FLAGS], ids=NAMES)
def test_a_wrong_flag_is_an_error_at_once(flags, words):
    with pytest.raises(ValueError, match=rf"^`{next(iter(flags))}`") as caught:
        NormGradCallback(**flags)
    assert not missing(words, str(caught.value)), caught.value


@pytest.mark.parametrize("flags", [flags for flags, *_ in FLAGS], ids=NAMES)
def test_a_wrong_flag_is_an_error_where_it_is_set_later(flags):
    callback = NormGradCallback()
    name, *others = flags
    for other in others:
        setattr(callback, other, flags[other])
    before = getattr(callback, name)
    with pytest.raises(ValueError, match=rf"^`{name}`"):
        setattr(callback, name, flags[name])
    assert getattr(callback, name) == before


class Overridden(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


def no_scalar(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0])


def without_dependence(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, batch).detach()


def of_nan(model: nn.Module, batch: Any) -> torch.Tensor:
    return torch.nan * cross_entropy(model, batch)


def compared(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch[0]).log_softmax(0).mean()


MAPS = {"a": torch.ones(2, 2, 2)}
OWN_MEANS = '`target="output"`'
ARGUMENTS: Rows = [
    (lambda: select_layers(network(), "covn"), "layers", "'covn'", "Nearest names: conv"),
    (lambda: select_layers(network(), "conv,act"), "layers", "'conv,act'", "['a', 'b']"),
    (lambda: select_layers(network(), "42"), "layers", "'42'", "conv, act, pool, flat, head"),
    (lambda: select_layers(network()), "inputs", "None"),
    (lambda: NormGrad(network(), num_images=0), "num_images", "0", "None"),
    (lambda: NormGrad("resnet18"), "model", "torch.nn.Module", "'str'"),
    (lambda: NormGrad(torch.compile(network(), backend="eager")), "model", "compiled", "`order0_maps`"),
    (lambda: NormGrad(network(), "act", target="weight"), "layers", "'act'", "Tanh", OWN_MEANS),
    (lambda: NormGrad(nn.Sequential(Overridden(3, 4, 3)), "0", target="weight"), "layers", "Overridden", OWN_MEANS),
    (lambda: NormGrad(network(), "conv").maps_of("grad_cam"), "kind", "'order0'", "'grad_cam'"),
    (lambda: order0_maps(network(), BATCH, cross_entropy, "conv"), "loss_fn", "'tuple'", "lambda model, batch"),
    (lambda: order0_maps(network(), no_scalar, BATCH, "conv"), "loss_fn", "(2, 5)", "`.mean()`"),
    (lambda: order0_maps(network(), lambda *_: 3.0, BATCH, "conv"), "loss_fn", "'float'", "tensor"),
    (lambda: order0_maps(network(), without_dependence, BATCH, "conv"), "loss_fn", "`.detach()`"),
    (lambda: order0_maps(nn.Sequential(network().flat, nn.Linear(192, 5)), cross_entropy, BATCH), "layers", "grid"),
    (lambda: grad_cam_maps(network(), cross_entropy, BATCH), "loss_fn", "`score_fn=`"),
    (lambda: grad_cam_maps(network(), BATCH, loss_fn=cross_entropy, score_fn=no_scalar), "loss_fn", "`score_fn=`"),
    (lambda: grad_cam_maps(network(), BATCH, "conv", score_fn=no_scalar), "score_fn", "(2, 5)", "`.mean()`"),
    (lambda: order1_maps(network(), nn.CrossEntropyLoss(), BATCH, "conv"), "loss_fn", "lambda model, batch"),
    (lambda: order1_maps(network(), without_dependence, BATCH, "conv"), "loss_fn", "`.detach()`"),
    (lambda: order1_maps(network(), lambda model, _: model.head.weight.sum(), BATCH, "conv"), "layers", "loss"),
    (lambda: order1_maps(network(), of_nan, BATCH, "conv"), "loss_fn", "finite", "nan"),
    (lambda: order1_maps(network(), compared, BATCH, "conv"), "per_image", "`per_image=False`"),
    (lambda: order1_maps(network(), cross_entropy, (IMAGES, {1, 2}), "conv"), "batch", "'set'", "`per_image=False`"),
    (lambda: order1_maps(network(), cross_entropy, (IMAGES, torch.ones(9, 6)), "conv"), "batch", "(9, 6)"),
    (lambda: log_maps(None, {}, None, 0), "logger", "folder", "'NoneType'"),
    (lambda: log_maps("maps", [torch.ones(1, 2, 2)], None, 0), "maps", "'list'"),
    (lambda: log_maps("maps", MAPS, [1], 0), "images", "'list'"),
    (lambda: log_maps("maps", {"a": -torch.ones(2, 2, 2)}, None, 0), "maps", "`signed=True`"),
    (lambda: log_maps("maps", MAPS, IMAGES, 0, tag=None), "tag", "None"),
    (lambda: log_maps("maps", MAPS, IMAGES, 0, tag=".."), "tag", "'../00_a'"),
    (lambda: NormGradCallback().figure(), "figure", "`trainer.fit`"),
]
"""Calls with a wrong argument, its name, and what the error says besides."""


@pytest.mark.parametrize(("call", "argument", "words"), [(call, name, words) for call, name, *words in ARGUMENTS])
def test_a_wrong_argument_is_an_error_that_begins_with_its_name(call, argument, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^`{argument}`") as caught:
        call()
    assert not missing(words, str(caught.value)), caught.value
    assert not list(tmp_path.rglob("*.jpg"))


VARIABLES: Rows = [
    ("NORMGRAD", "maybe", "1", "0", "'maybe'"),
    ("NORMGRAD_LAYER", "a", "NORMGRAD_LAYERS"),
    ("NORMGRAD_XYZZY", "a", "NORMGRAD_EVERY_N_STEPS"),
    ("NORMGRAD_EVERY_N_STEPS", "1.5", "'1.5'"),
    ("NORMGRAD_EVERY_N_STEPS", "0", "`every_n_steps`", "NORMGRAD_EVERY_N_STEPS=0"),
    ("NORMGRAD_PER_IMAGE", "jein", "1", "0", "'jein'"),
    ("NORMGRAD_MEAN", "0.5,grey", "'0.5,grey'"),
    ("NORMGRAD_TARGET", "inputs", "'output'", "'inputs'"),
    ("NORMGRAD_ORDER1_MAPS", "contrast,contrast", "`order1_maps`", "NORMGRAD_ORDER1_MAPS=contrast,contrast"),
    ("NORMGRAD_LAYERS", "net.cnv", "`layers`", "Nearest names: net.conv", "NORMGRAD_LAYERS=net.cnv"),
]
"""Variables with a wrong value, and what the error says besides the variable's name."""


# ---------------------------------------------------------------- messages of real runs


class Lit(pl.LightningModule):
    """The smallest module that trains on images.

    Args:
        net: what to train.
        step: what `training_step` returns, of the module and a batch.
        attributes: more of the module.
    """

    def __init__(self, net: nn.Module | None = None, step: Callable[..., Any] | None = None, **attributes: Any):
        super().__init__()
        self.net = network() if net is None else net
        self.step = step or (lambda module, batch: cross_entropy(module.net, batch))
        for name, value in attributes.items():
            setattr(self, name, value)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.step(self, batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.01)


class OwnSteps(Lit):
    """Optimises by hand."""

    def __init__(self, *args: Any, **attributes: Any):
        super().__init__(*args, automatic_optimization=False, **attributes)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))


class NoSteps(OwnSteps):
    """Does not even call backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None: ...


class FromIterator(Lit):
    """Draws its batches itself."""

    def training_step(self, dataloader_iter: Any) -> Any:
        return None


class OwnLogger(Logger):
    """As small as Lightning allows."""

    name, version = "mine", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any) -> None: ...


class FSDPStrategy(SingleDeviceStrategy):
    """Has the name of the one that needs several GPUs."""


class OddNames(list):
    """A data set that fails when it is asked for its classes."""

    @property
    def classes(self) -> Any:
        raise RuntimeError("nobody knows")


class NoHooks(nn.Conv2d):
    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no hooks here")


def trainer(folder: Any, **options: Any) -> pl.Trainer:
    """A Trainer that says nothing of its own."""
    settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    without = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    return pl.Trainer(**{**settings, **dict.fromkeys(without, False), **options})


def fit(folder: Any, module: pl.LightningModule, batch: Any = BATCH, options: Any = None, **flags: Any) -> None:
    """Train on the same batch three times, with an event each time."""
    callback = NormGradCallback(**{"every_n_steps": 1, "layers": "net.conv", **flags})
    trainer(folder, callbacks=[callback], **(options or {})).fit(module, loader(batch))


ORDER1 = {"order1_every_n_steps": 1, "num_images": 1}
ERRORS: Runs = {
    "no such layer": (lambda at: fit(at, Lit(), layers="net.stage4"), "`layers`", "'net.stage4'", "net.act"),
    "order 1, by hand": (lambda at: fit(at, OwnSteps(), **ORDER1), "order1", "def normgrad_loss(self, batch)"),
    "a probe, by hand": (lambda at: fit(at, OwnSteps(), probe="train"), "`probe`", "def normgrad_loss(self, batch)"),
    "compiled, by hand": (
        lambda at: fit(at, OwnSteps(torch.compile(network(), backend="eager"))),
        "compiled", "def normgrad_loss(self, batch)",
    ),
    "no method": (lambda at: fit(at, Lit(normgrad_loss=3), **ORDER1), "`normgrad_loss`", "Lit", "3"),
    "no batch": (lambda at: fit(at, FromIterator(), **ORDER1), "`dataloader_iter`", "FromIterator"),
    "sharded weights": (
        lambda at: fit(at, Lit(), options={"strategy": FSDPStrategy("cpu")}, **ORDER1),
        "`order1_every_n_steps`", "FSDPStrategy",
    ),
    "a problem, if asked to raise": (
        lambda at: fit(at, Lit(), layers="net.head", on_error="raise"), "NormGrad", "'net.head'", "(2, 5)",
    ),
}  # fmt: skip
"""What ends training before its first batch, or was asked to end it."""


@pytest.mark.parametrize("name", ERRORS)
def test_what_code_asks_for_in_vain_is_an_error(name, tmp_path):
    run, *words = ERRORS[name]
    with pytest.raises((ValueError, RuntimeError)) as caught:
        run(tmp_path)
    assert not missing(words, str(caught.value)), caught.value


@pytest.mark.parametrize(("variable", "value", "words"), [(name, value, words) for name, value, *words in VARIABLES])
def test_a_wrong_variable_is_an_error_that_names_it(variable, value, words, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=r"^`\w+`") as caught:
        trainer(tmp_path).fit(Lit(), loader())
    assert not missing((variable, *words), str(caught.value)), caught.value


def called_around_its_hooks(module: Lit, batch: Any) -> torch.Tensor:
    return module.net.head.forward(batch[0][:, 0, 0, :4]).sum()


def normalised_over_the_batch(module: Lit, batch: Any) -> torch.Tensor:
    return F.batch_norm(module.net(batch[0]), None, None, training=True)[:, 0].pow(3).sum()


def mapped(module: Lit, batch: Any) -> torch.Tensor:
    """The mean loss, as `vmap` gives it for each image."""
    weights = dict(module.net.named_parameters())
    return torch.func.vmap(lambda *one: loss_of_one(module, weights, *one))(*batch).mean()


def loss_of_one(module: Lit, weights: Any, image: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(torch.func.functional_call(module.net, weights, (image[None],)), label[None])


class PerImage(OwnSteps):
    """Takes the gradient of each image, as private training does: what its hooks see is of no step."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        gradient = torch.func.grad(lambda *args: loss_of_one(self, *args))
        gradients = torch.func.vmap(gradient, (None, 0, 0))(weights, *batch)
        for name, p in self.net.named_parameters():
            p.grad = gradients[name].mean(0)


class ForwardMode(OwnSteps):
    """Takes the gradient in a direction, and never goes back."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        weights = {name: p.detach() for name, p in self.net.named_parameters()}
        direction = {name: torch.ones_like(p) for name, p in weights.items()}

        def loss(weights: Any) -> torch.Tensor:
            return F.cross_entropy(torch.func.functional_call(self.net, weights, (batch[0],)), batch[1])

        _, slope = torch.func.jvp(loss, (weights,), (direction,))
        for name, p in self.net.named_parameters():
            p.grad = slope * direction[name]


class Spectral(nn.Module):
    """Works on spectra: all that it gives on a grid is complex."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(3, 3, 3, dtype=torch.cfloat) for _ in range(2))
        self.size = Then(torch.abs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.size(self.second(self.first(torch.fft.fft2(x)))).mean((2, 3))


def normalised() -> Lit:
    """A module with BatchNorm that has no statistics yet."""
    return Lit(nn.Sequential(OrderedDict(conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), rest=network()[2:])))


def rectified(*, inplace: bool) -> Lit:
    return Lit(nn.Sequential(OrderedDict(network().named_children(), act=nn.ReLU(inplace=inplace))))


def frozen() -> Lit:
    module = Lit()
    module.net.conv.requires_grad_(False)
    return module


def logged(at: Any, **flags: Any) -> None:
    fit(at, Lit(), options={"logger": TensorBoardLogger(at)}, **flags)


def validated(at: Any, batch: Any, probe: Any) -> None:
    module = Lit()
    module.validation_step = lambda batch, batch_idx: None
    callback = NormGradCallback(every_n_steps=1, layers="net.conv", probe=probe)
    trainer(at, callbacks=[callback], max_epochs=2).fit(module, loader(), loader(batch))


def talking(module: Lit, batch: Any) -> torch.Tensor:
    loss = cross_entropy(module.net, batch)
    torch.distributed.all_reduce(loss.detach().clone())
    return loss


def beside_others(at: Any, module: Lit, **flags: Any) -> None:
    """Train where Lightning believes that there are two processes."""
    strategy = SingleDeviceStrategy("cpu")
    strategy.world_size = 2
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        fit(at, module, options={"strategy": strategy}, **flags)
    finally:
        torch.distributed.destroy_process_group()


CALLS: list[str] = []
"""Out of reach of what passes put back."""


def summed(t: torch.Tensor) -> torch.Tensor:
    t = t.clone()
    torch.distributed.all_reduce(t)
    CALLS.append("done")
    return t


class Sums(torch.autograd.Function):
    """The identity; its gradient, or what it gives, comes from all processes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, where: str) -> torch.Tensor:
        ctx.where = where
        return summed(x) if where == "forward" else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return summed(gradient) if ctx.where == "backward" else gradient, None


class InParallel(nn.Module):
    """A network, a part of which is spread over processes."""

    def __init__(self, where: str):
        super().__init__()
        self.conv, self.rest, self.where = nn.Conv2d(3, 4, 3, padding=1), network()[1:], where

    def forward(self, x: torch.Tensor) -> Any:
        return self.rest(Sums.apply(self.conv(x), self.where))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_runs_by_default_starts_no_collective_and_says_nothing_of_it(where, tmp_path):
    CALLS.clear()
    assert warned(lambda: beside_others(tmp_path, Lit(InParallel(where)), read_every_n_steps=1)) == []
    assert CALLS == ["done"] * 3


def with_loss(value: Callable[[torch.Tensor], Any]) -> Lit:
    """A module whose `normgrad_loss` makes this of the loss."""
    module = Lit()
    module.normgrad_loss = lambda batch: value(cross_entropy(module.net, batch))
    return module


UNCUTTABLE = IMAGES, LABELS, torch.ones(9, 6)
OWN_LOSS = "normgrad_loss"
WARNINGS: Runs = {
    "labels": (lambda at: fit(at, Lit(normgrad_labels=lambda batch: 3.5)), "`normgrad_labels`", "3.5"),
    "masks": (lambda at: fit(at, Lit(normgrad_masks=lambda batch: "left")), "`normgrad_masks`", "'str'"),
    "names": (
        lambda at: trainer(at, callbacks=[NormGradCallback()]).fit(Lit(), DataLoader(OddNames([BATCH]), None)),
        "classes", "nobody knows",
    ),
    "too few names": (lambda at: fit(at, Lit(), classes=["cat"]), "`classes`", "1 names", "label 1"),
    "inside of torch.func": (lambda at: fit(at, PerImage(), layers="auto"), "`torch.func`", "`vmap`"),
    "inside of torch.func.jvp": (lambda at: fit(at, ForwardMode(), layers="auto"), "`torch.func`", "`jvp`"),
    "complex features": (lambda at: fit(at, Lit(Spectral()), layers="auto"), "complex"),
    "order 1 inside of torch.func": (
        lambda at: fit(at, Lit(step=mapped), per_image=False, **ORDER1), "order-1", "`torch.func`",
    ),
    "images of one pixel": (lambda at: fit(at, Lit(), (IMAGES[..., :1, :1], LABELS), layers="auto"), "one pixel"),
    "images with NaN": (lambda at: fit(at, normalised(), (IMAGES.log(), LABELS), **ORDER1), "NaN", "skips"),
    "a layer without a grid": (lambda at: fit(at, Lit(), layers="net.head"), "'net.head'", "(2, 5)", "pool"),
    "a frozen layer": (lambda at: fit(at, frozen()), "'net.conv'", "frozen"),
    "a layer that takes no hooks": (
        lambda at: fit(at, Lit(nn.Sequential(OrderedDict(network().named_children(), conv=NoHooks(3, 4, 3))))),
        "no hooks here",
    ),
    "called around hooks": (lambda at: fit(at, Lit(step=called_around_its_hooks)), "`layer(x)`", "`layer.forward(x)`"),
    "a loss of zero": (
        lambda at: fit(at, Lit(step=lambda m, b: 0 * cross_entropy(m.net, b))), "'net.conv'", "the loss is zero",
    ),
    "a loss of nan": (lambda at: fit(at, Lit(step=lambda m, b: of_nan(m.net, b))), "finite", "`callback.skipped`"),
    "no backward": (lambda at: fit(at, NoSteps()), "backward"),
    "a mean for two channels": (lambda at: logged(at, mean=[0.5, 0.5], views="panels"), "`mean`", "3", "2"),
    "a logger without pictures": (lambda at: fit(at, Lit(), options={"logger": OwnLogger()}), "OwnLogger", "normgrad"),
    "no validation": (lambda at: fit(at, Lit(), probe="val"), '`probe="val"`', '`probe="train"`'),
    "validation of one class": (lambda at: validated(at, (IMAGES, 0 * LABELS), "val"), "one class"),
    "order 1 of parts": (lambda at: fit(at, Lit(), UNCUTTABLE, **ORDER1), "order-1", "(9, 6)", "`per_image=False`"),
    "order 1 of a batch": (lambda at: fit(at, Lit(step=normalised_over_the_batch), **ORDER1), "`per_image=False`"),
    "an iterator": (lambda at: fit(at, Lit(more=iter([1])), per_image=False, **ORDER1), "iterator", OWN_LOSS),
    "other processes": (
        lambda at: beside_others(at, Lit(step=talking), per_image=False, **ORDER1), "order-1", "allreduce", OWN_LOSS,
    ),
    "a layer that is overwritten": (
        lambda at: fit(at, rectified(inplace=True), grad_cam=True), "'net.conv'", "Name the layer", "`inplace=False`",
    ),
    "a detached loss": (lambda at: fit(at, with_loss(torch.Tensor.detach), **ORDER1), OWN_LOSS, "`.detach()`"),
    "two losses": (lambda at: fit(at, with_loss(lambda x: x.expand(2)), **ORDER1), OWN_LOSS, "(2,)"),
    "a number": (lambda at: fit(at, with_loss(float), **ORDER1), OWN_LOSS),
}  # fmt: skip
"""What goes wrong while training goes on, and what its one warning says."""


def warned(run: Callable[[], object]) -> list[str]:
    """Our warnings of a run."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if "normgrad" in str(w.message).lower()]


@pytest.mark.parametrize("name", WARNINGS)
def test_what_goes_wrong_while_training_is_one_warning(name, tmp_path):
    run, *words = WARNINGS[name]
    texts = warned(lambda: run(tmp_path))
    assert len(texts) == len(set(texts))
    assert len([text for text in texts if not missing(words, text)]) == 1, texts


@pytest.mark.parametrize("flags", [{"probe": "train"}, ORDER1], ids=["a probe", "order 1"])
def test_a_step_that_fails_is_not_said_to_go_on(flags, tmp_path):
    def run() -> None:
        with pytest.raises(KeyError, match="nothing of that name"):
            fit(tmp_path, Lit(step=lambda module, batch: {}["nothing of that name"]), **flags)

    assert warned(run) == []


# ---------------------------------------------------------------- what messages advise


class Losses(OwnSteps):
    """Optimises by hand, and has the loss that messages ask for."""

    def normgrad_loss(self, batch: Any) -> torch.Tensor:
        return cross_entropy(self.net, batch)


def with_own_loss(step: Any = None) -> Lit:
    module = Lit(step=step, more=iter([1]))
    module.normgrad_loss = lambda batch: cross_entropy(module.net, batch)
    return module


def called_one_by_one(module: Lit, batch: Any) -> torch.Tensor:
    x = batch[0]
    for layer in module.net:
        x = layer(x)
    return F.cross_entropy(x, batch[1])


def after_training(at: Any) -> NormGradCallback:
    callback = NormGradCallback(every_n_steps=1, layers="net.conv")
    trainer(at, callbacks=[callback]).fit(Lit(), loader())
    return callback


REMEDIES: dict[str, Callable[[Any], object]] = {
    "`inplace=False`": lambda at: fit(at, rectified(inplace=False), grad_cam=True),
    "the layer that overwrites": lambda at: fit(at, rectified(inplace=True), layers="net.act", grad_cam=True),
    "def normgrad_loss, other processes": lambda at: beside_others(at, with_own_loss(talking), **ORDER1),
    "a smaller `epsilon`": lambda at: fit(at, Lit(), epsilon=1e-5, **ORDER1),
    "fewer images": lambda at: fit(at, Lit(), probe="train", num_images=1),
    "`order1_every_n_steps=None`": lambda at: fit(at, Lit(), order1_every_n_steps=None),
    "`per_image=True`": lambda at: fit(at, Lit(), per_image=True, **ORDER1),
    "`second_order=False`": lambda at: order1_maps(network(), cross_entropy, BATCH, "conv", second_order=False),
    "def normgrad_labels": lambda at: fit(at, Lit(normgrad_labels=lambda batch: batch[1])),
    "def normgrad_masks": lambda at: fit(at, Lit(normgrad_masks=lambda batch: batch[0][:, 0] > 0)),
    "a number for each channel": lambda at: logged(at, mean=[0.5] * 3, std=[0.2] * 3, views="panels"),
    "`enabled=False`": lambda at: fit(at, Lit(), enabled=False),
    "`probe=next(iter(loader))`": lambda at: fit(at, Lit(), probe=next(iter(loader()))),
    '`target="output"`': lambda at: fit(at, Lit(), grad_cam=True, target="output"),
    "def normgrad_loss, order 1": lambda at: fit(at, Losses(), **ORDER1),
    "def normgrad_loss, a probe": lambda at: fit(at, Losses(), probe="train"),
    "def normgrad_loss, compiled": lambda at: fit(at, Losses(torch.compile(network(), backend="eager"))),
    "def normgrad_loss, an iterator": lambda at: fit(at, with_own_loss(), per_image=False, **ORDER1),
    '`probe="train"`': lambda at: fit(at, Lit(), probe="train"),
    "`probe=batch`": lambda at: validated(at, (IMAGES, 0 * LABELS), BATCH),
    "`probe=False`": lambda at: fit(at, Lit(), probe=False),
    "`per_image=False`, parts": lambda at: fit(at, Lit(), UNCUTTABLE, per_image=False, **ORDER1),
    "`per_image=False`, a batch": lambda at: fit(at, Lit(step=normalised_over_the_batch), per_image=False, **ORDER1),
    "`per_image=False`, in a call": lambda at: order1_maps(network(), compared, BATCH, "conv", per_image=False),
    "`order0_maps`": lambda at: order0_maps(torch.compile(network(), backend="eager"), cross_entropy, BATCH, "conv"),
    "`.mean()`": lambda at: order0_maps(network(), lambda *both: no_scalar(*both).mean(), BATCH, "conv"),
    "`score_fn=`": lambda at: grad_cam_maps(network(), BATCH, score_fn=lambda *both: no_scalar(*both).mean()),
    "lambda model, batch": lambda at: order0_maps(
        network(), lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), BATCH
    ),
    "`signed=True`": lambda at: log_maps(at, {"a": -torch.ones(2, 2, 2)}, None, 0, signed=True),
    "`token_grid=(rows, columns)`": lambda at: read(Branch(lambda x: tokens(x)[:, :50]), token_grid=(5, 10)),
    "`channels_last=True`": lambda at: read(Branch(lambda x: x.movedim(1, -1)), channels_last=True),
    "a name for each class": lambda at: fit(at, Lit(), classes=["cat", "dog", "owl", "ape", "bee"]),
    "the layer that gives the magnitude": lambda at: fit(at, Lit(Spectral()), layers="net.size"),
    "an earlier layer": lambda at: fit(at, Lit(), layers="net.act"),
    "a NormGradCallback of the inner Trainer": lambda at: fit(
        at, Lit(step=lambda module, batch: (fit(at, Lit()), cross_entropy(module.net, batch))[1]), every_n_steps=2
    ),
    "`masks == number`": lambda at: fit(at, Lit(normgrad_masks=lambda batch: (255 * batch[0][:, 0]).round() == 3)),
    "`kinds=`": lambda _: NormGrad(network(), "conv", kinds=["order0", "grad_cam"]).maps_of("grad_cam"),
    "an example batch": lambda _: select_layers(network(), inputs=IMAGES),
    "`layer(x)`": lambda at: fit(at, Lit(step=called_one_by_one)),
    '`target="input"`': lambda at: fit(at, Lit(), layers="net.act", grad_cam=True, target="input"),
    "validation data": lambda at: validated(at, BATCH, "val"),
    "a step that takes a batch": lambda at: fit(at, Lit(), **ORDER1),
    "after the first step": lambda at: after_training(at).figure(),
    "another batch size": lambda _: read(Branch(SequenceFirst())),
    "`channels_last=None`": lambda _: read(Branch(tokens)),
    "one number for each axis": lambda _: read(Branch(tokens), token_grid=(8, 8)),
    "`token_grid=(rows, columns, tokens before)`": lambda _: read(
        Branch(lambda x: F.pad(tokens(x), (0, 0, 2, 3))), token_grid=(8, 8, 2)
    ),
    "the layer before the pooling": lambda _: read(Branch(lambda x: x.flatten(1)), "conv"),
}
"""What messages advise, taken: nothing is wrong any more."""


@pytest.mark.parametrize("remedy", REMEDIES)
def test_what_a_message_advises_works(remedy, tmp_path):
    assert warned(lambda: REMEDIES[remedy](tmp_path)) == []


def test_a_warning_that_is_made_an_error_does_not_end_training(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "NormGrad.*")
        fit(tmp_path, Lit(), layers="net.head")
    assert "'net.head'" in caplog.text


# ---------------------------------------------------------------- what the environment asks of a script


@pytest.mark.parametrize(
    ("module", "variable", "value", "words"),
    [
        (OwnSteps, "NORMGRAD_PROBE", "train", ("def normgrad_loss(self, batch)",)),
        (OwnSteps, "NORMGRAD_ORDER1_EVERY_N_STEPS", "1", ("def normgrad_loss(self, batch)",)),
    ],
)
def test_what_a_script_cannot_give_to_the_environment_is_one_warning(
    module, variable, value, words, tmp_path, monkeypatch
):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv(variable, value)
    texts = warned(lambda: trainer(tmp_path).fit(module(), loader()))
    assert len([text for text in texts if not missing((variable, *words), text)]) == 1, texts


@pytest.mark.parametrize(("variable", "value"), [("NORMGRAD_EVERY_N_STEPS", "0"), ("NORMGRAD_LAYER", "a")])
def test_an_error_about_a_variable_has_a_short_traceback(variable, value, tmp_path, monkeypatch):
    monkeypatch.setenv("NORMGRAD", "1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=variable) as caught:
        trainer(tmp_path)
    assert [entry.path.name for entry in caught.traceback if "normgrad_lightning" in str(entry.path)] == [
        "entry_point.py"
    ]
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_variable_is_advised_only_where_it_can_say_it():
    told = in_variables('Set `per_image=False`, or `probe=batch`, or `probe="train"`, or `probe=False`.')
    assert told == "Set `NORMGRAD_PER_IMAGE=0`, or `probe=batch`, or `NORMGRAD_PROBE=train`, or `NORMGRAD_PROBE=0`."


def test_flags_without_the_switch_are_one_warning(monkeypatch, tmp_path):
    monkeypatch.setenv("NORMGRAD_SCALE", "shared")
    (text,) = warned(lambda: trainer(tmp_path))
    assert not missing(("NORMGRAD_SCALE", "NORMGRAD=1"), text)


@pytest.mark.parametrize(
    ("variables", "flags", "words"),
    [
        ({"NORMGRAD": "0"}, {}, ("NORMGRAD=0",)),
        ({"NORMGRAD": "1", "NORMGRAD_SCALE": "shared"}, {"enabled": False}, ("NORMGRAD=1", "NORMGRAD_SCALE")),
        ({}, {"every_n_steps": 3}, ("net.conv", "every 3 steps", "`callback.maps`")),
        ({}, ORDER1, ("order1, adversarial, contrast",)),
        ({}, {"probe": BATCH}, ("probe",)),
    ],
)
def test_what_happens_is_announced_in_one_line(variables, flags, words, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    with caplog.at_level(logging.INFO):
        fit(tmp_path, Lit(), **flags)
    ours = [text for text in caplog.messages if "NormGrad" in text]
    assert len([text for text in ours if not missing(words, text)]) == 1, ours


# ---------------------------------------------------------------- what a recorder cannot read


class Then(nn.Module):
    """A layer that does whatever one likes."""

    def __init__(self, what: Callable[[torch.Tensor], Any]):
        super().__init__()
        self.what = what

    def forward(self, x: torch.Tensor) -> Any:
        return self.what(x)


class Branch(nn.Module):
    """Gives the features of a convolution, `(N, 4, 8, 8)`, and what the layer `odd` makes of them."""

    def __init__(self, odd: nn.Module | Callable[[torch.Tensor], Any]):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.odd = odd if isinstance(odd, nn.Module) else Then(odd)

    def forward(self, x: torch.Tensor) -> Any:
        features = self.conv(x)
        return features, self.odd(features)


def read(model: nn.Module, layers: Any = "odd", x: torch.Tensor = IMAGES, **options: Any) -> None:
    """Ask twice for the maps of a step."""
    with NormGrad(model, layers, **options) as recorder:
        outputs = model(x)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(t.sum() for t in tensors if t.requires_grad).backward()
        _ = recorder.maps, recorder.maps


def tokens(features: torch.Tensor) -> torch.Tensor:
    return features.flatten(2).transpose(1, 2)


class SequenceFirst(nn.Module):
    """Attention whose batch stands second; what it gives has it first again."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        x = tokens(features).transpose(0, 1)
        return self.attention(x, x, x)[0].transpose(0, 1)


def windows() -> nn.Module:
    return nn.Sequential(Then(lambda x: tokens(x).unflatten(1, (2, 32))), nn.LayerNorm(4))


TOKEN_GRID = "`token_grid=(rows, columns"
UNREADABLE: Runs = {
    "no spatial axis": (lambda: read(Branch(lambda x: x.flatten(1))), "'odd'", "(2, 256)", "pool"),
    "as many tokens as images": (
        lambda: read(Branch(SequenceFirst()), x=torch.randn(64, 3, 8, 8)),
        "'odd'",
        "`batch_first=False`",
        "(64, 64, 4)",
    ),
    "axes that the image has not": (
        lambda: read(Branch(tokens), token_grid=(4, 4, 4, 1)),
        "'odd'",
        "`token_grid=(4, 4, 4, 1)`",
    ),
    "another batch size": (lambda: read(Branch(lambda x: x[:1])), "'odd'", "(1, 4, 8, 8)", "batch"),
    "channels first": (lambda: read(Branch(tokens), channels_last=False), "'odd'", "`channels_last=False`"),
    "too many axes": (lambda: read(Branch(lambda x: x[:, :, None])), "'odd'", "(2, 4, 1, 8, 8)"),
    "fewer tokens": (lambda: read(Branch(tokens), token_grid=(9, 9)), "'odd'", "64", "`token_grid=(9, 9)`"),
    "more tokens": (lambda: read(Branch(tokens), token_grid=(7, 7)), "'odd'", "15", TOKEN_GRID),
    "no grid": (lambda: read(Branch(lambda x: tokens(x)[:, :50])), "'odd'", "50", TOKEN_GRID),
    "out of order": (lambda: read(Branch(lambda x: tokens(x)[:, torch.arange(63, -1, -1)])), "'odd'", "order"),
    "windows": (lambda: read(Branch(windows())), "'odd'", "windows", "`channels_last=True`"),
    "no tensor": (lambda: read(Branch(lambda x: x.argmax(1))), "'odd'", "tensor"),
    "complex": (
        lambda: read(Branch(nn.Sequential(Then(torch.fft.fft2), Then(torch.abs))), "odd.0"),
        "'odd.0'",
        "floating-point",
    ),
    "detached": (lambda: read(Branch(torch.Tensor.detach), ["conv", "odd"]), "'odd'", "detach"),
    "no image": (lambda: read(nn.Sequential(nn.Linear(4, 1)), "auto", torch.ones(2, 4)), "image", "(N, C, H, W)"),
    "no grid at all": (lambda: read(nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), "auto"), "grid", "flatten"),
}
"""Layers without maps, and what the one warning about each says."""


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_layer_that_cannot_be_read_is_one_warning(name):
    run, *words = UNREADABLE[name]
    (text,) = warned(run)
    assert not missing(words, text), text
