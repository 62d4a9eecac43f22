"""Running a step again in silence: nothing that it logs, prints or does to optimizers and schedulers has an effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normgrad_lightning.isolated.python_state import groups_of
from normgrad_lightning.isolated.sandbox import NoCollectives

if TYPE_CHECKING:
    from pytorch_lightning import Trainer

_SILENT_METHODS = ("log", "log_dict", "print")


@contextmanager
def silenced(module: Any, trainer: Trainer) -> Iterator[None]:
    """Let what the module logs, prints and does to optimizers and schedulers go nowhere."""
    own = [vars(part) for part in module.modules() if "_trainer" in vars(part)]
    groups = [restore for optimizer in trainer.optimizers for restore in groups_of(optimizer)]
    outer = [config.scheduler for config in trainer.lr_scheduler_configs]
    schedulers = [vars(s) for scheduler in outer for s in (scheduler, *getattr(scheduler, "_schedulers", ()))]
    kept = [(attributes, dict(attributes)) for attributes in (*own, *schedulers)]
    replaced = {**dict.fromkeys(_SILENT_METHODS, _do_nothing), "_trainer": _QuietTrainer(trainer)}
    try:
        for attributes in own:
            attributes.update(replaced)
        yield
    finally:
        for attributes in own:
            for name in replaced:
                attributes.pop(name, None)
        for attributes, before in kept:
            attributes.update(before)
        for restore in groups:
            restore()


@contextmanager
def alone(module: Any, trainer: Trainer) -> Iterator[None]:
    """Let a pass run in silence, and inside of this process: if it asks the others for anything, that is an error."""
    with silenced(module, trainer), NoCollectives() if trainer.world_size > 1 else nullcontext():
        yield


class LossAlone:
    """A loss that is computed in silence and inside of this process, whoever calls it.

    Args:
        trainer: runs the training.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._is_alone = False

    @contextmanager
    def alone(self, module: Any) -> Iterator[None]:
        """Keep forward and backward inside this process, and whatever they log to themselves."""
        if self._is_alone:
            yield
            return
        self._is_alone = True
        try:
            with alone(module, self._trainer):
                yield
        finally:
            self._is_alone = False

    def __call__(self, module: Any, batch: Any) -> Tensor:
        """Return the loss of the batch."""
        with self.alone(module):
            return self._of(module, batch)

    def _of(self, module: Any, batch: Any) -> Tensor:
        raise NotImplementedError


def _do_nothing(*_: object, **__: object) -> None:
    return None


class _Nowhere:
    """Stands in for a logger, its experiment and anything reached through them: accepts every call and does nothing.

    Args:
        real: whose plain values, such as names and folders, can be read.
    """

    def __init__(self, real: Any = None) -> None:
        vars(self)["_real"] = real

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = None if name == "experiment" else getattr(vars(self)["_real"], name, None)  # that may begin one
        if isinstance(value, dict):
            return dict(value)
        return value if isinstance(value, str | int | float | PurePath) else _Nowhere()

    def __call__(self, *_: object, **__: object) -> _Nowhere:
        return _Nowhere()

    def __getitem__(self, _: object) -> _Nowhere:
        return _Nowhere()

    def __setitem__(self, *_: object) -> None:
        pass

    def __setattr__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __contains__(self, _: object) -> bool:
        return False

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> _Nowhere:
        return self

    def __exit__(self, *_: object) -> None:
        pass


class _QuietTrainer:
    """The Trainer, but without loggers; what is set on it is forgotten."""

    def __init__(self, trainer: Trainer) -> None:
        loggers = [_Nowhere(logger) for logger in trainer.loggers]
        vars(self).update(_trainer=trainer, loggers=loggers, logger=loggers[0] if loggers else None, print=_do_nothing)
        vars(self)["_results"] = _Nowhere()  # where a `log` goes that somebody has kept

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_trainer"], name)
