"""Small networks with the habits of real ones, for the tests."""

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """A residual block that works in place wherever it can, or has no kink anywhere."""

    def __init__(self, channels: int, out: int, stride: int = 1, inplace: bool = True, smooth: bool = False):
        super().__init__()
        self.inplace = inplace and not smooth
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.Softplus() if smooth else nn.ReLU(inplace=inplace)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.short = nn.Conv2d(channels, out, 1, stride) if stride > 1 or channels != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        if self.inplace:
            out += self.short(x)
        else:
            out = out + self.short(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A stem and three stages."""

    def __init__(
        self, classes: int = 5, channels: int = 3, dropout: float = 0.0, inplace: bool = True, smooth: bool = False
    ):
        super().__init__()
        self.stem = nn.Conv2d(channels, 8, 3, 1, 1)
        self.stage1 = Residual(8, 8, inplace=inplace, smooth=smooth)
        self.stage2 = Residual(8, 16, 2, inplace=inplace, smooth=smooth)
        self.stage3 = Residual(16, 24, 2, inplace=inplace, smooth=smooth)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.drop = nn.Dropout(dropout)
        self.fc = nn.Linear(24, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.drop(self.pool(self.stage3(self.stage2(self.stage1(self.stem(x))))).flatten(1)))


class UNet(nn.Module):
    """Down two resolutions and up again, with skips."""

    def __init__(self, classes: int = 2):
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(inplace=True))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, 1, 1), nn.ReLU(inplace=True))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 16, 3, 1, 1), nn.ReLU(inplace=True))
        self.up2 = nn.ConvTranspose2d(16, 16, 2, 2)
        self.merge2 = nn.Sequential(nn.Conv2d(32, 8, 3, 1, 1), nn.ReLU(inplace=True))
        self.up1 = nn.ConvTranspose2d(8, 8, 2, 2)
        self.merge1 = nn.Sequential(nn.Conv2d(16, 8, 3, 1, 1), nn.ReLU(inplace=True))
        self.head = nn.Conv2d(8, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(a)
        c = self.merge2(torch.cat([self.up2(self.bottom(b)), b], 1))
        return self.head(self.merge1(torch.cat([self.up1(c), a], 1)))


class ViT(nn.Module):
    """Patches, class and register tokens, a few encoder blocks; the class token or the mean is read."""

    def __init__(
        self, image: tuple[int, int] = (32, 48), patch: int = 8, extra: int = 1, depth: int = 7, width: int = 16
    ):
        super().__init__()
        self.embed = nn.Conv2d(3, width, patch, patch)
        tokens = image[0] // patch * (image[1] // patch)
        self.extra = nn.Parameter(torch.randn(1, extra, width))
        self.place = nn.Parameter(torch.randn(1, tokens + extra, width) / 4)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(depth)
        )
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        t = self.embed(x).flatten(2).transpose(1, 2)
        t = torch.cat([self.extra.expand(len(t), -1, -1), t], 1) + self.place
        for block in self.blocks:
            t = block(t)
        return self.head(t[:, 0] if self.extra.shape[1] else t.mean(1))


def batch(n: int = 4, size: tuple[int, int] = (16, 24), classes: int = 5, dtype=torch.float32, seed: int = 0):
    """Images and labels."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 3, *size, generator=generator, dtype=dtype)
    return images, torch.randint(classes, (n,), generator=generator)
