"""NormGradCallback: Lightning's hooks, wired to sources, views and writers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from normgrad_lightning.both_lightnings import for_both_lightnings
from normgrad_lightning.environment import SWITCH, switch
from normgrad_lightning.events.event import Event, Source
from normgrad_lightning.events.images import ImageChoice
from normgrad_lightning.events.labels import check_classes, classes_of, labels_of
from normgrad_lightning.events.masks import masks_of
from normgrad_lightning.events.messages import Messenger, OnError
from normgrad_lightning.events.order1_passes import Order1Passes
from normgrad_lightning.events.probe import ProbeImages, ProbePasses
from normgrad_lightning.events.schedule import Schedule, is_last_step
from normgrad_lightning.events.settings import FLAGS, Images, Order1Flags, Probe, Settings, What, When, Which
from normgrad_lightning.events.training_loss import TrainingLoss, check_training_loss
from normgrad_lightning.events.training_step import TrainingStep
from normgrad_lightning.kinds import MapSet, Order1Kind
from normgrad_lightning.recording.options import ReadOptions, Target
from normgrad_lightning.report import Report
from normgrad_lightning.views.collected import Collected
from normgrad_lightning.views.figure import latest_figure
from normgrad_lightning.views.film import Film
from normgrad_lightning.views.look import Draw, Look, Scale, View
from normgrad_lightning.views.patches import Crop, Patches
from normgrad_lightning.writers.destinations import Writer, writers_for

if TYPE_CHECKING:
    from PIL.Image import Image
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    from normgrad_lightning.both_lightnings import Callback


class _Last(NamedTuple):
    """A batch that is over. It is given up when the next one begins."""

    batch: Any
    batch_idx: int


@dataclass
class _Fit:
    """What one `fit` needs, on rank 0.

    Attributes:
        report: what the run shows.
        sources: where maps come from, the training step first; empty if the model cannot be read.
        training_step: the first of them.
        group: what all tags begin with.
        classes: the names of the classes, if known.
        step: that training is at.
        last: the latest batch, between its end and the start of the next one.
        probe: the one of them that follows the same images through training.
    """

    report: Report
    sources: list[Source] = field(default_factory=list)
    training_step: TrainingStep | None = None
    group: str = MapSet.group
    classes: Sequence[str] | None = None
    step: int = 0
    last: _Last | None = None
    probe: ProbePasses | None = None


@for_both_lightnings
class NormGradCallback(Callback):
    """Shows in TensorBoard which pixels the training signal comes from, layer by layer, while a model trains.

    Order-0 maps are read from the gradients that training computes anyway: no pass of its own, and the same bits in the
    weights with and without it. Order-1 maps, if asked for, take passes of their own at the start of a batch, which
    leave no trace. See the README for how to read them.

    Args:
        enabled: False attaches nothing and costs nothing.
        layers: `"auto"` (the last layer of each resolution), a layer's name, a glob, or a list of these.
        target: where activation and gradient are read: at the layer's output or input, or for its own weight.
        grad_cam: also show Grad-CAM maps, from the same activation and gradient.
        name: what tells the tags of this callback from those of another in the same run; None: the second one of a run
            gets a number.
        every_n_steps: optimizer steps from one event to the next; the first and the last step are events.
        num_images: how many images of the batch are shown.
        images: which of the batch: classes in turn (`"balanced"`, where labels are known), the first, random ones, the
            hardest (those with the most training signal) or the easiest.
        classes: the names of the classes, by number; None: those of the data set (`dataset.classes`), if it has them.
        probe: images to follow through training, with a film of their maps at the end. Each event then takes about as
            long as a training step on these images, and more with order 1. `"train"` takes `num_images` of the first
            training batch, `"val"` of the first validation batch or batches, classes in turn; in code, a batch is taken
            as it is.
        views: what to show: `"overview"`, `"panels"`, `"patches"` (what each class is learned from), `"atlas"` (where),
            `"curves"`, `"film"` (of a probe); one, or a list of these. None: all.
        patch_layers: what patches and atlas are made of: `"combined"` (all layers), `"last"`, names or globs of layers.
        read_every_n_steps: optimizer steps from one step that patches, atlas and curves are collected from to the next.
        order1_every_n_steps: optimizer steps from one event with order-1 maps to the next; None: never.
        order1_maps: which: `"order1"` (what matters for training on the image), `"adversarial"` (what would degrade the
            model), `"contrast"` (the one minus the other); one, or a list of these.
        epsilon: size of order 1's inner step.
        per_image: whether each image takes its own inner step, or the whole batch takes one.
        second_order: False leaves out order 1's Hessian term, at half the price.
        factorised: whether order 1 takes the activation to be the same in all passes.
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
        skipped: how many events had no map because a gradient was not finite.

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

    def __init__(
        self,
        *,
        enabled: bool = What.enabled,
        layers: str | Sequence[str] = What.layers,
        target: Target = ReadOptions.target,
        grad_cam: bool = What.grad_cam,
        name: str | None = What.name,
        every_n_steps: int = When.every_n_steps,
        num_images: int = Which.num_images,
        images: Images = Which.images,
        classes: Sequence[str] | None = Which.classes,
        probe: Probe = Which.probe,
        views: View | Sequence[View] | None = Draw.views,
        patch_layers: str | Sequence[str] = Draw.patch_layers,
        read_every_n_steps: int = When.read_every_n_steps,
        order1_every_n_steps: int | None = When.order1_every_n_steps,
        order1_maps: Order1Kind | Sequence[Order1Kind] = Order1Flags.order1_maps,
        epsilon: float = Order1Flags.epsilon,
        per_image: bool = Order1Flags.per_image,
        second_order: bool = Order1Flags.second_order,
        factorised: bool = Order1Flags.factorised,
        mean: float | Sequence[float] | None = Look.mean,
        std: float | Sequence[float] | None = Look.std,
        colormap: str = Look.colormap,
        opacity: float = Look.opacity,
        scale: Scale = Look.scale,
        tile_size: int = Look.tile_size,
        token_grid: Sequence[int] | None = ReadOptions.token_grid,
        channels_last: bool | None = ReadOptions.channels_last,
        on_error: OnError = What.on_error,
    ) -> None:
        flags = locals()
        super().__init__()
        self._settings = Settings.of(flags)
        vars(self).update(self._settings.flags())
        self._messenger = Messenger(on_error)
        self._schedule = Schedule()
        self._choice = ImageChoice()
        self._probe_images = ProbeImages(self._messenger)
        self._film = Film()
        self._collected = Collected()
        self._fit: _Fit | None = None
        self._event: Event | None = None

        self.maps: dict[str, Tensor] = {}
        self.inputs: Tensor | None = None
        self.order1: dict[str, dict[str, Tensor]] = {}
        self.order1_inputs: Tensor | None = None
        self.latest: dict[str, MapSet] = {}
        self.skipped = 0

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # flags are attributes

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A flag is checked, and counts from the next event on, or from the next `fit`."""
        if name in FLAGS and "_settings" in vars(self):
            self._settings = self._settings.with_flag(name, value)
            value = self._settings.flags()[name]
        super().__setattr__(name, value)

    @property
    def state_key(self) -> str:
        """Tells callbacks of one Trainer apart, in a checkpoint: by all flags that are not the default."""
        return f"{type(self).__qualname__}{self._settings.changed_flags()}"

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs to go on: its schedule, its images, its film, and what it compares with."""
        parts = (self._schedule, self._choice, self._probe_images, self._film, self._collected)
        return {name: value for part in parts for name, value in part.state_dict().items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        with self._messenger.guard("going on with the schedule of a checkpoint (of another version?)"):
            steps = [state_dict[name] for name in ("last_event", "last_order1")]
            last = [None if step is None else int(step) for step in steps]
            self._choice.load_state_dict(state_dict)
            self._probe_images.load_state_dict(state_dict)
            self._film.load_state_dict(state_dict)
            self._collected.load_state_dict(state_dict)
            self._schedule = Schedule(*last)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Go on also if the checkpoint's run had other flags, or was one of 0.1.0: its state has another key."""
        states = checkpoint.get("callbacks", {})
        ours = [state for key, state in states.items() if str(key).startswith(f"{type(self).__qualname__}{{")]
        if self.state_key not in states and len(ours) == 1 and len(self._siblings(trainer)) == 1:
            self.load_state_dict(ours[0])

    def __getstate__(self) -> dict[str, Any]:
        """What a copy carries (as for spawned processes): nothing that belongs to a running `fit`."""
        set_by_trainer = ("log", "log_dict")  # methods of the module
        own = {name: value for name, value in vars(self).items() if name not in set_by_trainer}
        return {**own, "_fit": None, "_event": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out where pages go, and whether order-1 passes can compute the module's loss."""
        self._forget_fit()
        self._messenger.on_error = self._settings.what.on_error
        if stage != "fit" or not self._is_wanted(trainer):
            return
        if self._settings.when.order1_every_n_steps is not None:
            self._check_order1(trainer, pl_module)
        if self._settings.which.probe is not None:
            self._check_probe(trainer, pl_module)
        if trainer.global_step == 0:
            self._schedule, self._film, self._collected = Schedule(), Film(), Collected()
            self._probe_images.forget()
        report = Report(self._messenger, self._film, self._collected, self._without_panels)
        self._fit, self.latest = _Fit(report, group=self._group(trainer)), {}
        if trainer.is_global_zero:
            with self._messenger.guard("looking at the loggers"):
                report.writers, report.notes = self._destinations(trainer)

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Whether to look at this run: if the flag says so, and the environment does not say no."""
        enabled = self._settings.what.enabled
        if enabled and switch() is False:
            self._messenger.announce(trainer, f"{SWITCH}=0 in the environment switches NormGradCallback off.")
            return False
        return enabled

    def _group(self, trainer: Trainer) -> str:
        """What all tags begin with: other callbacks of the run have other tags."""
        siblings = self._siblings(trainer)
        before = [one._own_group for one in siblings[: siblings.index(self)]].count(self._own_group)
        return f"{self._own_group}_{before + 1}" if before else self._own_group

    def _siblings(self, trainer: Trainer) -> list[NormGradCallback]:
        """The callbacks of the Trainer that look at the run as this one does, and this one, which another may wrap."""
        ours = [callback for callback in trainer.callbacks if isinstance(callback, NormGradCallback)]  # type: ignore[attr-defined]
        others = [callback for callback in ours if callback is self or callback._shares_the_run]
        return others if self in others else [*others, self]

    @property
    def _own_group(self) -> str:
        name = self._settings.what.name
        return MapSet.group if name is None else f"{MapSet.group}_{name}"

    def _check_order1(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if order-1 passes cannot compute the module's loss."""
        check_training_loss(trainer, pl_module, "`order1_every_n_steps`: order-1 maps")

    def _check_probe(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Raise if passes on a probe cannot compute the module's loss."""
        check_training_loss(trainer, pl_module, "`probe`: maps of the same images through training")

    def _destinations(self, trainer: Trainer) -> tuple[list[Writer], list[str]]:
        """A writer for each destination, and a note for each logger that takes no images."""
        return writers_for(trainer.loggers, trainer.default_root_dir)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Check on every rank that the layers exist; read them on rank 0."""
        if self._fit is None:
            return
        with self._messenger.guard("looking at the model", reraise=(ValueError,)):
            step = TrainingStep(trainer, pl_module, self._current_settings, self._choice, self._messenger)
            if step.can_be_read and trainer.is_global_zero:
                self._fit.training_step = step
                order1 = Order1Passes(self._current_settings, self._choice, self._messenger, step)
                self._fit.probe = ProbePasses(self._current_settings, self._probe_images, self._messenger, step)
                self._fit.sources = [step, order1, self._fit.probe]

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Let the probe take its images, if it wants them from validation."""
        if self._fit is not None and self._fit.probe is not None and dataloader_idx == 0:
            self._fit.probe.see("val", pl_module, batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out what the classes are called."""
        if self._fit is None:
            return
        classes = self._settings.which.classes
        with self._messenger.guard("looking for the names of classes", reraise=(ValueError,)):
            if classes is not None:
                check_classes(classes, trainer.train_dataloader, pl_module)
            self._fit.classes = classes or classes_of(trainer.train_dataloader)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin an event if one is due."""
        if self._fit is None or not self._fit.sources:
            return
        self._fit.step, self._fit.last = trainer.global_step, None
        is_last, when = is_last_step(trainer, batch_idx), self._settings.when
        if self._schedule.is_due(trainer.global_step, when, is_last=is_last):
            with_order1 = self._schedule.order1_is_due(trainer.global_step, when, is_last=is_last)
            self._begin_event(trainer, pl_module, batch, batch_idx, self._fit, with_order1=with_order1)
        elif self._collects(self._fit) and self._schedule.reading_is_due(trainer.global_step, when):
            self._begin_event(trainer, pl_module, batch, batch_idx, self._fit, is_reading=True)

    def _collects(self, fit: _Fit) -> bool:
        """Whether steps between events are read."""
        step = fit.training_step
        return self._settings.draw.collects and bool(fit.report.writers) and step is not None and step.is_free

    def _begin_event(
        self,
        trainer: Trainer,
        module: LightningModule,
        batch: Any,
        batch_idx: int,
        fit: _Fit,
        *,
        with_order1: bool = False,
        is_reading: bool = False,
    ) -> None:
        self._messenger.on_error = self._settings.what.on_error
        labels = masks = None
        with self._messenger.guard("finding the labels of a batch"):
            labels = labels_of(module, batch)
        if self._settings.draw.collects:
            with self._messenger.guard("finding the masks of a batch"):
                masks = masks_of(module, batch)
        with self._messenger.guard("beginning an event"):
            self._event = Event(
                trainer.global_step,
                fit.sources[:1] if is_reading else fit.sources,
                module,
                batch,
                TrainingLoss(trainer, module, batch_idx),
                with_order1=with_order1,
                labels=labels,
                classes=fit.classes,
                group=fit.group,
                masks=masks,
                is_reading=is_reading,
            )
            self._event.begin()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the event know of training's backward pass."""
        if self._event is not None:
            self._event.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the event: take its maps, draw them, and write them."""
        if self._fit is not None and self._fit.sources:
            self._fit.last = _Last(batch, batch_idx)
        self._end_event(trainer)

    def _end_event(self, trainer: Trainer) -> None:
        if self._event is None:
            return
        with self._ended(self._event) as event:
            self._schedule.note(event)
            with self._messenger.guard("reading the maps"):
                self._collect(event)
                if not event.is_reading:
                    self._show(trainer, event)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop an event whose batch had no end, as when `on_train_batch_start` skips the rest of the epoch."""
        self._drop_event()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last step, warn if there was nothing to look at in any, and write the film."""
        if self._fit is not None:
            with self._messenger.guard("looking at the last step"):
                self._look_back(trainer, pl_module, self._fit)
        for source in self._fit.sources if self._fit is not None else ():
            source.conclude()
        self._finish_report(trainer)

    def _look_back(self, trainer: Trainer, module: LightningModule, fit: _Fit) -> None:
        """Show the last step in a pass of its own if it was no event: training has ended without notice."""
        last, fit.last = fit.last, None
        has_maps = self._schedule.last_event is not None
        if last is None or not has_maps or not self._schedule.is_due(fit.step, self._settings.when, is_last=True):
            return
        with suppress(ValueError):  # no loss to run it again with
            fit.sources[0].look_back()
            with_order1 = self._settings.when.order1_every_n_steps is not None
            self._begin_event(trainer, module, *last, fit, with_order1=with_order1)
        self._end_event(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off and forget the model when training breaks off: there will be no teardown."""
        self._drop_event()
        self._finish_report(trainer)
        self._forget_fit()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the model after training."""
        self._forget_fit()

    def figure(self, kind: str = "order0") -> Image:
        """The latest maps of a kind, as a picture: a notebook shows it.

        Raises:
            ValueError: there are none yet.
        """
        return latest_figure(self.latest, kind, self._settings.look)

    @property
    def patches(self) -> dict[str, dict[str, list[Crop]]]:
        """The latest patches by map and class, the strongest first: `patches["combined"]["dog"][0].pixels`."""
        view = self._collected.views["patches"]
        return view.shown if isinstance(view, Patches) else {}

    def _current_settings(self) -> Settings:
        """The flags as they are now."""
        return self._settings

    def _finish_report(self, trainer: Trainer) -> None:
        if self._fit is not None:
            self._fit.report.finish(trainer, self._settings.look)

    def _forget_fit(self) -> None:
        self._drop_event()
        self._fit = None

    def _drop_event(self) -> None:
        """End the event without a look at it, if there is one."""
        if self._event is not None:
            with self._ended(self._event):
                pass

    @contextmanager
    def _ended(self, event: Event) -> Iterator[Event]:
        """The event without hooks; after this, nothing of it is left."""
        try:
            with self._messenger.guard("ending an event"):
                event.stop()
            self._event = None  # not before: Ctrl-C may have left hooks
            yield event
        finally:
            event.forget()

    def _collect(self, event: Event) -> None:
        """Give the maps of the whole batch to the views that collect them."""
        fit = self._fit
        if fit is None or fit.training_step is None or not fit.report.writers or not self._settings.draw.collects:
            return
        batch = fit.training_step.whole_batch(event)
        if batch is not None:
            fit.report.read(batch, self._settings.look, self._settings.draw)

    def _show(self, trainer: Trainer, event: Event) -> None:
        """Keep the maps of an event, draw its page, and give that to every writer."""
        map_sets = event.map_sets(self._messenger)
        if event.skipped:
            self.skipped += event.skipped
            self._messenger.warn_once(
                "NormGrad skips steps whose gradients are not finite (as after an fp16 overflow); "
                "`callback.skipped` counts them."
            )
        if map_sets and self._fit is not None:
            self._keep(map_sets)
            about = [source.about for source in self._fit.sources]
            self._fit.report.show(trainer, map_sets, self._settings.look, self._settings.draw, about)

    def _keep(self, map_sets: Sequence[MapSet]) -> None:
        """Let the attributes show the latest maps."""
        self.latest = {**self.latest, **{one.name: one for one in map_sets}}
        of_batch = [one for one in map_sets if one.source == "batch"]
        order1 = {one.name: one for one in of_batch if one.kind.needs_passes}
        if order1:
            self.order1 = {name: dict(one.maps) for name, one in order1.items()}
            self.order1_inputs = next(iter(order1.values())).images
        if of_batch and of_batch[0].name not in order1:
            self.maps, self.inputs = dict(of_batch[0].maps), of_batch[0].images
