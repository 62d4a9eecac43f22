"""What is known of a training step when its batch begins, and what readers and passes return of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normgrad_lightning.isolated.one_pass import NotFinite, NothingToRead
from normgrad_lightning.isolated.retry import WithoutStatistics
from normgrad_lightning.maps import MapKind, MapSet
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.loss import NoLoss, TrainingLoss
from normgrad_lightning.views.tag_namer import TagNamer

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule


@dataclass(frozen=True)
class StepContext:
    """A training step that is read. Nobody writes into it: flags set on the way count from the next one on.

    Attributes:
        step: `trainer.global_step` at the start of the batch.
        module: what trains.
        batch: what it trains on.
        loss: the loss of a batch, for extra passes.
        settings: all flags, as they were when the batch began.
        is_event: whether maps are shown; else the step is only read for the views that collect.
        with_order1: whether order-1 maps are due.
        labels: the class of each image of the batch, if known; a tensor as long as nobody needs them on the host.
        classes: the names of the classes, if known.
        group: what all tags begin with.
        masks: where the object is in each image of the batch, if known.
    """

    step: int
    module: LightningModule
    batch: Any
    loss: TrainingLoss
    settings: Settings
    is_event: bool = True
    with_order1: bool = False
    labels: Sequence[int] | None = None
    classes: Sequence[str] | None = None
    group: str = MapSet.group
    masks: Tensor | None = None

    def map_set(
        self,
        kind: MapKind,
        maps: Mapping[str, Tensor],
        images_of: Mapping[str, Tensor | None],
        layers: Sequence[str],
        images: Tensor | None,
        **known: Any,
    ) -> MapSet:
        """Return these maps with what is known of the step; `known` has other fields of a `MapSet`."""
        about = {"variant": self.settings.variant, "classes": self.classes, "group": self.group, **known}
        return MapSet(kind, self.step, maps, images, images_of, layers, **about)

    def names(self, labels: Sequence[int]) -> dict[int, str]:
        """Return what classes are called."""
        return TagNamer(self.step, self.group, self.classes).names(labels)

    def labels_at(self, indices: Sequence[int]) -> list[int] | None:
        """Return the classes of these images of the batch, if known."""
        labels = self.labels
        fits = labels is not None and max(indices, default=0) < len(labels)
        return [int(labels[i]) for i in indices] if labels is not None and fits else None


@dataclass(frozen=True)
class Seen:
    """What a reader or a pass has seen of a step.

    Attributes:
        sets: a set for each kind of map.
        indices: which images of the batch the sets are of; None: all of them, or those of a probe.
        skipped: how many kinds of maps are missing because a gradient was not finite.
        excuse: why there are no maps, if that is a failure only when training learns from the batch. The sentence, not
            the error: a traceback would keep the tensors of the pass alive.
    """

    sets: Sequence[MapSet] = ()
    indices: Sequence[int] | None = None
    skipped: int = 0
    excuse: ValueError | None = None

    @property
    def is_of_single_images(self) -> bool:
        """Whether there is a map for each index: a video has several."""
        return all(len(m) == len(self.indices or ()) for one in self.sets for m in one.maps.values())


def seen_by(passes: Callable[[], Seen]) -> Seen:
    """Return what passes have seen. Handle expected reasons for missing maps."""
    try:
        return passes()
    except WithoutStatistics:
        raise
    except NotFinite:
        return Seen(skipped=1)
    except (NoLoss, NothingToRead) as error:
        return Seen(excuse=type(error)(str(error)))
    except RuntimeError as error:
        if "functorch" in str(error):
            raise ValueError("passes cannot read a network that runs inside of `torch.func`, as `vmap`.") from error
        raise
