"""Maps of a probe: a few images that are followed through training, in passes that leave no trace.

Images of the training batch are others at each event. A probe shows what changes in the network, not in the images. In
the first steps of training, BatchNorm takes the statistics of the probe, as its own are hardly more than what they
start with (see `batchnorm_warmup`): with these, a deep network's features may grow without limit. A `training_step`
that augments images at random draws the same numbers at each event.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from normgrad_lightning.isolated.batches import single_images
from normgrad_lightning.isolated.choose_layers import trained_layers
from normgrad_lightning.isolated.inner_step import InnerStep
from normgrad_lightning.isolated.interrupts import memory_explained
from normgrad_lightning.isolated.order1 import PassMaps, run_passes
from normgrad_lightning.isolated.random_state import devices_of, seed
from normgrad_lightning.isolated.retry import WholeBatch
from normgrad_lightning.layers.names import AUTO
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.context import Seen, StepContext
from normgrad_lightning.step.loss import TrainingLoss
from normgrad_lightning.step.order1 import order1_memory, pass_sets
from normgrad_lightning.step.probe_images import ProbeImages

_WHOSE = {"train": "the first training batch", "val": "the first validation batch or batches"}
_SEED = 0


def about_probe(settings: Settings) -> str:
    """Return a sentence on the probe, for the announcement; empty if there is none."""
    probe = settings.images.probe
    if not settings.images.asks_for_probe:
        return ""
    whose = _WHOSE[probe] if isinstance(probe, str) else "the batch given in code"
    return f"A probe, images of {whose}, takes extra passes at each event."


def probe_order0(context: StepContext, layers: Sequence[str], images: ProbeImages) -> Seen:
    """Return order-0 maps of the probe, and Grad-CAM where it is on, in one pass; nothing as long as it has no images.

    Args:
        context: the step.
        layers: what `"auto"` has chosen; empty if it has not.
        images: of the probe.
    """
    context.loss.check(context.module, context.batch)
    if not images.are_ready(context):
        return Seen()
    settings = context.settings
    fewer = f"To follow fewer images, set `num_images={max(settings.images.num_images // 2, 1)}`; to follow"
    with memory_explained(f"{fewer if isinstance(settings.images.probe, str) else 'To follow'} none, `probe=False`."):
        batch, known = images.on(context.module.device), settings.general.layers
        if known == AUTO:
            known = layers or trained_layers(context.module, context.loss, batch, settings.read)
        whole = WholeBatch(batch, None, steady=True)
        result = _passes(context, known, [batch], settings.general.kinds, InnerStep(), whole)
    return Seen(pass_sets(context, result, layers, labels=images.labels, source="probe"))


def probe_order1(context: StepContext, layers: Sequence[str], images: ProbeImages) -> Seen:
    """Return order-1 maps of the probe, made as those of the training batch are; `layers` are those of its order 0."""
    batch, flags = images.on(context.module.device), context.settings.order1
    batches = single_images(batch) if flags.per_image else [batch]
    whole = WholeBatch(batch, range(len(batches)) if flags.per_image else None, explains_errors=True, steady=True)
    with order1_memory(context.settings):
        result = _passes(context, layers, batches, list(flags.order1_maps), flags.inner_step, whole)
    return Seen(pass_sets(context, result, layers, labels=images.labels, source="probe"))


def _passes(
    context: StepContext,
    layers: str | Sequence[str],
    batches: Sequence[Any],
    kinds: Sequence[str],
    step: InnerStep,
    whole: WholeBatch,
) -> PassMaps:
    loss = _SameNumbers(context.loss.in_float32())
    return run_passes(context.module, loss, batches, layers, kinds, step, context.settings.read, whole=whole)


class _SameNumbers:
    """A loss that draws the same random numbers each time: an image that it augments must stay the same.

    It is called in passes that put the random state back.
    """

    def __init__(self, loss: TrainingLoss) -> None:
        self._loss = loss
        self.name = loss.name
        self.alone = loss.alone

    def __call__(self, module: Any, batch: Any) -> Tensor:
        """Return the loss of the batch."""
        seed(_SEED, devices_of(module.parameters()))
        return self._loss(module, batch)
