"""The check in a `fit`: does a piece of it with the network of a step that is read, when the step is over."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from normgrad_lightning.check.card import check_page
from normgrad_lightning.check.passes import CannotCheck, Pool, loss_pool, network_pool
from normgrad_lightning.check.rounds import Check, first_round
from normgrad_lightning.check.rule import rests, sentence
from normgrad_lightning.isolated.batches import batch_size
from normgrad_lightning.isolated.interrupts import TalksToOthers, memory_explained
from normgrad_lightning.maps import MapSet
from normgrad_lightning.page import Page
from normgrad_lightning.step.context import StepContext
from normgrad_lightning.step.messages import Messenger
from normgrad_lightning.step.network import Found, StepNetwork
from normgrad_lightning.step.quiet import alone
from normgrad_lightning.views.style import Style
from normgrad_lightning.views.tag_namer import TagNamer

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

MOST_IMAGES = 64
"""Of a batch that the check looks at."""

_AT_ONCE = 8  # images of a piece that asks the training loss, each alone
_NEAR_END = 0.2  # of all steps: then one more round begins
_ASKS = (
    "NormGrad: the check asks the loss of single images (`check=True`), so `{}` runs more often than without NormGrad; "
    "what it prints, writes to files or keeps outside of the module is not put back."
)


class StepCheck:
    """Does the check, step by step.

    By default it runs the network alone, where that is recognised, and nothing at all elsewhere: `training_step` never
    runs twice. With `check=True` it asks the training loss elsewhere.

    Args:
        trainer: runs the training.
        network: of its steps.
        check: what was measured; it outlives the `fit`.
        messenger: for the sentence, and for warnings.

    Attributes:
        is_at_work: whether there was something to do when it was last asked.
    """

    def __init__(self, trainer: Trainer, network: StepNetwork, check: Check, messenger: Messenger) -> None:
        self._trainer = weakref.ref(trainer)
        self._network, self._check, self._messenger = network, check, messenger
        self._has_given_up, self._has_looked, self._began_last_round = False, False, False
        self.is_at_work = False
        self._told: set[int] = set()
        self._is_over = False
        self._shown: list[tuple[int, int, int]] = []

    def is_due(self, context: StepContext) -> bool:
        """Return whether the step has a piece."""
        check, step, network = context.settings.general.check, context.step, self._network
        if check is not False and not self._has_given_up and network.obstacle is not None:
            self._give_up(network.obstacle, context)
        can_be = check is not False and not self._has_given_up and (bool(check) or network.may_be_found)
        self._check.begin_at(first_round(self._total()), step)
        self.is_at_work = can_be and (self._check.is_due(step) or self._last_round_begins(step))
        return self.is_at_work

    def do(self, context: StepContext, sets: Sequence[MapSet], found: Found | None, *, is_last: bool) -> None:
        """Do a piece; at the last step, all that its images are good for.

        Args:
            context: of the step, which is over. Its labels are on the host.
            sets: order-0 maps of the batch first.
            found: the network of the step.
            is_last: whether it is known to be the last one.
        """
        trainer = self._trainer()
        if trainer is None or not sets or not sets[0].maps:
            return
        self._is_over |= is_last  # what there is to say then is said in a moment
        self._tell()
        try:
            with memory_explained("To do without it, set `check=False`."):
                pool = self._pool(trainer, context, sets[0], found)
                if pool is not None:
                    self._advance(trainer, context, pool, is_last=is_last)
        except (CannotCheck, TalksToOthers) as error:
            self._give_up(str(error), context)
        except Exception:
            self._has_given_up = True
            raise

    def page(self, step: int, style: Style, group: str, classes: Sequence[str] | None) -> Page | None:
        """Return a card and curves of what is known; None if that was shown before."""
        results = self._check.results()
        state = [(label, one.step, one.n) for label, one in results.items()]
        if state == self._shown:
            return None
        self._shown = state
        self._tell()
        return check_page(results, style, TagNamer(step, group, classes), self._check.seen)

    def conclude(self, *, is_asked_for: bool) -> None:
        """Say at the end of training what was measured; that nothing was, if it was asked for or training was long."""
        results, trainer, self._is_over = self._check.results(), self._trainer(), True
        if trainer is None or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        was_due = is_asked_for or (self._has_looked and trainer.global_step >= self._check.first)
        if not results and (self._has_given_up or not was_due):
            return
        told = sentence(list(results.values()), self._check.seen)
        if not self._has_looked and not results:
            begins = f"the check begins at step {self._check.first}, or near the end, at steps that are read"
            told = f"No step was checked: {begins}."
        self._messenger.announce(trainer, f"NormGrad: {told}", cause="the check at the end")

    def _last_round_begins(self, step: int) -> bool:
        """Return whether the end is near, and the round for it has not begun."""
        total = self._total()
        return not self._began_last_round and math.isfinite(total) and step >= min((1 - _NEAR_END) * total, total - 1)

    def _total(self) -> float:
        """Return how many steps the run has; infinity if that is not known."""
        trainer = self._trainer()
        with suppress(Exception):  # of accumulation that changes on the way, Lightning cannot tell
            return math.inf if trainer is None else float(trainer.estimated_stepping_batches)
        return math.inf

    def _tell(self) -> None:
        """Say which classes rest on one small place, each once."""
        trainer, results = self._trainer(), self._check.results()
        new = {label: one for label, one in results.items() if label not in self._told and rests(one)}
        if not new or trainer is None or self._is_over:
            return
        self._told |= new.keys()
        step, more = max(one.step for one in new.values()), " More images follow." * self._check.wants_more(new)
        self._messenger.announce(trainer, f"NormGrad, step {step}: {sentence(list(new.values()))}{more}")

    def _advance(self, trainer: Trainer, context: StepContext, pool: Pool, *, is_last: bool) -> None:
        """Do a piece, or all."""
        self._check.names = context.names(pool.labels or []) | self._check.names
        if self._last_round_begins(context.step) and self._check.is_complete:
            self._began_last_round = True
            self._check.begin_round(context.step)
        self._has_looked = True
        with alone(context.module, trainer):
            while self._check.advance(pool, context.step) and is_last:
                pass

    def _pool(self, trainer: Trainer, context: StepContext, live: MapSet, found: Found | None) -> Pool | None:
        """Return what the step has shown and how to ask for more; None if there is no way."""
        if found is not None and found.call is not None:
            images_of = live.layers_of_one_input
            images = live.images_of[images_of[0]]
            if images is not None:
                count = min(MOST_IMAGES, *(len(live.maps[layer]) for layer in images_of), len(images))
                maps = {layer: live.maps[layer][:count] for layer in images_of}
                return network_pool(found.call, images[:count].detach(), maps, found.labels, found.young)
        return self._loss_pool(trainer, context, live) if context.settings.general.check else None

    def _loss_pool(self, trainer: Trainer, context: StepContext, live: MapSet) -> Pool | None:
        """Return a pool that asks the training loss."""
        try:
            context.loss.check(context.module, context.batch)
            count = batch_size(context.batch)
            first = context.step * _AT_ONCE % count
            chosen = sorted({(first + number) % count for number in range(_AT_ONCE)})
            labels = None if context.labels is None or len(context.labels) != count else context.labels
            layers, read = list(live.maps), context.settings.read
            loss = context.loss.in_float32()
            pool = loss_pool(context.module, loss, context.batch, labels, layers, chosen, read)
        except ValueError as error:
            self._give_up(str(error), context)
            return None
        self._messenger.announce(trainer, _ASKS.format(context.loss.name), cause="the check asks the loss")
        return pool

    def _give_up(self, why: str, context: StepContext) -> None:
        """Stop; say why if the check was asked for."""
        self._has_given_up = True
        if context.settings.general.check:
            self._messenger.problem(f"NormGrad cannot do the check: {why.rstrip('.')}.")
