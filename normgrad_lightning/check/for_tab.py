"""What the check found, for the NormGrad tab."""

from __future__ import annotations

import math
from collections.abc import Mapping

from normgrad_lightning.check.card import CLASSES, example_tiles, heads_of
from normgrad_lightning.check.results import ClassCheck
from normgrad_lightning.check.rule import LEAST, place_of, rests, sentence, verdict
from normgrad_lightning.tensorboard_tab import event
from normgrad_lightning.views.style import Style


def check_for_tab(checks: Mapping[int, ClassCheck], style: Style, seen: int = 0) -> event.Check | None:
    """Return what the tab shows of a check; None if nothing was measured.

    Args:
        checks: by class. Pictures go with those that rest on one place, and with a few of the others.
        style: how pictures look.
        seen: how many classes training has shown.
    """
    if not checks:
        return None
    in_order = sorted(checks.values(), key=lambda one: (not rests(one), -one.covered_difference))
    pictured = {one.name for one in in_order[:CLASSES]}
    classes = [_of_class(one, style, with_pictures=one.name in pictured) for one in checks.values()]
    step = max(one.step for one in checks.values())
    return event.Check(step, classes, _plain(sentence(list(checks.values()), seen)))


def _of_class(one: ClassCheck, style: Style, *, with_pictures: bool) -> event.ClassCheck:
    is_sure = rests(one)
    tiles = example_tiles(one.example, style) if with_pictures and one.example is not None else []
    return event.ClassCheck(
        name=one.name,
        images=one.n,
        step=one.step,
        plain=(one.plain, 0.0),
        covered=(one.covered, _error(one.covered_error)),
        covered_control=(one.covered_control, 0.0),
        pasted=None if one.pasted is None else (one.pasted, _error(one.pasted_error)),
        pasted_control=None if one.pasted_control is None else (one.pasted_control, 0.0),
        share=one.called,
        share_control=one.called_control,
        region=place_of(one),
        area=one.area,
        sentence=_plain(sentence([one])) if is_sure else None,
        sure=is_sure,
        verdict=verdict(one),
        asked=LEAST[one.form],
        pictures=[(head, tile[..., :3]) for head, tile in zip(heads_of(one), tiles, strict=False)],
    )


def _error(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0


def _plain(text: str) -> str:
    return text.replace("`", "")
