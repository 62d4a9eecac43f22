"""Lightning's first example: an autoencoder of vectors, by LightningCLI. It knows nothing of NormGrad."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningDataModule, LightningModule, callbacks
from lightning.pytorch.cli import LightningCLI
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import FakeData
from torchvision.transforms import ToTensor
from torchvision.utils import make_grid, save_image


class ImageSampler(callbacks.Callback):
    """Saves what the autoencoder makes of three images, at the end of each epoch."""

    def on_train_epoch_end(self, trainer, pl_module):
        images, _ = next(iter(DataLoader(trainer.datamodule.val, batch_size=3)))
        with torch.no_grad():
            pl_module.eval()
            generated = pl_module(images.flatten(1).to(pl_module.device))
            pl_module.train()
        save_image(make_grid(generated.reshape(images.shape)), f"generated_{trainer.current_epoch}.png")


class LitAutoEncoder(LightningModule):
    def __init__(self, hidden_dim: int = 64, learning_rate: float = 10e-3):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Sequential(nn.Linear(28 * 28, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 3))
        self.decoder = nn.Sequential(nn.Linear(3, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, 28 * 28))

    def forward(self, x):
        return self.decoder(self.encoder(x))

    def training_step(self, batch, batch_idx):
        return self._common_step(batch, "train")

    def validation_step(self, batch, batch_idx):
        self._common_step(batch, "val")

    def _common_step(self, batch, stage):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)


class Digits(LightningDataModule):
    def __init__(self, batch_size: int = 8):
        super().__init__()
        self.train = FakeData(32, (1, 28, 28), 10, transform=ToTensor())
        self.val = FakeData(8, (1, 28, 28), 10, transform=ToTensor(), random_offset=100)
        self.batch_size = batch_size

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(
        LitAutoEncoder,
        Digits,
        seed_everything_default=1234,
        run=False,
        trainer_defaults={"callbacks": ImageSampler(), "max_epochs": 1, "accelerator": "cpu"},
        save_config_kwargs={"overwrite": True},
    )
    cli.trainer.fit(cli.model, datamodule=cli.datamodule)
    cli.trainer.save_checkpoint("last.ckpt")
