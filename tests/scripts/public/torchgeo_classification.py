"""Land cover from 13 Sentinel-2 bands with torchgeo, as for EuroSAT. It knows nothing of NormGrad."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.datasets import NonGeoDataset
from torchgeo.trainers import ClassificationTask


class LandCover(NonGeoDataset):
    """Images of noise with a brighter field, whose band is the class."""

    classes = ("forest", "river", "highway")

    def __init__(self, split="train"):
        self.length = {"train": 12, "val": 4}[split]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = 1000 + 200 * torch.randn(13, 64, 64, generator=generator)
        top, left = torch.randint(0, 40, (2,), generator=generator).tolist()
        image[index % 3, top : top + 20, left : left + 20] += 2000
        return {"image": image, "label": torch.tensor(index % 3)}


class LandCoverDataModule(NonGeoDataModule):
    mean = torch.full((13,), 1000.0)
    std = torch.full((13,), 500.0)

    def __init__(self, batch_size=4, num_workers=0):
        super().__init__(LandCover, batch_size, num_workers)


pl.seed_everything(5)
datamodule = LandCoverDataModule()
task = ClassificationTask(model="resnet18", loss="ce", weights=None, in_channels=13, num_classes=3, lr=0.01)
checkpoint_callback = ModelCheckpoint(monitor="val_loss", dirpath="checkpoints", save_top_k=1, save_last=True)
early_stopping_callback = EarlyStopping(monitor="val_loss", min_delta=0.0, patience=10)
trainer = pl.Trainer(
    accelerator="cpu",
    callbacks=[checkpoint_callback, early_stopping_callback],
    log_every_n_steps=1,
    logger=TensorBoardLogger(save_dir="logs", name="tutorial_logs"),
    max_epochs=1,
    enable_progress_bar=False,
)
trainer.fit(model=task, datamodule=datamodule)
trainer.save_checkpoint("last.ckpt")
