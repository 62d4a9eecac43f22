"""Digits, or nearly: a convolutional network, a DataModule, validation, checkpoints. It knows nothing of NormGrad."""

import argparse

import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy


def draw_digits(n):
    """Seven-segment digits in noise, somewhere on 28 × 28 pixels."""
    generator = torch.Generator().manual_seed(1)
    segments = [(0, 0, 1, 7), (0, 0, 7, 1), (0, 6, 7, 1), (6, 0, 1, 7), (6, 0, 7, 1), (6, 6, 7, 1), (12, 0, 1, 7)]
    lit = ["012456", "25", "02346", "02356", "1235", "01356", "013456", "025", "0123456", "012356"]
    labels = torch.randint(10, (n,), generator=generator)
    images = torch.rand(n, 1, 28, 28, generator=generator) * 0.3
    for image, label in zip(images, labels, strict=True):
        top, left = torch.randint(2, 12, (2,), generator=generator).tolist()
        for y, x, height, width in (segments[int(place)] for place in lit[label]):
            image[0, top + y : top + y + height, left + x : left + x + width] = 1
    return images, labels


class DigitsDataModule(L.LightningDataModule):
    def __init__(self, batch_size: int = 32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage: str):
        generator = torch.Generator().manual_seed(42)
        digits = TensorDataset(*draw_digits(320))
        self.train, self.val = random_split(digits, [256, 64], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class LitClassifier(L.LightningModule):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout(0.25),
        )
        self.classifier = nn.Linear(16 * 7 * 7, 10)
        self.accuracy = MulticlassAccuracy(10)

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.log("train_loss", loss, prog_bar=True)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=1)
    args = parser.parse_args()
    L.seed_everything(0)
    trainer = L.Trainer(max_epochs=args.max_epochs, accelerator="cpu", log_every_n_steps=1)
    trainer.fit(LitClassifier(), datamodule=DigitsDataModule())
    trainer.save_checkpoint("last.ckpt")
