"""The entry point of both Lightnings: every Trainer calls `callbacks`.

So nothing heavy is imported here until the environment asks for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from normgrad_lightning.environment import SWITCH, switch, variable, variables

if TYPE_CHECKING:
    from normgrad_lightning.env_activation.environment_callback import EnvironmentCallback


def callbacks() -> list[EnvironmentCallback]:
    """Return the callback that the environment asks for, or none."""
    switched_on = switch()
    if switched_on:
        try:
            from normgrad_lightning.env_activation.environment_callback import EnvironmentCallback

            return [EnvironmentCallback()]
        except ValueError as error:  # a wrong flag: the user is not to read how it was found
            raise error.with_traceback(None) from None
        except Exception as error:
            _warn(f"NormGrad cannot be loaded; training continues without it. {type(error).__name__}: {error}")
    if switched_on is None and variables():
        names = ", ".join(map(variable, variables()))
        _warn(f"{names}: ignored because {SWITCH} is not set. Set {SWITCH}=1 to see maps.")
    return []


def _warn(sentence: str) -> None:
    from normgrad_lightning.step.messages import warn

    warn(sentence)
