"""Lightning's example of a backbone, two linear layers on images, by LightningCLI. It knows nothing of NormGrad."""

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor


class Backbone(torch.nn.Module):
    def __init__(self, hidden_dim: int = 128):
        super().__init__()
        self.l1 = torch.nn.Linear(28 * 28, hidden_dim)
        self.l2 = torch.nn.Linear(hidden_dim, 10)

    def forward(self, x):
        x = torch.relu(self.l1(x.view(x.size(0), -1)))
        return torch.relu(self.l2(x))


class LitClassifier(LightningModule):
    def __init__(self, hidden_dim: int = 128, learning_rate: float = 0.0001):
        super().__init__()
        self.save_hyperparameters()
        self.backbone = Backbone(hidden_dim)

    def forward(self, x):
        return self.backbone(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("valid_loss", F.cross_entropy(self(x), y), on_step=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        self.train = FakeData(32, (1, 28, 28), 10, transform=ToTensor())
        self.val = FakeData(8, (1, 28, 28), 10, transform=ToTensor(), random_offset=100)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(
        LitClassifier,
        Digits,
        seed_everything_default=1234,
        run=False,
        trainer_defaults={"max_epochs": 1, "accelerator": "cpu"},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.save_checkpoint("last.ckpt")
