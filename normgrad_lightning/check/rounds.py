"""Rounds of the check, spread over the steps of training: each call does a small, bounded piece.

The network changes while it trains, so every round starts new sums. Until a class is measured again, its latest
numbers stand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from normgrad_lightning.check import regions
from normgrad_lightning.check.passes import Changed, Losses, Pool
from normgrad_lightning.check.results import ClassCheck, Example, Tally, class_check, packed
from normgrad_lightning.check.rule import MIN_IMAGES, strength
from normgrad_lightning.check.typical import TypicalOfOthers
from normgrad_lightning.hooks.to_host import OnTheWay, from_host

ALL = -1
"""In place of a class, where no labels are known."""


class Form(NamedTuple):
    """A form of regions.

    Attributes:
        find: returns the region of each map.
        move: returns the same elsewhere.
        is_own: whether what is typical of other classes' maps is removed first. What is long, or at an edge, hardly
            stands out else; a small mark does, and more clearly.
    """

    find: Callable[..., Tensor]
    move: Callable[..., Tensor]
    is_own: bool


FORMS = {
    "square": Form(regions.peak_squares, regions.moved_squares, is_own=False),
    "tenth": Form(regions.strongest_tenths, regions.moved_around, is_own=True),
}
"""Every form of regions. Of each class, the one that told most is reported."""

FEW = MIN_IMAGES
"""Images of a class for each form of regions, at first."""

MANY = 24
"""Images of a class for the form that told most, if it looks as if the class rested on such a place."""

ROWS = 12
"""Images changed in one piece, at least; of larger batches, half as many as there are. Five passes, forward only."""

CLASSES = 12
"""Classes that a round looks at."""

FIRST = 50
"""Step that the first round begins at, in a run of five hundred steps or more."""

_EARLIEST, _PART = 10, 0.1  # in a shorter run: the step, and the part of all steps
_ROUNDS = (1, 2, 4)  # and ten times, a hundred times …; in units of the first step
_PROMISING = 0.5  # of what the rule asks for: then it is worth measuring more images
_LONGEST = 128  # pixels of an example


def first_round(total: float) -> int:
    """Return the step that the first round begins at in a run of so many steps."""
    return int(max(min(FIRST, _PART * total), _EARLIEST))


def round_of(step: int, first: int = FIRST) -> int:
    """Return how many rounds have begun by a step: they do at 50, 100, 200, 500, 1000, 2000, 5000 and so on.

    Args:
        step: of training.
        first: the step of the first round, instead of 50; the others are in proportion to it.
    """
    count, scale = 0, 1
    while True:
        for mark in _ROUNDS:
            if step < mark * scale * first:
                return count
            count += 1
        scale *= 10


class _Row(NamedTuple):
    """An image to change, its donor, and the form of its region. Images are numbers within a pool."""

    label: int
    form: str
    image: int
    donor: int
    can_paste: bool


class _Pending(NamedTuple):
    """What a piece gave: values, then examples. It is looked at in the next call, so nothing waits for it."""

    rows: Sequence[_Row]
    examples: Sequence[tuple[int, str]]
    tensors: OnTheWay


class _UsedImages(WeakKeyDictionary[Pool, set[tuple[str, int]]]):
    """The forms and images of each pool that were measured. Pickled, it is empty: no pool outlives its step."""

    def __reduce__(self) -> tuple[type[_UsedImages], tuple[()]]:
        return _UsedImages, ()


class Measured:
    """The sums of one class in one round.

    Attributes:
        step: of the latest image.
        tallies: for each form of regions.
        areas: of the regions, as shares of the image.
        examples: the clearest image of each.
    """

    def __init__(self) -> None:
        self.step = 0
        self.tallies = {form: Tally() for form in FORMS}
        self.areas = dict.fromkeys(FORMS, 0.0)
        self.examples: dict[str, Example] = {}
        self._images: dict[str, set[float]] = {form: set() for form in FORMS}
        self._tries = Counter[str]()

    def add(self, form: str, image: float, losses: Sequence[float]) -> None:
        """Add an image, unless it was measured before in this round."""
        self._tries[form] += 1
        if image not in self._images[form]:
            self._images[form].add(image)
            self.tallies[form].add(losses)

    @property
    def best(self) -> str:
        """The form that told most."""
        return max(self.tallies, key=lambda form: strength(self.tallies[form], form))

    @property
    def is_known(self) -> bool:
        """Whether there are enough images to say something."""
        return self.tallies[self.best].n >= FEW

    def wants(self, form: str) -> int:
        """Return how many more images should be measured; none if the same ones come by again and again."""
        fewest = min(tally.n for tally in self.tallies.values())
        is_worth_more = fewest >= FEW and form == self.best and strength(self.tallies[form], form) >= _PROMISING
        wanted = MANY if is_worth_more else FEW
        return max(wanted - self.tallies[form].n, 0) if self._tries[form] < 2 * wanted else 0

    @property
    def is_complete(self) -> bool:
        """Whether all images that it wants were measured."""
        return not any(map(self.wants, FORMS))

    def result(self, name: str) -> ClassCheck:
        """Return what was measured with the form that told most."""
        best = self.best
        return class_check(name, self.step, self.tallies[best], best, self.areas[best], self.examples.get(best))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint carries: the numbers, no pictures."""
        tallies = {form: tally.state_dict() for form, tally in self.tallies.items()}
        images = {form: sorted(of_form) for form, of_form in self._images.items()}
        return {"step": self.step, "areas": dict(self.areas), "tallies": tallies, "images": images}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Measured:
        """Return the sums of a checkpoint."""
        measured = cls()
        measured.step = int(state["step"])
        measured.areas.update(state["areas"])
        measured.tallies.update({form: Tally.of(one) for form, one in state["tallies"].items() if form in FORMS})
        measured._images.update({form: set(of_form) for form, of_form in state["images"].items() if form in FORMS})
        return measured


class Check:
    """Measures, in small pieces, what covering and pasting the strongest place of a class's images does.

    A round begins at steps 50, 100, 200, 500, 1000 and so on, and when `begin_round` asks for one. First, eight images
    of each class are measured with each form of regions; then more where it looks as if the class rested on them.

    Attributes:
        names: of the classes, where they are known; others are called by their number.
        first: the step that the first round begins at; `begin_at` changes it.
    """

    def __init__(self) -> None:
        self.names: dict[int, str] = {}
        self.first = FIRST
        self._round = 0
        self._now: dict[int, Measured] = {}
        self._before: dict[int, Measured] = {}
        self._counts = Counter[int]()
        self._used = _UsedImages()
        self._typical = TypicalOfOthers()
        self._pending: _Pending | None = None
        self._turn = 0

    @property
    def is_complete(self) -> bool:
        """Whether every class of this round that has come by has all images that it wants."""
        self.finish()
        return bool(self._now) and all(one.is_complete for one in self._now.values())

    @property
    def seen(self) -> int:
        """How many classes training has shown while something was measured."""
        return sum(label > ALL for label in self._counts)

    def begin_at(self, first: int, step: int) -> None:
        """Let the first round begin at a step, and the others in proportion, also if some have begun by now."""
        if first != self.first:
            self.first, self._round = first, min(self._round, round_of(step, first))

    def is_due(self, step: int) -> bool:
        """Return whether there is something to do at this step: a round begins, or is not over."""
        return round_of(step, self.first) > self._round or (self._round > 0 and not self.is_complete)

    def _begins(self, step: int) -> bool:
        """Return whether a round begins: one that is not over may last until the next but one."""
        return round_of(step, self.first) > self._round + (bool(self._now) and not self.is_complete)

    def begin_round(self, step: int) -> None:
        """Begin a new round now, as at the end of training."""
        self._before = self._latest()
        self._round, self._now = max(round_of(step, self.first), 1), {}
        self._typical.halve()

    def advance(self, pool: Pool, step: int) -> bool:
        """Do a piece of the round: five passes of some images. Return whether there was something to do.

        Call it again with the same pool for more of its images.

        Args:
            pool: what training has just seen.
            step: of training.

        Raises:
            CannotCheck: there is no way to do it; the message says why.
        """
        self.finish()
        if self._begins(step):
            self.begin_round(step)
        labels = [ALL] * len(pool.images) if pool.labels is None else list(pool.labels)
        if pool not in self._used:
            self._counts.update(labels)
            self._typical.add(pool.coarse, labels)
        rows = self._rows(labels, self._followed(), self._used.setdefault(pool, set()), step)
        if rows:
            self._pending = _measured(pool, rows, self._typical)
            self._used[pool].update((row.form, row.image) for row in rows)
        return bool(rows)

    def finish(self) -> None:
        """Take in what the latest piece gave."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        given, *of_examples = pending.tensors.arrived()
        for row, values in zip(pending.rows, given.tolist(), strict=True):
            *losses, image, area = values
            self._now[row.label].add(row.form, image, losses)
            self._now[row.label].areas[row.form] = area
        parts = iter(of_examples)
        for label, form in pending.examples:
            example = Example(*islice(parts, len(fields(Example))))
            kept = self._now[label].examples.get(form)
            if kept is None or float(example.ratio) > float(kept.ratio):
                self._now[label].examples[form] = example.copied()

    def results(self) -> dict[int, ClassCheck]:
        """Return what is known of each class; one with fewer than eight images is left out."""
        return {label: one.result(self._name(label)) for label, one in sorted(self._latest().items())}

    def wants_more(self, labels: Iterable[int]) -> bool:
        """Return whether more images of one of these classes will be measured in this round."""
        return any(label in self._now and not self._now[label].is_complete for label in labels)

    def _name(self, label: int) -> str:
        return "all" if label == ALL else self.names.get(label, str(label))

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint carries: the round, and the numbers of each class."""
        self.finish()
        rounds = {"now": self._now, "before": self._before}
        states = {name: {label: one.state_dict() for label, one in of.items()} for name, of in rounds.items()}
        return {"check": {"round": self._round, "names": dict(self.names), **states}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint; one of an earlier version has nothing of the check."""
        found = state.get("check", {"round": 0, "names": {}, "now": {}, "before": {}})
        self._pending, self._round, self.names = None, int(found["round"]), dict(found["names"])
        self._now, self._before = (
            {int(label): Measured.of(one) for label, one in found[name].items()} for name in ("now", "before")
        )

    def _latest(self) -> dict[int, Measured]:
        self.finish()
        return {**self._before, **{label: one for label, one in self._now.items() if one.is_known}}

    def _followed(self) -> list[int]:
        """Return the classes of this round: those that have begun, then those seen most often."""
        return list(dict.fromkeys([*self._now, *(label for label, _ in self._counts.most_common(CLASSES))]))[:CLASSES]

    def _rows(
        self, labels: Sequence[int], followed: Sequence[int], used: set[tuple[str, int]], step: int
    ) -> list[_Row]:
        """Return what to measure next: what has fewest images comes first."""
        found: list[tuple[int, _Row]] = []
        for label in followed:
            own = [image for image, other in enumerate(labels) if other == label and label >= ALL]
            if not own:
                continue
            begin = self._turn % len(own)  # batches may come in the same order again and again
            own = own[begin:] + own[:begin]
            measured = self._now.setdefault(label, Measured())
            measured.step = step
            for form in FORMS:
                fresh = [image for image in own if (form, image) not in used][: measured.wants(form)]
                rows = _rows_of(label, form, fresh, labels, self._turn)
                found += [(measured.tallies[form].n + nth, row) for nth, row in enumerate(rows)]
        self._turn += 1
        return [row for _, row in sorted(found, key=lambda one: one[0])[: max(ROWS, len(labels) // 2)]]


def _rows_of(label: int, form: str, own: Sequence[int], labels: Sequence[int], turn: int) -> Iterator[_Row]:
    """Yield a row for each image, with donors of other classes by turns; of the same class if there are no others."""
    others = [image for image, other in enumerate(labels) if other not in (label, ALL) and other > ALL]
    for nth, image in enumerate(own):
        donors = others or [other for other in range(len(labels)) if other != image]
        if donors:
            yield _Row(label, form, image, donors[(turn + nth) % len(donors)], bool(others))


def _measured(pool: Pool, rows: Sequence[_Row], typical: TypicalOfOthers) -> _Pending:
    """Return what the passes give for these rows."""
    device, size = pool.images.device, pool.images.shape[2:]

    def tensor(values: Sequence[Any]) -> Tensor:
        return from_host(torch.tensor(values), device)

    images, donors = [row.image for row in rows], [row.donor for row in rows]
    own = tensor(images)
    maps = pool.coarse[own]
    inside, control = (torch.zeros(len(rows), *size, dtype=torch.bool, device=device) for _ in range(2))
    for form in dict.fromkeys(row.form for row in rows):
        numbers = [number for number, row in enumerate(rows) if row.form == form]
        at = tensor(numbers)
        if FORMS[form].is_own:
            maps[at] = typical.removed(maps[at], [rows[number].label for number in numbers])
        inside[at] = FORMS[form].find(maps[at], size)
        control[at] = FORMS[form].move(inside[at])
    changed = Changed.of(pool.images[own], pool.images[tensor(donors)], inside, control)
    losses = pool.losses(changed, images, donors)
    pasted = tensor([row.can_paste for row in rows])
    losses = Losses(*losses[:3], *(t.where(pasted, torch.nan) for t in losses[3:]))
    fingerprints = pool.images.flatten(1)[own, ::3].float().sum(1)
    values = packed(losses, fingerprints, inside.flatten(1).float().mean(1))
    examples = dict(_examples(rows, changed, inside, maps.flatten(1).amax(1)))
    of_examples = [t for example in examples.values() for t in vars(example).values()]
    return _Pending(rows, list(examples), OnTheWay([values, *of_examples]))


def _examples(
    rows: Sequence[_Row], changed: Changed, inside: Tensor, ratio: Tensor
) -> Iterator[tuple[tuple[int, str], Example]]:
    """Yield the clearest image of each class and form, small."""
    for key in dict.fromkeys((row.label, row.form) for row in rows):
        at = from_host(torch.tensor([n for n, row in enumerate(rows) if (row.label, row.form) == key]), ratio.device)
        best = at[ratio[at].argmax(0, keepdim=True)]
        image, covered, pasted = (_small(t[best]) for t in (changed.images, changed.covered, changed.pasted))
        region = _small(inside[best][:, None])
        yield key, Example(image[0], region[0, 0] > 0.5, covered[0], pasted[0], ratio[best])


def _small(images: Tensor) -> Tensor:
    """Return images `(N, C, *S)` with no side longer than a card needs."""
    zoom = _LONGEST / max(images.shape[2:])
    size = [max(1, round(side * zoom)) for side in images.shape[2:]]
    return images.float() if zoom >= 1 else F.interpolate(images.float(), size, mode="area")
