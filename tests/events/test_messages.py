"""Every message that a user can get, and what it must say: the argument, the cause, the remedy.

The words around these are free, so that prose can be mended. Where a message is made of pieces, each of these is in a
case: `test_no_message_of_the_package_is_missing_here` compares the source with the messages that the cases give.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
import warnings
from argparse import ArgumentTypeError
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
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
from normgrad_lightning import (
    NormGrad,
    NormGradCallback,
    functional,
    grad_cam_maps,
    log_maps,
    order0_maps,
    order1_maps,
    select_layers,
)
from normgrad_lightning.cli.classes import check_number_of_classes, class_number, read_classes
from normgrad_lightning.cli.command import _numbers, _size, main
from normgrad_lightning.cli.explain import explain
from normgrad_lightning.cli.finding import find
from normgrad_lightning.cli.loading import arguments, build, load_images, load_trained
from normgrad_lightning.page import Page
from normgrad_lightning.passes.batches import CannotSlice, single_images
from normgrad_lightning.passes.inner_step import InnerStep
from normgrad_lightning.passes.one_pass import NotFinite
from normgrad_lightning.report import Report
from normgrad_lightning.views.drawing import Sheet, input_tiles
from normgrad_lightning.views.figure import latest_figure
from normgrad_lightning.views.look import Look
from normgrad_lightning.views.scales import scale_maps
from normgrad_lightning.writers import raw_maps

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


class OwnSteps(Lit):
    """Does its own steps."""

    def __init__(self, *args: Any, **attributes: Any):
        super().__init__(*args, automatic_optimization=False, **attributes)


class TurnsManual(Lit):
    """Does its own steps, and says so when training starts."""

    def on_train_start(self) -> None:
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))


class TrainsItself(OwnSteps):
    """Does its own steps, and they are whole."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(super().training_step(batch, batch_idx))


class OddLoss(Lit):
    """Has a property where a method is expected, and it fails."""

    @property
    def normgrad_loss(self) -> Any:
        raise RuntimeError("we are broken")


class FromIterator(Lit):
    """Draws its batches itself."""

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


class Named(list):
    """A data set that knows its classes."""

    classes = ("cat", "dog")


def named_loader() -> DataLoader:
    return DataLoader(Named([(images(), labels())]), batch_size=None)


class OddNames(list):
    """A data set that fails when it is asked for its classes."""

    def __init__(self) -> None:
        super().__init__([(images(), labels())])

    @property
    def classes(self) -> Any:
        raise RuntimeError("nobody knows.")


def with_hyperparameters(**values: Any) -> Lit:
    module = Lit()
    module.save_hyperparameters(values)
    return module


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

    def replaced(self, name: str, value: Any) -> Here:
        """Replace what goes by this name, in every module of the package that knows it."""
        ours = [module for path, module in sys.modules.items() if path.startswith("normgrad_lightning.")]
        places = [module for module in ours if name in vars(module or SimpleNamespace())]
        assert places, f"nothing in the package is called {name!r}"
        for module in places:
            self.patch.setattr(module, name, value)
        return self

    def broken(self, name: str) -> Here:
        """Let this function of the package fail."""

        def fail(*_: Any, **__: Any) -> None:
            raise RuntimeError("we are broken")

        return self.replaced(name, fail)

    def before_torch_2_6(self) -> Here:
        return self.replaced("CAN_RUN_EAGERLY", False)

    def with_little_room(self) -> Here:
        disk = SimpleNamespace(total=2**30, free=10 * 2**20)
        self.patch.setattr("shutil.disk_usage", lambda _: disk)
        return self

    def with_small_files(self) -> Here:
        return self.replaced("_largest_file", lambda: 100)


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


class KeepsSome(nn.Module):
    """A transformer that drops patches, as the encoder of a masked autoencoder does."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Conv2d(3, 4, 2, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = tokens(self.embed(x))[:, torch.tensor([3, 9, 0, 5])]
        for block in self.blocks:
            kept = block(kept)
        return self.head(kept.mean(1))


def read(model: nn.Module, layers: Any = "odd", x: torch.Tensor | None = None, **options: Any) -> None:
    """Ask twice for the maps of a step."""
    with NormGrad(model, layers, **options) as recorder:
        outputs = model(images() if x is None else x)
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(t.sum() for t in tensors if t.requires_grad).backward()
        _ = recorder.maps, recorder.maps


def tokens(features: torch.Tensor) -> torch.Tensor:
    return features.flatten(2).transpose(1, 2)


def order0(loss: Any = cross_entropy, layers: Any = "conv", model: nn.Module | None = None) -> None:
    order0_maps(model or network(), loss, (images(), labels()), layers)


def order1(loss: Any = cross_entropy, batch: Any = None, model: nn.Module | None = None, **options: Any) -> None:
    order1_maps(model or network(), loss, batch or (images(), labels()), **{"layers": "conv", **options})


def far_away(model: nn.Module, batch: Any) -> torch.Tensor:
    return (model(batch[0]) * 1e30).square().sum()


def normalised_over_the_batch(module: nn.Module, batch: Any) -> torch.Tensor:
    return F.batch_norm(module.net(batch[0]), None, None, training=True)[:, 0].pow(3).sum()


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
    here.patch.setitem(sys.modules, "normgrad_lightning.switch.environment_callback", None)
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
    here.replaced("has_compiled_anything", lambda: False)  # though tests before have
    here.train(Lit(step=lambda module, batch: module.net.head.forward(batch[0][:, 0, 0, :4]).sum()), **flags)


X, G = torch.ones(2, 4, 5, 7), torch.ones(2, 3, 5, 7)
ORDER1 = {"order1_every_n_steps": 1, "num_images": 1}
NEEDS_BATCH = ("compare", "images", "need*", "batch", "`per_image=False`")

# ---------------------------------------------------------------- the table


class Validates(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None: ...


def train_and_validate(here: Here) -> None:
    callback = NormGradCallback(every_n_steps=1, layers="net.conv", probe="val")
    here.trainer(callbacks=[callback]).fit(Validates(), loader(), loader())


def one_class_validated(here: Here) -> None:
    callback = NormGradCallback(every_n_steps=1, layers="net.conv", probe="val")
    here.trainer(callbacks=[callback]).fit(Validates(), loader(), loader((images(), 0 * labels())))


def save_probe(here: Here) -> None:
    callback = NormGradCallback(every_n_steps=1, layers="net.conv", probe="train")
    trainer = here.trainer(callbacks=[callback])
    trainer.fit(Lit(), loader((images(), labels(), [Path("a.png"), Path("b.png")])))
    trainer.save_checkpoint(here.folder / "a.ckpt")


def film_without_webp(here: Here) -> None:
    here.patch.setattr("PIL.features.check", lambda _: False)
    film_of_a_run(here)


def film_of_a_run(here: Here) -> None:
    """Train with a probe, and without the announcement of what is read."""
    here.patch.setattr(Report, "_is_announced", True)
    here.train(probe="train", trainer={"logger": TensorBoardLogger(here.folder)})


class Stops(pl.Callback):
    """Ends training after its second step."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        trainer.should_stop = batch_idx == 1


def end_without_notice(here: Here) -> None:
    def fail(_: Any) -> None:
        raise RuntimeError("we are broken")

    here.patch.setattr("normgrad_lightning.events.training_step.TrainingStep.look_back", fail)
    callback = NormGradCallback(layers="net.conv")
    here.trainer(callbacks=[callback, Stops()], max_epochs=2).fit(Lit(), loader())


@dataclass(frozen=True)
class Case:
    """A way to a message.

    Attributes:
        provoke: does what a user would do.
        kind: an error's type, a warning's category, or a level of `logging`.
        says: what the message must contain, in this order: the argument, what was expected, what came, the cause, the
            remedy. `*` stands for the rest of a word, `|` separates alternatives, `…` is the folder of the run.
    """

    provoke: Callable[[Here], object]
    kind: type[Exception] | int
    says: tuple[str, ...]


def error(provoke: Callable[[Here], object], *says: str, kind: type[Exception] = ValueError) -> Case:
    return Case(provoke, kind, says)


def warning(provoke: Callable[[Here], object], *says: str) -> Case:
    return Case(provoke, UserWarning, ("NormGrad", *says))


def info(provoke: Callable[[Here], object], *says: str) -> Case:
    return Case(provoke, logging.INFO, says)


def failed(provoke: Callable[[Here], object], *says: str) -> Case:
    """A part of ours fails while training: which part, that training goes on, and the true cause."""
    return warning(provoke, "fail*", *says)


GOES_ON = "training goes on|training continues|continues"
WHOLE_NUMBER = "whole number|integer"
POSITIVE = "above 0|positive|greater than 0"
ONCE = "once|twice|duplicate*|repeat*"
OFF = "off|disable*|without"
DO_WITHOUT = "without|remove|leave|drop|None"
EACH_IMAGE = "each image|per image|every image|single image"
OTHER_LAYERS = "another layer|other layers|different layer*"
NO_SUCH_FILE = "no such file|not exist|not found"
NO_SUCH_FLAG = "no such flag|no flag|not a flag|unknown"
KINDS_OF_ORDER1 = "'order1', 'adversarial', 'contrast'"
VARIABLES = ", ".join(sorted(f"NORMGRAD_{flag.upper()}" for flag in inspect.signature(NormGradCallback).parameters))

OUT_OF_ORDER = ("tokens", "not|no", "order", "rows", "index", "blocks", "name", "`token_grid=(rows, columns)`")
NO_SPATIAL_AXIS = ("no spatial|without spatial|without a spatial", "before", "pool*", "flatten*")
NO_GRADIENT = ("no gradient", "frozen", "detach*")
NO_LAYER_GETS_A_GRADIENT = ("no layer", "grid", "gradient")
IN_ITS_GRAPH = ("`.detach()`", "`torch.no_grad()`")
LOSS_OR_SCORE = ("`loss_fn=`", "lower*", "`score_fn=`", "raise*", "opposite")
AS_CALLED = ("no layer", "`layer(x)`", "`layer.forward(x)`")
NO_LOSS = ("`training_step`", "scalar tensor", "dict", '"loss"')
RETURN_IT = "`normgrad_loss(self, batch)`"
AN_ITERATOR = ("ValueError: `training_step`", "again|twice|repeat*", "iterator", "list_iterator", RETURN_IT)


def cannot_cut(*why: str) -> tuple[str, ...]:
    return ("`batch`", "tensors, tuples, dicts, dataclasses", "each image|per image", *why, "`per_image=False`")


def write_a_loss(*who: str, name: str = "OwnSteps") -> tuple[str, ...]:
    return (*who, "loss", "manual optimi*", name, "def normgrad_loss(self, batch):", "return F.cross_entropy")


CASES: dict[str, Case] = {
    # The package
    "a name that is not there": error(
        lambda _: normgrad_lightning.Nothing,
        "'normgrad_lightning'", "no attribute", "'Nothing'",
        kind=AttributeError,
    ),
    # Flags
    "flag: layers": error(
        lambda _: NormGradCallback(layers=5),
        "`layers`", "auto", "name", "glob*", "list", "5", "`model.named_modules()`",
    ),
    "flag: one of": error(
        lambda _: NormGradCallback(images="last"),
        "`images`", "'balanced', 'first', 'random', 'hardest', 'easiest'", "'last'",
    ),
    "flag: name": error(
        lambda _: NormGradCallback(name="a/b"),
        "`name`", "letters", "digits", "None", "'a/b'",
    ),
    "flag: classes": error(
        lambda _: NormGradCallback(classes="cat"),
        "`classes`", "list", "name*", "class*", "'cat'",
    ),
    "flag: classes, too few": error(
        lambda here: here.train(Lit(num_classes=5), classes=["cat", "dog"]),
        "`classes`", "name", "each class", "2", "Lit", "`num_classes`", "5", "one name for each",
    ),
    "flag: classes, fewer than the hyperparameters say": error(
        lambda here: here.train(with_hyperparameters(num_classes=5), classes=["cat", "dog"]),
        "`classes`", "2", "hyperparameters", "`num_classes`", "5",
    ),
    "flag: classes, fewer than the data set has": error(
        lambda here: here.trainer(callbacks=[NormGradCallback(classes=["cat"])]).fit(Lit(), named_loader()),
        "`classes`", "1", "data set", "`classes`", "2",
    ),
    "labels that are none": failed(
        lambda here: here.train(Lit(normgrad_labels=lambda batch: 3.5)),
        "`normgrad_labels`", "class", "whole numbers", "None", "3.5", "one number for each image",
    ),
    "labels of another shape": failed(
        lambda here: here.train(Lit(normgrad_labels=lambda batch: torch.zeros(2, 3, 4))),
        "`normgrad_labels`", "whole numbers", "(2, 3, 4)", "one number for each image",
    ),
    "masks that are none": failed(
        lambda here: here.train(Lit(normgrad_masks=lambda batch: "left")),
        "masks", "`normgrad_masks`", "(N, height, width)", "1", "object", "None", "'str'", "each image",
    ),
    "masks of another shape": failed(
        lambda here: here.train(
            Lit(normgrad_masks=lambda batch: torch.zeros(3, 8, 8)), trainer={"logger": TensorBoardLogger(here.folder)}
        ),
        "masks", "`normgrad_masks`", "each", "(3, 8, 8)", "(N, height, width)", "object",
    ),
    "masks of colours": failed(
        lambda here: here.train(
            Lit(normgrad_masks=lambda batch: 255 * torch.ones(2, 8, 8)),
            trainer={"logger": TensorBoardLogger(here.folder)},
        ),
        "masks", "`normgrad_masks`", "0 to 1", "255 to 255", "`masks == number`",
    ),
    "masks that are nested": failed(
        lambda here: here.train(
            Lit(normgrad_masks=lambda batch: torch.nested.nested_tensor([torch.zeros(2, 2), torch.zeros(3, 3)]))
        ),
        "masks", "`normgrad_masks`", "(N, height, width)", "nested tensor", "each image",
    ),
    "masks on no device": failed(
        lambda here: here.train(Lit(normgrad_masks=lambda batch: torch.zeros(2, 8, 8, device="meta"))),
        "masks", "`normgrad_masks`", "(N, height, width)", "(2, 8, 8)", "'meta'", "each image",
    ),
    "a layer for patches that has no map": failed(
        lambda here: here.train(patch_layers=["net.nope"], trainer={"logger": TensorBoardLogger(here.folder)}),
        "patches", "`patch_layers`", "'combined'", "'last'", "'net.nope'", "net.conv",
    ),
    "flag: views": error(
        lambda _: NormGradCallback(views=["overview", "patch"]),
        "`views`", "'overview'", "'patches'", "'atlas'", "'curves'", "'film'", "'patch'",
    ),
    "flag: patch_layers": error(
        lambda _: NormGradCallback(patch_layers=[]),
        "`patch_layers`", "names", "[]",
    ),
    "flag: read_every_n_steps": error(
        lambda _: NormGradCallback(read_every_n_steps=0),
        "`read_every_n_steps`", WHOLE_NUMBER, "1", "0", "events only",
    ),
    "flag: some of": error(
        lambda _: NormGradCallback(order1_maps=["order1", "order2"]),
        "`order1_maps`", KINDS_OF_ORDER1, "'order2'",
    ),
    "flag: a list": error(
        lambda _: NormGradCallback(order1_maps=1),
        "`order1_maps`", "list", KINDS_OF_ORDER1, ONCE, "1",
    ),
    "flag: every_n_steps": error(
        lambda _: NormGradCallback(every_n_steps=0),
        "`every_n_steps`", WHOLE_NUMBER, "1", "0", "`enabled=False`",
    ),
    "flag: order1_every_n_steps": error(
        lambda _: NormGradCallback(order1_every_n_steps=0),
        "`order1_every_n_steps`", WHOLE_NUMBER, "1", "0", "None", OFF,
    ),
    "flag: num_images": error(
        lambda _: NormGradCallback(num_images=True),
        "`num_images`", WHOLE_NUMBER, "1", "True",
    ),
    "flag: num_images of a recorder": error(
        lambda _: NormGrad(network(), num_images=0),
        "`num_images`", WHOLE_NUMBER, "1", "0", "None", "all",
    ),
    "flag: probe": error(
        lambda _: NormGradCallback(probe="test"),
        "`probe`", "None, 'train', 'val'", "batch", "'test'",
    ),
    "flag: probe, a loader": error(
        lambda _: NormGradCallback(probe=loader()),
        "`probe`", "None, 'train', 'val'", "batch", "DataLoader", "one batch", "`probe=next(iter(loader))`",
    ),
    "flag: epsilon": error(
        lambda _: NormGradCallback(epsilon=0),
        "`epsilon`", POSITIVE, "0",
    ),
    "flag: on or off": error(
        lambda _: NormGradCallback(enabled="false"),
        "`enabled`", "True", "False", "'false'",
    ),
    "flag: on, off or None": error(
        lambda _: NormGradCallback(channels_last="no"),
        "`channels_last`", "True", "False", "None", "'no'",
    ),
    "flag: mean": error(
        lambda _: NormGradCallback(mean="imagenet"),
        "`mean`", "None", "number", "list", "channel", "'imagenet'",
    ),
    "flag: std": error(
        lambda _: NormGradCallback(std=[0.2, 0.0, 0.2]),
        "`std`", POSITIVE, "[0.2, 0.0, 0.2]",
    ),
    "flag: mean and std": error(
        lambda _: NormGradCallback(mean=[0.5, 0.5], std=[0.2, 0.2, 0.2]),
        "`std`", "`mean`", "2", "3",
    ),
    "flag: opacity": error(
        lambda _: NormGradCallback(opacity=1.5),
        "`opacity`", "0", "1", "1.5",
    ),
    "flag: token_grid": error(
        lambda _: NormGradCallback(token_grid=(0, 3)),
        "`token_grid`", "None", "(rows, columns)", "(0, 3)|[0, 3]",
    ),
    "flag: colormap, nearly": error(
        lambda _: NormGradCallback(colormap="infrno"),
        "`colormap`", "cmap", "'infrno'", "'inferno'",
    ),
    "flag: colormap, not at all": error(
        lambda _: NormGradCallback(colormap="12345678"),
        "`colormap`", "cmap", "'12345678'", "'inferno'", "'viridis'",
    ),
    "flag: colormap, no name": error(
        lambda _: NormGradCallback(colormap=["inferno"]),
        "`colormap`", "name", "cmap", "['inferno']",
    ),
    "flag: a kind that weights do not have": error(
        lambda _: NormGradCallback(grad_cam=True, target="weight"),
        "`grad_cam`", '`target="output"`', '`target="input"`', '`target="weight"`', "weight", "target",
        DO_WITHOUT, "grad_cam",
    ),
    # Layers
    "layers: nearest names": error(
        lambda _: select_layers(network(), "covn"),
        "`layers`", "glob*", "'covn'", "no|none|not", "Nearest names: conv",
    ),
    "layers: several in one": error(
        lambda _: select_layers(network(), "conv,act"),
        "`layers`", "glob*", "'conv,act'", "list", "['a', 'b']", "[a,b]", "command line",
    ),
    "layers: first names": error(
        lambda _: select_layers(network(), "42"),
        "`layers`", "glob*", "'42'", "first names", "conv, act, pool, flat, head",
    ),
    "layers: none inside": error(
        lambda _: select_layers(nn.Conv2d(3, 4, 3), "42"),
        "`layers`", "glob*", "'42'", "no layers|no submodules|no modules",
    ),
    "layers: auto without inputs": error(
        lambda _: select_layers(network()),
        "`inputs`", "auto", "None", "batch", "name", "layers",
    ),
    "layers: no weight": error(
        lambda _: NormGrad(network(), "act", target="weight"),
        "`layers`", '`target="weight"`', "'act'", "Tanh", "convolution", "linear", '`target="output"`',
    ),
    "layers: a weight used in another way": error(
        lambda _: NormGrad(nn.Sequential(Overridden(3, 4, 3)), "0", target="weight"),
        "`layers`", '`target="weight"`', "'0'", "Overridden", "overrid*", "`Conv2d.forward`", '`target="output"`',
    ),
    "layers: no model": error(
        lambda _: NormGrad("resnet18"),
        "`model`", "torch.nn.Module", "'str'",
    ),
    "layers: compiled": error(
        lambda _: NormGrad(compiled(network())),
        "`model`", "compiled|uncompiled", "`order0_maps`", "eager*",
    ),
    # What a recorder cannot read
    "read: no spatial axis": warning(
        lambda _: read(Branch(lambda x: x.flatten(1))),
        "'odd'", "(2, 256)", *NO_SPATIAL_AXIS,
    ),
    "read: another batch size": warning(
        lambda _: read(Branch(lambda x: x[:1])),
        "'odd'", "(1, 4, 8, 8)", "not|differs", "batch size 2|batch size of 2|batch of 2", OTHER_LAYERS,
    ),
    "read: tokens with channels first": warning(
        lambda _: read(Branch(tokens), channels_last=False),
        "'odd'", "(2, 64, 4)", "cannot|not|no", "`channels_last=False`", "2 axes|2 spatial axes", "None", OTHER_LAYERS,
    ),
    "read: axes of token_grid": warning(
        lambda _: read(Branch(tokens), token_grid=(4, 4, 4, 4)),
        "'odd'", "`token_grid=(4, 4, 4, 4)`", "not|cannot", "2 axes|2 spatial axes", "number|size", "each axis",
    ),
    "read: too many axes": warning(
        lambda _: read(Branch(lambda x: x[:, :, None])),
        "'odd'", "(2, 4, 1, 8, 8)", "neither|not", "2 axes|2 spatial axes", "tokens", OTHER_LAYERS,
    ),
    "read: fewer tokens": warning(
        lambda _: read(Branch(tokens), token_grid=(9, 9)),
        "'odd'", "64 tokens", "fewer|less|too few", "`token_grid=(9, 9)`",
    ),
    "read: tokens on both sides": warning(
        lambda _: read(Branch(tokens), token_grid=(7, 7)),
        "'odd'", "15 tokens", "more", "`token_grid=(7, 7)`", "how many", "`token_grid=(rows, columns, tokens before)`",
    ),
    "read: tokens out of order": warning(
        lambda _: read(Branch(lambda x: tokens(x)[:, torch.arange(63, -1, -1)])),
        "'odd'", *OUT_OF_ORDER,
    ),
    "read: tokens that auto leaves out": warning(
        lambda _: read(KeepsSome(), "auto"),
        "'blocks.0'", "1 more", '`layers="auto"`', *OUT_OF_ORDER,
    ),
    "read: no grid": warning(
        lambda _: read(Branch(lambda x: tokens(x)[:, :50])),
        "'odd'", "50 tokens", "no|not", "grid", "patches", "8 × 8", "`token_grid=(rows, columns)`",
    ),
    "read: no grid and no image": warning(
        lambda _: read(nn.Sequential(nn.Linear(4, 4)), "0", torch.ones(2, 10, 4)),
        "'0'", "10 tokens", "no|not", "grid", "patches", "no image", "`token_grid=(rows, columns)`",
    ),
    "read: windows": warning(
        lambda _: read(Branch(nn.Sequential(Then(lambda x: tokens(x).unflatten(1, (2, 32))), nn.LayerNorm(4)))),
        "'odd'", "(2, 2, 32, 4)", "channels last", "(2, 32)", "not|differ", "(8, 8)", "windows", "`channels_last=True`",
    ),
    "read: tokens or images": warning(
        lambda _: read(Branch(nn.Sequential(Then(lambda x: tokens(x)[:, :2]), encoder(batch_first=False)))),
        "'odd'", "(2, 2, 4)", "tokens", "images", "`batch_first=False`", "batch size",
    ),
    "read: no tensor": warning(
        lambda _: read(Branch(lambda x: x.argmax(1))),
        "'odd'", "no|not", "floating-point tensor",
    ),
    "read: a parameter": warning(
        lambda _: read(Branch(OwnParameter())),
        "'odd'", "parameter", "not|instead", "features|activations",
    ),
    "read: frozen": warning(
        lambda _: read(frozen_below_the_head(), "conv"),
        "'conv'", *NO_GRADIENT,
    ),
    "read: detached": warning(
        lambda _: read(Branch(torch.Tensor.detach), ["conv", "odd"]),
        "'odd'", *NO_GRADIENT,
    ),
    "read: another geometry": warning(
        lambda _: read(padded_by_a_hook(), "conv", target="weight"),
        "'conv'", "output (2, 4, 8, 10)|output of (2, 4, 8, 10)|output shape (2, 4, 8, 10)", "size|shape", "geometry",
    ),
    "read: not called": warning(
        lambda _: read(Unused(), ["conv", "spare"]),
        "'spare'", "not call*|never call*",
    ),
    "read: without effect": warning(
        lambda _: read(Unused(), ["conv", "odd"]),
        "'odd'", "loss", "not depend*|independent",
    ),
    "read: our failure in a hook": warning(
        lambda here: here.broken("channel_norm") and read(network(), "conv"),
        "'conv'", "RuntimeError: we are broken",
    ),
    "read: our failure at watching": failed(
        lambda here: here.broken("patch_grid") and read(network(), "conv"),
        "watch*|observ*", "model", "RuntimeError: we are broken",
    ),
    "read: no image": warning(
        lambda _: read(nn.Sequential(nn.Linear(4, 1)), "auto", torch.ones(2, 4)),
        "no layer", "image", "floating-point", "(N, C, H, W)", "trained on", "images", "signals", "volumes",
    ),
    "read: all frozen": warning(
        lambda _: read(frozen_below_the_head(), "auto"),
        *NO_LAYER_GETS_A_GRADIENT, "frozen", "loss", "depend*",
    ),
    "read: no grid anywhere": warning(
        lambda _: read(nn.Sequential(nn.Flatten(), nn.Linear(192, 1)), "auto"),
        "no layer", "features", "grid", "image", "rows", "columns", "convolutions", "linear layers", "flatten*",
    ),
    "read: no grid that auto takes": warning(
        lambda _: read(nn.Sequential(nn.Conv2d(3, 4, 8), nn.Flatten()), "auto"),
        "no layer", "gradient", "auto", "features", "grid", "several cells", "image", "name", "`layers`",
    ),
    "read: all compiled": warning(
        lambda _: read(nn.Sequential(compiled(network())), "auto"),
        *NO_LAYER_GETS_A_GRADIENT, "compiled", "border*|boundar*|in and out",
    ),
    "read: a kind that is not recorded": error(
        lambda _: NormGrad(network(), "conv").maps_of("grad_cam"),
        "`kind`", "record*", "'order0'", "'grad_cam'", "`NormGrad(kinds=...)`",
    ),
    # Passes of our own
    "order 0: no scalar": error(
        lambda _: order0(lambda model, batch: model(batch[0])),
        "`loss_fn`", "scalar", "(2, 5)", "`.mean()`",
    ),
    "order 0: no tensor": error(
        lambda _: order0(lambda model, batch: 3.0),
        "`loss_fn`", "scalar", "'float'", "return", "tensor",
    ),
    "order 0: no dependence": error(
        lambda _: order0(lambda model, batch: torch.ones(())),
        "`loss_fn`", "depend*", "layers", "not|no", *IN_ITS_GRAPH,
    ),
    "order 0: no layer for auto": error(
        lambda _: order0(layers="auto", model=nn.Sequential(nn.Flatten(), nn.Linear(192, 5))),
        "`layers`", "auto", "no layer", "grid", "name",
    ),
    "grad_cam: a function by place": error(
        lambda _: grad_cam_maps(network(), cross_entropy, (images(), labels())),
        "`loss_fn`, `score_fn`", "one", "none", "second argument", "batch", *LOSS_OR_SCORE,
    ),
    "grad_cam: two functions": error(
        lambda _: grad_cam_maps(network(), images(), loss_fn=cross_entropy, score_fn=cross_entropy),
        "`loss_fn`, `score_fn`", "one", "loss_fn and score_fn", *LOSS_OR_SCORE,
    ),
    "order 1: no dependence": error(
        lambda _: order1(torch.no_grad()(cross_entropy)),
        "`loss_fn`", "depend*", "parameters", "not|no", *IN_ITS_GRAPH,
    ),
    "order 1: layers without effect": error(
        lambda _: order1(lambda model, batch: model.head.weight.sum()),
        "`layers`", "loss", "depends on none|not depend*", "choose|name|use", "forward pass",
    ),
    "order 1: loss not finite": error(
        lambda _: order1(lambda model, batch: torch.nan * cross_entropy(model, batch)),
        "`loss_fn`", "finite loss", "nan",
        kind=NotFinite,
    ),
    "order 1: gradient of weights not finite": error(
        lambda _: order1(in_call(2, without_gradient)),
        "`loss_fn`", "finite gradient*", "weights", "not|nan|inf",
        kind=NotFinite,
    ),
    "order 1: gradient at layers not finite": error(
        lambda _: order1(in_call(3, without_gradient)),
        "`loss_fn`", "finite gradient*", "layers", "not|nan|inf",
        kind=NotFinite,
    ),
    "order 1: no gradient of one image": error(
        lambda _: order1(lambda model, batch: model(batch[0]).log_softmax(0).mean()),
        "`per_image`", "single images", "alone has no gradient", "batch has one", *NEEDS_BATCH,
    ),
    "order 1: not finite for one image": error(
        lambda _: order1(lambda model, batch: model(batch[0]).var(0).mean()),
        "`per_image`", "single images", "alone is not finite", "batch is", *NEEDS_BATCH,
    ),
    "order 1: BatchNorm without statistics": error(
        lambda _: order1(far_away, (images(1), labels(1)), nn.Sequential(network(), nn.BatchNorm1d(5)), layers="0.act"),
        "`loss_fn`", "finite loss", "inf", "BatchNorm*", "statistics", "not been updated", "`num_batches_tracked`", "0",
        "eval mode", "train",
        kind=NotFinite,
    ),
    "order 1: not the same in every pass": error(
        lambda _: order1(in_call(3, cropped)),
        "`layers`", "'conv'", "same", "pass*", "step", "size|shape", OTHER_LAYERS, "`second_order=False`",
    ),
    "order 1: a layer that cannot be read": warning(
        lambda _: order1(layers=["conv", "head"]),
        "'head'", "(1, 5)", *NO_SPATIAL_AXIS,
    ),
    # Batches that cannot be cut
    "batch: no axis": error(
        lambda _: order1(batch={"name": "text"}),
        *cannot_cut("no tensor", "batch axis"),
        kind=CannotSlice,
    ),
    "batch: two sizes": error(
        lambda _: order1(batch=({"signal": torch.ones(3, 8)},)),
        *cannot_cut("size", "1 or 3"),
        kind=CannotSlice,
    ),
    "batch: one thing each, or several": error(
        lambda _: order1(batch=[torch.ones(2, 8, 8), torch.ones(2, 8, 8)]),
        *cannot_cut("each image|per image", "several", "all images"),
        kind=CannotSlice,
    ),
    "batch: a part that is one thing each, or several": error(
        lambda _: order1(batch=(images(), [torch.ones(2, 8), torch.ones(2, 8)])),
        *cannot_cut("`1`", "each image|per image", "2", "all images"),
        kind=CannotSlice,
    ),
    "batch: packed": error(
        lambda _: order1(batch=pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])),
        *cannot_cut("packed sequence"),
        kind=CannotSlice,
    ),
    "batch: unknown": error(
        lambda _: order1(batch=(images(), {1, 2})),
        *cannot_cut("`1`", "'set'"),
        kind=CannotSlice,
    ),
    "batch: sparse": error(
        lambda _: order1(batch=(images(), torch.ones(2, 3).to_sparse())),
        *cannot_cut("`1`", "no dense|not dense|not a dense|sparse"),
        kind=CannotSlice,
    ),
    "batch: another size": error(
        lambda _: order1(batch=(images(), torch.ones(9, 6))),
        *cannot_cut("`1`", "(9, 6)", "2"),
        kind=CannotSlice,
    ),
    "batch: other targets": error(
        lambda _: order1(batch=(images(), [{"box": 1}] * 3)),
        *cannot_cut("`1`", "3", "not 2|2 images|of 2"),
        kind=CannotSlice,
    ),
    "batch: places": error(
        lambda _: single_images(images(), [5]),
        "`chosen`", "2 images", "[5]",
        kind=IndexError,
    ),
    # The maths
    "maths: no grid": error(
        lambda _: functional.normgrad(X[0, 0], G),
        "`x`", "floating-point", "batch", "channel", "spatial", "torch.float32", "(5, 7)",
    ),
    "maths: axes": error(
        lambda _: functional.normgrad(X, G[..., 0]),
        "`g`", "axes", "`x`", "(2, 4, 5, 7)", "(2, 3, 5)",
    ),
    "maths: grids": error(
        lambda _: functional.normgrad(X, G[..., 1:]),
        "`g`", "batch", "grid", "`x`", "(2, 5, 7)", "(2, 5, 6)", "(2, 3, 5, 6)", "activation", "gradient", "one|same",
    ),
    "maths: grad_cam": error(
        lambda _: functional.grad_cam(X, G),
        "`g`", "shape", "`x`", "(2, 4, 5, 7)", "(2, 3, 5, 7)", "gradient", "`x`",
    ),
    "maths: contrast": error(
        lambda _: functional.contrast(X[:, 0], G[:1, 0]),
        "`adversarial`", "shape", "`order1`", "(2, 5, 7)", "(1, 5, 7)",
    ),
    "maths: passes": error(
        lambda _: functional.normgrad_order1(X, G, X, X, X, G, epsilon=1.0, h=1.0),
        "`g_plus`", "shape", "`g`", "(2, 3, 5, 7)", "(2, 4, 5, 7)", "same", "all passes|every pass|each pass",
    ),
    "maths: h": error(
        lambda _: functional.normgrad_order1(X, G, X, G, X, G, epsilon=1.0, h=0.0),
        "`h`", POSITIVE, "infinity|inf", "Hessian", "0.0",
    ),
    "maths: output of a convolution": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=3),
        "`g`", "(2, 3, 5)", "(2, 4, 5, 7)", "(2, 3, 5, 7)", "gradient", "convolution*", "output",
    ),
    "maths: output of a transposed one": error(
        lambda _: functional.normgrad_conv_transpose(X, G, kernel_size=3),
        "`g`", "2", "(7, 9)", "(7, 9)", "(2, 4, 5, 7)", "(2, 3, 5, 7)", "gradient", "transposed convolution*", "output",
    ),
    "maths: groups": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, groups=2),
        "`groups`", "divi*", "3", "`g`", "2",
    ),
    "maths: padding_mode": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, padding_mode="same"),
        "`padding_mode`", "'zeros', 'reflect', 'replicate', 'circular'", "'same'",
    ),
    "maths: padding": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, padding="full"),
        "`padding`", "number", "axis", "'same'", "'valid'", "'full'",
    ),
    "maths: per axis": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=1, stride=0),
        "`stride`", "1", "2", "0",
    ),
    "maths: window": error(
        lambda _: functional.normgrad_conv(X, G, kernel_size=9),
        "`kernel_size`", "fit*|inside|within", "(5, 7)", "(9, 9)", "dilation", "(1, 1)", "padding", "[(0, 0), (0, 0)]",
    ),
    "maths: no maps to combine": error(
        lambda _: functional.combine([], 4),
        "`maps`", "at least one layer", "none", "step",
    ),
    "maths: what is combined": error(
        lambda _: functional.combine([X.long()], 4),
        "`maps`", "floating-point", "one, two or three", "torch.int64", "(2, 4, 5, 7)", "dict", "list",
    ),
    "maths: maps of other images": error(
        lambda _: functional.combine([X, X[:1]], 4),
        "`maps`", "as many images", "axes", "(2, 4, 5, 7), (1, 4, 5, 7)", "same", "images",
    ),
    "maths: signed maps are not combined": error(
        lambda _: functional.combine([X - 100.0], 4),
        "`maps`", "from 0 up", "negative", "signed", "combined",
    ),
    "maths: size": error(
        lambda _: functional.combine([X.abs()], (4, 4)),
        "`size`", "whole number*", "3", "(4, 4)", "images",
    ),
    # Pictures
    "picture: scale": error(
        lambda _: scale_maps(X[:, 0].numpy(), "global"),
        "`scale`", "'robust', 'image', 'shared'", "'global'",
    ),
    "picture: maps": error(
        lambda _: Sheet(input_tiles(images().numpy())).panel(X[:1, 0].numpy()),
        "`maps`", "2", EACH_IMAGE, "1",
    ),
    "page: a tag twice": error(
        lambda _: Page(0, scalars={"a": 1.0}, maps={"a": X.numpy()}),
        "`page`", "tag", ONCE, "'a'", "2",
    ),
    "raw maps: another version": error(
        lambda _: raw_maps.decode(raw_maps.encode(X.numpy()).replace(b'"version":1', b'"version":9')),
        "`data`", "version 1", "version 9",
    ),
    # Before training
    "setup: a probe and manual optimisation": error(
        lambda here: here.train(OwnSteps(), probe="train"),
        *write_a_loss("`probe`", "same images", "training"),
    ),
    "setup: normgrad_loss": error(
        lambda here: here.train(Lit(normgrad_loss=3), **ORDER1),
        "`normgrad_loss`", "method", "`normgrad_loss(self, batch)`", "Lit", "3",
    ),
    "setup: manual optimisation": error(
        lambda here: here.train(OwnSteps(), **ORDER1),
        *write_a_loss("`order1_every_n_steps`", "order-1"),
    ),
    "setup: manual optimisation, compiled": error(
        lambda here: here.train(OwnSteps(compiled(network()))),
        *write_a_loss("`layers`", "compiled"),
    ),
    "setup: dataloader_iter": error(
        lambda here: here.train(FromIterator(), **ORDER1),
        "`order1_every_n_steps`", "order-1", "batch", "`training_step`", "FromIterator", "`dataloader_iter`",
        "batch", DO_WITHOUT,
    ),
    "setup: sharded": error(
        lambda here: here.train(trainer={"strategy": FSDPStrategy("cpu")}, **ORDER1),
        "`order1_every_n_steps`", "order-1", "weights", "one process|single process|each process", "FSDPStrategy",
        DO_WITHOUT, "order-0|order 0",
    ),
    "setup: a layer": error(
        lambda here: here.train(layers="net.stage4"),
        "`layers`", "'net.stage4'", "Nearest names: net.act, net.head, net.flat, net, net.pool",
    ),
    "setup: all compiled": warning(
        lambda here: here.before_torch_2_6().train(compiled(Lit()), layers="auto"),
        "nothing|cannot|not|no", "module", "compiled", "torch 2.6",
    ),
    "setup: all compiled, manual optimisation": warning(
        lambda here: here.train(compiled(OwnSteps()), layers="auto"),
        "nothing|cannot|not|no", "module", "compiled", *write_a_loss("`layers`", "compiled"),
    ),
    "setup: the network compiled, manual optimisation": warning(
        lambda here: here.train(with_compiled_net(OwnSteps()), layers="auto"),
        *NO_LAYER_GETS_A_GRADIENT, "compiled", "border*|boundar*|in and out", *write_a_loss("`layers`", "compiled"),
    ),
    "setup: a logger without images": warning(
        lambda here: here.train(trainer={"logger": OwnLogger()}),
        "cannot|not|no", "images", "OwnLogger", "…/normgrad",
    ),
    "log_maps: no logger": error(
        lambda _: log_maps(None, {}, None, 0),
        "`logger`", "Lightning", "Fabric", "`SummaryWriter`", "folder", "'NoneType'",
    ),
    "log_maps: no maps": error(
        lambda here: log_maps(here.folder, [torch.ones(1, 2, 2)], None, 0),
        "`maps`", "tensor", "layer*", "name", "'list'",
    ),
    "log_maps: no images": error(
        lambda here: log_maps(here.folder, {"a": torch.ones(1, 2, 2)}, [1], 0),
        "`images`", "tensor", "None", "'list'",
    ),
    "log_maps: contrast": error(
        lambda here: log_maps(here.folder, {"a": -torch.ones(1, 2, 2)}, None, 0),
        "`maps`", "0", "negative", "contrast", "`signed=True`",
    ),
    "setup: loggers that cannot be looked at": failed(
        lambda here: here.broken("writers_for").train(),
        "logger*", GOES_ON, "RuntimeError: we are broken",
    ),
    # The environment
    "environment: neither on nor off": error(
        lambda here: here.asked("maybe").train(),
        "`NORMGRAD`", "1", "0", "environment", "'maybe'",
    ),
    "environment: off": info(
        lambda here: here.asked("0").train(),
        "NORMGRAD=0", "environment", "NormGradCallback", OFF,
    ),
    "environment: on, beside a callback of the script": info(
        lambda here: here.asked(NORMGRAD_SCALE="shared").train(enabled=False),
        "NORMGRAD=1", "no|not", "NormGradCallback", "script", "own|already", "NORMGRAD_SCALE", "ignored",
    ),
    "environment: flags without the switch": Case(
        lambda here: here.asked("", NORMGRAD_SCALE="shared").trainer(),
        UserWarning,
        ("NORMGRAD_SCALE", "no effect|ignored", "NORMGRAD is not|NORMGRAD is unset", "NORMGRAD=1"),
    ),
    "environment: something of ours is broken": warning(
        unloadable,
        "load*|import*", GOES_ON, "without", "ModuleNotFoundError", "normgrad_lightning.switch.environment_callback",
    ),
    "environment: no such flag": error(
        lambda here: here.asked(NORMGRAD_LAYER="a").trainer(),
        "`NORMGRAD_LAYER`", NO_SUCH_FLAG, "NORMGRAD_LAYERS",
    ),
    "environment: nothing like a flag": error(
        lambda here: here.asked(NORMGRAD_XYZZY="a").trainer(),
        "`NORMGRAD_XYZZY`", NO_SUCH_FLAG, VARIABLES,
    ),
    "environment: no whole number": error(
        lambda here: here.asked(NORMGRAD_EVERY_N_STEPS="1.5").trainer(),
        "`NORMGRAD_EVERY_N_STEPS`", WHOLE_NUMBER, "'1.5'",
    ),
    "environment: too small": error(
        lambda here: here.asked(NORMGRAD_EVERY_N_STEPS="0").trainer(),
        "`every_n_steps`", WHOLE_NUMBER, "1", "0", "`enabled=False`", "environment", "NORMGRAD_EVERY_N_STEPS=0",
    ),
    "environment: neither yes nor no": error(
        lambda here: here.asked(NORMGRAD_PER_IMAGE="jein").trainer(),
        "`NORMGRAD_PER_IMAGE`", "1", "0", "'jein'",
    ),
    "environment: no number": error(
        lambda here: here.asked(NORMGRAD_MEAN="0.5,grey").trainer(),
        "`NORMGRAD_MEAN`", "number", "commas", "none", "'0.5,grey'",
    ),
    "environment: none of the choices": error(
        lambda here: here.asked(NORMGRAD_TARGET="inputs").trainer(),
        "`NORMGRAD_TARGET`", "'output', 'input', 'weight'", "'inputs'",
    ),
    "environment: one of the choices twice": error(
        lambda here: here.asked(NORMGRAD_ORDER1_MAPS="contrast,contrast").trainer(),
        "`order1_maps`", KINDS_OF_ORDER1, ONCE, "['contrast', 'contrast']",
        "environment", "NORMGRAD_ORDER1_MAPS=contrast,contrast",
    ),
    "environment: no such layer": error(
        lambda here: here.asked(NORMGRAD_LAYERS="net.cnv").trainer().fit(Lit(), loader()),
        "`layers`", "'net.cnv'", "Nearest names: net.conv, net.act, net, net.pool, net.head",
        "environment", "NORMGRAD_LAYERS=net.cnv",
    ),
    "environment: a probe that the script cannot give": warning(
        lambda here: here.asked(NORMGRAD_PROBE="train").trainer().fit(TrainsItself(), loader()),
        "ignores", "NORMGRAD_PROBE", "training goes on", "without a probe",
        *write_a_loss("`probe`", "same images", name="TrainsItself"),
    ),
    "environment: order 1 that the script cannot give": warning(
        lambda here: here.asked(NORMGRAD_ORDER1_EVERY_N_STEPS="1").trainer().fit(TrainsItself(), loader()),
        "ignores", "NORMGRAD_ORDER1_EVERY_N_STEPS", "training goes on", "order-0",
        *write_a_loss("`order1_every_n_steps`", "order-1", name="TrainsItself"),
    ),
    # Functions of a model and a batch
    "loss_fn: arguments in another order": error(
        lambda _: order0_maps(network(), (images(), labels()), cross_entropy, "conv"),
        "`loss_fn`", "function of the model and a batch", "'tuple'", "lambda model, batch",
    ),
    "loss_fn: a module of torch": error(
        lambda _: order1_maps(network(), nn.CrossEntropyLoss(), (images(), labels()), "conv"),
        "`loss_fn`", "function of the model and a batch", "'CrossEntropyLoss'", "lambda model, batch",
    ),
    "score_fn: no scalar": error(
        lambda _: grad_cam_maps(network(), images(), "conv", score_fn=lambda model, x: model(x)[:, 0]),
        "`score_fn`", "scalar", "(2,)", "`.mean()`",
    ),
    "log_maps: a tag that is no text": error(
        lambda here: log_maps(here.folder, {"a": images()[:, 0]}, images(), 0, tag=None),
        "`tag`", "text", "None",
    ),
    "log_maps: a tag that leaves its folder": error(
        lambda here: log_maps(here.folder, {"a": images()[:, 0].abs()}, images(), 0, tag=".."),
        "`tag`", "slashes", "'../00_a'",
    ),
    # Notebooks
    "figure: before the first event": error(
        lambda _: NormGradCallback().figure(),
        "`figure`", "no maps", "after", "`trainer.fit`",
    ),
    "figure: another kind": error(
        lambda _: latest_figure({"order0": None}, "contrast", Look()),
        "`kind`", "'order0'", "'contrast'",
    ),
    # The command
    "command: no colon": error(
        lambda _: find("torchvision.models"),
        "`torchvision.models`", "package.module:Name", "file.py:Name", "torchvision.models:resnet18", "train.py:*",
    ),
    "command: a file without a name": error(
        lambda here: find(str(here.written("a.py", b"class Net: pass"))),
        "`…/a.py`", "file.py:Name", "name", "missing", "…/a.py:Net",
    ),
    "command: no such script": error(
        lambda here: find(f"{here.written('train.py', b'').parent}/tain.py:Net"),
        "`…/tain.py:Net`", NO_SUCH_FILE, "train.py",
    ),
    "command: no such name in a script": error(
        lambda here: find(f"{here.written('07-a.py', b'class LitModel: pass')}:LitModle"),
        "`…/07-a.py:LitModle`", "no|not", "'LitModle'", "LitModel",
    ),
    "command: no such module": error(
        lambda _: find("no.such:Thing"),
        "`no.such:Thing`", "no module", "'no'", "import", "folder",
    ),
    "command: no such name": error(
        lambda _: find("collections:OrderdDict"),
        "`collections:OrderdDict`", "collections", "no|not", "'OrderdDict'", "OrderedDict", "UserDict",
    ),
    "command: no argument": error(
        lambda _: arguments(["a"]),
        "`--arg`", "name=value", "'a'",
    ),
    "command: arguments that do not fit": error(
        lambda _: build("torch.nn:Conv2d", {"in_channels": 3}),
        "`torch.nn:Conv2d`", "missing", "'out_channels'", "`--arg name=value`",
    ),
    "command: nothing to train": error(
        lambda _: build("builtins:dict", {}),
        "`builtins:dict`", "torch.nn.Module", "'dict'",
    ),
    "command: no such checkpoint": error(
        lambda here: load_trained(here.folder / "a.ckpt", "torch.nn:ReLU", {}),
        "`…/a.ckpt`", NO_SUCH_FILE,
    ),
    "command: no checkpoint": error(
        lambda here: load_trained(here.written("a.ckpt", b"abc"), "torch.nn:ReLU", {}),
        "`…/a.ckpt`", "torch cannot read|no checkpoint|not a checkpoint", "checkpoint|torch",
    ),
    "command: half a checkpoint": error(
        lambda here: load_trained(here.written("a.ckpt", b"PK\x03\x04abc"), "torch.nn:ReLU", {}),
        "`…/a.ckpt`", "torch cannot read|no checkpoint|not a checkpoint", "checkpoint|torch",
    ),
    "command: a checkpoint with code": error(
        lambda here: load_trained(here.saved({"a": SimpleNamespace()}), "torch.nn:ReLU", {}),
        "`…/a.ckpt`", "tensors", "types.SimpleNamespace", "load*", "run|runs|execute*", "trust", "`--unsafe`",
    ),
    "command: a checkpoint without names": error(
        lambda here: load_trained(here.saved([1]), "torch.nn:ReLU", {}),
        "`…/a.ckpt`", "weights", "name", "'list'",
    ),
    "command: other weights": error(
        lambda here: load_trained(here.saved({"bias": torch.ones(1)}), "torch.nn:ReLU", {}),
        "`…/a.ckpt`", "weights", "not", "`torch.nn:ReLU`", "`--arg name=value`", "Unexpected key(s)", '"bias"',
    ),
    "command: a checkpoint without a class": error(
        lambda here: load_trained(here.saved({"state_dict": {}}), None, {}),
        "`…/a.ckpt`", "weights", "not", "class", "`--module train.py:LitModel`",
    ),
    "command: a checkpoint that names a class": error(
        lambda here: load_trained(here.saved({"hyper_parameters": {"_class_path": "os.path.Net"}}), None, {}),
        "`…/a.ckpt`", "names|name", "class", "run|runs|execute*", "`--module os.path:Net`",
    ),
    "command: a module beside none of a checkpoint": error(
        lambda here: main(["layers", "torch.nn:ReLU", "--module", "torch.nn:Tanh", "--traceback"]),
        "`--module`", "checkpoint", "'torch.nn:ReLU'", "one of them",
    ),
    "command: a folder": error(
        lambda here: load_trained(here.folder, "torch.nn:ReLU", {}),
        "`…`", "folder",
    ),
    "command: a mean for other channels": error(
        lambda here: load_images([], mean=[0.1, 0.2]),
        "`--mean`", "3", "channel*", "2",
    ),
    "command: no deviation": error(
        lambda here: load_images([], std=[0.1, 0.0, 0.1]),
        "`--std`", POSITIVE, "0",
    ),
    "command: layers without a grid": error(
        lambda _: explain(network(), images(), labels(), ["head"], ["order0"], InnerStep()),
        "`--layers`", "'head'", "(1, 5)", *NO_SPATIAL_AXIS,
    ),
    "command: an input that does not fit": error(
        lambda _: main(["layers", "torch.nn:Bilinear", *arguments_of(2, 2, 2), "--input", "1x4", "--traceback"]),
        "`--input`", "cannot|not|fail*", "1x4", "Bilinear.forward()", "'input2'",
    ),
    "command: no finite mean": error(
        lambda here: load_images([], mean=[float("nan")]),
        "`--mean`", "finite", "[nan]",
    ),
    "command: floating-point pixels": error(
        lambda here: load_images([here.drawn("a.tif", (4, 4), "F")]),
        "`…/a.tif`", "whole numbers|integer*", "pixels", "floating-point",
    ),
    "command: arguments of a module": error(
        lambda here: build(f"{__name__}:A_MODULE", {"a": 1}),
        "`--arg`", f"`{__name__}:A_MODULE`", "module already|already a module", "no arguments",
    ),
    "command: no class at all": error(
        lambda here: explain_with_labels(here, "-1"),
        "`--label`", "class*", "[-1]",
    ),
    "command: no classes": error(
        lambda here: read_classes("cats"),
        "`--classes`", "commas", "text file", "no file", "'cats'",
    ),
    "command: classes that are no text": error(
        lambda here: read_classes(str(here.written("classes.txt", b"\xff\xfe\x00"))),
        "`--classes`", "text file", "line", "'…/classes.txt'",
    ),
    "command: another number of classes": error(
        lambda here: check_number_of_classes(["cat", "dog"], 3),
        "`--classes`", "3 names", "3 classes", "2",
    ),
    "command: a name of several classes": error(
        lambda here: class_number("crane", ["crane", "dog", "crane"]),
        "`--label`", "one class", "'crane'", "several", "number",
    ),
    "command: a name without names": error(
        lambda here: class_number("cat", None),
        "`--label`", "number", "not known", "'cat'", "`--classes`",
    ),
    "command: no class of this name": error(
        lambda here: class_number("cta", ["cat", "dog"]),
        "`--label`", "name", "number", "'cta'", "cat",
    ),
    "command: no numbers": error(
        lambda here: _numbers("a,b"),
        "numbers", "commas", "'a,b'",
        kind=ArgumentTypeError,
    ),
    "command: no size": error(
        lambda here: _size("3x4x5"),
        "HEIGHTxWIDTH", "'3x4x5'",
        kind=ArgumentTypeError,
    ),
    "command: no such image": error(
        lambda here: load_images([here.folder / "a.png"]),
        "`…/a.png`", NO_SUCH_FILE,
    ),
    "command: no image": error(
        lambda here: load_images([here.written("a.png", b"abc")]),
        "`…/a.png`", "Pillow cannot read|no image|not an image", "image|Pillow",
    ),
    "command: images of several sizes": error(
        lambda here: load_images([here.drawn("a.png", (4, 6)), here.drawn("b.png", (6, 4))]),
        "`--size`", "size*", "4x6, 6x4", "HEIGHTxWIDTH",
    ),
    "command: no classifier": error(
        lambda _: explain(network()[:2], images(), labels(), ["conv"], ["order0"], InnerStep()),
        "`--module`", "score*", "(N, classes)", "(1, 4, 8, 8)", "loss",
        "`normgrad_loss(self, batch)`", "`grad_cam`", "`--maps`", "`--label`",
    ),
    "command: no such class": error(
        lambda _: explain(network(), images(), labels() + 4, ["conv"], ["grad_cam"], InnerStep()),
        "`--label`", "0", "4", "5 classes", "5",
    ),
    "command: another number of labels": error(
        lambda here: explain_with_labels(here, "1", "2"),
        "`--label`", "one", "1", "image*", "2",
    ),
    # While training
    "run: a layer that cannot be read": warning(
        lambda here: here.train(layers="net.head"),
        "'net.head'", "(2, 5)", *NO_SPATIAL_AXIS,
    ),
    "run: the same as an error": error(
        lambda here: here.train(layers="net.head", on_error="raise"),
        "NormGrad", "'net.head'", "(2, 5)", *NO_SPATIAL_AXIS,
        kind=RuntimeError,
    ),
    "run: the same, where warnings are errors": Case(
        train_with_warnings_as_errors,
        logging.WARNING,
        ("NormGrad", "'net.head'", "(2, 5)", *NO_SPATIAL_AXIS),
    ),
    "run: unseen": warning(
        train_unseen,
        *AS_CALLED, "training starts|training begins|start of training",
    ),
    "run: unseen, order 1": warning(
        lambda here: train_unseen(here, layers="auto", **ORDER1),
        *AS_CALLED, "training starts|training begins|start of training",
    ),
    "run: unseen on single images": failed(
        lambda here: here.train(Lit(step=unseen_if_single), layers="auto", **ORDER1),
        "pass", GOES_ON, "NothingToRead: `layers`", *AS_CALLED,
    ),
    "run: a map of zeros": warning(
        lambda here: here.train(Lit(step=lambda module, batch: 0 * cross_entropy(module.net, batch))),
        "'net.conv'", "zero", "no gradient", "first step", "head", "zero", "class token", "earlier layer",
    ),
    "run: no backward pass": warning(
        lambda here: here.train(OwnSteps()),
        "no maps", "no backward pass", "steps",
    ),
    "run: not finite": warning(
        lambda here: here.train(Lit(step=lambda module, batch: torch.nan * cross_entropy(module.net, batch))),
        "skip*", "gradients", "not finite|non-finite|infinite", "fp16", "`callback.skipped`",
    ),
    "run: order-1 maps of zeros": warning(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: 0 * loss)), **ORDER1),
        "order-1 maps", "images", "zero", "inner step", "smaller", "`epsilon`",
    ),
    "run: no validation for the probe": warning(
        lambda here: here.train(probe="val"),
        '`probe="val"`', "first validation batch", "none|no", "`trainer.fit`", "validation data", '`probe="train"`',
    ),
    "run: a probe of one class": warning(
        one_class_validated,
        "one class", "validation batches", "no other", "`Trainer(num_sanity_val_steps=8)`", "`probe=batch`",
    ),
    "run: a probe that checkpoints cannot keep": warning(
        save_probe,
        "not", "probe", "checkpoints", "tensors, numbers, text, lists, tuples and dicts", "resumed", "anew|new",
    ),
    # What fails while training
    "failed: cutting a batch for the probe": failed(
        lambda here: here.train(batch=(images(), labels(), torch.ones(9, 6)), probe="train"),
        "images", "probe", GOES_ON, 'ValueError: `probe="train"`', "single images", "`2`", "(9, 6)", "2",
        "in code", "`probe=batch`",
    ),
    "failed: a pass on the probe": failed(
        lambda here: here.train(Lit(more=iter([1])), probe="train"),
        "pass", "probe", GOES_ON, *AN_ITERATOR,
    ),
    "failed: order-1 passes on the probe": failed(
        lambda here: here.train(probe=(images(), labels(), torch.ones(9, 6)), **ORDER1),
        "order-1", "probe", GOES_ON, "CannotSlice", *cannot_cut("`2`", "(9, 6)", "2"),
    ),
    "failed: the film": failed(
        film_without_webp,
        "film", GOES_ON, "RuntimeError", "Pillow", "WebP", "install|update",
    ),
    "failed: on single images": failed(
        lambda here: here.train(batch=(images(), labels(), torch.ones(9, 6)), **ORDER1),
        "order-1", "single images", GOES_ON, "CannotSlice", *cannot_cut("`2`", "(9, 6)", "2"),
    ),
    "failed: on the batch": failed(
        lambda here: here.train(Lit(step=only_when_training(torch.Tensor.detach)), per_image=False, **ORDER1),
        "order-1", GOES_ON, "ValueError: `training_step`", "loss", "depend*", "parameters", "not|no", *IN_ITS_GRAPH,
    ),
    "failed: beside other processes": failed(
        train_beside_others,
        "order-1", GOES_ON, "RuntimeError", "c10d.allreduce_.default", "one process|single process", RETURN_IT,
    ),
    "failed: an iterator": failed(
        lambda here: here.train(Lit(more=iter([1])), per_image=False, **ORDER1),
        "order-1", GOES_ON, *AN_ITERATOR,
    ),
    "failed: a rehearsal": failed(
        lambda here: here.train(Lit(compiled(network()), more=iter([1]))),
        "rehears*", "training step", GOES_ON, *AN_ITERATOR,
    ),
    "failed: attaching": failed(
        lambda here: here.train(Lit(closed_network())),
        "attach*", "hooks", GOES_ON, "RuntimeError: no hooks here",
    ),
    "failed: the loss scale": failed(
        lambda here: here.train(trainer={"plugins": with_scaler()}),
        "loss scale", GOES_ON, "RuntimeError: no scale",
    ),
    "failed: a step without loss": failed(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: None)), **ORDER1),
        "pass", GOES_ON, "NoLoss", *NO_LOSS, "None", RETURN_IT,
    ),
    "failed: a dict without loss": failed(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: {"los": loss})), **ORDER1),
        "pass", GOES_ON, "NoLoss", *NO_LOSS, "dict", "['los']", RETURN_IT,
    ),
    "failed: a loss for each image": failed(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: loss.expand(2))), per_image=False, **ORDER1),
        "order-1", GOES_ON, "ValueError", *NO_LOSS, "(2,)", RETURN_IT,
    ),
    "failed: a loss that is no tensor": failed(
        lambda here: here.train(Lit(step=only_when_training(lambda loss: 0.5)), per_image=False, **ORDER1),
        "order-1", GOES_ON, "ValueError", *NO_LOSS, "0.5", RETURN_IT,
    ),
    "failed: reading": failed(
        lambda here: here.broken("signal").train(images="hardest"),
        "reading", "maps", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: collecting": failed(
        lambda here: here.train(mean=[0.5, 0.5], trainer={"logger": TensorBoardLogger(here.folder)}, views="patches"),
        "collect*", "patches", GOES_ON, "ValueError: `mean`", "3", "channel*", "2", "`mean`", "normalised|normalized",
    ),
    "failed: collecting from a batch": failed(
        lambda here: here.broken("coarse").train(trainer={"logger": TensorBoardLogger(here.folder)}, views="patches"),
        "collect*", "batch", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: drift": failed(
        lambda here: here.broken("drift").train(
            trainer={"logger": TensorBoardLogger(here.folder)}, views="curves", probe="train"
        ),
        "draw*", "drift", "probe", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: drawing": failed(
        lambda here: here.train(mean=[0.5, 0.5], trainer={"logger": TensorBoardLogger(here.folder)}, views="panels"),
        "draw*", GOES_ON, "ValueError: `mean`", "3", "channel*", "2", "`mean`", "normalised|normalized",
    ),
    "failed: writing": failed(
        lambda here: here.with_little_room().train(trainer={"logger": TensorBoardLogger(here.folder)}),
        "writing", "TensorBoard (…/lightning_logs/version_0)", GOES_ON,
        "OSError: [Errno 28]", "10.0 MB", "left|free", "disk", "free", "'…/lightning_logs/version_0'",
    ),
    "failed: writing to a file with a limit": failed(
        lambda here: here.with_small_files().train(trainer={"logger": TensorBoardLogger(here.folder)}),
        "writing", "TensorBoard (…/lightning_logs/version_0)", GOES_ON,
        "OSError: [Errno 27]", "0.0 MB", "ulimit -f", "raise|increase", "'…/lightning_logs/version_0/events",
    ),
    "failed: looking at the model": failed(
        lambda here: here.broken("must_rehearse").train(),
        "the model", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: beginning an event": failed(
        lambda here: here.train(OddLoss()),
        "beginning an event", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: the names of classes": failed(
        lambda here: here.trainer(callbacks=[NormGradCallback()]).fit(Lit(), DataLoader(OddNames(), batch_size=None)),
        "names of classes", GOES_ON, "RuntimeError: nobody knows",
    ),
    "failed: the last step": failed(
        end_without_notice,
        "last step", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: ending an event": failed(
        lambda here: here.broken("ways_to").train(),
        "ending an event", GOES_ON, "RuntimeError: we are broken",
    ),
    "failed: manual since training began": failed(
        lambda here: here.train(TurnsManual(), **ORDER1),
        "order-1", "single images", GOES_ON, "ValueError", *write_a_loss("pass", name="TurnsManual"),
    ),
    "failed: a loss that needs the batch": failed(
        lambda here: here.train(Lit(step=normalised_over_the_batch), **ORDER1),
        "order-1", "single images", GOES_ON, "NeedsBatch: `per_image`", "single images",
        "alone fails", "ValueError", "Expected more than 1 value", "batch does not", *NEEDS_BATCH,
    ),
    "failed: resuming": failed(
        lambda _: NormGradCallback().load_state_dict({"last_event": 5}),
        "schedule", "checkpoint", "version", GOES_ON, "KeyError: 'last_order1'",
    ),
    # What is read, and where it goes
    "info: nowhere": info(
        lambda here: here.train(layers="auto", every_n_steps=3),
        "NormGrad", "net.conv", "(auto)", "every 3 steps", "no logger|without a logger", "panels", "`callback.maps`",
    ),
    "info: nowhere, for the environment": info(
        lambda here: here.asked().trainer(fast_dev_run=3).fit(Lit(), loader()),
        "NormGrad", "net.conv", "(auto)", "every 100 steps", "no logger", "panels",
    ),
    "info: two places": info(
        lambda here: here.train(trainer={"logger": [TensorBoardLogger(here.folder, n) for n in "ab"]}),
        "NormGrad", "net.conv", "every step", "pictures", "TensorBoard (…/a/version_0)", "TensorBoard (…/b/version_0)",
    ),
    "info: order 1": info(
        lambda here: here.train(**ORDER1),
        "NormGrad", "net.conv", "every step",
        "order-1 maps", "order1, adversarial, contrast", "every step", "inner step", EACH_IMAGE,
        "no logger|without a logger", "`callback.maps`",
    ),
    "info: order 1 of the batch": info(
        lambda here: here.train(per_image=False, order1_every_n_steps=2, order1_maps=["contrast"]),
        "NormGrad", "net.conv", "every step",
        "order-1 maps", "contrast", "every 2 steps", "inner step", "batch",
        "no logger|without a logger", "`callback.maps`",
    ),
    "info: a probe": info(
        lambda here: here.train(probe="train"),
        "NormGrad", "net.conv", "every step", "probe", "first training batch", "pass*", "each event",
        "no logger|without a logger", "`callback.maps`",
    ),
    "info: a probe of validation": info(
        train_and_validate,
        "NormGrad", "net.conv", "every step", "probe", "first validation batch", "pass*", "each event",
        "no logger|without a logger", "`callback.maps`",
    ),
    "info: a probe given in code": info(
        lambda here: here.train(probe=(images(), labels())),
        "NormGrad", "net.conv", "every step", "probe", "in code", "pass*", "each event",
        "no logger|without a logger", "`callback.maps`",
    ),
    "info: the film": info(
        film_of_a_run,
        "NormGrad", "film", "probe", "TensorBoard (…/lightning_logs/version_0)",
    ),
    "info: compiled": info(
        lambda here: here.train(Lit(compiled(network())), layers="auto"),
        "NormGrad", "net.conv", "(auto)", "every step", "pass", "compiled",
        "no logger|without a logger", "`callback.maps`",
    ),
}  # fmt: skip


# ---------------------------------------------------------------- each message comes, once and with its meaning


class Records(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append(record)


@contextmanager
def recorded_logs() -> Iterator[list[logging.LogRecord]]:
    """What is logged inside."""
    handler, root = Records(), logging.getLogger()
    root.addHandler(handler)
    try:
        yield handler.kept
    finally:
        root.removeHandler(handler)


def provoked(case: Case, here: Here) -> list[str]:
    """What a user gets of that kind: the text of the error, all our warnings, or all that we log."""
    here.patch.setattr(logging.getLogger("pytorch_lightning"), "propagate", True)
    with warnings.catch_warnings(record=True) as caught, recorded_logs() as records:
        warnings.simplefilter("always")
        try:
            case.provoke(here)
        except Exception as error:
            if not is_kind(case, Exception) or not isinstance(error, case.kind):
                raise
            return [str(error)]
    if is_kind(case, Warning):
        return [str(w.message) for w in caught if "normgrad" in str(w.message).lower()]
    logged = [record.getMessage() for record in records if record.levelno == case.kind]
    return [text for text in logged if "NormGrad" in text]


def is_kind(case: Case, kind: type[Exception]) -> bool:
    return isinstance(case.kind, type) and issubclass(case.kind, kind)


class Provoked:
    """The messages of each case, which is provoked once for all tests."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.known: dict[str, list[str]] = {}

    def __getitem__(self, name: str) -> list[str]:
        if name not in self.known:
            folder = self.folder / str(len(self.known))
            folder.mkdir(exist_ok=True)
            with pytest.MonkeyPatch.context() as patch:
                texts = provoked(CASES[name], Here(folder, patch))
            self.known[name] = [text.replace(str(folder), "…") for text in texts]
        return self.known[name]

    def all(self) -> dict[str, str]:
        """The message of each case that has one; what is wrong with the others is told by the test of each case."""
        texts: dict[str, str] = {}
        for name in CASES:
            with suppress(Exception):
                texts[name] = self[name][0]
        return texts


@pytest.fixture(scope="module")
def messages_of(tmp_path_factory):
    return Provoked(tmp_path_factory.mktemp("messages"))


@cache
def expression(fragment: str) -> re.Pattern[str]:
    """What finds a fragment: whole words and numbers, in upper or lower case."""
    alternatives = []
    for words in fragment.split("|"):
        before = r"(?<![\w.])" if words[0].isdigit() else r"(?<!\w)" if words[0].isalpha() else ""
        after = r"(?!\w|\.\d)" if words[-1].isdigit() else r"(?!\w)" if words[-1].isalpha() else ""
        alternatives.append(before + re.escape(words).replace(r"\*", r"\w*") + after)
    return re.compile("|".join(alternatives), re.IGNORECASE)


def unsaid(says: Sequence[str], text: str) -> str | None:
    """The first of these that does not occur in a text after those before it."""
    text, place = " ".join(text.split()), 0
    for fragment in says:
        found = expression(fragment).search(text, place)
        if found is None:
            return fragment
        place = found.end()
    return None


@pytest.mark.parametrize("name", CASES)
def test_each_message_comes_once_and_has_its_meaning(name, messages_of):
    texts = messages_of[name]
    assert len(texts) == 1, texts
    missing = unsaid(CASES[name].says, texts[0])
    assert missing is None, f"{missing!r} is missing, or not in this order, in: {texts[0]}"


def test_fragments_are_whole_words_and_numbers_in_their_order():
    text = "`epsilon`: expected a number above 0,\n    but got 2.50 (Infinite).  Use `other=1`."
    assert unsaid(("`epsilon`", "above 0|positive", "2.50", "use `other=1`"), text) is None
    assert unsaid(("positive|ABOVE 0", "exp*"), text) == "exp*"  # order
    for absent in ("2", "2.5", "50", "finite", "`other`", "numb"):
        assert unsaid((absent,), text) == absent


def test_no_case_fits_the_message_of_another(messages_of):
    texts = messages_of.all()
    weak = [
        f"{name!r} would take the message of {other!r}: {text}"
        for name, of_name in texts.items()
        for other, text in texts.items()
        if CASES[name].kind == CASES[other].kind and of_name not in text and unsaid(CASES[name].says, text) is None
    ]
    assert not weak, "\n".join(weak)


# ---------------------------------------------------------------- all messages are written in one way


SOMEONE_ELSES = ("we are broken", "no hooks here", "no scale", "None in sys.modules")
"""How errors end that are not ours, where a message ends by quoting one."""


def starts_with_its_argument(case: Case, text: str) -> bool:
    """Whether an error that is about an argument begins with that, in backticks; also where a warning quotes it."""
    if is_kind(case, ValueError) or is_kind(case, IndexError):
        return re.match(r"`[^`]+`(, `[^`]+`)*: ", text) is not None
    return re.search(r"ValueError: (?!`)", text) is None


def has_no_archaic_turn(case: Case, text: str) -> bool:
    """Whether it does without "for" as a conjunction, and the like."""
    return re.search(r", for (?!example|instance)|\bof ours\b|\bis told\b", text) is None


def ends_as_a_sentence_or_with_code(case: Case, text: str) -> bool:
    last_line = text.rstrip().splitlines()[-1]
    is_code = last_line.startswith("    ") or last_line.endswith(("`", "'", '"'))
    return is_code or last_line.endswith((".", "?", *SOMEONE_ELSES))


@pytest.mark.parametrize("rule", [starts_with_its_argument, has_no_archaic_turn, ends_as_a_sentence_or_with_code])
def test_all_messages_follow_the_style(rule, messages_of):
    broken = [f"{name}: {text}" for name, text in messages_of.all().items() if not rule(CASES[name], text)]
    assert not broken, "\n".join(broken)


# ---------------------------------------------------------------- no message of the package is missing here


CAPTIONS = ("MapKind", "text")
"""Classes and functions whose texts stand in pictures: a row of the table of kinds is made of these."""

VIEWS_WITH_WORDS = ("atlas", "drawing", "lettering", "origin", "overview", "patches")
PRINTING = ("cli/command.py", "cli/given.py", *(f"views/{name}.py" for name in VIEWS_WITH_WORDS))
"""Modules whose other texts are what was asked for, or stand in pictures: see their own tests."""

HELP = ("help", "description", "epilog", "metavar")
"""Arguments for what a command says of itself."""

KEYS = ("cause",)
"""Arguments that tell one message from another, and are not shown."""

TELLING = ("warn_once", "problem", "guard", "announce", "warn", "warning", "info")
"""Functions that give a user the texts they are called with, of one word or of many."""


def is_string(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def called(node: ast.AST) -> str | None:
    """The name of the function, method or class that is called here."""
    return getattr(node.func, "attr", getattr(node.func, "id", None)) if isinstance(node, ast.Call) else None


def no_texts(node: ast.AST) -> list[ast.AST]:
    """What below a node is no message: docstrings, parts of f-strings, help, captions, keys."""
    if isinstance(node, ast.Expr):
        return [node.value]
    if isinstance(node, ast.JoinedStr):
        return [part for part in node.values if isinstance(part, ast.Constant)]
    if isinstance(node, ast.FormattedValue):
        return [] if node.format_spec is None else list(ast.walk(node.format_spec))
    is_other = isinstance(node, ast.keyword) and node.arg in (*HELP, *KEYS)
    return list(ast.walk(node)) if is_other or called(node) in CAPTIONS else []


def given(node: ast.AST) -> Iterator[ast.AST]:
    """What a user gets from here: all that is raised, and what a telling function is called with."""
    if isinstance(node, ast.Raise):
        yield from ast.walk(node)
    elif isinstance(node, ast.Call) and called(node) in TELLING:
        for argument in (*node.args, *node.keywords):
            yield from ast.walk(argument)


def written(node: Any) -> str:
    """A string as an expression of `re`, with anything for its values."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(re.escape(part.value) if isinstance(part, ast.Constant) else ".*" for part in parts)


def messages(source: str, all_texts: bool = True) -> dict[int, list[str]]:
    """The texts for people in a module, by line: all strings with a space, and whatever is raised, warned or logged."""
    nodes = list(ast.walk(ast.parse(source)))
    others = {id(other) for node in nodes for other in no_texts(node)}
    told = {id(part) for node in nodes for part in given(node)}
    found: dict[int, list[str]] = {}
    for node in nodes:
        if not is_string(node) or id(node) in others:
            continue
        if id(node) in told or (all_texts and r"\ " in written(node)):
            found.setdefault(node.lineno, []).append(written(node))
    return found


def messages_by_place() -> Iterator[tuple[str, str]]:
    """The texts for people in the package, and the file and line of each."""
    package = Path(normgrad_lightning.__file__).parent
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package).as_posix()
        for line, texts in messages(path.read_text(encoding="utf-8"), name not in PRINTING).items():
            yield from ((f"{name}:{line}", text) for text in texts)


def test_no_message_of_the_package_is_missing_here(messages_of):
    texts = list(messages_of.all().values())
    missing = [
        f"{place}: {message}"
        for place, message in messages_by_place()
        if not any(re.search(message, text, re.DOTALL) for text in texts)
    ]
    assert not missing, "No case in `CASES` gives these:\n" + "\n".join(missing)


SOURCE = '''
"""A docstring."""
HINT = "Use " "another."
"""What follows a constant."""
ROWS = (MapKind("order2", "what a caption says", meaning=f"{HINT} or this"),)

def tell(self, x: "int", tag="a/b") -> None:
    """Another docstring."""
    why = "it is odd" if x else f"{x:.1f} MB are too few"
    with self._messenger.guard("drawing"):
        self._reasons.setdefault("key", why + "; try again")
    self._messenger.warn_once("once")
    self._messenger.announce(trainer, cause="not shown", sentence="started" + self._messenger.problem("why"))
    logging.getLogger("a.b").info("seen")
    raise ValueError(f"`x`: got {', '.join(x)}. {HINT}")
'''


def test_a_new_message_would_be_found_wherever_it_is_written():
    found = [message for of_line in messages(SOURCE).values() for message in of_line]
    readable = sorted(message.replace("\\", "") for message in found)
    assert readable == [
        ", ", ".* MB are too few", "; try again", "Use another.", "`x`: got .*. .*", "drawing", "it is odd", "once",
        "seen", "started", "why",
    ]  # fmt: skip
