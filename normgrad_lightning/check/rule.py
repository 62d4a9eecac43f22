"""When to say that a class rests on one small place, and in which words."""

from __future__ import annotations

import math
from collections.abc import Collection
from itertools import zip_longest

from normgrad_lightning.check.results import COVERED, PASTED, ClassCheck, Tally

MIN_IMAGES = 8
"""Of a class, to say anything of it."""

LEAST = {"square": 1.2, "tenth": 2.0}
"""By how much the loss must rise, more than with the control, both covered and pasted, for a region of this form.

The strongest tenth of an image is a larger part of an object that is rightly looked at: it must tell more, and surer.
"""

SURE = {"square": 3.0, "tenth": 4.0}
"""How many standard errors both differences must be above zero."""

EARLY = 100
"""Steps: before, a class that is not found may not be learned yet."""

RIGHTLY = "A class may rightly rest on one place: look whether it is a part of the object."

UNSEEN = "What is everywhere in an image (tint, blur, noise), long or in several parts may be missed."


def rests(check: ClassCheck) -> bool:
    """Return whether the class rests on one small place.

    It does if, over at least 8 of its images, covering the place raises their loss by at least 1.2 more than covering
    another place does, and pasting it into other images raises theirs by at least 1.2 more than pasting another part
    does; and if both differences are at least three times their standard error. If the place is no square but the
    strongest tenth of the image, it takes 2.0, and four times.
    """
    return not _missing(check)


def _missing(check: ClassCheck) -> list[str]:
    """Return what the rule asks for that is not so, in words."""
    missing = [f"it takes {MIN_IMAGES} images of the class"] if check.n < MIN_IMAGES else []
    ways = zip_longest(("covering", "pasting"), _lacking(check), fillvalue=f"{LEAST[check.form]}")
    return missing + [f"{way} must raise the loss by at least {asked}" for way, asked in ways if asked]


def _lacking(check: ClassCheck) -> list[str | None]:
    """Return what each difference should be but is not, in words; None if it is large enough, and sure."""
    least, sure = LEAST[check.form], SURE[check.form]
    enough = [(difference >= least, difference >= sure * error) for difference, error in _differences(check)]
    return [
        f"{least}" if not large else f"{sure:.0f} standard errors" if not clear else None for large, clear in enough
    ]


def strength(tally: Tally, form: str) -> float:
    """Return the smaller of both differences, in units of what the rule asks for; minus infinity if unknown."""
    known = [value for value in (tally.mean(COVERED), tally.mean(PASTED)) if math.isfinite(value)]
    return min(known, default=-math.inf) / LEAST[form]


def may_rest(check: ClassCheck) -> bool:
    """Return whether the numbers leave it open: one difference tells, or neither is clearly below what the rule asks.

    A difference is clearly below if it is less than half of that, and below with two standard errors added.
    """
    if check.n < MIN_IMAGES:
        return True
    least = LEAST[check.form]
    return None in _lacking(check) or all(d + max(2 * error, least / 2) >= least for d, error in _differences(check))


def sentence(checks: Collection[ClassCheck], seen: int = 0) -> str:
    """Return what was measured, in words: of each class that rests on one small place, or that none was found.

    Args:
        checks: of all classes that were measured.
        seen: how many classes training has shown; more than were measured if there were few images of some.
    """
    found = [_says(check) for check in checks if rests(check)]
    if found:
        return " ".join([*found, RIGHTLY])
    if not checks:
        return f"The check cannot say anything: it has measured fewer than {MIN_IMAGES} images of each class."
    open_ones = [check for check in checks if may_rest(check)]
    if open_ones:
        return _doubts(max(open_ones, key=_closeness))
    return _nothing(checks, seen)


def _says(check: ClassCheck) -> str:
    return (
        f"`{check.name}` rests on {place_of(check)}: covering {100 * check.area:.0f} % of its images raises their loss "
        f"from {check.plain:.2f} to {check.covered:.2f} ({check.covered_control:.2f} if another place is covered; "
        f"{check.n} images); pasted into other images, the same place raises theirs from {check.pasted_control:.2f} to "
        f"{check.pasted:.2f}.{_called(check)}"
    )


def place_of(check: ClassCheck) -> str:
    """Return what to call the region that told most."""
    return "one small place" if check.form == "square" else "a small part of its images"


def verdict(check: ClassCheck) -> str:
    """Return in a few words whether the class rests on one small place."""
    if rests(check):
        return f"rests on {place_of(check)}"
    return "not sure" if may_rest(check) else "not found to rest on one small place"


def _doubts(check: ClassCheck) -> str:
    why = "; ".join(_missing(check))
    return f"Not sure whether `{check.name}` rests on {place_of(check)}: {why}. {_measured(check)}.{_called(check)}"


def _called(check: ClassCheck) -> str:
    if check.called is None or check.called_control is None:
        return ""
    called, control = (f"{100 * share:.0f} %" for share in (check.called, check.called_control))
    return f" {called} of those images are then called `{check.name}` ({control} if another part is pasted)."


def _nothing(checks: Collection[ClassCheck], seen: int) -> str:
    """Return that nothing was found, and what was asked for. No class is named: none is near to that."""
    step = max(check.step for check in checks)
    none = "So far, no class" if 0 < step < EARLY else "No class"
    asked = f"raise the loss by {LEAST['square']} ({LEAST['tenth']} where the place is a tenth of the image)"
    why = f"for none do covering and pasting both {asked}"
    if all(check.pasted is None for check in checks):
        why = f"for none does covering {asked}; nothing was pasted: that takes labels of several classes"
    count = len(checks)
    of = f"{count} of {seen} classes" if seen > count else "1 class" if count == 1 else f"{count} classes"
    when = f", step {step}" if step else ""
    return f"{none} was found to rest on one small place: {why}. {UNSEEN} Checked: {of}{when}."


def _measured(check: ClassCheck) -> str:
    covered, *pasted = (f"{difference:+.2f} ± {error:.2f}" for difference, error in _differences(check))
    when = f", step {check.step}" if check.step else ""
    told = f"Covering {100 * check.area:.0f} % of its images changes their loss by {covered}"
    told += f", pasting that into other images changes theirs by {pasted[0]}" if pasted else ""
    told += f" (compared with another place; {check.n} images{when})"
    return told if pasted else f"{told}; nothing was pasted: that takes labels of several classes"


def _differences(check: ClassCheck) -> list[tuple[float, float]]:
    """Return both differences to the controls with their standard errors; only the first if nothing was pasted."""
    pairs = [(check.covered_difference, check.covered_error)]
    if check.pasted_difference is not None and check.pasted_error is not None:
        pairs.append((check.pasted_difference, check.pasted_error))
    return pairs


def _closeness(check: ClassCheck) -> float:
    """Return the smaller of both differences, as a share of what the rule asks for: it asks for both."""
    return min(difference for difference, _ in _differences(check)) / LEAST[check.form]
