"""Trains twice, with the callback and without, and tells whether any bit differs and whether the maps are right.

The maps are compared with a slow reference that shares nothing with the package: the run without the callback keeps its
weights, batch and random state at the start of each step; afterwards each of these steps is done once more, eagerly and
in float32 (in float64, if that is what was trained in), with a tap at each layer.
"""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import reference
import torch
import torch.nn.functional as F
from networks import ResNet, batch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from normgrad_lightning import NormGradCallback
from normgrad_lightning.views.catalogue import VIEWS

NUM_IMAGES = 2
EPSILON = 5e-3
LAYERS = ["net.stage1", "net.stage2", "net.stage3"]
ALL_VIEWS = tuple(name for name in VIEWS if name != "tab")  # that writes a report after each run
"""Those that are shown by default, and those on request."""


def row(group: str, setup: str, note: str = "") -> Any:
    """Marks a test as a row of the table of set-ups: what is set up, and what to know about it."""
    return pytest.mark.works_with(group, setup, note)


class Lit(pl.LightningModule):
    """A classifier with BatchNorm and dropout, that logs, counts and keeps lists as users do; no kink in its network.

    Args:
        net: makes the network.
    """

    def __init__(self, net: Callable[[], nn.Module] | None = None):
        super().__init__()
        torch.manual_seed(0)
        self.net = ResNet(dropout=0.3, smooth=True) if net is None else net()
        self.mean = MeanMetric()
        self.losses: list[Tensor] = []

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.keep(loss)
        return loss

    def keep(self, loss: Tensor) -> None:
        self.losses.append(loss.detach())
        self.mean.update(loss.detach())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=4)
        self.log("mean", self.mean, on_step=True, on_epoch=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(n: int = 24, batch_size: int = 4, **options: Any) -> DataLoader:
    return DataLoader(TensorDataset(*batch(n)), batch_size=batch_size, **{"shuffle": True, **options})


@dataclass
class Moment:
    """The start of a batch, before anything of it has happened."""

    step: int
    weights: dict[str, Tensor]
    frozen: set[str]
    batch: Any
    random: list[Any]


def random_state() -> list[Any]:
    return [torch.get_rng_state(), np.random.get_state(), random.getstate()]


def set_random_state(state: list[Any]) -> None:
    torch.set_rng_state(state[0])
    np.random.set_state(state[1])
    random.setstate(state[2])


class Moments(pl.Callback):
    """Keeps the start of each step of the run without the callback, and the moment before its last backward."""

    def __init__(self) -> None:
        self.of_step: dict[int, Moment] = {}
        self.of_backward: dict[int, Moment] = {}
        self._batch: Any = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batch = batch
        self.of_step.setdefault(trainer.global_step, self._now(trainer, pl_module))

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.of_backward[trainer.global_step] = self._now(trainer, pl_module)

    def _now(self, trainer: Any, pl_module: Any) -> Moment:
        weights = {clean(name): t.detach().clone() for name, t in pl_module.state_dict().items()}
        frozen = {clean(name) for name, p in pl_module.named_parameters() if not p.requires_grad}
        return Moment(trainer.global_step, weights, frozen, copy.deepcopy(self._batch), random_state())


class History(pl.Callback):
    """Keeps the maps that a callback shows, by the step they were shown for."""

    def __init__(self, callback: NormGradCallback) -> None:
        self.callback = callback
        self.step = -1
        self.maps: dict[int, dict[str, Tensor]] = {}
        self.order1: dict[int, dict[str, dict[str, Tensor]]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.step = trainer.global_step

    def on_train_batch_end(self, *_: Any) -> None:
        kinds = {name for name, one in self.callback.latest.items() if one.step == self.step and one.source == "batch"}
        if "order0" in kinds:
            self.maps[self.step] = self.callback.maps
        if kinds & {"order1", "adversarial", "contrast"}:
            self.order1[self.step] = self.callback.order1


class Told(pl.Callback):
    """What the run told its progress bar and its other callbacks, step by step."""

    def __init__(self) -> None:
        self.of_steps: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        told = [trainer.callback_metrics, trainer.progress_bar_metrics, trainer.logged_metrics]
        self.of_steps.append([{name: float(value) for name, value in metrics.items()} for metrics in told])
        self.of_steps.append(copy.deepcopy(outputs))


def clean(name: str) -> str:
    return name.replace("_orig_mod.", "")


@dataclass
class Run:
    """One training run, and all that it may be told apart by."""

    trainer: Any
    module: Any
    warned: list[str]
    traces: dict[str, Any]
    moments: dict[int, Moment] = field(default_factory=dict)
    backwards: dict[int, Moment] = field(default_factory=dict)
    history: History | None = None

    @property
    def callback(self) -> NormGradCallback:
        assert self.history is not None
        return self.history.callback


def traces(trainer: Any, module: Any, told: Told) -> dict[str, Any]:
    """All that two runs may be told apart by."""
    metric_states = [m.metric_state for m in module.modules() if hasattr(m, "metric_state")]
    return {
        "weights and buffers": {clean(name): t.detach().clone() for name, t in module.state_dict().items()},
        "gradients": [None if p.grad is None else p.grad.clone() for p in module.parameters()],
        "optimizers": copy.deepcopy([optimizer.state_dict() for optimizer in trainer.optimizers]),
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "scaler": trainer.precision_plugin.state_dict(),
        "random": random_state(),
        "modes": [m.training for m in module.modules()],
        "asks for gradients": [p.requires_grad for p in module.parameters()],
        "attributes": sorted(vars(module)),
        "losses": list(module.losses),
        "metrics": copy.deepcopy(metric_states),
        "told": told.of_steps,
        "logged": scalars(trainer),
        "steps": [trainer.global_step, trainer.current_epoch],
        "hooks": [hooks_on(m) for m in module.modules()],
    }


def hooks_on(module: nn.Module) -> list[int]:
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [len(vars(module)[kind]) for kind in kinds]


def event_files(trainer: Any) -> list[EventAccumulator]:
    """What each event file holds. Read together, those of one second would come in the order of their names."""
    files = sorted(Path(trainer.logger.log_dir).glob("events*"))
    accumulators = [EventAccumulator(str(file), size_guidance={"images": 0, "scalars": 0}) for file in files]
    for accumulator in accumulators:
        accumulator.Reload()
    return accumulators


def scalars(trainer: Any) -> dict[str, list[tuple[int, float]]]:
    """What the run itself logged under each tag: steps and values."""
    if not trainer.loggers or "TensorBoard" not in type(trainer.logger).__name__:
        return {}
    logged: dict[str, list[tuple[int, float]]] = {}
    for read in event_files(trainer):
        for tag in (tag for tag in read.Tags()["scalars"] if not tag.startswith("normgrad")):
            logged.setdefault(tag, []).extend((e.step, e.value) for e in read.Scalars(tag))
    return {tag: sorted(logged[tag]) for tag in sorted(logged)}


def pictures(trainer: Any) -> dict[str, list[int]]:
    """The steps of the pictures under each tag."""
    shown: dict[str, list[int]] = {}
    for read in event_files(trainer):
        for tag in read.Tags()["images"]:
            shown.setdefault(tag, []).extend(e.step for e in read.Images(tag))
    return {tag: sorted(steps) for tag, steps in shown.items()}


def panels(trainer: Any, *, probe: bool = False) -> dict[str, list[int]]:
    """The steps of the panels under each tag, with those of a probe if that is asked for; of no other pictures."""
    is_panel = re.compile(rf"normgrad_{'' if probe else '(?![^/]*probe_)'}[^/]+/\d\d_[^/]+").fullmatch
    return {tag: steps for tag, steps in pictures(trainer).items() if is_panel(tag)}


def same(a: Any, b: Any) -> bool:
    """Whether two things are the same to the last bit, also where they are not a number."""
    if isinstance(a, Tensor):
        alike = isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        return alike and torch.equal(_bytes(a), _bytes(b))
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.tobytes() == b.tobytes()
    if isinstance(a, Mapping):
        return isinstance(b, Mapping) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _bytes(t: Tensor) -> Tensor:
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def train(
    make: Callable[[], Any],
    folder: Any,
    callback: NormGradCallback | None = None,
    *,
    data: Callable[[], Any] = loader,
    callbacks: Callable[[], list[Any]] = list,
    plugins: Callable[[], list[Any]] | None = None,
    fit: Mapping[str, Any] | None = None,
    run: Callable[[Any, Any, Any], None] | None = None,
    **options: Any,
) -> Run:
    """Train a new module on new data, with `callback` or, without one, keeping each step's start.

    Args:
        make: makes the module.
        folder: for the logs.
        callback: what to watch with.
        data: makes the loader.
        callbacks: makes the other callbacks.
        plugins: makes the Trainer's plugins.
        fit: more arguments of `trainer.fit`.
        run: does something else than `trainer.fit(module, data, **fit)`.
        options: of the Trainer.
    """
    pl.seed_everything(7, verbose=False)
    module, told = make(), Told()
    own: list[Any] = [Moments()] if callback is None else [callback, History(callback)]
    trainer = pl.Trainer(
        **{
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "default_root_dir": folder,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "enable_checkpointing": False,
            "log_every_n_steps": 1,
            "callbacks": [told, *callbacks(), *own],
            "plugins": None if plugins is None else plugins(),
            **options,
        }
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if run is None:
            trainer.fit(module, data(), **(fit or {}))
        else:
            run(trainer, module, data())
    warned = [str(w.message) for w in caught if "NormGrad" in str(w.message) or "normgrad" in str(w.message)]
    module = trainer.lightning_module if trainer.lightning_module is not None else module
    result = Run(trainer, module, warned, traces(trainer, module, told))
    if callback is None:
        result.moments, result.backwards = own[0].of_step, own[0].of_backward
    else:
        result.history = own[1]
    return result


def assert_same(plain: Run, watched: Run) -> None:
    """Raise if anything that a run leaves behind differs."""
    for what in plain.traces:
        assert same(plain.traces[what], watched.traces[what]), f"{what} differ with the callback"


def watching(**flags: Any) -> NormGradCallback:
    """Order 0 at each step, order 1 at each third and the last; of the first images, for which there is a reference."""
    return NormGradCallback(
        **{
            "every_n_steps": 1,
            "order1_every_n_steps": 3,
            "num_images": NUM_IMAGES,
            "images": "first",
            "epsilon": EPSILON,
            "on_error": "raise",
            "views": ALL_VIEWS,
            **flags,
        }
    )


def twice(
    folder: Any,
    make: Callable[[], Any] = Lit,
    *,
    flags: Mapping[str, Any] | None = None,
    layers: Sequence[str] = LAYERS,
    order1_layers: Sequence[str] | None = None,
    steps: Sequence[int] | None = (0, 1, 2, 3, 4, 5),
    order1_steps: Sequence[int] | None = (0, 3, 5),
    tolerance: float = 1e-5,
    order1_tolerance: float = 1e-4,
    eager: Callable[[], Any] | None = None,
    singles: Callable[[Any], tuple[Tensor, ...]] = tuple,
    last_backward: bool = False,
    **options: Any,
) -> tuple[Run, Run]:
    """Train without and with the callback; check that no bit differs, which steps have maps, and each of the maps.

    Args:
        folder: for the logs.
        make: makes the module; it computes `loss(batch)`.
        flags: of the callback.
        layers: which layers must have maps.
        order1_layers: which must have order-1 maps, if others.
        steps: which steps must have order-0 maps; None: do not look.
        order1_steps: which steps must have order-1 maps; None: do not look.
        tolerance: how far an order-0 map may be from the reference, as a share of it, in the L2 norm.
        order1_tolerance: the same for order 1.
        eager: makes the module for the reference, if it must be made in another way.
        singles: makes tuples of tensors, which the reference can cut, of a batch; `loss` must take them too.
        last_backward: whether order-0 maps are those of the weights before the step's last backward.
        options: of `train`.

    Returns:
        Both runs, for more questions.
    """
    plain = train(make, f"{folder}/plain", **options)
    watched = train(make, f"{folder}/watched", watching(**(flags or {})), **options)
    assert_same(plain, watched)
    assert watched.history is not None
    if steps is not None:
        assert list(watched.history.maps) == list(steps)
    if order1_steps is not None:
        assert list(watched.history.order1) == list(order1_steps)
    moments = plain.backwards if last_backward else plain.moments
    for step, maps in watched.history.maps.items():
        assert list(maps) == list(layers)
        assert_close(maps, order0(moments[step], eager or make, layers), tolerance)
    for step, kinds in watched.history.order1.items():
        for kind in ("order1", "adversarial"):
            names = list(order1_layers or layers)
            assert list(kinds[kind]) == names
            wanted = order1(plain.moments[step], eager or make, names, singles, adversarial=kind == "adversarial")
            assert_close(kinds[kind], wanted, order1_tolerance)
    return plain, watched


def assert_close(maps: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    """Raise if a map is further from what is expected than this share of it."""
    for name, m in expected.items():
        seen = maps[name].to(torch.float64)
        wanted = m[:NUM_IMAGES].to(torch.float64)
        assert seen.shape == wanted.shape, name
        assert wanted.norm() > 0, name
        distance = float((seen - wanted).norm() / wanted.norm())
        assert distance <= tolerance, f"{name}: {distance:.2e} away from the reference"


def at(moment: Moment, make: Callable[[], Any]) -> Any:
    """A new module with the weights of a moment, wide enough to be a reference."""
    module = make()
    if not list(module.parameters()):
        module.configure_model()
    weights = {name: wide(t) for name, t in moment.weights.items()}
    if any(t.dtype == torch.float64 for t in weights.values()):
        module.double()
    module.load_state_dict(weights)
    for name, p in module.named_parameters():
        p.requires_grad_(name not in moment.frozen)
    return module


def with_statistics(moment: Moment, make: Any, probed: Any) -> Moment:
    """The moment on the probe, with the statistics of the probe in all BatchNorm layers that are young."""
    module = at(moment, make).eval()
    layers = [m for m in module.modules() if isinstance(m, nn.BatchNorm2d)]
    young = [layer for layer in layers if (1 - layer.momentum) ** int(layer.num_batches_tracked) > 0.01]
    for layer in young:
        layer.reset_running_stats()
        layer.momentum = None
        layer.train()
    with torch.no_grad():
        module.loss(probed)
    return replace(moment, batch=probed, weights={name: t.clone() for name, t in module.state_dict().items()})


def wide(value: Any) -> Any:
    """The same in float32 where it is in half precision."""
    if isinstance(value, Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, Mapping):
        return {key: wide(part) for key, part in value.items()}
    return type(value)(map(wide, value)) if isinstance(value, list | tuple) else value


def order0(
    moment: Moment,
    make: Callable[[], Any],
    layers: Sequence[str],
    formula: Callable[[Tensor, Tensor], Tensor] = reference.normgrad,
) -> dict[str, Tensor]:
    """The order-0 maps of a step, from the products at the output of each layer, added up over its uses."""
    module = at(moment, make).train()
    uses: dict[str, list[list[Tensor]]] = {name: [] for name in layers}
    for name in layers:
        module.get_submodule(name).register_forward_hook(tap(uses[name]))
    set_random_state(moment.random)
    module.loss(wide(copy.deepcopy(moment.batch))).backward()
    return {name: torch.stack([formula(x, g) for x, g in of]).sum(0) for name, of in uses.items()}


def tap(uses: list[list[Tensor]]) -> Callable[..., Tensor]:
    """A hook that keeps the output of a layer and its gradient; later layers may work in place on a copy."""

    def take(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        use = [output.detach().clone()]
        output.register_hook(lambda gradient: use.append(gradient.clone()))
        uses.append(use)
        return output.clone()

    return take


def order1(
    moment: Moment,
    make: Callable[[], Any],
    layers: Sequence[str],
    singles: Callable[[Any], tuple[Tensor, ...]],
    *,
    adversarial: bool,
) -> dict[str, Tensor]:
    """The order-1 maps of a step's first images, from four real passes each."""
    images = tuple(part[:NUM_IMAGES] for part in singles(wide(copy.deepcopy(moment.batch))))
    return reference.order1(
        at(moment, make),
        lambda module, single: module.loss(single),
        images,
        layers,
        epsilon=EPSILON,
        adversarial=adversarial,
    )
