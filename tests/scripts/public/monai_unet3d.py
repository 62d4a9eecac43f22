"""A 3-d U-Net on scans with MONAI: dict transforms, crops, MetaTensor batches. It knows nothing of NormGrad."""

import lightning.pytorch as pl
import torch
from monai.data import CacheDataset, DataLoader, create_test_image_3d, decollate_batch, list_data_collate
from monai.inferers import sliding_window_inference
from monai.losses import DiceLoss
from monai.metrics import DiceMetric
from monai.networks.layers import Norm
from monai.networks.nets import UNet
from monai.transforms import (
    AsDiscrete,
    Compose,
    EnsureChannelFirstd,
    EnsureTyped,
    RandCropByPosNegLabeld,
    RandRotate90d,
    ScaleIntensityd,
)
from monai.utils import set_determinism


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self._model = UNet(
            spatial_dims=3,
            in_channels=1,
            out_channels=2,
            channels=(8, 16, 32),
            strides=(2, 2),
            num_res_units=2,
            norm=Norm.BATCH,
        )
        self.loss_function = DiceLoss(to_onehot_y=True, softmax=True)
        self.post_pred = Compose([AsDiscrete(argmax=True, to_onehot=2)])
        self.post_label = Compose([AsDiscrete(to_onehot=2)])
        self.dice_metric = DiceMetric(include_background=False, reduction="mean", get_not_nans=False)

    def forward(self, x):
        return self._model(x)

    def prepare_data(self):
        volumes = [create_test_image_3d(40, 40, 40, num_seg_classes=1, rad_max=10) for _ in range(5)]
        data = [{"image": image, "label": label} for image, label in volumes]
        keys = ["image", "label"]
        common = [EnsureChannelFirstd(keys, channel_dim="no_channel"), ScaleIntensityd("image"), EnsureTyped(keys)]
        crops = RandCropByPosNegLabeld(
            keys, label_key="label", spatial_size=(32, 32, 16), pos=1, neg=1, num_samples=2, image_key="image"
        )
        train_transforms = Compose([*common, crops, RandRotate90d(keys, prob=0.5, spatial_axes=[0, 1])])
        self.train_ds = CacheDataset(data[:3], train_transforms, cache_rate=1.0, num_workers=0, progress=False)
        self.val_ds = CacheDataset(data[3:], Compose(common), cache_rate=1.0, num_workers=0, progress=False)

    def train_dataloader(self):
        return DataLoader(self.train_ds, batch_size=1, shuffle=True, num_workers=0, collate_fn=list_data_collate)

    def val_dataloader(self):
        return DataLoader(self.val_ds, batch_size=1, num_workers=0)

    def configure_optimizers(self):
        return torch.optim.Adam(self._model.parameters(), 1e-4)

    def training_step(self, batch, batch_idx):
        images, labels = batch["image"], batch["label"]
        loss = self.loss_function(self.forward(images), labels)
        self.log("train_loss", loss.item())
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        images, labels = batch["image"], batch["label"]
        outputs = sliding_window_inference(images, (32, 32, 16), 4, self.forward)
        outputs = [self.post_pred(i) for i in decollate_batch(outputs)]
        labels = [self.post_label(i) for i in decollate_batch(labels)]
        self.dice_metric(y_pred=outputs, y=labels)

    def on_validation_epoch_end(self):
        self.log("val_dice", self.dice_metric.aggregate().item())
        self.dice_metric.reset()


set_determinism(seed=10)
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, enable_progress_bar=False)
trainer.fit(Net())
trainer.save_checkpoint("last.ckpt")
