"""Switched on with no code: `NORMGRAD=1 python train.py`.

Every Trainer calls `callbacks` through an entry point, so nothing is imported here until the environment asks for it.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from normgrad_lightning.environment import SWITCH, switch, variable, variables

if TYPE_CHECKING:
    from normgrad_lightning.ambient import AmbientCallback


def callbacks() -> list[AmbientCallback]:
    """The callback that the environment asks for, or none."""
    asked = switch()
    if asked:
        from normgrad_lightning.ambient import AmbientCallback

        return [AmbientCallback()]
    if asked is None and variables():
        names = ", ".join(map(variable, variables()))
        warnings.warn(f"{names}: set to no effect, for {SWITCH} is not. {SWITCH}=1 shows maps.", stacklevel=2)
    return []
