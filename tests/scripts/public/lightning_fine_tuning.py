"""Lightning's transfer learning: a frozen ResNet that is unfrozen by and by. It knows nothing of NormGrad."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks.finetuning import BaseFinetuning
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Accuracy
from torchvision import transforms
from torchvision.datasets import FakeData
from torchvision.models import resnet18


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones=(1, 2), train_bn=False):
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module):
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == self.milestones[0]:
            modules = pl_module.feature_extractor[-3:]
        elif epoch == self.milestones[1]:
            modules = pl_module.feature_extractor[:-3]
        else:
            return
        self.unfreeze_and_add_param_group(modules=modules, optimizer=optimizer, train_bn=self.train_bn)


class TransferLearningModel(LightningModule):
    def __init__(self, lr=1e-3, milestones=(1, 2)):
        super().__init__()
        self.lr = lr
        self.milestones = milestones
        self.feature_extractor = nn.Sequential(*list(resnet18().children())[:-1])
        self.fc = nn.Sequential(nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 32), nn.Linear(32, 1))
        self.train_acc = Accuracy(task="binary")
        self.valid_acc = Accuracy(task="binary")

    def forward(self, x):
        return self.fc(self.feature_extractor(x).squeeze(-1).squeeze(-1))

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits, y_true = self.forward(x), y.view((-1, 1)).type_as(x)
        loss = F.binary_cross_entropy_with_logits(logits, y_true)
        self.log("train_acc", self.train_acc(torch.sigmoid(logits), y_true.int()), prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits, y_true = self.forward(x), y.view((-1, 1)).type_as(x)
        self.log("val_loss", F.binary_cross_entropy_with_logits(logits, y_true), prog_bar=True)
        self.log("val_acc", self.valid_acc(torch.sigmoid(logits), y_true.int()), prog_bar=True)

    def configure_optimizers(self):
        trainable = [p for p in self.parameters() if p.requires_grad]
        optimizer = optim.Adam(trainable, lr=self.lr)
        return [optimizer], [optim.lr_scheduler.MultiStepLR(optimizer, milestones=self.milestones, gamma=0.1)]


if __name__ == "__main__":
    seed_everything(1234)
    normalize = transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    train_transform = transforms.Compose([transforms.RandomHorizontalFlip(), transforms.ToTensor(), normalize])
    valid_transform = transforms.Compose([transforms.ToTensor(), normalize])
    train = FakeData(8, (3, 64, 64), 2, transform=train_transform)
    valid = FakeData(4, (3, 64, 64), 2, transform=valid_transform, random_offset=100)
    trainer = Trainer(
        accelerator="cpu",
        callbacks=[MilestonesFinetuning()],
        enable_model_summary=False,
        enable_progress_bar=False,
        log_every_n_steps=1,
        max_epochs=3,
        num_sanity_val_steps=0,
    )
    loaders = DataLoader(train, batch_size=4, shuffle=True), DataLoader(valid, batch_size=4)
    trainer.fit(TransferLearningModel(), *loaders)
    trainer.save_checkpoint("last.ckpt")
