"""Order-1 maps of a step, from passes on the weights that the step will use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from normgrad_lightning.isolated.batches import batch_size, single_images
from normgrad_lightning.isolated.choose_layers import trained_layers
from normgrad_lightning.isolated.interrupts import failures_dropped, memory_explained
from normgrad_lightning.isolated.one_pass import NothingToRead
from normgrad_lightning.isolated.order0 import maps_of_pass
from normgrad_lightning.isolated.order1 import PassMaps, run_passes
from normgrad_lightning.isolated.retry import WholeBatch
from normgrad_lightning.layers.names import AUTO
from normgrad_lightning.maps import KINDS, MapSet
from normgrad_lightning.settings import Settings, every
from normgrad_lightning.step.context import Seen, StepContext
from normgrad_lightning.step.image_choice import ImageChoice
from normgrad_lightning.step.messages import Messenger


def about_order1(settings: Settings) -> str:
    """Return a sentence on what the passes make, for the announcement; empty if there are none."""
    steps, flags = settings.schedule.order1_every_n_steps, settings.order1
    if steps is None:
        return ""
    whose = "an inner step for each image" if flags.per_image else "one inner step for the whole batch"
    return f"Order-1 maps ({', '.join(flags.order1_maps)}) come {every(steps)}, with {whose}."


def order1_memory(settings: Settings) -> AbstractContextManager[None]:
    """Return a context that says what to do if there is too little memory for order 1."""
    if settings.order1.per_image:
        needs = "Order 1 needs three times the memory of the weights beside training's own"
    else:
        needs = "For an image at a time, set `per_image=True`"
    return memory_explained(f"{needs}. To do without order 1, set `order1_every_n_steps=None`.")


def order1_of_batch(context: StepContext, layers: Sequence[str], choice: ImageChoice, messenger: Messenger) -> Seen:
    """Return order-1 maps of the training batch: of the images chosen here, or of all if they share an inner step.

    Args:
        context: the step.
        layers: what `"auto"` has chosen; empty if it has not.
        choice: chooses the images to show.
        messenger: for warnings.
    """
    settings, module, loss = context.settings, context.module, context.loss.in_float32()
    with order1_memory(settings):
        loss.check(module, context.batch)
        known: str | Sequence[str] = layers if settings.general.layers == AUTO else settings.general.layers
        known = known or _auto_layers(context)
        per_image, flags = settings.order1.per_image, settings.order1
        indices = _chosen(context, known, choice) if per_image else None
        result = run_passes(
            module,
            loss,
            [context.batch] if indices is None else single_images(context.batch, indices),
            known,
            flags.order1_maps,
            flags.inner_step,
            settings.read,
            num_images=None if per_image else settings.images.read_first,
            whole=WholeBatch(context.batch, indices, explains_errors=True),
        )
    labels = context.labels if indices is None else context.labels_at(indices)
    sets = pass_sets(context, result, layers, labels=labels)
    _warn_of_zeros(sets, messenger, nothing_to_learn=result.nothing_to_learn)
    return Seen(sets, indices)


def pass_sets(context: StepContext, result: PassMaps, layers: Sequence[str], **known: Any) -> list[MapSet]:
    """Return a set for each kind of map that passes have made; `known` has other fields of a `MapSet`."""
    numbered = list(dict.fromkeys([*layers, *result.layers]))  # a layer keeps its number
    sets = []
    for name, maps in result.on_host.items():
        kind = KINDS[name]
        of_batch = kind.needs_passes and not context.settings.order1.per_image
        variant = context.settings.variant + ("_batch" if of_batch else "")
        images_of = dict.fromkeys(maps, result.images)
        about = {"variant": variant, **known, "labels": _fitting(known.get("labels"), maps)}
        sets.append(context.map_set(kind, maps, images_of, numbered, result.images, **about))
    return sets


def _fitting(labels: Sequence[int] | None, maps: Mapping[str, Tensor]) -> Sequence[int] | None:
    """Return the labels if there is one for each map: a video has several."""
    return labels if labels is not None and all(len(m) == len(labels) for m in maps.values()) else None


def _auto_layers(context: StepContext) -> list[str]:
    """Return what `"auto"` chooses: an image is enough to see that, unless the loss needs the batch."""
    module, loss, options = context.module, context.loss, context.settings.read
    if context.settings.order1.per_image:
        image = single_images(context.batch, [0])[0]
        with failures_dropped(but=(NothingToRead,)):  # the next pass says why
            return trained_layers(module, loss, image, options)
    return trained_layers(module, loss, context.batch, options)


def _chosen(context: StepContext, layers: str | Sequence[str], choice: ImageChoice) -> list[int]:
    """Return the indices of the images to show, before training has seen the batch."""
    sums: dict[str, Tensor] = {}
    which = context.settings.images
    if which.by_signal:
        maps = maps_of_pass(context.module, context.loss, context.batch, layers, "order0", context.settings.read)
        sums = {layer: m.flatten(1).sum(1).cpu() for layer, m in maps.items()}
    return choice.indices(which, sums, batch_size(context.batch), context.labels)


def _warn_of_zeros(sets: Sequence[MapSet], messenger: Messenger, *, nothing_to_learn: bool) -> None:
    """Warn if the loss of an image has no gradient, or has none any more after the inner step."""
    lowered = [m for one in sets if one.kind.step < 0 for m in one.maps.values()]
    if all(m.flatten(1).any(1).all() for m in lowered):
        return
    if nothing_to_learn:
        why = "Their loss has no gradient: the model has learned these images, or their labels are ignored."
    else:
        why = "The inner step has fitted these images. If this continues, a smaller `epsilon` shows more."
    messenger.warn_once(f"NormGrad: order-1 maps of some images are zero. {why}")
