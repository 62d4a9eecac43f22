"""The callback that `NORMGRAD=1` adds to a script."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, get_type_hints

from normgrad_lightning.callback import NormGradCallback
from normgrad_lightning.environment import SWITCH, can_be_set, flags, variable, variables
from normgrad_lightning.settings import FLAGS
from normgrad_lightning.writers.destinations import Writer
from normgrad_lightning.writers.disk import next_log_dir
from normgrad_lightning.writers.files import FilesWriter

if TYPE_CHECKING:
    from pytorch_lightning import LightningModule, Trainer

_TEXTS = {"True": "1", "False": "0"}


class EnvironmentCallback(NormGradCallback):
    """`NormGradCallback` with the flags of the environment, for a Trainer that has none.

    It leaves no trace in checkpoints: they are the same, and can be resumed from, with and without it.
    """

    _without_panels = "This run has no logger that takes panels."
    _shares_the_run = False

    def __init__(self) -> None:
        with _naming_variables():
            super().__init__(**flags(_kinds()))
        self._messenger.phrase = in_variables
        self._log_dirs: dict[str, str] = {}

    @property
    def state_key(self) -> str:
        """A unique key: a list of callbacks that serves two Trainers collects two of these."""
        return f"{type(self).__qualname__}{id(self)}"

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state."""
        return {}

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Do as the callback does; errors name the variable."""
        with _naming_variables():
            super().setup(trainer, pl_module, stage)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Do as the callback does; errors name the variable."""
        with _naming_variables():
            super().on_fit_start(trainer, pl_module)

    def _check_loss(self, trainer: Trainer, pl_module: LightningModule, flag: str) -> None:
        """Do without a flag that needs the script's loss, if there is none: a switch without code never ends a run."""
        try:
            super()._check_loss(trainer, pl_module, flag)
        except ValueError as error:
            setattr(self, flag, False if flag == "probe" else None)
            self._messenger.warn_once(f"NormGrad ignores {variable(flag)}; training continues without it. {error}")

    def _destinations(self, trainer: Trainer) -> tuple[list[Writer], list[str]]:
        """Return a writer of files if there is no logger: whoever sets the switch asks for maps.

        They go where Lightning's loggers keep theirs: `default_root_dir` itself may hold what a script lists or loads.
        """
        if trainer.loggers or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return super()._destinations(trainer)
        root = str(trainer.default_root_dir)
        folder = self._log_dirs.setdefault(root, next_log_dir(root))
        return [FilesWriter(os.path.join(folder, "normgrad"))], []

    def _is_wanted(self, trainer: Trainer) -> bool:
        """Return whether the script has no callback of its own, and this is the first one added."""
        ours = [callback for callback in trainer.callbacks if isinstance(callback, NormGradCallback)]  # type: ignore[attr-defined]
        others = [callback for callback in ours if not isinstance(callback, EnvironmentCallback)]
        if others:
            ignored = "".join(f" {variable(flag)} is ignored." for flag in variables())
            self._messenger.announce(
                trainer, f"{SWITCH}=1 adds no NormGradCallback because this script has its own.{ignored}"
            )
        return not others and ours[0] is self and super()._is_wanted(trainer)


def in_variables(sentence: str) -> str:
    """Return a sentence with variables in place of flags: `NORMGRAD_PER_IMAGE=0` for `per_image=False`."""

    def spelled(found: re.Match[str]) -> str:
        flag, text = found[1], _TEXTS.get(found[2], found[2])
        return f"`{variable(flag)}={text}`" if flag in FLAGS and can_be_set(flag, text, _kinds()) else found[0]

    return re.sub(r'`(\w+)="?(\w+)"?`', spelled, sentence)


def _kinds() -> dict[str, Any]:
    """Return the type of each flag."""
    return {name: kind for name, kind in get_type_hints(NormGradCallback.__init__).items() if name != "return"}


@contextmanager
def _naming_variables() -> Iterator[None]:
    """End errors about a flag with the variable that set it."""
    try:
        yield
    except ValueError as error:
        set_by = [f"{variable(flag)}={text}" for flag, text in variables().items() if f"`{flag}" in str(error)]
        if not set_by:
            raise
        raise ValueError(
            f"{error} In the environment: {', '.join(set_by)}. {SWITCH}=0 switches NormGrad off."
        ) from None
