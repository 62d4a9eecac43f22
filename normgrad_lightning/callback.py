"""NormGradCallback: the flags, and Lightning's hooks, each handed to the session of the `fit`."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import wraps
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normgrad_lightning.both_lightnings import for_both_lightnings
from normgrad_lightning.check.results import ClassCheck
from normgrad_lightning.environment import REMOVED, SWITCH, hint, switch
from normgrad_lightning.fit.session import Session
from normgrad_lightning.fit.state import RunState
from normgrad_lightning.hooks.safe_hooks import unseen
from normgrad_lightning.layers.options import ReadOptions, Target
from normgrad_lightning.maps import MapSet, Order1Kind
from normgrad_lightning.settings import (
    FLAGS,
    GeneralFlags,
    ImageFlags,
    Images,
    OnError,
    Order1Flags,
    Probe,
    ScheduleFlags,
    Settings,
)
from normgrad_lightning.step.loss import check_training_loss
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.views.catalogue import View, ViewFlags
from normgrad_lightning.views.crops import Crop
from normgrad_lightning.views.figure import latest_figure
from normgrad_lightning.views.style import Scale, Style
from normgrad_lightning.writers.destinations import Writer, writers_for
from normgrad_lightning.writers.outputs import Outputs

if TYPE_CHECKING:
    from PIL.Image import Image
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    from normgrad_lightning.both_lightnings import Callback

_ORDER0 = "order0"
_SET_BY_TRAINER = ("log", "log_dict")  # methods of the module
_ASKS_FOR = {"order1_every_n_steps": "order-1 maps", "probe": "maps of the same images through training"}


def _explains_wrong_flags(init: Callable[..., None]) -> Callable[..., None]:
    """Explain removed and mistyped flags before Python says that they are unexpected. The signature stays readable."""

    @wraps(init)
    def explained(self: NormGradCallback, **flags: Any) -> None:
        for name in sorted(flags.keys() - FLAGS):
            raise ValueError(f"`{name}`: {REMOVED[name]}") if name in REMOVED else TypeError(_no_flag(self, name))
        init(self, **flags)

    return explained


def _no_flag(callback: NormGradCallback, name: str) -> str:
    return f"`{name}`: expected a flag of {type(callback).__name__}, but there is none. {hint(name, FLAGS)}"


@for_both_lightnings
class NormGradCallback(Callback):
    """Shows in TensorBoard which pixels the training signal comes from, layer by layer, while a model trains.

    Order-0 maps are read from the gradients that training computes anyway: no extra pass, and the same bits in the
    weights with and without it. Order-1 maps, if asked for, take extra passes at the start of a batch, which
    leave no trace. See the README for how to read them.

    Args:
        enabled: False attaches nothing and costs nothing.
        layers: `"auto"` (the last layer of each resolution), a layer's name, a glob, or a list of these.
        target: where activation and gradient are read: at the layer's output or input, or for its own weight.
        grad_cam: also show Grad-CAM maps, from the same activation and gradient.
        check: whether to test what patches show: the strongest place of a class's images is covered, and pasted into
            others, and the losses are compared. None: where the network is recognised, which then runs alone, forward;
            True: elsewhere, too, by running `training_step` on single images; False: never.
        name: tag prefix, needed only with several callbacks in a run; None: the second one gets a number.
        every_n_steps: optimizer steps from one event to the next; the first and the last step are events. None: steps
            0, 10, 20, 50, 100, 200, 500, 1000, then every 1000th, or fewer if the budget asks for that.
        num_images: how many images of the batch are shown.
        images: which of the batch: classes in turn (`"balanced"`, where labels are known), the first, random ones, the
            hardest (those with the most training signal) or the easiest.
        classes: the names of the classes, by number; None: those of the data set (`dataset.classes`), if it has them.
        probe: images to follow through training, with a film of their maps at the end. None: `num_images` of the first
            batch, classes in turn, where the network is recognised, which then runs alone, at the events of the default
            schedule at most; False: none. `"train"` takes images of the first training batch, `"val"` of the first
            validation batch or batches; in code, a batch is taken as it is. With these, each event runs `training_step`
            on them, and more passes with order 1.
        views: what to show: `"overview"`, `"panels"`, `"patches"` (what each class is learned from), `"atlas"` (where),
            `"curves"`, `"film"` (of a probe), in code also a function of yours; one, or a list of these. None: all.
        read_every_n_steps: optimizer steps from one step that patches, atlas and curves are collected from to the next.
            None: 10, or more if the budget asks for that.
        order1_every_n_steps: optimizer steps from one event with order-1 maps to the next; None: never.
        budget: the share of the training time that NormGrad may take. It measures itself, and makes readings and then
            events rarer, unless their flags are set. None: as much as it takes.
        order1_maps: which: `"order1"` (what matters for training on the image), `"adversarial"` (what would degrade the
            model), `"contrast"` (the one minus the other); one, or a list of these.
        epsilon: size of order 1's inner step.
        per_image: whether each image takes its own inner step, or the whole batch takes one.
        mean: mean that the images were normalised with, to show them as they were; None (with `std` None): each image
            is stretched from its minimum to its maximum.
        std: standard deviation that they were normalised with.
        colormap: the name of a colour map in the cmap package.
        opacity: how much the strongest values hide of the image, from 0 to 1.
        scale: `"robust"` (each map smoothed by about a cell, its largest values clipped), `"image"` (each map from its
            minimum to its maximum) or `"shared"` (all images of a panel on one such scale).
        tile_size: pixels of a tile's longer side.
        token_grid: rows and columns of a transformer's patches, if they cannot be inferred. If tokens stand after the
            patches, too, how many stand before them is a third number.
        channels_last: whether features are `(N, *S, C)`, if that cannot be inferred.
        on_error: whether a failure of NormGrad is one warning, or an error (for debugging).

    Attributes:
        maps: the latest order-0 map of each layer, `(num_images, *S)`, on the CPU.
        inputs: the images they belong to, as the network saw them.
        order1: the latest order-1 maps of each layer, by kind: `order1["contrast"]["net.layer4"]`.
        order1_inputs: the images that these belong to.
        latest: the latest maps of every kind, as a `MapSet`: `latest["grad_cam"].maps["net.layer4"]`, and those of the
            probe: `latest["probe_order0"]`.
        check: what covering and pasting one place of each class's images does: `check["dog"].covered`.
        skipped: how often an event lacked maps because gradients were not finite; those of the step, of order 1 and of
            the probe count each.
        cost: the share of the training time so far that went to NormGrad, as measured.

    Example:
        >>> import torch
        >>> from pytorch_lightning import LightningModule, Trainer
        >>> from normgrad_lightning import NormGradCallback
        >>> class Module(LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = torch.nn.Conv2d(1, 1, 1, bias=False)
        ...         torch.nn.init.ones_(self.net.weight)
        ...     def training_step(self, images):
        ...         return self.net(images).square().sum() / 2
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> callback = NormGradCallback(layers="net", every_n_steps=50)
        >>> quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> trainer = Trainer(max_steps=1, accelerator="cpu", callbacks=[callback], enable_checkpointing=False, **quiet)
        >>> images = torch.tensor([[[0.0, 1.0], [2.0, 3.0]]])
        >>> trainer.fit(Module(), torch.utils.data.DataLoader([images]))

        The layer passes the image on, and the gradient of half a sum of squares is the image again: so the map is x².

        >>> callback.maps["net"]
        tensor([[[0., 1.],
                 [4., 9.]]])
    """

    _without_panels = "No logger takes panels: see `callback.maps`."
    _shares_the_run = True

    @_explains_wrong_flags
    def __init__(
        self,
        *,
        enabled: bool = GeneralFlags.enabled,
        layers: str | Sequence[str] = GeneralFlags.layers,
        target: Target = ReadOptions.target,
        grad_cam: bool = GeneralFlags.grad_cam,
        check: bool | None = GeneralFlags.check,
        name: str | None = GeneralFlags.name,
        every_n_steps: int | None = ScheduleFlags.every_n_steps,
        num_images: int = ImageFlags.num_images,
        images: Images = ImageFlags.images,
        classes: Sequence[str] | None = ImageFlags.classes,
        probe: Probe = ImageFlags.probe,
        views: View | Sequence[View] | None = ViewFlags.views,
        read_every_n_steps: int | None = ScheduleFlags.read_every_n_steps,
        order1_every_n_steps: int | None = ScheduleFlags.order1_every_n_steps,
        budget: float | None = ScheduleFlags.budget,
        order1_maps: Order1Kind | Sequence[Order1Kind] = Order1Flags.order1_maps,
        epsilon: float = Order1Flags.epsilon,
        per_image: bool = Order1Flags.per_image,
        mean: float | Sequence[float] | None = Style.mean,
        std: float | Sequence[float] | None = Style.std,
        colormap: str = Style.colormap,
        opacity: float = Style.opacity,
        scale: Scale = Style.scale,
        tile_size: int = Style.tile_size,
        token_grid: Sequence[int] | None = ReadOptions.token_grid,
        channels_last: bool | None = ReadOptions.channels_last,
        on_error: OnError = GeneralFlags.on_error,
    ) -> None:
        flags = {name: value for name, value in locals().items() if name in FLAGS}
        super().__init__()
        self._settings = Settings.of(flags)
        vars(self).update(self._settings.flags())
        self._messenger = Messenger(on_error)
        self._state = RunState(self._messenger)
        self._session: Session | None = None

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # flags are attributes

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A flag is checked, and counts from the next event on; no other attribute is new.

        `enabled`, `name` and `classes` count from the next `fit` on.
        """
        if name in FLAGS and "_settings" in vars(self):
            self._settings = self._settings.with_flag(name, value)
            value = self._settings.flags()[name]
        elif not (name.startswith("_") or name in (*FLAGS, *_SET_BY_TRAINER) or hasattr(type(self), name)):
            self._check_new(name)
        super().__setattr__(name, value)

    def _check_new(self, name: str) -> None:
        """Raise if a new attribute is a mistyped flag. Subclasses may have their own attributes."""
        is_ours = type(self).__module__.startswith("normgrad_lightning.")
        if is_ours or difflib.get_close_matches(name, FLAGS, 1, 0.8):
            raise AttributeError(_no_flag(self, name))

    @property
    def state_key(self) -> str:
        """Tells callbacks of one Trainer apart in a checkpoint, by all flags that are not the default."""
        return f"{type(self).__qualname__}{self._settings.changed}"

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs: its schedule, its images, its film, and what it compares with."""
        self._finish()
        return self._state.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._state.load_state_dict(state_dict)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Continue also if the checkpoint's run had other flags: its state has another key."""
        states = checkpoint.get("callbacks", {})
        ours = [state for key, state in states.items() if str(key).startswith(f"{type(self).__qualname__}{{")]
        if self.state_key not in states and len(ours) == 1 and len(self._siblings(trainer)) == 1:
            self.load_state_dict(ours[0])

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy carries (as for spawned processes): nothing that belongs to a running `fit`."""
        self._finish()
        own = {name: value for name, value in vars(self).items() if name not in _SET_BY_TRAINER}
        return {**own, "_session": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out where pages go, and whether order-1 passes can compute the module's loss."""
        if self._is_busy_elsewhere(trainer):
            return
        self._end_session()
        self._messenger.on_error = self._settings.general.on_error
        if stage != "fit" or not self._is_wanted(trainer):
            return
        self._messenger.start_over()
        if self._settings.schedule.order1_every_n_steps is not None:
            self._check_loss(trainer, pl_module, "order1_every_n_steps")
        if self._settings.images.asks_for_probe:
            self._check_loss(trainer, pl_module, "probe")
        if trainer.global_step == 0:
            self._state.start_over()
        writers, notes = list[Writer](), list[str]()
        if trainer.is_global_zero:
            with self._messenger.guard("looking at the loggers"):
                writers, notes = self._destinations(trainer)
        self._state.forget_maps()
        outputs = Outputs(self._messenger, self._without_panels, writers, notes)
        self._session = Session(trainer, self._state, self._messenger, outputs, self._group(trainer))

    def _is_busy_elsewhere(self, trainer: Trainer) -> bool:
        """Return whether another Trainer is in the middle of a `fit` with this callback, and warn of that."""
        session = self._session
        if session is None or session.is_of(trainer) or not session.is_running:
            return False
        self._messenger.warn_once(
            "NormGrad reads the outer of two nested `fit`s only. Give the inner Trainer its own NormGradCallback."
        )
        return True

    def _session_of(self, trainer: Trainer) -> Session | None:
        """Return the session of this Trainer; None if it has none, or another Trainer has it."""
        session = self._session
        return session if session is not None and session.is_of(trainer) else None

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Return whether to read this run: if the flag says so, and the environment does not say no."""
        enabled = self._settings.general.enabled
        if enabled and switch() is False:
            self._messenger.announce(trainer, f"{SWITCH}=0 in the environment switches NormGradCallback off.")
            return False
        return enabled

    def _group(self, trainer: Trainer) -> str:
        """Return what all tags begin with: other callbacks of the run have other tags."""
        taken: list[str] = []
        for one in self._siblings(trainer):
            numbered = (f"{one._own_group}_{number}" for number in count(2))
            taken.append(next(group for group in chain([one._own_group], numbered) if group not in taken))
            if one is self:
                break
        return taken[-1]

    def _siblings(self, trainer: Trainer) -> list[NormGradCallback]:
        """Return the callbacks that read this run as this one does, and this one, which another may wrap."""
        ours = [callback for callback in trainer.callbacks if isinstance(callback, NormGradCallback)]  # type: ignore[attr-defined]
        others = [callback for callback in ours if callback is self or callback._shares_the_run]
        return others if self in others else [*others, self]

    @property
    def _own_group(self) -> str:
        name = self._settings.general.name
        return MapSet.group if name is None else f"{MapSet.group}_{name}"

    def _check_loss(self, trainer: Trainer, pl_module: LightningModule, flag: str) -> None:
        """Raise if the passes that a flag asks for cannot compute the module's loss."""
        check_training_loss(trainer, pl_module, f"`{flag}`: {_ASKS_FOR[flag]}")

    def _destinations(self, trainer: Trainer) -> tuple[list[Writer], list[str]]:
        """Return a writer for each destination, and a note for each logger that takes no images."""
        return writers_for(trainer.loggers, trainer.default_root_dir)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check on every rank that the layers exist."""
        if session := self._session_of(trainer):
            session.find_layers(trainer, pl_module, self._settings)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Let the probe take its images, if it wants them from validation."""
        if dataloader_idx == 0 and (session := self._session_of(trainer)):
            session.see_validation(pl_module, batch, self._settings)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out what the classes are called."""
        if session := self._session_of(trainer):
            session.find_classes(trainer, pl_module, self._settings)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to read the step, if that is due."""
        if session := self._session_of(trainer):
            session.begin_batch(trainer, pl_module, batch, batch_idx, self._settings)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Look at training's loss."""
        if session := self._session_of(trainer):
            with unseen():
                session.before_backward(loss)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note training's backward pass, and run the probe by default."""
        if session := self._session_of(trainer):
            with unseen():
                session.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take what was seen of this step, and show what was seen of the one before."""
        if session := self._session_of(trainer):
            session.end_batch(outputs)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop a step whose batch had no end, as when `on_train_batch_start` skips the rest of the epoch."""
        if session := self._session_of(trainer):
            session.drop()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show what is pending, warn if there was nothing to show in any step, and write the film."""
        if session := self._session_of(trainer):
            session.end_training(trainer, self._settings)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Show what is pending, take the hooks off and forget the model: there will be no teardown."""
        session = self._session_of(trainer)
        if session is None:
            return
        self._messenger.on_error = "warn"  # an error of ours must not take the place of theirs
        try:
            session.finish()
            session.conclude(trainer, self._settings)
        finally:
            self._end_session()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the model after training."""
        if self._session_of(trainer) is not None:
            self._end_session()

    def _end_session(self) -> None:
        if self._session is not None:
            self._session.drop()
            self._session.finish()
        self._session = None

    def _finish(self) -> None:
        """Show what is pending: somebody asks for it."""
        if self._session is not None:
            self._session.finish()

    @property
    def latest(self) -> dict[str, MapSet]:
        """The latest maps of every kind, and those of the probe."""
        self._finish()
        return self._state.latest

    @property
    def maps(self) -> dict[str, Tensor]:
        """The latest order-0 map of each layer."""
        return dict(self.latest[_ORDER0].maps) if _ORDER0 in self.latest else {}

    @property
    def inputs(self) -> Tensor | None:
        """The images that `maps` belong to, as the network saw them."""
        return self.latest[_ORDER0].images if _ORDER0 in self.latest else None

    @property
    def order1(self) -> dict[str, dict[str, Tensor]]:
        """The latest order-1 maps of each layer, by kind."""
        return {one.name: dict(one.maps) for one in self._latest_order1()}

    @property
    def order1_inputs(self) -> Tensor | None:
        """The images that `order1` belongs to."""
        return next((one.images for one in self._latest_order1()), None)

    def _latest_order1(self) -> list[MapSet]:
        """Return the sets of the latest event with order-1 maps."""
        sets = [one for one in self.latest.values() if one.kind.needs_passes and one.source == MapSet.source]
        return [one for one in sets if one.step == max(other.step for other in sets)]

    @property
    def skipped(self) -> int:
        """How often an event lacked maps because gradients were not finite."""
        self._finish()
        return self._state.skipped

    @property
    def cost(self) -> float:
        """The share of the training time so far that went to NormGrad, as measured."""
        return self._state.budget.share

    @property
    def check(self) -> dict[str, ClassCheck]:
        """What covering and pasting the strongest place of each class's images does, by name of the class."""
        self._finish()
        return {one.name: one for one in self._state.check.results().values()}

    @check.setter
    def check(self, value: bool | None) -> None:
        """Take the flag: `__setattr__` has put it into the settings."""

    @property
    def patches(self) -> dict[str, dict[str, list[Crop]]]:
        """The latest patches by map and class, the strongest first: `patches["combined"]["dog"][0].pixels`.

        Empty if there is no logger to show them.
        """
        self._finish()
        return self._state.views.patches

    def figure(self, kind: str = _ORDER0) -> Image:
        """Return the latest maps of a kind as a picture: a notebook shows it.

        Raises:
            ValueError: there are none yet.
        """
        return latest_figure(self.latest, kind, self._settings.style)
