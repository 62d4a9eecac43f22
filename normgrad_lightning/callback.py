"""NormGradCallback: when to look, on which images, and whom to tell. The maths and the drawing live elsewhere."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from normgrad_lightning.batches import batch_size, single_images
from normgrad_lightning.capture import NormGrad
from normgrad_lightning.checks import (
    check_choice,
    check_choices,
    check_flag,
    check_grid,
    check_whole,
)
from normgrad_lightning.environment import SWITCH, switch
from normgrad_lightning.isolation import CAN_RUN_EAGERLY
from normgrad_lightning.layers import AUTO, TARGETS, check_spec, compiled_layers, is_compiled
from normgrad_lightning.loggers import PanelWriter, panel_writers
from normgrad_lightning.order1 import EPSILON, KINDS, NotFinite, Order1, Settings, run_passes
from normgrad_lightning.panels import Look, numbered
from normgrad_lightning.passes import NothingToRead, order0_maps, trained_layers
from normgrad_lightning.render import Panel
from normgrad_lightning.telling import warn
from normgrad_lightning.training_loss import NoLoss, TrainingLoss, check_training_loss, scale_of
from normgrad_lightning.watch import Live, Rehearsal, Watch, has_compiled_anything, must_rehearse

if TYPE_CHECKING:
    from pytorch_lightning import Callback, LightningModule, Trainer
else:

    def _callbacks() -> Iterator[type]:
        """The `Callback` of each Lightning there is: they hold a copy each, and either may be imported after us."""
        for name in ("pytorch_lightning", "lightning.pytorch"):
            with suppress(Exception):  # one of the two may be broken, and nobody miss it
                yield import_module(name).Callback

    Callback = type("_Callback", tuple(_callbacks()) or (import_module("pytorch_lightning").Callback,), {})

Kind = Literal["order1", "adversarial", "contrast"]
IMAGES = {
    "first": "the first of the batch",
    "random": "drawn anew for each event, with a generator of our own",
    "hardest": "those with the most training signal",
}
ON_ERROR = {
    "warn": "a failure of ours is a warning, once; training goes on",
    "raise": "a failure of ours stops training, for debugging",
}
RANDOM_SEED = 0


class NormGradCallback(Callback):
    """Shows in TensorBoard which pixels the training signal comes from, layer by layer, while a model trains.

    Order-0 maps are read from the gradients that training computes anyway: no pass of its own, and the same bits in the
    weights with and without it. Order-1 maps, if asked for, take passes of their own at the start of a batch, which
    leave no trace. See the README for how to read them.

    Args:
        enabled: False attaches nothing and costs nothing.
        layers: `"auto"` (the last layer of each resolution), a layer's name, a glob, or a list of these.
        target: where activation and gradient are read: at the layer's output or input, or for its own weight.
        every_n_steps: optimizer steps from one event to the next; the first step is an event.
        num_images: how many images of the batch are shown.
        images: which of the batch: the first, random ones, or the hardest (those with most training signal).
        order1_every_n_steps: optimizer steps from one event with order-1 maps to the next; None: never.
        order1_maps: which: `"order1"` (what matters for training on the image), `"adversarial"` (what would degrade the
            model), `"contrast"` (the one minus the other); one, or a list of these.
        epsilon: size of order 1's inner step.
        per_image: whether each image takes an inner step of its own, or the whole batch takes one.
        second_order: False leaves order 1's Hessian term out, at half the price.
        factorised: whether order 1 takes the activation to be the same in all passes.
        mean: the mean the images were normalised with, to show them; None (with `std` None): each stretched by itself.
        std: the standard deviation they were normalised with.
        colormap: the name of a colour map in the cmap package.
        opacity: how much the strongest values hide of the image, from 0 to 1.
        scale: whether each map is drawn from its minimum to its maximum, or all images of a panel on a shared scale.
        tile_size: pixels of a tile's longer side.
        token_grid: rows and columns of a transformer's patches, if they cannot be inferred.
        channels_last: whether features are `(N, *S, C)`, if that cannot be inferred.
        on_error: whether a failure of ours is one warning, or an error (for debugging).

    Attributes:
        maps: the latest order-0 map of each layer, `(num_images, *S)`, on the CPU.
        inputs: the images they belong to, as the network saw them.
        order1: the latest maps of each layer, by kind: `order1["contrast"]["net.layer4"]`.
        order1_inputs: the images that these belong to.
        skipped: how many events had no map because a gradient was not finite.

    Example:
        >>> from pytorch_lightning import Trainer
        >>> from normgrad_lightning import NormGradCallback
        >>> trainer = Trainer(callbacks=[NormGradCallback(every_n_steps=50)], logger=False)
    """

    def __init__(
        self,
        *,
        enabled: bool = True,
        layers: str | Sequence[str] = AUTO,
        target: Literal["output", "input", "weight"] = "output",
        every_n_steps: int = 100,
        num_images: int = 8,
        images: Literal["first", "random", "hardest"] = "first",
        order1_every_n_steps: int | None = None,
        order1_maps: Kind | Sequence[Kind] = ("order1", "adversarial", "contrast"),
        epsilon: float = EPSILON,
        per_image: bool = True,
        second_order: bool = True,
        factorised: bool = True,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
        colormap: str = "inferno",
        opacity: float = 0.6,
        scale: Literal["image", "shared"] = "image",
        tile_size: int = 128,
        token_grid: Sequence[int] | None = None,
        channels_last: bool | None = None,
        on_error: Literal["warn", "raise"] = "warn",
    ) -> None:
        super().__init__()
        check_flag("enabled", enabled)
        check_spec(layers)
        check_choice("target", target, TARGETS)
        check_whole("every_n_steps", every_n_steps, 1, " To switch the callback off, set `enabled=False`.")
        check_whole("num_images", num_images, 1)
        check_choice("images", images, IMAGES)
        if order1_every_n_steps is not None:
            check_whole("order1_every_n_steps", order1_every_n_steps, 1, " None switches order-1 maps off.")
        kinds = [order1_maps] if isinstance(order1_maps, str) else order1_maps
        check_choices("order1_maps", kinds, KINDS)
        Settings(epsilon, second_order, factorised)
        check_flag("per_image", per_image)
        look = Look(
            mean=_plain(mean), std=_plain(std), colormap=colormap, opacity=opacity, scale=scale, tile_size=tile_size
        )
        check_grid(token_grid)
        check_flag("channels_last", channels_last, or_none=True)
        check_choice("on_error", on_error, ON_ERROR)
        self.enabled = enabled
        self.layers = _plain(layers)
        self.target = target
        self.every_n_steps = every_n_steps
        self.num_images = num_images
        self.images = images
        self.order1_every_n_steps = order1_every_n_steps
        self.order1_maps = tuple(kinds)
        self.epsilon = epsilon
        self.per_image = per_image
        self.second_order = second_order
        self.factorised = factorised
        self.mean = _plain(mean)
        self.std = _plain(std)
        self.colormap = colormap
        self.opacity = opacity
        self.scale = scale
        self.tile_size = tile_size
        self.token_grid = _plain(token_grid)
        self.channels_last = channels_last
        self.on_error = on_error

        self.maps: dict[str, Tensor] = {}
        self.inputs: Tensor | None = None
        self.order1: dict[str, dict[str, Tensor]] = {}
        self.order1_inputs: Tensor | None = None
        self.skipped = 0
        self._look = look
        self._inputs_of: dict[str, Tensor | None] = {}
        self._wanted = False
        self._watch: Watch | None = None
        self._writers: list[PanelWriter] = []
        self._last_event: int | None = None
        self._last_order1: int | None = None
        self._order1: Order1 | None = None
        self._order1_is_due = False
        self._excuse: NoLoss | NothingToRead | None = None
        self._chosen: list[int] | None = None
        self._event: int | None = None
        self._loss_scale = 1.0
        self._hint = ""
        self._announced = False
        self._told: set[str] = set()
        self._warned: set[str] = set()
        self._random = random.Random(RANDOM_SEED)
        self._saw_backward = False
        self._names: list[str] = []

    @property
    def state_key(self) -> str:
        """Tells callbacks of one Trainer that look at different things apart, in a checkpoint."""
        return self._generate_state_key(
            layers=self.layers,
            target=self.target,
            images=self.images,
            order1_maps=self.order1_maps,
            epsilon=self.epsilon,
            per_image=self.per_image,
            second_order=self.second_order,
            factorised=self.factorised,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on with its schedule and its random images."""
        version, numbers, gauss = self._random.getstate()
        return {
            "last_event": self._last_event,
            "last_order1": self._last_order1,
            "random": [version, list(numbers), gauss],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        with self._guard("going on with the schedule of a checkpoint (of another version?)"):
            self._last_event = state_dict["last_event"]
            self._last_order1 = state_dict["last_order1"]
            version, numbers, gauss = state_dict["random"]
            self._random.setstate((version, tuple(numbers), gauss))

    def __getstate__(self) -> dict[str, Any]:
        """What a copy carries (as for spawned processes): nothing that belongs to this one's run."""
        of_the_trainer = ("log", "log_dict")  # it sets these to methods of the module
        own = {name: value for name, value in self.__dict__.items() if name not in of_the_trainer}
        return {**own, "_watch": None, "_writers": [], "_event": None, "_order1": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out where panels go, and whether order-1 passes can have the module's loss."""
        self._wanted = stage == "fit" and self._is_wanted(trainer)
        if not self._wanted:
            return
        if self.order1_every_n_steps is not None:
            check_training_loss(trainer, pl_module, "`order1_every_n_steps`: order-1 maps")
        if trainer.global_step == 0:
            self._last_event = self._last_order1 = None
        self._writers = []
        if trainer.is_global_zero:
            with self._guard("looking at the loggers"):
                self._writers, notes = panel_writers(trainer.loggers, trainer.default_root_dir)
                for note in notes:
                    self._warn_once(note)

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Whether to look at this run: if the flag says so, and the environment does not say no."""
        if self.enabled and switch() is False:
            self._say(trainer, f"{SWITCH}=0 in the environment switches NormGradCallback off.")
            return False
        return self.enabled

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check on every rank that the layers can be had; watch them on rank 0."""
        if not self._wanted:
            return
        with self._guard("looking at the model", but=(ValueError,)):
            watch = self._choose_watch(trainer, pl_module)
            self._watch = watch if trainer.is_global_zero else None

    def _choose_watch(self, trainer: Trainer, pl_module: LightningModule) -> Watch | None:
        """Training itself where it can be read, else a rehearsal; None, and a warning, if neither can be had."""
        self._hint = ""
        if must_rehearse(pl_module, self.layers, self.target):
            try:
                return self._rehearsal(trainer, pl_module)
            except ValueError as error:
                if self.layers != AUTO:
                    raise
                self._hint = f" {error}"
        elif not CAN_RUN_EAGERLY and compiled_layers(pl_module):
            self._hint = " Before torch 2.6, nothing can be read inside of compiled code."
        if is_compiled(pl_module):
            self._complain(f"NormGrad shows nothing, for the whole module is compiled.{self._hint}")
            return None
        return Live(pl_module, self.layers, **self._options_of_watch())

    def _rehearsal(self, trainer: Trainer, pl_module: LightningModule) -> Rehearsal:
        check_training_loss(trainer, pl_module, "`layers`: maps of layers inside of compiled code")
        return Rehearsal(pl_module, self.layers, **self._options_of_watch())

    def _options_of_watch(self) -> dict[str, Any]:
        return {"num_images": self.num_images if self.images == "first" else None, **self._options()}

    def _options(self) -> dict[str, Any]:
        return {"target": self.target, "token_grid": self.token_grid, "channels_last": self.channels_last}

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin an event if one is due: run the order-1 passes, and look at the step that begins."""
        if self._watch is None:
            return
        step = trainer.global_step
        self._order1_is_due = _is_due(step, self.order1_every_n_steps, self._last_order1)
        if not self._order1_is_due and not _is_due(step, self.every_n_steps, self._last_event):
            return
        self._event, self._order1, self._chosen, self._excuse = step, None, None, None
        self._saw_backward, self._loss_scale = False, 1.0
        self._watch = self._renewed(self._watch, trainer, pl_module)
        loss = TrainingLoss(trainer, pl_module, batch_idx)
        if self._order1_is_due:
            with self._guard("the order-1 passes" + (" on single images" if self.per_image else "")):
                self._run_order1(self._watch, loss, pl_module, batch)
        with self._guard("a rehearsal of the training step" if self._watch.rehearses else "attaching the hooks"):
            self._begin_watch(self._watch, loss, pl_module, batch)

    def _renewed(self, watch: Watch, trainer: Trainer, pl_module: LightningModule) -> Watch:
        """The same watch; maybe another, if the model has other modules since, or compiled ones."""
        with self._guard("looking at the model"):
            if not watch.is_up_to_date():
                return self._choose_watch(trainer, pl_module) or watch
        return watch

    def _begin_watch(self, watch: Watch, loss: TrainingLoss, pl_module: LightningModule, batch: Any) -> None:
        if watch.rehearses:
            loss.check(pl_module)
            self._loss_scale = 1.0 / loss.scale
        try:
            watch.begin(loss, batch)
        except NoLoss as error:
            self._excuse = error

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note by how much this backward's gradients are scaled, before the scale changes."""
        if self._event is None or self._watch is None:
            return
        self._saw_backward = True
        if not self._watch.rehearses:
            with self._guard("reading the loss scale"):
                self._loss_scale = _loss_scale(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the event: take the maps, draw them, and hand them out."""
        if self._event is None or self._watch is None:
            return
        step, self._event = self._event, None
        recorder = self._watch.end()
        trained = self._saw_backward or (recorder is not None and recorder.has_gradients)
        if trained:  # else the batch was skipped: the event waits
            self._last_event = step
        if self._order1_is_due and (trained or self._order1 is not None):
            self._last_order1 = step
        with self._guard("reading the maps"):
            taken = recorder is not None and self._take_maps(recorder, trainer, pl_module)
            if trained and (taken or recorder is None):  # else training cannot be read either, and that is told
                self._tell_excuse()
            if self._take_order1() or taken:
                self._announce(trainer)
                self._show(step, order0=taken)
        if recorder is not None:
            recorder.clear()
        self._order1 = None

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the hooks off where a batch had no end, as when `on_train_batch_start` skips the rest of the epoch."""
        if self._event is not None and self._watch is not None:
            self._event = self._order1 = None
            self._watch.end()

    def _tell_excuse(self) -> None:
        """Tell why a pass of our own gave nothing for a batch that training learned from."""
        if self._excuse is not None:
            with self._guard("a pass of its own"):
                raise self._excuse

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off when training breaks off."""
        self._stop()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the model after training."""
        self._stop()

    def _stop(self) -> None:
        self._event = self._order1 = None
        if self._watch is not None:
            self._watch.end()
            self._watch = None

    def _run_order1(self, watch: Watch, loss: TrainingLoss, module: LightningModule, batch: Any) -> None:
        """Make the order-1 maps of the images to show, on the weights that this batch's own step will use."""
        options = self._options()
        loss.check(module)
        try:
            layers = watch.layers if self.layers == AUTO else self.layers
            if self.per_image:
                layers = layers or trained_layers(module, loss, *single_images(batch, [0]), **options)
                self._chosen = self._choose_beforehand(loss, module, batch, layers, options)
                batches, num_images = single_images(batch, self._chosen), None
            else:
                layers = layers or trained_layers(module, loss, batch, **options)
                batches, num_images = [batch], self.num_images if self.images == "first" else None
            settings = Settings(self.epsilon / loss.scale, self.second_order, self.factorised)
            result = run_passes(
                module, loss, batches, layers, self.order1_maps, settings, num_images=num_images, **options
            )
        except NotFinite:
            self._skip()
            return
        except (NoLoss, NothingToRead) as error:
            self._excuse = error
            return
        maps = {
            kind: {name: m.cpu() / (1.0 if kind == "contrast" else loss.scale) for name, m in of_layers.items()}
            for kind, of_layers in result.maps.items()
        }
        self._order1 = result._replace(maps=maps)

    def _choose_beforehand(
        self,
        loss: TrainingLoss,
        module: LightningModule,
        batch: Any,
        layers: str | Sequence[str],
        options: dict[str, Any],
    ) -> list[int]:
        """The places in the batch of the images to show, before training has seen it."""
        maps = order0_maps(module, loss, batch, layers, **options) if self.images == "hardest" else {}
        return self._choose_images(maps, batch_size(batch)).tolist()

    def _take_order1(self) -> bool:
        """Read the passes' result into `order1` and `order1_inputs`, for the images that are shown of this batch."""
        if self._order1 is None:
            return False
        maps, images, layers, _ = self._order1  # order 0 tells of the problems
        self._names = list(dict.fromkeys([*self._names, *layers]))
        chosen = None if self.per_image else self._chosen
        self.order1 = {kind: {name: _rows(m, chosen) for name, m in of.items()} for kind, of in maps.items()}
        self.order1_inputs = _pick(images, chosen)
        if any(not m.flatten(1).any(1).all() for m in self.order1.get("order1", {}).values()):
            self._warn_once(
                "NormGrad: order-1 maps of some images are zero: the inner step has fitted them, or they were learned "
                "before. If that goes on, a smaller `epsilon` shows more."
            )
        return True

    def _skip(self) -> None:
        self.skipped += 1
        self._warn_once(
            "NormGrad skips steps whose gradients are not finite (as after an fp16 overflow); "
            "`callback.skipped` counts them."
        )

    def _take_maps(self, recorder: NormGrad, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Read the recorder into `maps` and `inputs`; False if there is nothing to show."""
        self._names = recorder.layers
        maps = {name: _scaled(m.cpu(), self._loss_scale) for name, m in recorder.latest_maps().items()}
        totals = {name: float(m.sum()) for name, m in maps.items()}
        if not recorder.has_run and self._saw_backward:
            self._rehearse_instead(trainer, pl_module)
        self._report(recorder, totals)
        if not all(math.isfinite(totals[name]) or bool(m.isfinite().all()) for name, m in maps.items()):
            self._skip()
            return False
        if not maps:
            return False
        images = {name: recorder.images_of(name) for name in maps}
        parts = [*maps.values(), *(i for i in images.values() if i is not None)]
        count = min(map(len, parts))
        if self._chosen is None:
            self._chosen = self._choose_images(maps, count).tolist()
        chosen = [place for place in self._chosen if place < count]
        self.maps = {name: _rows(m, chosen) for name, m in maps.items()}
        self.inputs = _pick(recorder.images, chosen)
        self._inputs_of = {
            name: self.inputs if i is recorder.images else _pick(i, chosen) for name, i in images.items()
        }
        return True

    def _report(self, recorder: NormGrad, totals: Mapping[str, float]) -> None:
        """Tell what cannot be read, and what there is nothing to see in, each once."""
        for problem in recorder.new_problems(after_backward=recorder.has_run and self._saw_backward):
            self._complain(problem + self._hint)
        for name in (name for name, total in totals.items() if total == 0):
            self._warn_once(
                f"NormGrad: the map of {name!r} is zero everywhere, so no gradient reaches its locations. At the first "
                "step that is so if the head's weights start at zero; always, if the head reads a class token alone."
            )

    def _rehearse_instead(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """No layer was seen at work: they may be in compiled functions, which a rehearsal runs eagerly."""
        if isinstance(self._watch, Live) and has_compiled_anything():
            with suppress(ValueError):
                self._watch = self._rehearsal(trainer, pl_module)
                return
        self._complain(
            "NormGrad saw no layer at work: hooks work only in layers that are called as `layer(x)`, not as "
            "`layer.forward(x)`, and that are part of the model when training starts."
        )

    def _choose_images(self, maps: Mapping[str, Tensor], count: int) -> Tensor:
        """The places in the batch of the images to show, of the first `count`."""
        shown = min(count, self.num_images)
        if self.images == "random":
            return torch.tensor(self._random.sample(range(count), shown))
        if self.images == "hardest":
            return _signal(maps, count).argsort(descending=True)[:shown]
        return torch.arange(shown)

    def _announce(self, trainer: Trainer) -> None:
        """Say once which layers are read and where the panels go, as Lightning says such things."""
        if self._announced:
            return
        self._announced = True
        where = " and ".join(writer.where for writer in self._writers)
        panels = f"panels go to {where}" if where else "without a logger there are no panels, only `callback.maps`"
        how = f"{' (auto)' if self.layers == AUTO else ''} {_every(self.every_n_steps)}"
        if self._watch is not None and self._watch.rehearses:
            how += ", in a pass of its own for each event, as the model is compiled"
        self._say(trainer, f"NormGrad reads {', '.join(self._names)}{how}; {panels}.{self._about_order1()}")

    def _say(self, trainer: Trainer, sentence: str) -> None:
        """Say it once, on rank 0, where Lightning says such things."""
        if trainer.is_global_zero and sentence not in self._told:
            self._told.add(sentence)
            home = next(kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer")
            log = logging.getLogger(f"{home.split('.trainer')[0]}.normgrad")
            log.info(sentence)

    def _about_order1(self) -> str:
        if self.order1_every_n_steps is None:
            return ""
        steps = _every(self.order1_every_n_steps)
        whose = "an inner step for each image" if self.per_image else "one inner step for the whole batch"
        return f" Order-1 maps ({', '.join(self.order1_maps)}) come {steps}, with {whose}."

    def _show(self, step: int, order0: bool) -> None:
        """Draw the latest maps, and give the panels to every writer."""
        if not self._writers:
            return
        panels: list[Panel] = []
        with self._guard("drawing"):
            panels.extend(self._panels(order0))
        for writer in self._writers if panels else ():
            with self._guard(f"writing to {writer.where}"):
                writer.log_panels(step, panels)

    def _panels(self, order0: bool) -> Iterator[Panel]:
        at = "" if self.target == "output" else f"_{self.target}"
        if order0:
            panels = self._look.panels(self.maps, self._inputs_of)
            yield from numbered(f"normgrad_order0{at}", panels, self._names)
        if self._order1 is not None:
            of = "" if self.per_image else "_batch"
            for kind, maps in self.order1.items():
                panels = self._look.panels(maps, dict.fromkeys(maps, self.order1_inputs), signed=kind == "contrast")
                yield from numbered(f"normgrad_{kind}{at}{of}", panels, self._names)

    @contextmanager
    def _guard(self, doing: str, *, but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """A failure inside is told once and stops nothing, unless `on_error="raise"`; `but` these are the user's."""
        try:
            yield
        except Exception as error:
            if self.on_error == "raise" or isinstance(error, but):
                raise
            kind = type(error).__name__
            self._warn_once(f"NormGrad failed at {doing}, and training goes on: {kind}: {error}", f"{doing}: {kind}")

    def _complain(self, problem: str) -> None:
        if self.on_error == "raise":
            raise RuntimeError(problem)
        self._warn_once(problem)

    def _warn_once(self, sentence: str, cause: str | None = None) -> None:
        """Warn, unless this cause (by default, this sentence) was told before."""
        if (cause or sentence) not in self._warned:
            self._warned.add(cause or sentence)
            warn(sentence)


def _plain(value: Any) -> Any:
    """A list of OmegaConf's, or of another config, as one of Python's; all else as it is."""
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value


def _every(steps: int) -> str:
    return "every step" if steps == 1 else f"every {steps} steps"


def _is_due(step: int, every: int | None, last: int | None) -> bool:
    """Whether a multiple of `every` has come since the last event (steps may come in twos)."""
    return every is not None and (last is None or step // every > last // every)


def _loss_scale(trainer: Trainer, pl_module: LightningModule) -> float:
    """What undoes Lightning's division by accumulated batches and a GradScaler's factor."""
    accumulated = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
    return accumulated / scale_of(trainer)


def _rows(t: Tensor, chosen: Sequence[int] | None) -> Tensor:
    """The rows of these images; of all, if None is said."""
    if chosen is None:
        return t
    places = [place for place in chosen if place < len(t)]
    return t[: len(places)] if places == list(range(len(places))) else t[places]


def _pick(images: Tensor | None, chosen: Sequence[int] | None) -> Tensor | None:
    """A copy of these images, for they are training's own."""
    return None if images is None else _rows(images, chosen).to("cpu", copy=True)


def _scaled(m: Tensor, factor: float) -> Tensor:
    return m if factor == 1 else m * factor


def _signal(maps: Mapping[str, Tensor], count: int) -> Tensor:
    """How much of the training signal comes from each image: its share of each layer's maps, added up."""
    totals = [m[:count].flatten(1).sum(1) for m in maps.values()]
    return torch.stack([total / total.sum().clamp_min(1e-38) for total in totals]).sum(0)
