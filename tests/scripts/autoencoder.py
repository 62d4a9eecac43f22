"""A convolutional autoencoder of squares, as in many a first Lightning script. It knows nothing of NormGrad."""

import pytorch_lightning as pl
import torch
from torch import nn, optim, utils


class Squares(utils.data.Dataset):
    def __len__(self):
        return 128

    def __getitem__(self, i):
        image = torch.zeros(3, 32, 32)
        top, left = 3 * i % 20, 7 * i % 20
        image[i % 3, top : top + 10, left : left + 10] = 1
        return image


pl.seed_everything(1)
encoder = nn.Sequential(
    nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU()
)
decoder = nn.Sequential(
    nn.ConvTranspose2d(16, 8, 2, stride=2), nn.ReLU(), nn.ConvTranspose2d(8, 3, 2, stride=2), nn.Sigmoid()
)


class LitAutoEncoder(pl.LightningModule):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder

    def training_step(self, batch, batch_idx):
        noisy = batch + 0.1 * torch.randn_like(batch)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(noisy)), batch)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = optim.AdamW(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": optim.lr_scheduler.StepLR(optimizer, 1)}


autoencoder = LitAutoEncoder(encoder, decoder)
train_loader = utils.data.DataLoader(Squares(), batch_size=16, shuffle=True)
trainer = pl.Trainer(limit_train_batches=6, max_epochs=2, accelerator="cpu", devices=1, enable_progress_bar=False)
trainer.fit(model=autoencoder, train_dataloaders=train_loader)
trainer.save_checkpoint("last.ckpt")
