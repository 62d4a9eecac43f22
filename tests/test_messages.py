"""Every message a user can get from us, with its whole text; and that no message of the package is missing here.

`…` in a text stands for a folder of the run. Where a message is made of pieces, each of these is in a case.
"""

from __future__ import annotations

import ast
import logging
import re
import sys
import warnings
from argparse import ArgumentTypeError
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from PIL import Image
from pytorch_lightning.loggers import Logger, TensorBoardLogger
from pytorch_lightning.plugins.precision import Precision
from pytorch_lightning.strategies import SingleDeviceStrategy
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import normgrad_lightning
from normgrad_lightning import NormGrad, NormGradCallback, functional, log_maps, order0_maps, order1_maps, select_layers
from normgrad_lightning.batches import CannotSlice, single_images
from normgrad_lightning.command import _numbers, _size, main
from normgrad_lightning.explain import explain
from normgrad_lightning.hooks import floating_tensors
from normgrad_lightning.loading import arguments, build, find, load_images, load_trained
from normgrad_lightning.order1 import NotFinite
from normgrad_lightning.render import Sheet, input_tiles, scale_maps

# ---------------------------------------------------------------- what users train

A_MODULE = nn.ReLU()


def network() -> nn.Sequential:
    """A convolution and a classifier."""
    torch.manual_seed(0)
    layers = {"conv": nn.Conv2d(3, 4, 3, padding=1), "act": nn.Tanh(), "pool": nn.AdaptiveAvgPool2d(1)}
    return nn.Sequential(OrderedDict(layers, flat=nn.Flatten(), head=nn.Linear(4, 5)))


def images(n: int = 2) -> torch.Tensor:
    return torch.randn(n, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def labels(n: int = 2) -> torch.Tensor:
    return torch.arange(n) % 5


def cross_entropy(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


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


class Manual(Lit):
    """Does its own steps."""

    def __init__(self, *args: Any, **attributes: Any):
        super().__init__(*args, automatic_optimization=False, **attributes)


class TurnsManual(Lit):
    """Does its own steps, and says so when training starts."""

    def on_train_start(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))


class Takes(Lit):
    def training_step(self, dataloader_iter: Any) -> Any:
        return None


class OwnLogger(Logger):
    """As small as Lightning allows."""

    name = "mine"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None: ...

    def log_hyperparams(self, params: Any) -> None: ...


class FSDPStrategy(SingleDeviceStrategy):
    """Goes by the name of the one that needs several GPUs."""


def loader(batch: Any = None) -> DataLoader:
    """The same batch three times."""
    return DataLoader([batch or (images(), labels())] * 3, batch_size=None)


@dataclass
class Here:
    """Where a case plays: a folder, and a way to break things until it is over."""

    folder: Path
    patch: pytest.MonkeyPatch

    def train(self, module: Any = None, batch: Any = None, trainer: dict[str, Any] | None = None, **flags: Any) -> None:
        """Train on the same batch three times, with an event each time."""
        callback = NormGradCallback(**{"every_n_steps": 1, "layers": "net.conv", **flags})
        module = Lit() if module is None else module
        self.trainer(**{"callbacks": [callback], **(trainer or {})}).fit(module, loader(batch))

    def trainer(self, **options: Any) -> pl.Trainer:
        """A Trainer that says nothing of its own."""
        settings = {"max_epochs": 1, "accelerator": "cpu", "devices": 1, "default_root_dir": self.folder}
        without = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        return pl.Trainer(**{**settings, **dict.fromkeys(without, False), **options})

    def asked(self, NORMGRAD: str = "1", **variables: str) -> Here:
        """Let the environment say this."""
        for name, text in {"NORMGRAD": NORMGRAD, **variables}.items():
            self.patch.setenv(name, text)
        return self

    def written(self, name: str, contents: bytes) -> Path:
        """A file, and the current folder is that of it."""
        self.patch.chdir(self.folder)
        (self.folder / name).write_bytes(contents)
        return self.folder / name

    def saved(self, contents: Any) -> Path:
        """A checkpoint."""
        torch.save(contents, self.written("a.ckpt", b""))
        return self.folder / "a.ckpt"

    def drawn(self, name: str, size: tuple[int, int], mode: str = "RGB") -> Path:
        """A picture of this height and width."""
        Image.new(mode, size[::-1]).save(self.written(name, b""))
        return self.folder / name

    def broken(self, place: str) -> Here:
        """Let this function of ours fail."""

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("we are broken")

        self.patch.setattr(f"normgrad_lightning.{place}", fail)
        return self

    def before_torch_2_6(self) -> Here:
        self.patch.setattr("normgrad_lightning.watch.CAN_RUN_EAGERLY", False)
        self.patch.setattr("normgrad_lightning.isolation.CAN_RUN_EAGERLY", False)
        self.patch.setattr("normgrad_lightning.callback.CAN_RUN_EAGERLY", False)
        return self

    def with_little_room(self) -> Here:
        disk = SimpleNamespace(total=2**30, free=10 * 2**20)
        self.patch.setattr("normgrad_lightning.loggers.shutil.disk_usage", lambda _: disk)
        return self

    def with_small_files(self) -> Here:
        self.patch.setattr("normgrad_lightning.loggers._largest_file", lambda: 100)
        return self


def compiled(module: Any) -> Any:
    return torch.compile(module, backend="eager")


def with_compiled_net(module: Any) -> Any:
    module.net = compiled(module.net)
    return module


def in_a_pass_of_ours(module: Lit) -> bool:
    return type(module._trainer).__name__ == "_QuietTrainer"


def only_when_training(value: Any) -> Callable[..., Any]:
    """A step that gives its loss to training, and `value(loss)` to passes of ours."""

    def step(module: Lit, batch: Any) -> Any:
        loss = cross_entropy(module.net, batch)
        return value(loss) if in_a_pass_of_ours(module) else loss

    return step


# ---------------------------------------------------------------- what users read without Lightning


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


def read(model: nn.Module, layers: Any = "odd", x: torch.Tensor | None = None, **options: Any) -> None:
    """Ask twice for the maps of a step."""
    with NormGrad(model, layers, **options) as recorder:
        outputs = floating_tensors(model(images() if x is None else x))
        sum(t.sum() for t in outputs if t.requires_grad).backward()
        _ = recorder.maps, recorder.maps


def tokens(features: torch.Tensor) -> torch.Tensor:
    return features.flatten(2).transpose(1, 2)


def order0(loss: Any = cross_entropy, layers: Any = "conv", model: nn.Module | None = None) -> None:
    order0_maps(model or network(), loss, (images(), labels()), layers)


def order1(loss: Any = cross_entropy, batch: Any = None, model: nn.Module | None = None, **options: Any) -> None:
    order1_maps(model or network(), loss, batch or (images(), labels()), **{"layers": "conv", **options})


class Overridden(nn.Conv2d):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


class Unused(Branch):
    """Calls `odd` for nothing, and `spare` not at all."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(4, 4, 1))
        self.spare = nn.Conv2d(4, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features, _ = super().forward(x)
        return features


class NoHooks(nn.Conv2d):
    def register_forward_hook(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no hooks here")


def closed_network() -> nn.Module:
    model = network()
    model.conv = NoHooks(3, 4, 3)
    return model


def encoder(batch_first: bool = True) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 1, 8, batch_first=batch_first)


class OwnParameter(nn.Module):
    """Gives its places for features."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.ones(2, 4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.places


def padded_by_a_hook() -> nn.Module:
    model = network()
    model.conv.register_forward_hook(lambda _, args, output: F.pad(output, (1, 1)))
    return model


def frozen_below_the_head() -> nn.Module:
    model = network()
    model.conv.requires_grad_(False)
    return model


class NoGradient(torch.autograd.Function):
    """Changes nothing, and has a gradient that is not a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return g * torch.nan


def in_call(number: int, other: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose n-th call does something else."""
    calls: list[int] = []

    def loss(model: nn.Module, batch: Any) -> Any:
        calls.append(1)
        return (other if len(calls) == number else cross_entropy)(model, batch)

    return loss


def without_gradient(model: nn.Module, batch: Any) -> torch.Tensor:
    return NoGradient.apply(cross_entropy(model, batch))


def cropped(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model, (batch[0][..., 1:], batch[1]))


class FailsLater:
    """A scaler that breaks between the beginning of a step and its backward."""

    calls = 0

    def get_scale(self) -> float:
        self.calls += 1
        if self.calls % 2 == 0:
            raise RuntimeError("no scale")
        return 1.0


def with_scaler() -> Precision:
    plugin = Precision()
    plugin.scaler = FailsLater()
    return plugin


def talking(module: Lit, batch: Any) -> torch.Tensor:
    loss = cross_entropy(module.net, batch)
    torch.distributed.all_reduce(loss.detach().clone())
    return loss


def train_beside_others(here: Here) -> None:
    strategy = SingleDeviceStrategy("cpu")
    strategy.world_size = 2
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        here.train(Lit(step=talking), trainer={"strategy": strategy}, per_image=False, **ORDER1)
    finally:
        torch.distributed.destroy_process_group()


def arguments_of(*sizes: int) -> list[str]:
    names = ("in1_features", "in2_features", "out_features")
    return [f"--arg={name}={size}" for name, size in zip(names, sizes, strict=True)]


def unloadable(here: Here) -> None:
    here.patch.setitem(sys.modules, "normgrad_lightning.ambient", None)
    here.asked().trainer()


def explain_with_labels(here: Here, *labels: str) -> None:
    files = [str(here.saved({})), str(here.drawn("a.png", (4, 4)))]
    main(["explain", *files, "--module", "torch.nn:ReLU", "--label", *labels, "--traceback"])


def train_with_warnings_as_errors(here: Here) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "NormGrad.*")
        here.train(layers="net.head")


def unseen_if_single(module: Any, batch: Any) -> torch.Tensor:
    """A loss that goes around the layers for a batch of one."""
    if len(batch[0]) > 1:
        return cross_entropy(module.net, batch)
    return module.net.head.forward(batch[0][:, 0, 0, :4]).sum()


def train_unseen(here: Here, **flags: Any) -> None:
    """Train with a network that is not called."""
    here.patch.setattr("normgrad_lightning.callback.has_compiled_anything", lambda: False)  # though tests before have
    here.train(Lit(step=lambda module, batch: module.net.head.forward(batch[0][:, 0, 0, :4]).sum()), **flags)


X, G = torch.ones(2, 4, 5, 7), torch.ones(2, 3, 5, 7)
ORDER1 = {"order1_every_n_steps": 1, "num_images": 1}

# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Case:
    """A way to a message.

    Attributes:
        provoke: does what a user would do.
        kind: an error's type, a warning's category, or a level of `logging`.
        text: all of it.
    """

    provoke: Callable[[Here], object]
    kind: type[Exception] | int
    text: str


def error(provoke: Callable[[Here], object], text: str, kind: type[Exception] = ValueError) -> Case:
    return Case(provoke, kind, text)


def warning(provoke: Callable[[Here], object], text: str) -> Case:
    return Case(provoke, UserWarning, text)


def info(provoke: Callable[[Here], object], text: str) -> Case:
    return Case(provoke, logging.INFO, text)


def cannot_cut(why: str) -> str:
    return (
        "`batch`: expected tensors, tuples, dicts, dataclasses and lists of these with one part for each image, "
        f"but {why}. Set `per_image=False`, which takes the batch as it is."
    )


def write_a_loss(who: str, name: str = "Manual") -> str:
    return f"""{who} need the loss of a batch, and with manual optimisation `training_step` gives none. \
Add a method to {name} that computes it and does nothing else:

    def normgrad_loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self(images), labels)
"""


CASES: dict[str, Case] = {
    # The package
    "a name that is not there": error(
        lambda _: normgrad_lightning.Nothing, "module 'normgrad_lightning' has no attribute 'Nothing'", AttributeError
    ),
    # Flags
    "flag: layers": error(
        lambda _: NormGradCallback(layers=5),
        '`layers`: expected "auto", a layer\'s name, a glob or a list of these, but got 5. The names are those of '
        "`model.named_modules()`.",
    ),
    "flag: one of": error(
        lambda _: NormGradCallback(images="last"),
        "`images`: expected one of 'first', 'random', 'hardest', but got 'last'.",
    ),
    "flag: some of": error(
        lambda _: NormGradCallback(order1_maps=["order1", "order2"]),
        "`order1_maps`: expected some of 'order1', 'adversarial', 'contrast', but got 'order2'.",
    ),
    "flag: a list": error(
        lambda _: NormGradCallback(order1_maps=1),
        "`order1_maps`: expected a list of 'order1', 'adversarial', 'contrast', each once, but got 1.",
    ),
    "flag: every_n_steps": error(
        lambda _: NormGradCallback(every_n_steps=0),
        "`every_n_steps`: expected a whole number of at least 1, but got 0. To switch the callback off, set "
        "`enabled=False`.",
    ),
    "flag: order1_every_n_steps": error(
        lambda _: NormGradCallback(order1_every_n_steps=0),
        "`order1_every_n_steps`: expected a whole number of at least 1, but got 0. None switches order-1 maps off.",
    ),
    "flag: num_images": error(
        lambda _: NormGradCallback(num_images=True),
        "`num_images`: expected a whole number of at least 1, but got True.",
    ),
    "flag: num_images of a recorder": error(
        lambda _: NormGrad(network(), num_images=0),
        "`num_images`: expected a whole number of at least 1, but got 0. None takes all.",
    ),
    "flag: epsilon": error(lambda _: NormGradCallback(epsilon=0), "`epsilon`: expected a number above 0, but got 0."),
    "flag: on or off": error(
        lambda _: NormGradCallback(enabled="false"), "`enabled`: expected True or False, but got 'false'."
    ),
    "flag: on, off or None": error(
        lambda _: NormGradCallback(channels_last="no"), "`channels_last`: expected True, False or None, but got 'no'."
    ),
    "flag: mean": error(
        lambda _: NormGradCallback(mean="imagenet"),
        "`mean`: expected None, a number, or a list with one for each channel, but got 'imagenet'.",
    ),
    "flag: std": error(
        lambda _: NormGradCallback(std=[0.2, 0.0, 0.2]), "`std`: expected positive numbers, but got [0.2, 0.0, 0.2]."
    ),
    "flag: mean and std": error(
        lambda _: NormGradCallback(mean=[0.5, 0.5], std=[0.2, 0.2, 0.2]),
        "`std`: expected as many numbers as `mean` has, 2, but got 3.",
    ),
    "flag: opacity": error(
        lambda _: NormGradCallback(opacity=1.5),
        "`opacity`: expected a number from 0 (image only) to 1 (map only), but got 1.5.",
    ),
    "flag: token_grid": error(
        lambda _: NormGradCallback(token_grid=(0, 3)),
        "`token_grid`: expected None or the sizes (rows, columns), but got (0, 3).",
    ),
    "flag: colormap, nearly": error(
        lambda _: NormGradCallback(colormap="infrno"),
        "`colormap`: expected the name of a colour map in the cmap package, but got 'infrno'. Did you mean 'inferno'?",
    ),
    "flag: colormap, not at all": error(
        lambda _: NormGradCallback(colormap="12345678"),
        "`colormap`: expected the name of a colour map in the cmap package, but got '12345678'. Try 'inferno' or "
        "'viridis'.",
    ),
    "flag: colormap, no name": error(
        lambda _: NormGradCallback(colormap=["inferno"]),
        "`colormap`: expected the name of a colour map in the cmap package, but got ['inferno'].",
    ),
    # Layers
    "layers: nearest names": error(
        lambda _: select_layers(network(), "covn"),
        "`layers`: expected names or globs of the model's layers, but 'covn' matches none. Nearest names: conv.",
    ),
    "layers: several in one": error(
        lambda _: select_layers(network(), "conv,act"),
        "`layers`: expected names or globs of the model's layers, but 'conv,act' matches none. Several names are a "
        "list: ['a', 'b']; [a,b] on a command line.",
    ),
    "layers: first names": error(
        lambda _: select_layers(network(), "42"),
        "`layers`: expected names or globs of the model's layers, but '42' matches none. The first names are "
        "conv, act, pool, flat, head.",
    ),
    "layers: none inside": error(
        lambda _: select_layers(nn.Conv2d(3, 4, 3), "42"),
        "`layers`: expected names or globs of the model's layers, but '42' matches none. The model has no layers "
        "inside.",
    ),
    "layers: auto without inputs": error(
        lambda _: select_layers(network()),
        '`inputs`: "auto" decides from what the network does with real inputs, but got None. Pass an example '
        "batch, or name the layers.",
    ),
    "layers: no weight": error(
        lambda _: NormGrad(network(), "act", target="weight"),
        "`layers`: `target=\"weight\"` cannot read 'act': Tanh is no convolution and no linear layer. Use "
        '`target="output"`.',
    ),
    "layers: a weight used in another way": error(
        lambda _: NormGrad(nn.Sequential(Overridden(3, 4, 3)), "0", target="weight"),
        "`layers`: `target=\"weight\"` cannot read '0': Overridden overrides `Conv2d.forward`, so the patches it "
        'reads are not known. Use `target="output"`.',
    ),
    "layers: no model": error(
        lambda _: NormGrad("resnet18"),
        "`model`: expected a torch.nn.Module, but got 'str'.",
    ),
    "layers: compiled": error(
        lambda _: NormGrad(compiled(network())),
        "`model`: expected a module that is not compiled, for nothing can be read inside of compiled code. "
        "`order0_maps` runs it eagerly, in a pass of its own.",
    ),
    # What a recorder cannot read
    "read: no spatial axis": warning(
        lambda _: read(Branch(lambda x: x.flatten(1))),
        "NormGrad cannot read the layer 'odd': its shape (2, 256) has no spatial axis. Choose a layer before the "
        "pooling or flattening.",
    ),
    "read: another batch size": warning(
        lambda _: read(Branch(lambda x: x[:1])),
        "NormGrad cannot read the layer 'odd': its shape (1, 4, 8, 8) does not begin with the batch size 2, so "
        "its values belong to no one image. Choose another layer.",
    ),
    "read: tokens with channels first": warning(
        lambda _: read(Branch(tokens), channels_last=False),
        "NormGrad cannot read the layer 'odd': its shape (2, 64, 4) cannot have `channels_last=False` for images "
        "with 2 axes. Leave it at None, or choose other layers.",
    ),
    "read: axes of token_grid": warning(
        lambda _: read(Branch(tokens), token_grid=(4, 4, 4)),
        "NormGrad cannot read the layer 'odd': `token_grid=(4, 4, 4)` does not fit images with 2 axes. Give one "
        "number for each axis.",
    ),
    "read: too many axes": warning(
        lambda _: read(Branch(lambda x: x[:, :, None])),
        "NormGrad cannot read the layer 'odd': its shape (2, 4, 1, 8, 8) is neither features on 2 spatial axes "
        "nor tokens. Choose another layer.",
    ),
    "read: fewer tokens": warning(
        lambda _: read(Branch(tokens), token_grid=(9, 9)),
        "NormGrad cannot read the layer 'odd': it has 64 tokens, fewer than `token_grid=(9, 9)` needs.",
    ),
    "read: no grid": warning(
        lambda _: read(Branch(lambda x: tokens(x)[:, :50])),
        "NormGrad cannot read the layer 'odd': its 50 tokens fit no grid of square patches that cover the image "
        "(it has 8 × 8 pixels). Set `token_grid=(rows, columns)`.",
    ),
    "read: no grid and no image": warning(
        lambda _: read(nn.Sequential(nn.Linear(4, 4)), "0", torch.ones(2, 10, 4)),
        "NormGrad cannot read the layer '0': its 10 tokens fit no grid of square patches that cover the image "
        "(no image was seen). Set `token_grid=(rows, columns)`.",
    ),
    "read: windows": warning(
        lambda _: read(Branch(nn.Sequential(Then(lambda x: tokens(x).unflatten(1, (2, 32))), nn.LayerNorm(4)))),
        "NormGrad cannot read the layer 'odd': its shape (2, 2, 32, 4) has channels last, but the proportions of "
        "(2, 32) are not those of the image (8, 8): these may be windows. If they are a grid, set "
        "`channels_last=True`.",
    ),
    "read: tokens or images": warning(
        lambda _: read(Branch(nn.Sequential(Then(lambda x: tokens(x)[:, :2]), encoder(batch_first=False)))),
        "NormGrad cannot read the layer 'odd': its shape (2, 2, 4) does not tell tokens from images, as the "
        "model has parts with `batch_first=False`. Use another batch size.",
    ),
    "read: no tensor": warning(
        lambda _: read(Branch(lambda x: x.argmax(1))),
        "NormGrad cannot read the layer 'odd': it gives no floating-point tensor.",
    ),
    "read: a parameter": warning(
        lambda _: read(Branch(OwnParameter())),
        "NormGrad cannot read the layer 'odd': it gives a parameter, not features of the images.",
    ),
    "read: frozen": warning(
        lambda _: read(frozen_below_the_head(), "conv"),
        "NormGrad cannot read the layer 'conv': it gets no gradient, for it and all before it are frozen, or what it "
        "gives is detached.",
    ),
    "read: detached": warning(
        lambda _: read(Branch(torch.Tensor.detach), ["conv", "odd"]),
        "NormGrad cannot read the layer 'odd': it gets no gradient, for it and all before it are frozen, or what it "
        "gives is detached.",
    ),
    "read: another geometry": warning(
        lambda _: read(padded_by_a_hook(), "conv", target="weight"),
        "NormGrad cannot read the layer 'conv': its output (2, 4, 8, 10) does not have the size that its own "
        "geometry gives.",
    ),
    "read: not called": warning(
        lambda _: read(Unused(), ["conv", "spare"]),
        "NormGrad cannot read the layer 'spare': the forward pass does not call it.",
    ),
    "read: without effect": warning(
        lambda _: read(Unused(), ["conv", "odd"]),
        "NormGrad cannot read the layer 'odd': the loss does not depend on it.",
    ),
    "read: our failure in a hook": warning(
        lambda here: here.broken("products.channel_norm") and read(network(), "conv"),
        "NormGrad cannot read the layer 'conv': RuntimeError: we are broken.",
    ),
    "read: our failure at watching": warning(
        lambda here: here.broken("scout.patch_grid") and read(network(), "conv"),
        "NormGrad failed at watching the model: RuntimeError: we are broken.",
    ),
    "read: no image": warning(
        lambda _: read(nn.Sequential(nn.Linear(4, 1)), "auto", torch.ones(2, 4)),
        "NormGrad found no layer to read: no module was given an image, a floating-point tensor (N, C, H, W). It "
        "needs a model that is trained on images, signals or volumes.",
    ),
    "read: all frozen": warning(
        lambda _: read(frozen_below_the_head(), "auto"),
        "NormGrad found no layer to read: no layer that gives features on a grid gets a gradient. Check that the "
        "model is not frozen as a whole and that the loss depends on it.",
    ),
    "read: all compiled": warning(
        lambda _: read(nn.Sequential(compiled(network())), "auto"),
        "NormGrad found no layer to read: no layer that gives features on a grid gets a gradient. Parts of the "
        "model are compiled, and those are read at their border only.",
    ),
    # Passes of our own
    "order 0: no scalar": error(
        lambda _: order0(lambda model, batch: model(batch[0])),
        "`loss_fn`: expected a scalar tensor, but got a tensor of shape (2, 5). Reduce it, for example with `.mean()`.",
    ),
    "order 0: no tensor": error(
        lambda _: order0(lambda model, batch: 3.0),
        "`loss_fn`: expected a scalar tensor, but got 'float'. Return the loss as a tensor.",
    ),
    "order 0: no dependence": error(
        lambda _: order0(lambda model, batch: torch.ones(())),
        "`loss_fn`: expected a loss that depends on the chosen layers, but it does not. Check that it is "
        "computed by the model, without `.detach()` and outside of `torch.no_grad()`.",
    ),
    "order 0: no layer for auto": error(
        lambda _: order0(layers="auto", model=nn.Sequential(nn.Flatten(), nn.Linear(192, 5))),
        '`layers`: "auto" found no layer that gives features on a grid. Name the layers.',
    ),
    "order 1: no dependence": error(
        lambda _: order1(torch.no_grad()(cross_entropy)),
        "`loss_fn`: expected a loss that depends on the model's parameters, but it does not. Check that it is "
        "computed by the model, without `.detach()` and outside of `torch.no_grad()`.",
    ),
    "order 1: layers without effect": error(
        lambda _: order1(lambda model, batch: model.head.weight.sum()),
        "`layers`: the loss depends on none of them. Choose layers that the forward pass uses.",
    ),
    "order 1: loss not finite": error(
        lambda _: order1(lambda model, batch: torch.nan * cross_entropy(model, batch)),
        "`loss_fn`: expected a finite loss, but got nan.",
        NotFinite,
    ),
    "order 1: gradient of weights not finite": error(
        lambda _: order1(in_call(2, without_gradient)),
        "`loss_fn`: expected a finite gradient of the weights, but it is not.",
        NotFinite,
    ),
    "order 1: gradient at layers not finite": error(
        lambda _: order1(in_call(3, without_gradient)),
        "`loss_fn`: expected finite gradients at the layers, but they are not.",
        NotFinite,
    ),
    "order 1: not the same in every pass": error(
        lambda _: order1(in_call(3, cropped)),
        "`layers`: expected 'conv' to do the same in every pass, but a small step of the weights changes how "
        "often it is called or the size of what it gives. Choose other layers, or set `second_order=False`.",
    ),
    "order 1: a layer that cannot be read": warning(
        lambda _: order1(layers=["conv", "head"]),
        "NormGrad cannot read the layer 'head': its shape (1, 5) has no spatial axis. Choose a layer before the "
        "pooling or flattening.",
    ),
    # Batches that cannot be cut
    "batch: no axis": error(
        lambda _: order1(batch={"name": "text"}), cannot_cut("there is no tensor with a batch axis"), CannotSlice
    ),
    "batch: two sizes": error(
        lambda _: order1(batch=({"signal": torch.ones(3, 8)},)), cannot_cut("its size may be 1 or 3"), CannotSlice
    ),
    "batch: one thing each, or several": error(
        lambda _: order1(batch=[torch.ones(2, 8, 8), torch.ones(2, 8, 8)]),
        cannot_cut("it may be one thing for each image, or several of all images"),
        CannotSlice,
    ),
    "batch: a part that is one thing each, or several": error(
        lambda _: order1(batch=(images(), [torch.ones(2, 8), torch.ones(2, 8)])),
        cannot_cut("`1` may be one thing for each image, or 2 of all images"),
        CannotSlice,
    ),
    "batch: packed": error(
        lambda _: order1(batch=pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])),
        cannot_cut("it is a packed sequence"),
        CannotSlice,
    ),
    "batch: unknown": error(lambda _: order1(batch=(images(), {1, 2})), cannot_cut("`1` is a 'set'"), CannotSlice),
    "batch: sparse": error(
        lambda _: order1(batch=(images(), torch.ones(2, 3).to_sparse())),
        cannot_cut("`1` is no dense tensor"),
        CannotSlice,
    ),
    "batch: another size": error(
        lambda _: order1(batch=(images(), torch.ones(9, 6))),
        cannot_cut("`1` has shape (9, 6), which does not begin with 2"),
        CannotSlice,
    ),
    "batch: other targets": error(
        lambda _: order1(batch=(images(), [{"box": 1}] * 3)), cannot_cut("`1` has 3 parts, not 2"), CannotSlice
    ),
    "batch: places": error(
        lambda _: single_images(images(), [5]),
        "`chosen`: expected places in a batch of 2 images, but got [5].",
        IndexError,
    ),
    # The maths
    "maths: no grid": error(
        lambda _: functional.normgrad(X[0, 0], G),
        "`x`: expected a floating-point tensor with a batch, a channel and at least one spatial axis, but got "
        "torch.float32 of shape (5, 7).",
    ),
    "maths: axes": error(
        lambda _: functional.normgrad(X, G[..., 0]),
        "`g`: expected as many axes as `x`, (2, 4, 5, 7), but got (2, 3, 5).",
    ),
    "maths: grids": error(
        lambda _: functional.normgrad(X, G[..., 1:]),
        "`g`: expected the batch and grid of `x`, (2, 5, 7) of (2, 4, 5, 7), but got (2, 5, 6) of (2, 3, 5, 6). "
        "Pass the activation and the gradient of one point.",
    ),
    "maths: grad_cam": error(
        lambda _: functional.grad_cam(X, G),
        "`g`: expected the shape of `x`, (2, 4, 5, 7), but got (2, 3, 5, 7). Pass the gradient at `x`.",
    ),
    "maths: contrast": error(
        lambda _: functional.contrast(X[:, 0], G[:1, 0]),
        "`adversarial`: expected the shape of `order1`, (2, 5, 7), but got (1, 5, 7).",
    ),
    "maths: passes": error(
        lambda _: functional.normgrad_order1(X, G, X, X, X, G, epsilon=1.0, h=1.0),
        "`g_plus`: expected the shape of `g`, (2, 3, 5, 7), but got (2, 4, 5, 7). Pass the same point in all passes.",
    ),
    "maths: h": error(
        lambda _: functional.normgrad_order1(X, G, X, G, X, G, epsilon=1.0, h=0.0),
        "`h`: expected a number above 0, or infinity for no Hessian term, but got 0.0.",
    ),
    "maths: output of a convolution": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=3),
        "`g`: expected a batch and grid of (2, 3, 5) for an input of (2, 4, 5, 7) and this geometry, but got (2, "
        "3, 5, 7). Pass the gradient at the convolution's output.",
    ),
    "maths: output of a transposed one": error(
        lambda _: functional.normgrad_conv_transpose(X, G, kernel_size=3),
        "`g`: expected a batch of 2 and a grid from (7, 9) to (7, 9) for an input of (2, 4, 5, 7) and this "
        "geometry, but got (2, 3, 5, 7). Pass the gradient at the transposed convolution's output.",
    ),
    "maths: groups": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, groups=2),
        "`groups`: expected a divisor of the 3 channels of `g`, but got 2.",
    ),
    "maths: padding_mode": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, padding_mode="same"),
        "`padding_mode`: expected one of 'zeros', 'reflect', 'replicate', 'circular', but got 'same'.",
    ),
    "maths: padding": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, padding="full"),
        "`padding`: expected a number, one for each axis, 'same' or 'valid', but got 'full'.",
    ),
    "maths: per axis": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, stride=0),
        "`stride`: expected a number of at least 1, or 2 of them, but got 0.",
    ),
    "maths: window": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=9),
        "`kernel_size`: expected a window that fits the grid (5, 7), but got (9, 9) with dilation (1, 1) and "
        "padding [(0, 0), (0, 0)].",
    ),
    # Pictures
    "picture: scale": error(
        lambda _: scale_maps(X[:, 0].numpy(), "global"),
        "`scale`: expected one of 'image', 'shared', but got 'global'.",
    ),
    "picture: maps": error(
        lambda _: Sheet(input_tiles(images().numpy())).panel(X[:1, 0].numpy()),
        "`maps`: expected 2, one for each image, but got 1.",
    ),
    # Before training
    "setup: normgrad_loss": error(
        lambda here: here.train(Lit(normgrad_loss=3), **ORDER1),
        "`normgrad_loss`: expected a method `normgrad_loss(self, batch)` of Lit, but got 3.",
    ),
    "setup: manual optimisation": error(
        lambda here: here.train(Manual(), **ORDER1),
        write_a_loss("`order1_every_n_steps`: order-1 maps"),
    ),
    "setup: manual optimisation, compiled": error(
        lambda here: here.train(Manual(compiled(network()))),
        write_a_loss("`layers`: maps of layers inside of compiled code"),
    ),
    "setup: dataloader_iter": error(
        lambda here: here.train(Takes(), **ORDER1),
        "`order1_every_n_steps`: order-1 maps need a batch, but `training_step` of Takes takes its own from a "
        "`dataloader_iter`. Let it take a batch, or do without these maps.",
    ),
    "setup: sharded": error(
        lambda here: here.train(trainer={"strategy": FSDPStrategy("cpu")}, **ORDER1),
        "`order1_every_n_steps`: order-1 maps need all weights in one process, but FSDPStrategy spreads them "
        "over several. Do without these maps: order-0 maps of layers that are not compiled need no pass of their "
        "own.",
    ),
    "setup: a layer": error(
        lambda here: here.train(layers="net.stage4"),
        "`layers`: expected names or globs of the model's layers, but 'net.stage4' matches none. Nearest names: "
        "net.act, net.head, net.flat, net, net.pool.",
    ),
    "setup: all compiled": warning(
        lambda here: here.before_torch_2_6().train(compiled(Lit()), layers="auto"),
        "NormGrad shows nothing, for the whole module is compiled. Before torch 2.6, nothing can be read inside of "
        "compiled code.",
    ),
    "setup: all compiled, manual optimisation": warning(
        lambda here: here.train(compiled(Manual()), layers="auto"),
        "NormGrad shows nothing, for the whole module is compiled. "
        + write_a_loss("`layers`: maps of layers inside of compiled code"),
    ),
    "setup: the network compiled, manual optimisation": warning(
        lambda here: here.train(with_compiled_net(Manual()), layers="auto"),
        "NormGrad found no layer to read: no layer that gives features on a grid gets a gradient. Parts of the model "
        "are compiled, and those are read at their border only. "
        + write_a_loss("`layers`: maps of layers inside of compiled code"),
    ),
    "setup: a logger without images": warning(
        lambda here: here.train(trainer={"logger": OwnLogger()}),
        "NormGrad writes its panels to …/normgrad, for it cannot give images to OwnLogger.",
    ),
    "log_maps: no logger": error(
        lambda _: log_maps(None, {}, None, 0),
        "`logger`: expected a logger of Lightning or Fabric that takes images, a `SummaryWriter` or the name of a "
        "folder, but got 'NoneType'.",
    ),
    "log_maps: no maps": error(
        lambda here: log_maps(here.folder, [torch.ones(1, 2, 2)], None, 0),
        "`maps`: expected a tensor for each layer's name, but got 'list'.",
    ),
    "log_maps: no images": error(
        lambda here: log_maps(here.folder, {"a": torch.ones(1, 2, 2)}, [1], 0),
        "`images`: expected a tensor or None, but got 'list'.",
    ),
    "log_maps: contrast": error(
        lambda here: log_maps(here.folder, {"a": -torch.ones(1, 2, 2)}, None, 0),
        "`maps`: expected values from 0 up, but some are negative. For contrast, set `signed=True`.",
    ),
    "setup: loggers that cannot be looked at": warning(
        lambda here: here.broken("callback.panel_writers").train(),
        "NormGrad failed at looking at the loggers, and training goes on: RuntimeError: we are broken",
    ),
    # The environment
    "environment: neither on nor off": error(
        lambda here: here.asked("maybe").train(),
        "`NORMGRAD`: expected 1 or 0 in the environment, but got 'maybe'.",
    ),
    "environment: off": info(
        lambda here: here.asked("0").train(), "NORMGRAD=0 in the environment switches NormGradCallback off."
    ),
    "environment: on, beside a callback of the script": info(
        lambda here: here.asked(NORMGRAD_SCALE="shared").train(enabled=False),
        "NORMGRAD=1 adds no NormGradCallback, for this script has its own. NORMGRAD_SCALE is ignored.",
    ),
    "environment: flags without the switch": warning(
        lambda here: here.asked("", NORMGRAD_SCALE="shared").trainer(),
        "NORMGRAD_SCALE: set to no effect, for NORMGRAD is not. NORMGRAD=1 shows maps.",
    ),
    "environment: something of ours is broken": warning(
        unloadable,
        "NormGrad cannot be loaded, and training goes on without: ModuleNotFoundError: import of "
        "normgrad_lightning.ambient halted; None in sys.modules",
    ),
    "environment: no such flag": error(
        lambda here: here.asked(NORMGRAD_LAYER="a").trainer(),
        "`NORMGRAD_LAYER`: there is no such flag. Did you mean NORMGRAD_LAYERS?",
    ),
    "environment: nothing like a flag": error(
        lambda here: here.asked(NORMGRAD_XYZZY="a").trainer(),
        "`NORMGRAD_XYZZY`: there is no such flag. Did you mean one of NORMGRAD_CHANNELS_LAST, NORMGRAD_COLORMAP, "
        "NORMGRAD_ENABLED, NORMGRAD_EPSILON, NORMGRAD_EVERY_N_STEPS, NORMGRAD_FACTORISED, NORMGRAD_IMAGES, "
        "NORMGRAD_LAYERS, NORMGRAD_MEAN, NORMGRAD_NUM_IMAGES, NORMGRAD_ON_ERROR, NORMGRAD_OPACITY, "
        "NORMGRAD_ORDER1_EVERY_N_STEPS, NORMGRAD_ORDER1_MAPS, NORMGRAD_PER_IMAGE, NORMGRAD_SCALE, "
        "NORMGRAD_SECOND_ORDER, NORMGRAD_STD, NORMGRAD_TARGET, NORMGRAD_TILE_SIZE, NORMGRAD_TOKEN_GRID?",
    ),
    "environment: no whole number": error(
        lambda here: here.asked(NORMGRAD_EVERY_N_STEPS="1.5").trainer(),
        "`NORMGRAD_EVERY_N_STEPS`: expected a whole number, but got '1.5'.",
    ),
    "environment: too small": error(
        lambda here: here.asked(NORMGRAD_EVERY_N_STEPS="0").trainer(),
        "`NORMGRAD_EVERY_N_STEPS`: expected a whole number of at least 1, but got 0. To switch the callback off, set "
        "`NORMGRAD=0`.",
    ),
    "environment: neither yes nor no": error(
        lambda here: here.asked(NORMGRAD_PER_IMAGE="jein").trainer(),
        "`NORMGRAD_PER_IMAGE`: expected 1 or 0, but got 'jein'.",
    ),
    "environment: no number": error(
        lambda here: here.asked(NORMGRAD_MEAN="0.5,grey").trainer(),
        "`NORMGRAD_MEAN`: expected a number (several: separated by commas) or none, but got '0.5,grey'.",
    ),
    "environment: none of the choices": error(
        lambda here: here.asked(NORMGRAD_TARGET="inputs").trainer(),
        "`NORMGRAD_TARGET`: expected 'output', 'input', 'weight', but got 'inputs'.",
    ),
    "environment: one of the choices twice": error(
        lambda here: here.asked(NORMGRAD_ORDER1_MAPS="contrast,contrast").trainer(),
        "`NORMGRAD_ORDER1_MAPS`: expected a list of 'order1', 'adversarial', 'contrast', each once, but got "
        "['contrast', 'contrast'].",
    ),
    "environment: no such layer": error(
        lambda here: here.asked(NORMGRAD_LAYERS="net.cnv").trainer().fit(Lit(), loader()),
        "`NORMGRAD_LAYERS`: expected names or globs of the model's layers, but 'net.cnv' matches none. Nearest names: "
        "net.conv, net.act, net, net.pool, net.head.",
    ),
    # The command
    "command: no colon": error(
        lambda _: find("torchvision.models"),
        "`torchvision.models`: expected package.module:Name, such as torchvision.models:resnet18.",
    ),
    "command: no such module": error(
        lambda _: find("no.such:Thing"),
        "`no.such:Thing`: there is no module 'no' here. Name it as Python would import it from this folder.",
    ),
    "command: no such name": error(
        lambda _: find("collections:OrderdDict"),
        "`collections:OrderdDict`: collections has no 'OrderdDict'. Did you mean OrderedDict or UserDict?",
    ),
    "command: no argument": error(lambda _: arguments(["a"]), "`--arg`: expected name=value, but got 'a'."),
    "command: arguments that do not fit": error(
        lambda _: build("torch.nn:Conv2d", {"in_channels": 3}),
        "`torch.nn:Conv2d`: missing a required argument: 'out_channels'. `--arg name=value` gives an argument.",
    ),
    "command: nothing to train": error(
        lambda _: build("builtins:dict", {}),
        "`builtins:dict`: expected a torch.nn.Module or what makes one, but got 'dict'.",
    ),
    "command: no such checkpoint": error(
        lambda here: load_trained(here.folder / "a.ckpt", "torch.nn:ReLU", {}), "`…/a.ckpt`: there is no such file."
    ),
    "command: no checkpoint": error(
        lambda here: load_trained(here.written("a.ckpt", b"abc"), "torch.nn:ReLU", {}),
        "`…/a.ckpt`: this is no checkpoint that torch can read.",
    ),
    "command: half a checkpoint": error(
        lambda here: load_trained(here.written("a.ckpt", b"PK\x03\x04abc"), "torch.nn:ReLU", {}),
        "`…/a.ckpt`: this is no checkpoint that torch can read.",
    ),
    "command: a checkpoint with code": error(
        lambda here: load_trained(here.saved({"a": SimpleNamespace()}), "torch.nn:ReLU", {}),
        "`…/a.ckpt`: it holds more than tensors and plain values: types.SimpleNamespace. To load that is to run what "
        "the file says. If you trust it, add `--unsafe`.",
    ),
    "command: a checkpoint without names": error(
        lambda here: load_trained(here.saved([1]), "torch.nn:ReLU", {}),
        "`…/a.ckpt`: expected weights by name, but it holds 'list'.",
    ),
    "command: other weights": error(
        lambda here: load_trained(here.saved({"bias": torch.ones(1)}), "torch.nn:ReLU", {}),
        "`…/a.ckpt`: its weights are not those of `torch.nn:ReLU`. If that needs other arguments, give them by `--arg "
        'name=value`. Error(s) in loading state_dict for ReLU:\n\tUnexpected key(s) in state_dict: "bias". ',
    ),
    "command: a folder": error(lambda here: load_trained(here.folder, "torch.nn:ReLU", {}), "`…`: this is a folder."),
    "command: a mean for other channels": error(
        lambda here: load_images([], mean=[0.1, 0.2]),
        "`--mean`: expected one number or 3, as the channels, but got 2.",
    ),
    "command: no deviation": error(
        lambda here: load_images([], std=[0.1, 0.0, 0.1]), "`--std`: expected positive numbers, but got 0."
    ),
    "command: layers without a grid": error(
        lambda _: explain(network(), images(), labels(), ["head"], ["order0"]),
        "`--layers`: NormGrad cannot read the layer 'head': its shape (1, 5) has no spatial axis. Choose a layer "
        "before the pooling or flattening.",
    ),
    "command: an input that does not fit": error(
        lambda _: main(["layers", "torch.nn:Bilinear", *arguments_of(2, 2, 2), "--input", "1x4", "--traceback"]),
        "`--input`: the model cannot be called with images of 1x4. It says: Bilinear.forward() missing 1 required "
        "positional argument: 'input2'",
    ),
    "command: no finite mean": error(
        lambda here: load_images([], mean=[float("nan")]), "`--mean`: expected finite numbers, but got [nan]."
    ),
    "command: floating-point pixels": error(
        lambda here: load_images([here.drawn("a.tif", (4, 4), "F")]),
        "`…/a.tif`: expected whole numbers for pixels, but they are floating-point.",
    ),
    "command: arguments of a module": error(
        lambda here: build(f"{__name__}:A_MODULE", {"a": 1}),
        f"`--arg`: `{__name__}:A_MODULE` is a module already, and takes no arguments.",
    ),
    "command: no class at all": error(
        lambda here: explain_with_labels(here, "-1"), "`--label`: expected the numbers of classes, but got [-1]."
    ),
    "command: no numbers": error(
        lambda here: _numbers("a,b"), "expected numbers, separated by commas, but got 'a,b'", ArgumentTypeError
    ),
    "command: no size": error(lambda here: _size("3x4x5"), "expected HEIGHTxWIDTH, but got '3x4x5'", ArgumentTypeError),
    "command: no such image": error(
        lambda here: load_images([here.folder / "a.png"]), "`…/a.png`: there is no such file."
    ),
    "command: no image": error(
        lambda here: load_images([here.written("a.png", b"abc")]),
        "`…/a.png`: this is no image that Pillow can read.",
    ),
    "command: images of several sizes": error(
        lambda here: load_images([here.drawn("a.png", (4, 6)), here.drawn("b.png", (6, 4))]),
        "`--size`: the images differ in size (4x6, 6x4), so it is needed: HEIGHTxWIDTH.",
    ),
    "command: no classifier": error(
        lambda _: explain(network()[:2], images(), labels(), ["conv"], ["order0"]),
        "`--module`: expected one that gives a score for each class, (N, classes), but it gives shape (1, 4, 8, 8). "
        "For another loss, define `normgrad_loss(self, batch)`, leave `grad_cam` out of `--maps`, and give `--label`.",
    ),
    "command: no such class": error(
        lambda _: explain(network(), images(), labels() + 4, ["conv"], ["grad_cam"]),
        "`--label`: expected a number from 0 to 4, as the model knows 5 classes, but got 5.",
    ),
    "command: another number of labels": error(
        lambda here: explain_with_labels(here, "1", "2"),
        "`--label`: expected one, or 1 for as many images, but got 2.",
    ),
    # While training
    "run: a layer that cannot be read": warning(
        lambda here: here.train(layers="net.head"),
        "NormGrad cannot read the layer 'net.head': its shape (2, 5) has no spatial axis. Choose a layer before "
        "the pooling or flattening.",
    ),
    "run: the same as an error": error(
        lambda here: here.train(layers="net.head", on_error="raise"),
        "NormGrad cannot read the layer 'net.head': its shape (2, 5) has no spatial axis. Choose a layer before "
        "the pooling or flattening.",
        RuntimeError,
    ),
    "run: the same, where warnings are errors": Case(
        train_with_warnings_as_errors,
        logging.WARNING,
        "NormGrad cannot read the layer 'net.head': its shape (2, 5) has no spatial axis. Choose a layer before "
        "the pooling or flattening.",
    ),
    "run: unseen": warning(
        train_unseen,
        "NormGrad saw no layer at work: hooks work only in layers that are called as `layer(x)`, not as "
        "`layer.forward(x)`, and that are part of the model when training starts.",
    ),
    "run: unseen, order 1": warning(
        lambda here: train_unseen(here, layers="auto", **ORDER1),
        "NormGrad saw no layer at work: hooks work only in layers that are called as `layer(x)`, not as "
        "`layer.forward(x)`, and that are part of the model when training starts.",
    ),
    "run: unseen on single images": warning(
        lambda here: here.train(Lit(step=unseen_if_single), layers="auto", **ORDER1),
        "NormGrad failed at a pass of its own, and training goes on: NothingToRead: `layers`: no layer was seen at "
        "work. Hooks see only layers that are called as `layer(x)`, not as `layer.forward(x)`.",
    ),
    "run: a map of zeros": warning(
        lambda here: here.train(Lit(step=lambda module, batch: 0 * cross_entropy(module.net, batch))),
        "NormGrad: the map of 'net.conv' is zero everywhere, so no gradient reaches its locations. At the first "
        "step that is so if the head's weights start at zero; always, if the head reads a class token alone.",
    ),
    "run: not finite": warning(
        lambda here: here.train(Lit(step=lambda module, batch: torch.nan * cross_entropy(module.net, batch))),
        "NormGrad skips steps whose gradients are not finite (as after an fp16 overflow); `callback.skipped` "
        "counts them.",
    ),
    "run: order-1 maps of zeros": warning(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: 0 * loss)), **ORDER1),
        "NormGrad: order-1 maps of some images are zero: the inner step has fitted them, or they were learned "
        "before. If that goes on, a smaller `epsilon` shows more.",
    ),
    # What fails while training
    "failed: on single images": warning(
        lambda here: here.train(batch=(images(), labels(), torch.ones(9, 6)), **ORDER1),
        "NormGrad failed at the order-1 passes on single images, and "
        "training goes on: CannotSlice: `batch`: expected tensors, tuples, dicts, dataclasses and lists of these "
        "with one part for each image, but `2` has shape (9, 6), which does not begin with 2. Set "
        "`per_image=False`, which takes the batch as it is.",
    ),
    "failed: on the batch": warning(
        lambda here: here.train(Lit(step=only_when_training(torch.Tensor.detach)), per_image=False, **ORDER1),
        "NormGrad failed at the order-1 passes, and training goes on: ValueError: `training_step`: expected a "
        "loss that depends on the model's parameters, but it does not. Check that it is computed by the model, "
        "without `.detach()` and outside of `torch.no_grad()`.",
    ),
    "failed: beside other processes": warning(
        train_beside_others,
        "NormGrad failed at the order-1 passes, and training goes on: RuntimeError: it calls "
        "c10d.allreduce_.default in a pass that runs on one process alone, so the others would not answer. Write "
        "a method `normgrad_loss(self, batch)` that returns the loss without that.",
    ),
    "failed: an iterator": warning(
        lambda here: here.train(Lit(more=iter([1])), per_image=False, **ORDER1),
        "NormGrad failed at the order-1 passes, and training goes on: ValueError: `training_step`: expected a "
        "step that can be run again, but the module holds an iterator (list_iterator), and what a step draws "
        "from it cannot be put back. Write a method `normgrad_loss(self, batch)` that returns the loss and draws "
        "nothing.",
    ),
    "failed: a rehearsal": warning(
        lambda here: here.train(Lit(compiled(network()), more=iter([1]))),
        "NormGrad failed at a rehearsal of the training step, and training goes on: ValueError: `training_step`: "
        "expected a step that can be run again, but the module holds an iterator (list_iterator), and what a "
        "step draws from it cannot be put back. Write a method `normgrad_loss(self, batch)` that returns the "
        "loss and draws nothing.",
    ),
    "failed: attaching": warning(
        lambda here: here.train(Lit(closed_network())),
        "NormGrad failed at attaching the hooks, and training goes on: RuntimeError: no hooks here",
    ),
    "failed: the loss scale": warning(
        lambda here: here.train(trainer={"plugins": with_scaler()}),
        "NormGrad failed at reading the loss scale, and training goes on: RuntimeError: no scale",
    ),
    "failed: a step without loss": warning(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: None)), **ORDER1),
        "NormGrad failed at a pass of its own, and training goes on: NoLoss: `training_step`: expected a scalar "
        'tensor, or a dict with one under "loss", but got None. Write a method `normgrad_loss(self, batch)` that '
        "returns the loss.",
    ),
    "failed: a dict without loss": warning(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: {"los": loss})), **ORDER1),
        "NormGrad failed at a pass of its own, and training goes on: NoLoss: `training_step`: expected a scalar "
        "tensor, or a dict with one under \"loss\", but got a dict with ['los']. Write a method "
        "`normgrad_loss(self, batch)` that returns the loss.",
    ),
    "failed: a loss for each image": warning(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: loss.expand(2))), per_image=False, **ORDER1),
        "NormGrad failed at the order-1 passes, and training goes on: ValueError: `training_step`: expected a "
        'scalar tensor, or a dict with one under "loss", but got a tensor of shape (2,). Write a method '
        "`normgrad_loss(self, batch)` that returns the loss.",
    ),
    "failed: a loss that is no tensor": warning(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: 0.5)), per_image=False, **ORDER1),
        "NormGrad failed at the order-1 passes, and training goes on: ValueError: `training_step`: expected a "
        'scalar tensor, or a dict with one under "loss", but got 0.5. Write a method `normgrad_loss(self, '
        "batch)` that returns the loss.",
    ),
    "failed: reading": warning(
        lambda here: here.broken("callback._signal").train(images="hardest"),
        "NormGrad failed at reading the maps, and training goes on: RuntimeError: we are broken",
    ),
    "failed: drawing": warning(
        lambda here: here.train(mean=[0.5, 0.5], trainer={"logger": TensorBoardLogger(here.folder)}),
        "NormGrad failed at drawing, and training goes on: ValueError: `mean`: expected one number or 3, one for "
        "each channel of the image, but got 2. Give the `mean` that the images were normalised with.",
    ),
    "failed: writing": warning(
        lambda here: here.with_little_room().train(trainer={"logger": TensorBoardLogger(here.folder)}),
        "NormGrad failed at writing to TensorBoard (…/lightning_logs/version_0), and training goes on: OSError: "
        "[Errno 28] 10.0 MB are left on the disk, and they are for the run's own files: "
        "'…/lightning_logs/version_0'",
    ),
    "failed: writing to a file with a limit": warning(
        lambda here: here.with_small_files().train(trainer={"logger": TensorBoardLogger(here.folder)}),
        "NormGrad failed at writing to TensorBoard (…/lightning_logs/version_0), and training goes on: OSError: "
        "[Errno 27] files may have 0.0 MB (ulimit -f), and the rest is for the run's own values: "
        "'…/lightning_logs/version_0/…'",
    ),
    "failed: looking at the model": warning(
        lambda here: here.broken("callback.must_rehearse").train(),
        "NormGrad failed at looking at the model, and training goes on: RuntimeError: we are broken",
    ),
    "failed: manual since training began": warning(
        lambda here: here.train(TurnsManual(), **ORDER1),
        "NormGrad failed at the order-1 passes on single images, and training goes on: ValueError: "
        + write_a_loss("maps that take a pass of their own", "TurnsManual"),
    ),
    "failed: resuming": warning(
        lambda _: NormGradCallback().load_state_dict({"last_event": 5}),
        "NormGrad failed at going on with the schedule of a checkpoint (of another version?), and training goes on: "
        "KeyError: 'last_order1'",
    ),
    # What is read, and where it goes
    "info: nowhere": info(
        lambda here: here.train(layers="auto"),
        "NormGrad reads net.conv (auto) every step; without a logger there are no panels, only `callback.maps`.",
    ),
    "info: two places": info(
        lambda here: here.train(trainer={"logger": [TensorBoardLogger(here.folder, n) for n in "ab"]}),
        "NormGrad reads net.conv every step; panels go to TensorBoard (…/a/version_0) and TensorBoard (…/b/version_0).",
    ),
    "info: order 1": info(
        lambda here: here.train(**ORDER1),
        "NormGrad reads net.conv every step; without a logger there are no panels, only `callback.maps`. Order-1 maps "
        "(order1, adversarial, contrast) come every step, with an inner step for each image.",
    ),
    "info: order 1 of the batch": info(
        lambda here: here.train(per_image=False, order1_every_n_steps=2, order1_maps=["contrast"]),
        "NormGrad reads net.conv every step; without a logger there are no panels, only `callback.maps`. Order-1 maps "
        "(contrast) come every 2 steps, with one inner step for the whole batch.",
    ),
    "info: compiled": info(
        lambda here: here.train(Lit(compiled(network())), layers="auto"),
        "NormGrad reads net.conv (auto) every step, in a pass of its own for each event, as the model is compiled; "
        "without a logger there are no panels, only `callback.maps`.",
    ),
}


# ---------------------------------------------------------------- each message comes, once and whole


def provoked(case: Case, here: Here, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What a user is told of that kind: the text of the error, all our warnings, or all that we log."""
    here.patch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if isinstance(case.kind, type) and not issubclass(case.kind, Warning):
            with pytest.raises(case.kind) as raised:
                case.provoke(here)
            return [str(raised.value)]
        case.provoke(here)
    warned = [str(w.message) for w in caught if "normgrad" in str(w.message).lower()]
    logged = [record.getMessage() for record in caplog.records if record.levelno == case.kind]
    return warned if case.kind is UserWarning else [text for text in logged if "NormGrad" in text]


def pattern(text: str) -> str:
    return ".+".join(map(re.escape, text.split("…")))


@pytest.mark.parametrize("name", CASES)
def test_every_message_is_told_once_and_whole(name, tmp_path, monkeypatch, caplog):
    case = CASES[name]
    told = provoked(case, Here(tmp_path, monkeypatch), caplog)
    assert len(told) == 1, told
    assert re.fullmatch(pattern(case.text), told[0]), told[0]


# ---------------------------------------------------------------- no message of the package is missing here


CHOICES = ("IMAGES", "KINDS", "MEANINGS", "ON_ERROR", "SCALES", "TARGETS")
"""Tables whose values say what each choice means, to readers of the code alone."""

PRINTING = ("command.py",)
"""Modules whose other texts are what was asked for: see their own tests."""

HELP = ("help", "description", "epilog", "metavar")
"""What a command says of itself."""

TELLING = ("_guard", "_complain", "_warn_once", "_say", "warn", "warning", "info")
"""Functions that tell what they are given, in one word or in many."""


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def no_texts(node: ast.AST) -> list[ast.AST]:
    """What below a node is no text of its own: docstrings, pieces and formats of f-strings, what choices mean."""
    if isinstance(node, ast.Expr):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.FormattedValue):
        return [] if node.format_spec is None else list(ast.walk(node.format_spec))
    if isinstance(node, ast.keyword) and node.arg in HELP:
        return list(ast.walk(node))
    is_table = isinstance(node, ast.Assign) and any(getattr(t, "id", None) in CHOICES for t in node.targets)
    return list(ast.walk(node)) if is_table else []


def is_telling(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", None)) in TELLING
    return isinstance(node, ast.Raise)


def written(node: Any) -> str:
    """A string as an expression of `re`, with anything for its values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)


def messages(source: str, all_texts: bool = True) -> dict[int, list[str]]:
    """The texts for people in a module, by line: all strings with a space, and whatever is raised, warned or logged."""
    nodes = list(ast.walk(ast.parse(source)))
    others = {id(other) for node in nodes for other in no_texts(node)}
    told = {id(part) for node in nodes if is_telling(node) for part in ast.walk(node)}
    found: dict[int, list[str]] = {}
    for node in nodes:
        if not is_string(node) or id(node) in others:
            continue
        if id(node) in told or (all_texts and r"\ " in written(node)):
            found.setdefault(node.lineno, []).append(written(node))
    return found


def test_no_message_of_the_package_is_missing_here():
    texts = [case.text for case in CASES.values()]
    missing = [
        f"{path.name}:{line}: {message}"
        for path in sorted(Path(normgrad_lightning.__file__).parent.rglob("*.py"))
        for line, of_line in messages(path.read_text(encoding="utf-8"), path.name not in PRINTING).items()
        for message in of_line
        if not any(re.search(message, text, re.DOTALL) for text in texts)
    ]
    assert not missing, "These have no case in `CASES`:\n" + "\n".join(missing)


SOURCE = '''
"""A docstring."""
KINDS = {"a": "what a is for"}
"""What follows a constant."""
HINT = "Use " "another."

def tell(self, x: "int", tag="a/b") -> None:
    """Another docstring."""
    why = "it is odd" if x else f"{x:.1f} MB are too few"
    with self._guard("drawing"):
        self._reasons.setdefault("key", why + "; try again")
    raise ValueError(f"`x`: got {', '.join(x)}. {HINT}")
'''


def test_a_new_message_would_be_found_wherever_it_is_written():
    found = [message for of_line in messages(SOURCE).values() for message in of_line]
    readable = sorted(message.replace("\\", "") for message in found)
    assert readable == [
        ", ", ".* MB are too few", "; try again", "Use another.", "`x`: got .*. .*", "drawing", "it is odd",
    ]  # fmt: skip
