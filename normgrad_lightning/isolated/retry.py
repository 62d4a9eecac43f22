"""A second look at order-1 passes that gave no maps: on other statistics of BatchNorm, or on the whole batch.

Passes on single images in eval mode see less than training does. Where their loss is not finite or an image gets no
gradient, the reason may be that BatchNorm has no statistics yet, or that the loss compares images with each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgrad_lightning.hooks.to_host import OnTheWay, are_finite
from normgrad_lightning.isolated.batchnorm_warmup import BatchNorm
from normgrad_lightning.isolated.inner_step import InnerStepPasses
from normgrad_lightning.isolated.interrupts import failures_dropped, is_out_of_memory
from normgrad_lightning.isolated.one_pass import NotFinite, NothingToRead, check_finite
from normgrad_lightning.isolated.pairs import LayerMaps
from normgrad_lightning.layers.nested import floating_tensors


class NeedsBatch(ValueError):
    """A loss that single images have none of."""

    def __init__(self, alone: str, together: str) -> None:
        super().__init__(
            f"`per_image`: expected a loss of single images, but that of an image alone {alone}, and that of the whole "
            f"batch {together}. Losses that compare images with each other need the batch. Set `per_image=False`, "
            "which takes it as it is."
        )


class WithoutStatistics(NotFinite):
    """A loss or a gradient that is not finite, in a model whose BatchNorm has no statistics."""


class PassResult(NamedTuple):
    """What passes give.

    Attributes:
        maps: by kind.
        on_host: the same, on the host.
        images: that they are of; None if none was recognised.
        nothing_to_learn: whether some images have a loss without any gradient, before an inner step.
    """

    maps: dict[str, LayerMaps]
    on_host: dict[str, LayerMaps]
    images: Tensor | None
    nothing_to_learn: bool = False

    @property
    def dark(self) -> list[bool]:
        """For each kind and image, whether its map is zero at all layers."""
        of_kinds = [[m.flatten(1).any(1) for m in of_layers.values()] for of_layers in self.on_host.values()]
        return [dark for of in of_kinds if of for dark in torch.stack(of).any(0).logical_not().tolist()]


class WholeBatch(NamedTuple):
    """A batch that training takes as a whole, and what the passes take of it.

    Attributes:
        batch: the batch.
        indices: which of its images the passes take, one by one; None: the batch as it is.
        explains_errors: whether to look at the batch also if the loss of an image raises.
        steady: whether BatchNorm layers that have hardly any statistics always take those of the batch, not only where
            the passes give nothing: for maps that are compared from event to event.
        young: these layers, and how often they have been updated, where that is known; None: the passes look.
    """

    batch: Any
    indices: Sequence[int] | None
    explains_errors: bool = False
    steady: bool = False
    young: Mapping[BatchNorm, int] | None = None


class Retry:
    """Runs order-1 passes, and once more or on the whole batch if they give nothing.

    Args:
        passes: runs the passes.
        run: returns the maps of some batches.
        batches: what the passes take.
        whole: where that comes from.
    """

    def __init__(
        self,
        passes: InnerStepPasses,
        run: Callable[[Sequence[Any]], PassResult],
        batches: Sequence[Any],
        whole: WholeBatch,
    ) -> None:
        self._passes = passes
        self._run = run
        self._batches = batches
        self._whole = whole

    def maps(self) -> PassResult:
        """Return what the passes give; if that is nothing, what they give with the batch's statistics for BatchNorm.

        Raises:
            NeedsBatch: only the whole batch has maps.
        """
        whole = self._whole
        young = self._passes.batchnorm_warmup if whole.young is None else whole.young
        updates = min(young.values(), default=None)
        if whole.steady and updates is not None and self._passes.use_statistics_of(whole.batch, young):
            updates = None
        result, problem = self._attempt(self._batches)
        result = result or self._without_ignored()
        if result is not None and (result.nothing_to_learn or not any(result.dark)):
            return result
        if updates is not None and self._passes.use_statistics_of(whole.batch, young):
            result, problem = self._attempt(self._batches)
            updates = None
        if result is None:
            if self._needs_batch(any):
                raise NeedsBatch("is not finite", "is")
            is_young = updates == 0 and are_finite(floating_tensors(whole.batch))
            raise _without_statistics(problem) if is_young else NotFinite(problem)
        if all(result.dark) and self._needs_batch(all):
            raise NeedsBatch("has no gradient", "has one")
        return result._replace(nothing_to_learn=self._is_learned(result))

    def _without_ignored(self) -> PassResult | None:
        """Return maps of zeros for images without a gradient in the batch, and those of the others; None if in vain.

        The loss of such an image alone may be a mean over nothing: its labels are ignored.
        """
        whole, count = self._whole, len(self._batches)
        if whole.indices is None or count < 2:
            return None
        with failures_dropped():
            maps = self._order0(whole.batch, whole.indices)
            images = None if self._passes.images is None else self._passes.images[list(whole.indices)]
            counts = torch.stack([m.flatten(1).any(1) for m in maps]).any(0)  # not a number counts
            others = counts.nonzero().flatten().tolist()
            if 0 < len(others) < count:
                result, _ = self._attempt([self._batches[i] for i in others])
                if result is not None:
                    of_all = {
                        kind: {name: _spread(m, others, count) for name, m in of.items()}
                        for kind, of in result.maps.items()
                    }
                    return PassResult(of_all, arrived(of_all), images, nothing_to_learn=True)
        return None

    def _is_learned(self, result: PassResult) -> bool:
        """Return whether the first image whose maps are zero had no gradient even before an inner step."""
        dark = [i % len(self._batches) for i, is_dark in enumerate(result.dark) if is_dark]
        return self._whole.indices is not None and bool(dark) and not self._has_maps(self._batches[dark[0]], [0])

    def _attempt(self, batches: Sequence[Any]) -> tuple[PassResult | None, str]:
        """Return what the passes give, or None and what is not finite."""
        try:
            return self._run(batches), ""
        except NotFinite as error:
            return None, str(error)
        except NothingToRead:
            raise
        except Exception as error:
            if is_out_of_memory(error) or not self._whole.explains_errors or not self._needs_batch(any):
                raise
            raise NeedsBatch(f"fails with {type(error).__name__} ({error})", "does not") from error

    def _needs_batch(self, which: Callable[[Iterable[bool]], bool]) -> bool:
        """Return whether any or all images have an order-0 map in the batch, but none alone, before any inner step."""
        whole = self._whole
        if whole.indices is None or not self._has_maps(whole.batch, whole.indices):
            return False
        return which(not self._has_maps(image, [0]) for image in self._batches)

    def _has_maps(self, batch: Any, indices: Sequence[int]) -> bool:
        with failures_dropped():
            maps = self._order0(batch, indices)
            return all(bool(m.isfinite().all()) for m in maps) and any(m.any() for m in maps)
        return False

    def _order0(self, batch: Any, indices: Sequence[int]) -> list[Tensor]:
        """Return the order-0 map of each layer for these images of a batch, on the host."""
        self._passes.losses.clear()
        maps = [m[list(indices)] for m in self._passes.order0(batch).values()]
        loss, *maps = OnTheWay([*self._passes.losses, *maps]).arrived()
        check_finite(loss)
        return maps


def _without_statistics(problem: str) -> WithoutStatistics:
    return WithoutStatistics(
        f"{problem} BatchNorm's statistics have not been updated yet (`num_batches_tracked` is 0): in eval mode it "
        "normalises nothing, and features may grow without limit. Train for some steps first."
    )


def _spread(m: Tensor, rows: Sequence[int], count: int) -> Tensor:
    """Return a tensor of `count` rows: these, and zeros elsewhere."""
    whole = m.new_zeros(count, *m.shape[1:])
    whole[list(rows)] = m
    return whole


def arrived(maps: Mapping[str, LayerMaps], losses: Sequence[Tensor] = ()) -> dict[str, LayerMaps]:
    """Return maps on the host, in one copy with the losses that they are of.

    Raises:
        NotFinite: a loss or a map is not.
    """
    here = iter(OnTheWay([*losses, *(m for of_layers in maps.values() for m in of_layers.values())]).arrived())
    for _ in losses:
        check_finite(next(here))
    on_host = {kind: {name: next(here) for name in of_layers} for kind, of_layers in maps.items()}
    if not all(bool(m.isfinite().all()) for of_layers in on_host.values() for m in of_layers.values()):
        raise NotFinite("`loss_fn`: expected finite gradients at the layers, but they are not.")
    return on_host
