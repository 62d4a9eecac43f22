"""LightningCLI as most people have it. It knows nothing of NormGrad."""

from classifier import DigitsDataModule, LitClassifier
from lightning.pytorch.cli import LightningCLI

if __name__ == "__main__":
    LightningCLI(LitClassifier, DigitsDataModule, seed_everything_default=0)
