"""Flags of the callback on the command line and in a config file, among those of the training itself.

    python examples/03_command_line.py fit --config examples/03_command_line.yaml
    python examples/03_command_line.py fit --config examples/03_command_line.yaml --normgrad.enabled=false
    python examples/03_command_line.py fit --config examples/03_command_line.yaml --normgrad.order1_every_n_steps=64
    python examples/03_command_line.py fit --help

It takes about half a minute on two CPU cores and needs the extra `cli` (`pip install -e ".[cli]"`).
"""

from __future__ import annotations

import pytorch_lightning as pl
from classifier import HELD_OUT, ShapeClassifier, quiet_lightning
from pytorch_lightning.cli import LightningArgumentParser, LightningCLI
from shapes import ShapesDataset
from torch.utils.data import DataLoader

from normgrad_lightning import NormGradCallback


class Shapes(pl.LightningDataModule):
    """Drawn pictures of one object each.

    Args:
        images: training pictures to draw.
        batch_size: pictures per step.
    """

    def __init__(self, images: int = 4096, batch_size: int = 32) -> None:
        super().__init__()
        self.images, self.batch_size = images, batch_size

    def setup(self, stage: str) -> None:
        """Draw them."""
        self.training, self.held_out = ShapesDataset(self.images, seed=0), ShapesDataset(HELD_OUT, seed=1)

    def train_dataloader(self) -> DataLoader:
        """Return batches to learn from."""
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """Return batches to be judged by."""
        return DataLoader(self.held_out, self.batch_size)


class CommandLine(LightningCLI):
    """Lightning's, with a group of flags `--normgrad.…`; the callback is added to the Trainer by itself."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the group."""
        parser.add_lightning_class_args(NormGradCallback, "normgrad")


if __name__ == "__main__":
    quiet_lightning()
    CommandLine(ShapeClassifier, Shapes, save_config_kwargs={"overwrite": True})
