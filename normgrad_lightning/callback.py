"""NormGradCallback: Lightning's hooks, wired to sources, views and writers."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, count
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normgrad_lightning.both_lightnings import for_both_lightnings
from normgrad_lightning.environment import SWITCH, switch
from normgrad_lightning.events.messages import Messenger, OnError
from normgrad_lightning.events.settings import FLAGS, Images, Order1Flags, Probe, Settings, What, When, Which
from normgrad_lightning.events.training_loss import check_training_loss
from normgrad_lightning.kinds import MapSet, Order1Kind
from normgrad_lightning.memory import Memory
from normgrad_lightning.recording.options import ReadOptions, Target
from normgrad_lightning.report import Report
from normgrad_lightning.run import Run
from normgrad_lightning.views.figure import latest_figure
from normgrad_lightning.views.look import Draw, Look, Scale, View
from normgrad_lightning.views.patches import Crop
from normgrad_lightning.writers.destinations import Writer, writers_for

if TYPE_CHECKING:
    from PIL.Image import Image
    from pytorch_lightning import Callback, LightningModule, Trainer
else:
    from normgrad_lightning.both_lightnings import Callback


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
        skipped: how often an event lacked maps because gradients were not finite; those of the step, of order 1 and of
            the probe count each.

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
        self._memory = Memory(self._messenger)
        self._run: Run | None = None

        self._forget_maps()

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # flags are attributes

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute. A flag is checked, and counts from the next event on.

        `enabled`, `name` and `classes` count from the next `fit` on.
        """
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
        return self._memory.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the checkpoint's run was."""
        self._memory.load_state_dict(state_dict)

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
        return {**own, "_run": None}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out where pages go, and whether order-1 passes can compute the module's loss."""
        self._forget_run()
        self._messenger.on_error = self._settings.what.on_error
        if stage != "fit" or not self._is_wanted(trainer):
            return
        self._messenger.begin_anew()
        if self._settings.when.order1_every_n_steps is not None:
            self._check_order1(trainer, pl_module)
        if self._settings.which.probe is not None:
            self._check_probe(trainer, pl_module)
        if trainer.global_step == 0:
            self._memory.begin_anew()
        report = Report(self._messenger, self._memory.film, self._memory.collected, self._without_panels)
        if trainer.is_global_zero:
            with self._messenger.guard("looking at the loggers"):
                report.writers, report.notes = self._destinations(trainer)
        if self.latest:  # of another run
            self._forget_maps()
        group = self._group(trainer)
        self._run = Run(self._current_settings, self._memory, self._messenger, report, group, self._keep)

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Whether to look at this run: if the flag says so, and the environment does not say no."""
        enabled = self._settings.what.enabled
        if enabled and switch() is False:
            self._messenger.announce(trainer, f"{SWITCH}=0 in the environment switches NormGradCallback off.")
            return False
        return enabled

    def _group(self, trainer: Trainer) -> str:
        """What all tags begin with: other callbacks of the run have other tags."""
        taken: list[str] = []
        for one in self._siblings(trainer):
            numbered = (f"{one._own_group}_{number}" for number in count(2))
            taken.append(next(group for group in chain([one._own_group], numbered) if group not in taken))
            if one is self:
                break
        return taken[-1]

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
        """Check on every rank that the layers exist."""
        if self._run is not None:
            self._run.find_sources(trainer, pl_module)

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Let the probe take its images, if it wants them from validation."""
        if self._run is not None and dataloader_idx == 0:
            self._run.see_validation(pl_module, batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find out what the classes are called."""
        if self._run is not None:
            self._run.find_classes(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin an event if one is due."""
        if self._run is not None:
            self._run.begin_batch(trainer, pl_module, batch, batch_idx)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the event know of training's backward pass."""
        if self._run is not None:
            self._run.after_backward()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """End the event: take its maps, draw them, and write them."""
        if self._run is not None:
            self._run.end_batch(trainer, pl_module, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Drop an event whose batch had no end, as when `on_train_batch_start` skips the rest of the epoch."""
        if self._run is not None:
            self._run.drop_event()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the last step, warn if there was nothing to look at in any, and write the film."""
        if self._run is not None:
            self._run.end_training(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Take the hooks off and forget the model when training breaks off: there will be no teardown."""
        self._messenger.on_error = "warn"  # an error of ours must not take the place of theirs
        try:
            if self._run is not None:
                self._run.finish_report(trainer)
        finally:
            self._forget_run()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the model after training."""
        self._forget_run()

    def _forget_run(self) -> None:
        if self._run is not None:
            self._run.drop_event()
        self._run = None

    def _current_settings(self) -> Settings:
        """The flags as they are now."""
        return self._settings

    def _forget_maps(self) -> None:
        self.maps: dict[str, Tensor] = {}
        self.inputs: Tensor | None = None
        self.order1: dict[str, dict[str, Tensor]] = {}
        self.order1_inputs: Tensor | None = None
        self.latest: dict[str, MapSet] = {}
        self.skipped = 0

    def _keep(self, map_sets: Sequence[MapSet], skipped: int) -> None:
        """Let the attributes show the latest maps."""
        self.skipped += skipped
        self.latest = {**self.latest, **{one.name: one for one in map_sets}}
        of_batch = [one for one in map_sets if one.source == MapSet.source]
        order1 = {one.name: one for one in of_batch if one.kind.needs_passes}
        if order1:
            self.order1 = {name: dict(one.maps) for name, one in order1.items()}
            self.order1_inputs = next(iter(order1.values())).images
        if of_batch and of_batch[0].name not in order1:
            self.maps, self.inputs = dict(of_batch[0].maps), of_batch[0].images

    @property
    def patches(self) -> dict[str, dict[str, list[Crop]]]:
        """The latest patches by map and class, the strongest first: `patches["combined"]["dog"][0].pixels`.

        Empty if there is no logger to show them.
        """
        return self._memory.collected.patches

    def figure(self, kind: str = "order0") -> Image:
        """The latest maps of a kind, as a picture: a notebook shows it.

        Raises:
            ValueError: there are none yet.
        """
        return latest_figure(self.latest, kind, self._settings.look)
