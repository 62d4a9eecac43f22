"""SimCLR with lightly: a ResNet, two views of each image, a loss of the whole batch. It knows nothing of NormGrad."""

import pytorch_lightning as pl
import torch
import torchvision
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from torch import nn


class SimCLR(pl.LightningModule):
    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 256, 64)
        self.criterion = NTXentLoss()

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def training_step(self, batch, batch_idx):
        (x0, x1), _ = batch
        loss = self.criterion(self(x0), self(x1))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


pl.seed_everything(1)
transform = SimCLRTransform(input_size=64, gaussian_blur=0.0)
dataset = torchvision.datasets.FakeData(size=12, image_size=(3, 64, 64), num_classes=4, transform=transform)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=1)
trainer.fit(SimCLR(), loader)
trainer.save_checkpoint("last.ckpt")
