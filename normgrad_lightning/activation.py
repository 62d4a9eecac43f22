"""Switched on with no code: `NORMGRAD=1 python train.py`.

Every Trainer calls `callbacks` through an entry point, so nothing is imported here until the environment asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normgrad_lightning.environment import SWITCH, switch, variable, variables
from normgrad_lightning.telling import warn

if TYPE_CHECKING:
    from normgrad_lightning.ambient import AmbientCallback


def callbacks() -> list[AmbientCallback]:
    """The callback that the environment asks for, or none."""
    asked = switch()
    if asked:
        try:
            from normgrad_lightning.ambient import AmbientCallback

            return [AmbientCallback()]
        except ValueError:  # a flag of the user's
            raise
        except Exception as error:
            warn(f"NormGrad cannot be loaded, and training goes on without: {type(error).__name__}: {error}")
    if asked is None and variables():
        names = ", ".join(map(variable, variables()))
        warn(f"{names}: set to no effect, for {SWITCH} is not. {SWITCH}=1 shows maps.")
    return []
