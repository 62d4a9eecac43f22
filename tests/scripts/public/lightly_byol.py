"""BYOL with lightly: a momentum copy of the backbone, and a prediction head. It knows nothing of NormGrad."""

import copy

import pytorch_lightning as pl
import torch
import torchvision
from lightly.loss import NegativeCosineSimilarity
from lightly.models.modules import BYOLPredictionHead, BYOLProjectionHead
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.transforms import BYOLTransform, BYOLView1Transform, BYOLView2Transform
from lightly.utils.scheduler import cosine_schedule
from torch import nn


class BYOL(pl.LightningModule):
    def __init__(self):
        super().__init__()
        resnet = torchvision.models.resnet18()
        self.backbone = nn.Sequential(*list(resnet.children())[:-1])
        self.projection_head = BYOLProjectionHead(512, 256, 64)
        self.prediction_head = BYOLPredictionHead(64, 256, 64)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        z = self.projection_head(self.backbone(x).flatten(start_dim=1))
        return self.prediction_head(z)

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (x0, x1), _ = batch
        p0, z0 = self(x0), self.forward_momentum(x0)
        p1, z1 = self(x1), self.forward_momentum(x1)
        loss = 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


pl.seed_everything(2)
transform = BYOLTransform(
    view_1_transform=BYOLView1Transform(input_size=64, gaussian_blur=0.0),
    view_2_transform=BYOLView2Transform(input_size=64, gaussian_blur=0.0),
)
dataset = torchvision.datasets.FakeData(size=12, image_size=(3, 64, 64), num_classes=4, transform=transform)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, drop_last=True)
trainer = pl.Trainer(max_epochs=1, accelerator="cpu", devices=1, enable_progress_bar=False, log_every_n_steps=1)
trainer.fit(BYOL(), loader)
trainer.save_checkpoint("last.ckpt")
