"""The callback that the environment adds to a script that knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_type_hints

from normgrad_lightning.callback import NormGradCallback
from normgrad_lightning.environment import SWITCH, flags, variable, variables

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer


class AmbientCallback(NormGradCallback):
    """`NormGradCallback` with the flags of the environment, for a Trainer that has none.

    It leaves no trace in checkpoints: they are the same, and can be resumed from, with and without it.
    """

    def __init__(self) -> None:
        kinds = get_type_hints(NormGradCallback.__init__)
        del kinds["return"]
        with _naming_variables():
            super().__init__(**flags(kinds))

    @property
    def state_key(self) -> str:
        """A key of its own: a list of callbacks that serves two Trainers collects two of us."""
        return f"{type(self).__qualname__}{id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """As the callback does, but an error names the variable that it is about."""
        with _naming_variables():
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """As the callback does, but an error names the variable that it is about."""
        with _naming_variables():
            super().on_fit_start(trainer, pl_module)

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Stand back for a callback that the script has itself, and for another one of ours."""
        ours = [callback for callback in trainer.callbacks if isinstance(callback, NormGradCallback)]  # type: ignore[attr-defined]
        others = [callback for callback in ours if not isinstance(callback, AmbientCallback)]
        if others:
            ignored = "".join(f" {variable(flag)} is ignored." for flag in variables())
            self._say(trainer, f"{SWITCH}=1 adds no NormGradCallback, for this script has its own.{ignored}")
        return not others and ours[0] is self and super()._is_wanted(trainer)


@contextmanager
def _naming_variables() -> Iterator[None]:
    """An error about a flag that the environment has set is about the variable."""
    try:
        yield
    except ValueError as error:
        sentence = str(error).replace("`enabled=False`", f"`{SWITCH}=0`")
        for flag in variables():
            sentence = sentence.replace(f"`{flag}`", f"`{variable(flag)}`").replace(f"`{flag}=", f"`{variable(flag)}=")
        raise ValueError(sentence) from error
