"""The check of a trained model for given images, in lines and as a part of the sheet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image
from torch import Tensor, nn

from normgrad_lightning.check.card import check_card
from normgrad_lightning.check.given import check_maps
from normgrad_lightning.check.passes import CannotCheck
from normgrad_lightning.check.results import ClassCheck
from normgrad_lightning.check.rule import MIN_IMAGES, sentence
from normgrad_lightning.cli.image_maps import loss_of
from normgrad_lightning.views.style import Style


def checks_of(
    module: nn.Module, images: Tensor, labels: Tensor, layers: Sequence[str]
) -> tuple[dict[str, ClassCheck], list[str]]:
    """Return the check of each class with at least eight images, by number, and lines to print; of few images, none."""
    if len(images) < MIN_IMAGES:
        return {}, []
    try:
        checks = check_maps(module, loss_of(module), (images, labels), layers, labels=labels.tolist())
    except CannotCheck as error:
        return {}, [f"The check cannot be done: {error}."]
    return checks, [sentence(list(checks.values())).replace("`", ""), *map(_line, checks.values())]


def with_check(sheet: Image.Image, checks: Mapping[str, ClassCheck], style: Style) -> Image.Image:
    """Return the sheet with the card of the check below, if there is one."""
    if not checks:
        return sheet
    card = Image.fromarray(np.ascontiguousarray(check_card(list(checks.values()), style)[..., :3]))
    whole = Image.new("RGB", (max(sheet.width, card.width + 20), sheet.height + card.height), "white")
    whole.paste(sheet, (0, 0))
    whole.paste(card, (20, sheet.height))
    return whole


def _line(one: ClassCheck) -> str:
    line = f"  {one.name}, {one.n} images: loss {one.plain:.2f}"
    line += f", place covered {one.covered:.2f}, another {one.covered_control:.2f}"
    if one.pasted is None or one.pasted_control is None:
        return line
    return f"{line}; others with the place pasted {one.pasted:.2f}, with another part {one.pasted_control:.2f}"
