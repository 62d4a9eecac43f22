"""Lightning's semantic segmentation: a U-Net in one ModuleList, a dict from the step. It knows nothing of NormGrad."""

from itertools import pairwise

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset


class Streets(Dataset):
    """Wide images of noise with a road and a car; 250 is void."""

    def __init__(self, length, offset=0):
        self.length, self.offset = length, offset

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.offset + index)
        image = 0.3 * torch.randn(3, 48, 96, generator=generator)
        mask = torch.full((48, 96), 250)
        mask[24:] = 0
        left = int(torch.randint(0, 70, (), generator=generator))
        mask[20:34, left : left + 24] = 1
        image[0, 24:] += 1
        image[1, 20:34, left : left + 24] += 2
        return image, mask


class DoubleConv(nn.Module):
    def __init__(self, in_ch, out_ch):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(in_ch, out_ch, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_ch),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_ch, out_ch, kernel_size=3, padding=1),
            nn.BatchNorm2d(out_ch),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.net(x)


class Down(nn.Module):
    def __init__(self, in_ch, out_ch):
        super().__init__()
        self.net = nn.Sequential(nn.MaxPool2d(kernel_size=2, stride=2), DoubleConv(in_ch, out_ch))

    def forward(self, x):
        return self.net(x)


class Up(nn.Module):
    def __init__(self, in_ch, out_ch):
        super().__init__()
        self.upsample = nn.ConvTranspose2d(in_ch, in_ch // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_ch, out_ch)

    def forward(self, x1, x2):
        x1 = self.upsample(x1)
        diff_h, diff_w = x2.shape[2] - x1.shape[2], x2.shape[3] - x1.shape[3]
        x1 = F.pad(x1, [diff_w // 2, diff_w - diff_w // 2, diff_h // 2, diff_h - diff_h // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, num_classes, num_layers=3, features_start=8):
        super().__init__()
        self.num_layers = num_layers
        feats = [features_start * 2**i for i in range(num_layers)]
        downs = [Down(a, b) for a, b in pairwise(feats)]
        ups = [Up(a, b) for a, b in pairwise(feats[::-1])]
        head = nn.Conv2d(features_start, num_classes, kernel_size=1)
        self.layers = nn.ModuleList([DoubleConv(3, features_start), *downs, *ups, head])

    def forward(self, x):
        xi = [self.layers[0](x)]
        for layer in self.layers[1 : self.num_layers]:
            xi.append(layer(xi[-1]))
        for i, layer in enumerate(self.layers[self.num_layers : -1]):
            xi[-1] = layer(xi[-1], xi[-2 - i])
        return self.layers[-1](xi[-1])


class SegModel(LightningModule):
    def __init__(self, batch_size=4, lr=1e-3):
        super().__init__()
        self.batch_size = batch_size
        self.lr = lr
        self.net = UNet(num_classes=2)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_nb):
        img, mask = batch
        loss = F.cross_entropy(self(img.float()), mask.long(), ignore_index=250)
        return {"loss": loss, "log": {"train_loss": loss.detach()}}

    def validation_step(self, batch, batch_idx):
        img, mask = batch
        self.log("val_loss", F.cross_entropy(self(img.float()), mask.long(), ignore_index=250), prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.Adam(self.net.parameters(), lr=self.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)]

    def train_dataloader(self):
        return DataLoader(Streets(12), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Streets(4, offset=100), batch_size=self.batch_size, shuffle=False)


if __name__ == "__main__":
    seed_everything(12)
    trainer = Trainer(accelerator="cpu", max_epochs=1, log_every_n_steps=1, enable_progress_bar=False)
    trainer.fit(SegModel())
    trainer.save_checkpoint("last.ckpt")
