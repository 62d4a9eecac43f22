"""What the check has measured: running sums of each class, and what they say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from normgrad_lightning.check.passes import Losses

COVERED, PASTED = "covered_difference", "pasted_difference"
QUANTITIES = (*Losses._fields, COVERED, PASTED)
"""What is summed up over images: the losses, and the differences to the control, whose spread is needed."""


@dataclass(frozen=True, eq=False)
class Example:
    """One image of a class for the card, small.

    Attributes:
        image: `(C, *S)`, as the network saw it.
        region: `(*S)`, true inside.
        covered: the image with a donor's pixels inside.
        pasted: the donor with the image's pixels inside.
        ratio: the map's peak in units of its mean: of all, the image with the largest one is kept.
    """

    image: Tensor
    region: Tensor
    covered: Tensor
    pasted: Tensor
    ratio: Tensor

    def copied(self) -> Example:
        """Return the same in memory of its own: what arrives on the host together lives together."""
        return Example(*(t.clone() for t in vars(self).values()))


@dataclass(frozen=True)
class ClassCheck:
    """What a class rests on, as far as covering and pasting one place of its images can tell.

    Losses are means over images. Where the network gives scores, they are cross-entropies.

    Attributes:
        name: of the class; `"all"` without labels.
        step: of training, when it was measured; 0 of a finished model.
        n: how many of its images were measured.
        plain: loss of its images as they are.
        covered: the same with the region covered by another image's pixels.
        covered_control: the same with a place of the same form covered elsewhere.
        covered_error: standard error of the difference of these two.
        pasted: loss of other classes' images with the region pasted into them; None if there were none.
        pasted_control: the same with another part pasted.
        pasted_error: standard error of the difference of these two.
        called: share of those images that are now called this class; None without scores.
        called_control: the same with another part pasted.
        form: of the region that told most: `"square"`, around the peak, or `"tenth"`, the strongest tenth of the image.
        area: of the region, as a share of the image.
        example: for the card.
    """

    name: str
    step: int
    n: int
    plain: float
    covered: float
    covered_control: float
    covered_error: float
    pasted: float | None
    pasted_control: float | None
    pasted_error: float | None
    called: float | None
    called_control: float | None
    form: str
    area: float
    example: Example | None = field(default=None, repr=False, compare=False)

    def __repr__(self) -> str:
        """Return the numbers, with two decimals."""
        known = {one.name: getattr(self, one.name) for one in fields(self) if one.repr}
        told = (f"{name}={v:.2f}" if isinstance(v, float) else f"{name}={v!r}" for name, v in known.items())
        return f"{type(self).__name__}({', '.join(told)})"

    @property
    def covered_difference(self) -> float:
        """How much more covering the region costs than covering another place."""
        return self.covered - self.covered_control

    @property
    def pasted_difference(self) -> float | None:
        """How much more the pasted region costs other images than another part does."""
        if self.pasted is None or self.pasted_control is None:
            return None
        return self.pasted - self.pasted_control


class Tally:
    """Sums over the images of one class, for one form of regions.

    Attributes:
        n: how many images.
    """

    def __init__(self) -> None:
        self.n = 0
        self._sums: list[float] = [0.0] * len(QUANTITIES)
        self._squares = [0.0] * len(QUANTITIES)

    def add(self, losses: Sequence[float]) -> None:
        """Add an image: what `Losses` has, in that order. An image whose own losses are not finite does not count."""
        plain, covered, covered_control, pasted, pasted_control, *_ = losses
        if not all(map(math.isfinite, (plain, covered, covered_control))):
            return
        self.n += 1
        for index, value in enumerate([*losses, covered - covered_control, pasted - pasted_control]):
            self._sums[index] += value
            self._squares[index] += value * value

    def mean(self, of: str) -> float:
        """Return the mean of a quantity; NaN if an image had none."""
        return self._sums[QUANTITIES.index(of)] / self.n if self.n else math.nan

    def error(self, of: str) -> float:
        """Return the standard error of a mean; infinite for fewer than two images."""
        if self.n < 2:
            return math.inf
        index = QUANTITIES.index(of)
        total = self._sums[index]
        return math.sqrt(max(self._squares[index] - total * total / self.n, 0.0) / (self.n - 1) / self.n)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint carries."""
        return {"n": self.n, "sums": list(self._sums), "squares": list(self._squares)}

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Tally:
        """Return the tally of a checkpoint."""
        tally = cls()
        tally.n, tally._sums, tally._squares = int(state["n"]), list(state["sums"]), list(state["squares"])
        return tally


def packed(losses: Losses, *more: Tensor) -> Tensor:
    """Return everything in one tensor, `(R, 7 + len(more))`: one transfer to the host."""
    return torch.stack([t.float() for t in (*losses, *more)], 1)


def class_check(name: str, step: int, tally: Tally, form: str, area: float, example: Example | None) -> ClassCheck:
    """Return the means of a tally."""
    means = {of: tally.mean(of) for of in QUANTITIES}
    may_be_unknown = {of: means[of] if math.isfinite(means[of]) else None for of in Losses._fields[3:]}
    return ClassCheck(
        name=name,
        step=step,
        n=tally.n,
        plain=means["plain"],
        covered=means["covered"],
        covered_control=means["covered_control"],
        covered_error=tally.error(COVERED),
        pasted_error=tally.error(PASTED) if math.isfinite(means[PASTED]) else None,
        **may_be_unknown,
        form=form,
        area=area,
        example=example,
    )
