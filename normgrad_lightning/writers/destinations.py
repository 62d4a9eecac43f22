"""Which writer takes a page to which logger.

Lightning's loggers share no way to log an image, so there is a writer for each destination. All give the step as the
logger gives it for its own scalars. Loggers are recognised by the names of their classes: those of `pytorch_lightning`
and of `lightning.pytorch` are the same to us, and neither is imported. A logger's `experiment`, which creates runs and
files, is first used when the first page is written.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from normgrad_lightning.page import Page
from normgrad_lightning.writers.aim import AimWriter
from normgrad_lightning.writers.comet import CometWriter
from normgrad_lightning.writers.disk import files_dir
from normgrad_lightning.writers.files import FilesWriter
from normgrad_lightning.writers.mlflow import MLFlowWriter
from normgrad_lightning.writers.tensorboard import TensorBoardWriter
from normgrad_lightning.writers.wandb import WandbWriter


class Writer(Protocol):
    """Takes pages to one destination.

    Attributes:
        where: the destination, for people.
    """

    where: str

    def write(self, page: Page) -> None:
        """Write the whole page, or nothing of it and raise.

        Once written, it survives a killed process as the logger's own values do. A remote store may fail half-way.
        """


Folder = str | os.PathLike[str]

WRITERS: dict[str, Callable[[Any, Folder], Writer]] = {
    "TensorBoardLogger": lambda logger, _: TensorBoardWriter(logger),
    "SummaryWriter": lambda logger, _: TensorBoardWriter(logger),
    "WandbLogger": lambda logger, _: WandbWriter(logger),
    "MLFlowLogger": lambda logger, _: MLFlowWriter(logger),
    "CometLogger": lambda logger, _: CometWriter(logger),
    "AimLogger": AimWriter,
}
"""By a logger's class, or one that it inherits from. All others get files."""


def writers_for(loggers: Iterable[Any], fallback_dir: Folder) -> tuple[list[Writer], list[str]]:
    """Return a writer for each destination, and a note for each logger that we do not know.

    Its pages go to files beside its logs, as do those of a `CSVLogger`. The dummy logger of `fast_dev_run` gets no
    writer, and neither does a second logger of the same folder.

    Args:
        loggers: `trainer.loggers`. Nothing is created on disk here.
        fallback_dir: the parent of `normgrad/` for a logger without a local folder.
    """
    writers: list[Writer] = []
    notes: list[str] = []
    folders: set[str] = set()
    for logger in loggers:
        names = [base.__name__ for base in type(logger).__mro__]
        known = next((WRITERS[name] for name in names if name in WRITERS), None)
        if known is not None:
            writers.append(known(logger, fallback_dir))
        elif "DummyLogger" not in names:
            folder = files_dir(logger, fallback_dir)
            if "CSVLogger" not in names:
                notes.append(f"NormGrad cannot log images to {type(logger).__name__}. It writes files to {folder}.")
            if os.path.abspath(folder) not in folders:
                folders.add(os.path.abspath(folder))
                writers.append(FilesWriter(folder))
    return writers, notes
