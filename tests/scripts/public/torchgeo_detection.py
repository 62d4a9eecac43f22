"""Ships from above with torchgeo's detection task, FCOS. It knows nothing of NormGrad."""

import lightning.pytorch as pl
import torch
from torchgeo.datamodules import NonGeoDataModule
from torchgeo.datamodules.utils import collate_fn_detection
from torchgeo.datasets import NonGeoDataset
from torchgeo.trainers import ObjectDetectionTask


class Ships(NonGeoDataset):
    """One or two bright rectangles on dark water."""

    def __init__(self, split="train"):
        self.length = {"train": 9, "val": 3}[split]

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        image = 60 * torch.rand(3, 64, 96, generator=generator)
        boxes = []
        for _ in range(1 + index % 2):
            top, left = torch.randint(0, 40, (2,), generator=generator).tolist()
            image[:, top : top + 20, left : left + 30] += 150
            boxes.append([left, top, left + 30, top + 20])
        return {"image": image, "bbox_xyxy": torch.tensor(boxes), "label": torch.ones(len(boxes), dtype=torch.long)}


class ShipsDataModule(NonGeoDataModule):
    def __init__(self, batch_size=3, num_workers=0):
        super().__init__(Ships, batch_size, num_workers)
        self.collate_fn = collate_fn_detection


pl.seed_everything(7)
task = ObjectDetectionTask(model="fcos", backbone="resnet18", weights=None, num_classes=2, trainable_layers=5, lr=1e-4)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, enable_progress_bar=False)
trainer.fit(task, datamodule=ShipsDataModule())
trainer.save_checkpoint("last.ckpt")
