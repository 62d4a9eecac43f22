"""Lightning's ImageNet example by LightningCLI, `logger=False`. It knows nothing of NormGrad."""

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.model_helpers import get_torchvision_model
from torch.utils.data import DataLoader
from torchmetrics import Accuracy
from torchvision import transforms
from torchvision.datasets import FakeData


class ImageNetLightningModel(LightningModule):
    def __init__(self, arch: str = "resnet18", lr: float = 0.1, momentum: float = 0.9, batch_size: int = 4):
        super().__init__()
        self.lr = lr
        self.momentum = momentum
        self.batch_size = batch_size
        self.model = get_torchvision_model(arch, weights=None)
        self.train_acc1 = Accuracy(task="multiclass", num_classes=1000, top_k=1)
        self.eval_acc1 = Accuracy(task="multiclass", num_classes=1000, top_k=1)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        images, target = batch
        output = self.model(images)
        loss_train = F.cross_entropy(output, target)
        self.log("train_loss", loss_train)
        self.train_acc1(output, target)
        self.log("train_acc1", self.train_acc1, prog_bar=True)
        return loss_train

    def validation_step(self, batch, batch_idx):
        images, target = batch
        output = self.model(images)
        self.log("val_loss", F.cross_entropy(output, target))
        self.eval_acc1(output, target)
        self.log("val_acc1", self.eval_acc1, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=self.momentum, weight_decay=1e-4)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 30)]

    def setup(self, stage: str):
        normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
        crops = [transforms.RandomResizedCrop(64), transforms.RandomHorizontalFlip()]
        train_transform = transforms.Compose([*crops, transforms.ToTensor(), normalize])
        eval_transform = transforms.Compose([transforms.CenterCrop(64), transforms.ToTensor(), normalize])
        self.train_dataset = FakeData(12, (3, 128, 128), 1000, transform=train_transform)
        self.eval_dataset = FakeData(4, (3, 128, 128), 1000, transform=eval_transform, random_offset=100)

    def train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.eval_dataset, batch_size=self.batch_size)


if __name__ == "__main__":
    cli = LightningCLI(
        ImageNetLightningModel,
        run=False,
        trainer_defaults={
            "max_epochs": 1,
            "accelerator": "cpu",
            "devices": 1,
            "logger": False,
            "enable_progress_bar": False,
            "callbacks": [ModelCheckpoint(monitor="val_acc1", mode="max")],
        },
        seed_everything_default=42,
    )
    cli.trainer.fit(cli.model)
    cli.trainer.save_checkpoint("last.ckpt")
