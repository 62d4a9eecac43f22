"""When to say that a class rests on one small place, and in which words."""

from __future__ import annotations

import math
from collections.abc import Collection

from normgrad_lightning.check.results import COVERED, PASTED, ClassCheck, Tally

MIN_IMAGES = 8
"""Of a class, to say anything of it."""

LEAST = {"square": 1.2, "tenth": 2.0}
"""By how much the loss must rise, more than with the control, both covered and pasted, for a region of this form.

The strongest tenth of an image is a larger part of an object that is rightly looked at: it must tell more.
"""

SURE = 3.0
"""How many standard errors both differences must be above zero."""

EVERYWHERE = "What is everywhere in an image (tint, blur, noise) cannot be seen this way."


def rests(check: ClassCheck) -> bool:
    """Return whether the class rests on one small place.

    It does if, over at least 8 of its images, covering the place raises their loss by at least 1.2 more than covering
    another place does, and pasting it into other images raises theirs by at least 1.2 more than pasting another part
    does; and if both differences are at least three times their standard error. If the place is no square but the
    strongest tenth of the image, it takes 2.0.
    """
    if check.pasted_difference is None or check.pasted_error is None or check.n < MIN_IMAGES:
        return False
    pairs = ((check.covered_difference, check.covered_error), (check.pasted_difference, check.pasted_error))
    return all(difference >= max(LEAST[check.form], SURE * error) for difference, error in pairs)


def strength(tally: Tally, form: str) -> float:
    """Return the smaller of both differences, in units of what the rule asks for; minus infinity if unknown."""
    known = [value for value in (tally.mean(COVERED), tally.mean(PASTED)) if math.isfinite(value)]
    return min(known, default=-math.inf) / LEAST[form]


def sentence(checks: Collection[ClassCheck]) -> str:
    """Return what was measured, in words: a sentence for each class that rests on one small place, or that none does.

    Args:
        checks: of all classes.
    """
    found = [_says(check) for check in checks if rests(check)]
    return " ".join(found) if found else _nothing(checks)


def _says(check: ClassCheck) -> str:
    return (
        f"`{check.name}` rests on one small place: covering {100 * check.area:.0f} % of its images raises their loss "
        f"from {check.plain:.2f} to {check.covered:.2f} ({check.covered_control:.2f} if another place is covered); "
        f"pasted into other images, the same place raises theirs from {check.pasted_control:.2f} to "
        f"{check.pasted:.2f}.{_called(check)}"
    )


def _called(check: ClassCheck) -> str:
    if check.called is None or check.called_control is None:
        return ""
    called, control = (f"{100 * share:.0f} %" for share in (check.called, check.called_control))
    return f" {called} of these are then called `{check.name}` ({control} if another part is pasted)."


def _nothing(checks: Collection[ClassCheck]) -> str:
    if not checks:
        return f"The check had too few images of each class: it needs {MIN_IMAGES}. {EVERYWHERE}"
    largest = max(checks, key=_least)
    if largest.pasted_difference is None:
        told = (
            f"`{largest.name}`, covering adds {largest.covered_difference:.2f} to its loss; with images of one class "
            "alone, nothing can be pasted"
        )
    else:
        told = (
            f"`{largest.name}`, covering adds {largest.covered_difference:.2f} to its loss, pasting "
            f"{largest.pasted_difference:.2f} to that of others"
        )
    return f"No class rests on one small place (largest: {told}). {EVERYWHERE}"


def _least(check: ClassCheck) -> float:
    pasted = check.pasted_difference
    return check.covered_difference if pasted is None else min(check.covered_difference, pasted)
