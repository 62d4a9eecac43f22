"""From the record of a step to pages and writers, one training step later: nothing waits for what was seen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from normgrad_lightning.fit.state import RunState
from normgrad_lightning.isolated.random_state import preserved_rng
from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.settings import Settings
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.normalisation import Normalisation
from normgrad_lightning.step.sets_on_the_way import SetsOnTheWay
from normgrad_lightning.views.style import Style
from normgrad_lightning.writers.outputs import Outputs, places_of

if TYPE_CHECKING:
    from pytorch_lightning import Trainer


@dataclass(frozen=True)
class Record:
    """What was seen of a step, to be shown one step later.

    Attributes:
        step: `trainer.global_step` when its batch began.
        settings: all flags, as they were then.
        is_event: whether its maps are shown.
        sets: the maps of the images that are shown, those of the step itself first; none if the step was only read.
        batch: order-0 maps of the whole batch on coarse grids, for the views that collect; at most one set.
        skipped: how many kinds of maps are missing because a gradient was not finite.
        about: sentences on what is read.
    """

    step: int
    settings: Settings
    is_event: bool
    sets: SetsOnTheWay = field(default_factory=SetsOnTheWay)
    batch: SetsOnTheWay = field(default_factory=SetsOnTheWay)
    skipped: int = 0
    about: Sequence[str] = ()


class Showing:
    """Keeps the maps of a record, lets the views draw, and gives their pages to every writer.

    Args:
        trainer: runs the training.
        state: what outlives the `fit`.
        messenger: for warnings.
        outputs: where pages go.
        group: what all tags begin with.
        check_page: returns a page of what the check has measured by a step, if that is new.

    Attributes:
        pending: what is to be shown next.
        normalisation: the mean and the standard deviation of the images, if they were found.
    """

    def __init__(
        self,
        trainer: Trainer,
        state: RunState,
        messenger: Messenger,
        outputs: Outputs,
        group: str,
        check_page: Callable[[int, Style], Page | None],
    ) -> None:
        self._trainer = weakref.ref(trainer)
        self._state, self._messenger, self._outputs = state, messenger, outputs
        self._group, self._check_page = group, check_page
        self._fits = False
        self.pending: Record | None = None
        self.normalisation: Normalisation | None = None

    def collects(self, settings: Settings) -> bool:
        """Return whether a view that somebody will see needs the maps of whole batches."""
        return bool(self._outputs.writers) and settings.views.collects

    def finish(self) -> None:
        """Show what is pending."""
        record, self.pending = self.pending, None
        if record is not None:
            with preserved_rng([]):  # views of the user's may draw
                self._show(record)

    def conclude(self, trainer: Trainer, settings: Settings, step: int) -> None:
        """Write what comes at the end of training, or where it breaks off.

        Args:
            trainer: runs it.
            settings: all flags.
            step: the last one.
        """
        with preserved_rng([]):
            self._write_last_pages(trainer, settings, step)
        self._outputs.conclude(trainer, with_report="tab" in settings.views.chosen)

    def _show(self, record: Record) -> None:
        settings, messenger, views = record.settings, self._messenger, self._state.views
        with messenger.guard("collecting from a batch"):
            for batch in record.batch.arrived():
                views.add(batch, self._style(settings, batch), settings.views, messenger.guard)
        if not record.is_event:
            return
        sets = record.sets.arrived()
        live = [one for one in sets if one.largest]
        is_finite = all(bool(value.isfinite()) for one in live for value in one.largest.values())
        sets = [one for one in sets if is_finite or not one.largest]
        skipped = record.skipped + (not is_finite)
        self._state.keep_maps(sets, skipped)
        if skipped:
            messenger.warn_once(
                "NormGrad skips steps whose gradients are not finite (as after an fp16 overflow, or if images "
                "have NaN); `callback.skipped` counts them."
            )
        _warn_of_zeros(live[:1], messenger)
        trainer = self._trainer()
        if sets and trainer is not None:
            with messenger.guard("showing the maps"):
                self._write(trainer, record, sets)

    def _write(self, trainer: Trainer, record: Record, sets: Sequence[MapSet]) -> None:
        """Let every view draw an event, and every writer write the pages."""
        settings, writers = record.settings, self._outputs.writers
        if not writers:
            self._outputs.announce(trainer, (), record.about)
            return
        style = self._style(settings, sets[0])
        pages = self._state.views.pages(sets, style, settings.views, self._messenger.guard)
        pages += self._check_pages(record.step, style)
        if pages and "curves" in settings.views.chosen:
            pages.append(Page(record.step, scalars={f"{self._group}/cost": self._state.budget.share}))
        all_come_later = not pages and settings.views.views is not None
        written = writers if all_come_later else self._outputs.write(pages)
        self._outputs.announce(trainer, written, record.about)

    def _write_last_pages(self, trainer: Trainer, settings: Settings, step: int) -> None:
        if not self._outputs.writers:
            return
        style = self._style(settings)
        pages = self._state.views.last_pages(style, settings.views, self._messenger.guard)
        for page in [*pages, *self._check_pages(step, style)]:
            written = self._outputs.write([page])
            films = ", ".join(f"{tag}.webp" for tag in page.films)
            if written and films:
                places = places_of(written)
                self._messenger.announce(trainer, f"NormGrad wrote a film of the probe, {films}, to {places}.")

    def _check_pages(self, step: int, style: Style) -> list[Page]:
        with self._messenger.guard("drawing the check"):
            page = self._check_page(step, style)
            return [] if page is None else [page]
        return []

    def _style(self, settings: Settings, one: MapSet | None = None) -> Style:
        """Return how pictures look: in true colours, if the normalisation was found and fits the images."""
        style, found = settings.style, self.normalisation
        if one is not None and one.images is not None and found is not None:
            self._fits = len(found[0]) in (1, one.images.shape[1])
        if found is None or not self._fits or not (style.mean is None and style.std is None):
            return style
        return replace(style, mean=found[0], std=found[1])


def _warn_of_zeros(sets: Sequence[MapSet], messenger: Messenger) -> None:
    """Warn once of each layer whose map is zero everywhere."""
    largest = [(layer, value) for one in sets for layer, value in one.largest.items()]
    if len(largest) > 1 and not any(value for _, value in largest):
        messenger.warn_once(
            "NormGrad: the maps of all layers are zero everywhere: the loss has no gradient, as when it is zero. At "
            "the first step this happens if the head's weights start at zero."
        )
        return
    for name in [layer for layer, value in largest if value == 0]:
        messenger.warn_once(
            f"NormGrad: the map of {name!r} is zero everywhere: no gradient reaches its locations. At the first "
            "step this happens if the head's weights start at zero. If it continues, the loss is zero, or the head "
            "reads only a class token: then choose an earlier layer."
        )
