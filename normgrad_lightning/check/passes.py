"""The five passes of the check: plain, covered, covered elsewhere, pasted into others, another part pasted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normgrad_lightning.check.network import NetworkCall, scores_in
from normgrad_lightning.check.regions import coarse_map, put_into
from normgrad_lightning.hooks.to_host import from_host
from normgrad_lightning.isolated.batches import batch_size, copied, single_images
from normgrad_lightning.isolated.batchnorm_warmup import BatchNorm, collected, layers_warming_up
from normgrad_lightning.isolated.choose_layers import auto_layers
from normgrad_lightning.isolated.interrupts import TalksToOthers, is_out_of_memory
from normgrad_lightning.isolated.one_pass import LossFunction, replayed, widened_batch, with_few_copies
from normgrad_lightning.isolated.sandbox import HALF, Sandbox
from normgrad_lightning.layers.names import AUTO
from normgrad_lightning.layers.nested import map_tensors
from normgrad_lightning.layers.options import ReadOptions
from normgrad_lightning.layers.own_passes import own_pass
from normgrad_lightning.maths.tensor_subclasses import plain

NEVER_ENTERED = (
    "the images that the maps belong to did not enter the network again: it changes them by chance, or in another way "
    "in eval mode"
)


class CannotCheck(ValueError):
    """The check cannot be done here; the message says why."""


_HALF = re.compile("BFloat16|Half")


def scores_alone(network: nn.Module, args: Any, kwargs: Any, count: int) -> Tensor:
    """Return the scores of a network that runs alone, `(N, C)`, for `count` images in float32.

    Raises:
        CannotCheck: it gives none in eval mode, or fails there: it casts to half precision by itself, for example.
    """
    try:
        output = network(*args, **kwargs)
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, TalksToOthers):
            raise
        why = f"does not run alone in eval mode: {type(error).__name__} ({error})"
        if isinstance(error, RuntimeError) and _HALF.search(str(error)):
            why = "casts to half precision by itself"
        raise CannotCheck(f"the network {why}") from error
    scores = scores_in(output, count)
    if scores is None:
        raise CannotCheck("the network gives no scores in eval mode")
    return scores.float()


def _check_scores(scores: Tensor, trained: Tensor) -> None:
    """Raise `CannotCheck` if scores of eval mode are probabilities, and those of training are not."""
    if _are_probabilities(scores) and not _are_probabilities(trained.float()):
        raise CannotCheck("the network gives probabilities in eval mode")


def _are_probabilities(rows: Tensor) -> bool:
    return bool((rows >= 0).all() & ((rows.sum(1) - 1).abs() < 1e-3).all())


class Changed(NamedTuple):
    """Images of a class, those of others (donors), and both with a part of the other. All are `(R, C, *S)`.

    Attributes:
        images: as they are.
        covered: with the donor's pixels inside of the region.
        covered_control: the same at the control's place.
        donors: other images.
        pasted: donors with the image's pixels inside of the region.
        pasted_control: the same at the control's place.
    """

    images: Tensor
    covered: Tensor
    covered_control: Tensor
    donors: Tensor
    pasted: Tensor
    pasted_control: Tensor

    @classmethod
    def of(cls, images: Tensor, donors: Tensor, region: Tensor, control: Tensor) -> Changed:
        """Return what `region` and `control`, `(R, *S)`, make of images and donors."""
        return cls(
            images,
            put_into(region, donors, images),
            put_into(control, donors, images),
            donors,
            put_into(region, images, donors),
            put_into(control, images, donors),
        )


class Losses(NamedTuple):
    """What the passes gave for each row, `(R,)` each.

    Attributes:
        plain: the images' loss.
        covered: the same with the region covered.
        covered_control: the same with another place covered.
        pasted: the donors' loss, with their own labels and the region pasted into them.
        pasted_control: the same with another part pasted.
        called: 1 where a donor with the region has the class of the image as its highest score; NaN without scores.
        called_control: the same with another part.
    """

    plain: Tensor
    covered: Tensor
    covered_control: Tensor
    pasted: Tensor
    pasted_control: Tensor
    called: Tensor
    called_control: Tensor


class Entrance:
    """Where images enter a network: the modules that are called with them, found in the first pass.

    Needs no knowledge of the batch: augmentation is over where the images enter, and lists have become tensors. Outer
    modules come first, so those inside see what the images were replaced by.
    """

    def __init__(self) -> None:
        self._modules: list[nn.Module] = []

    @contextmanager
    def replaced(self, model: nn.Module, images: Tensor, by: Tensor) -> Iterator[None]:
        """Let `by` enter the network inside, in the place of `images`.

        Raises:
            CannotCheck: the images did not enter.
        """
        is_known, found = bool(self._modules), dict[nn.Module, None]()

        def replace(module: nn.Module, args: Any, kwargs: Any) -> Any:
            def replaced(t: Tensor) -> Tensor:
                if t.shape != images.shape or not (is_known or _are_same(t, images)):
                    return t
                found[module] = None
                return by.to(t.dtype)

            return map_tensors(replaced, (args, kwargs))

        modules = self._modules or [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
        handles = [m.register_forward_pre_hook(replace, with_kwargs=True, prepend=True) for m in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self._modules = list(found)
        if not found:
            raise CannotCheck(NEVER_ENTERED)


def _are_same(t: Tensor, images: Tensor) -> bool:
    return bool(torch.allclose(plain(t).detach().float(), images.float(), rtol=1e-3, atol=1e-5))


@dataclass(frozen=True, eq=False)
class Pool:
    """Images that training has just seen, their maps, and what it takes to see what a change of them does.

    Attributes:
        images: `(N, C, *S)`, as the network saw them.
        maps: `(N, *G)` of each layer, in the order of the network.
        labels: the class of each image; None if they are not known.
        losses: returns what the passes give for changed images: the rows, which image of these each of them is, and
            which image its donor is.
    """

    images: Tensor
    maps: Mapping[str, Tensor]
    labels: Sequence[int] | None
    losses: Callable[[Changed, Sequence[int], Sequence[int]], Losses]

    @cached_property
    def coarse(self) -> Tensor:
        """The maps to take regions from, `(N, *G)`."""
        return coarse_map(self.maps)


def network_pool(
    call: NetworkCall,
    images: Tensor,
    maps: Mapping[str, Tensor],
    labels: Sequence[int],
    young: Iterable[BatchNorm] | None = None,
) -> Pool:
    """Return a pool that runs the network alone: forward, in eval mode, without gradients, leaving no trace.

    Each pass has the same random numbers. Weights in half precision run in float32. BatchNorm layers that have hardly
    any statistics yet use those of the whole batch, as training does.

    Args:
        call: of the network in the training step, with all its images.
        images: `(N, C, *S)`, those that the maps belong to: the first of the step, or all.
        maps: their maps.
        labels: the class of each image of the step.
        young: the BatchNorm layers that have hardly any statistics, and maybe others; None: it looks for them.
    """
    known = set(layers_warming_up(call.module) if young is None else young)
    within = [layer for layer in known if layer in set(call.module.modules())]
    targets, entrance = from_host(torch.tensor(labels), call.scores.device), Entrance()

    def losses(changed: Changed, image_rows: Sequence[int], donor_rows: Sequence[int]) -> Losses:
        rows, others = (from_host(torch.tensor(list(r)), targets.device) for r in (image_rows, donor_rows))
        run = partial(_network_losses, call, targets, within, entrance, changed, rows, others)
        return with_few_copies(call.module, run, exact=True)

    return Pool(images, maps, list(labels[: len(images)]), losses)


def _network_losses(
    call: NetworkCall,
    labels: Tensor,
    young: Sequence[BatchNorm],
    entrance: Entrance,
    changed: Changed,
    image_rows: Tensor,
    donor_rows: Tensor,
    copies: bool,
) -> Losses:
    own, others = labels[image_rows], labels[donor_rows]
    sandbox = Sandbox(call.module, exact=True, read_only=not copies)

    def scores(of: NetworkCall, before: Tensor, after: Tensor) -> Tensor:
        def run(model: nn.Module) -> Tensor:
            _evaluate(model)
            with entrance.replaced(model, before, after):
                return scores_alone(model, of.args, of.kwargs, len(after))

        result: Tensor = sandbox.run(run)
        return result

    with torch.no_grad(), own_pass(), torch.autocast(labels.device.type, enabled=False):
        if young:
            whole = _widened(call._replace(args=copied(call.args), kwargs=copied(call.kwargs)))
            sandbox.replace(
                collected(young, sandbox.run, lambda model: scores_alone(model, whole.args, whole.kwargs, len(labels)))
            )
        of_images, of_donors = _widened(call.at(image_rows)), _widened(call.at(donor_rows))
        on_images = [scores(of_images, changed.images, after) for after in changed[:3]]
        _check_scores(on_images[0], call.scores)
        on_donors = [scores(of_donors, changed.donors, after) for after in changed[4:]]
    plain_, covered, covered_control = (F.cross_entropy(s, own, reduction="none") for s in on_images)
    pasted, pasted_control = (F.cross_entropy(s, others, reduction="none") for s in on_donors)
    called, called_control = ((s.argmax(1) == own).float() for s in on_donors)
    return Losses(plain_, covered, covered_control, pasted, pasted_control, called, called_control)


def loss_pool(
    model: nn.Module,
    loss_fn: LossFunction,
    batch: Any,
    labels: Sequence[int] | None = None,
    layers: str | Sequence[str] = AUTO,
    chosen: Sequence[int] | None = None,
    options: ReadOptions | None = None,
) -> Pool:
    """Return a pool that asks the loss of single images: for any loss that an image has alone, and any batch.

    One forward and backward pass for each image finds its map, and the image as it enters the network. All
    passes run in float32, also where weights are in half precision.

    Args:
        model: any module.
        loss_fn: `loss_fn(model, batch)`, a scalar.
        batch: whatever that takes, of which single images can be taken.
        labels: the class of each image of the batch.
        layers: see `select_layers`.
        chosen: which images of the batch; by default, all.
        options: how to read layers.

    Raises:
        CannotCheck: images of several sizes, or none, enter the network.
    """
    chosen = list(range(batch_size(batch))) if chosen is None else list(chosen)
    ones, options = single_images(batch, chosen), options or ReadOptions()
    if layers == AUTO:
        layers = auto_layers(model, loss_fn, batch, options)
    seen = [replayed(model, loss_fn, one, layers, options, training=False, exact=True) for one in ones]
    entered = [recorder.images for recorder in seen]
    images = [t for t in entered if t is not None and len(t) == 1]
    if len(images) < len(entered):
        raise CannotCheck("no images were seen to enter the network, or several for each image of the batch")
    if len({t.shape for t in images}) > 1:
        raise CannotCheck("images of several sizes enter the network")
    maps_of = [recorder.latest_maps() for recorder in seen]
    common = [name for name in maps_of[0] if len({maps[name].shape for maps in maps_of if name in maps}) == 1]
    maps = {name: torch.cat([m[name] for m in maps_of]) for name in common if all(name in m for m in maps_of)}
    if not maps:
        raise CannotCheck("no layer has maps")

    def sandbox(copies: bool) -> Sandbox:
        return Sandbox(model, exact=True, read_only=not copies)

    def loss_of(one: int, after: Tensor) -> Tensor:
        def run(stand_in: nn.Module) -> Tensor:
            with torch.no_grad(), Entrance().replaced(stand_in, images[one], after):
                loss: Tensor = plain(loss_fn(stand_in, widened_batch(ones[one])))
                return loss.detach().float().reshape(())

        with own_pass():
            loss: Tensor = with_few_copies(model, lambda copies: sandbox(copies).run(run), exact=True)
        return loss

    def losses(changed: Changed, image_rows: Sequence[int], donor_rows: Sequence[int]) -> Losses:
        plain_, covered, covered_control = (_stacked(loss_of, image_rows, after) for after in changed[:3])
        pasted, pasted_control = (_stacked(loss_of, donor_rows, after) for after in changed[4:])
        unknown = torch.full_like(plain_, torch.nan)
        return Losses(plain_, covered, covered_control, pasted, pasted_control, unknown, unknown)

    return Pool(torch.cat(images), maps, None if labels is None else [labels[one] for one in chosen], losses)


def _stacked(loss: Callable[[int, Tensor], Tensor], ones: Sequence[int], images: Tensor) -> Tensor:
    return torch.stack([loss(one, image[None]) for one, image in zip(ones, images, strict=True)])


def _widened(call: NetworkCall) -> NetworkCall:
    """Return the call with what is in half precision in float32."""
    args, kwargs = map_tensors(lambda t: t.float() if t.dtype in HALF else t, (call.args, call.kwargs))
    return call._replace(args=args, kwargs=kwargs)


def _evaluate(model: nn.Module) -> None:
    """Set eval mode everywhere; the sandbox puts each module's own mode back."""
    for module in model.modules():
        if "training" in vars(module):
            vars(module)["training"] = False
