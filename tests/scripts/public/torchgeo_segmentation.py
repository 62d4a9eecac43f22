"""Building footprints with torchgeo's segmentation task, a U-Net, augmented on the device. Nothing of NormGrad."""

import kornia.augmentation as K
import lightning.pytorch as pl
import torch
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.datasets import NonGeoDataset
from torchgeo.trainers import SemanticSegmentationTask


class Buildings(NonGeoDataset):
    """Four bands, wider than high, with bright rectangles."""

    def __init__(self, split="train"):
        self.length = {"train": 12, "val": 4}[split]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = 80 * torch.rand(4, 64, 96, generator=generator)
        mask = torch.zeros(64, 96, dtype=torch.long)
        for label in (1, 2):
            top, left = torch.randint(0, 44, (2,), generator=generator).tolist()
            mask[top : top + 18, left : left + 24] = label
            image[label, top : top + 18, left : left + 24] += 120
        return {"image": image, "mask": mask}


class BuildingsDataModule(NonGeoDataModule):
    mean = torch.tensor(0.0)
    std = torch.tensor(255.0)

    def __init__(self, batch_size=4, num_workers=0):
        super().__init__(Buildings, batch_size, num_workers)
        self.train_aug = K.AugmentationSequential(
            K.Normalize(mean=self.mean, std=self.std),
            K.RandomHorizontalFlip(p=0.5),
            K.RandomVerticalFlip(p=0.5),
            data_keys=None,
            keepdim=True,
        )


pl.seed_everything(6)
datamodule = BuildingsDataModule()
task = SemanticSegmentationTask(
    model="unet", backbone="resnet18", weights=None, in_channels=4, task="multiclass", num_classes=3, loss="ce"
)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, enable_progress_bar=False)
trainer.fit(task, datamodule=datamodule)
trainer.save_checkpoint("last.ckpt")
