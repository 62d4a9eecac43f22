"""Models of segmentation_models_pytorch: each decoder on a small encoder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from zoo.member import CLASSES, Member, segment

SIZE = (128, 192)
MODELS: dict[str, dict[str, Any]] = {
    "Unet": {"encoder_name": "resnet18"},
    "UnetPlusPlus": {"encoder_name": "resnet18"},
    "FPN": {"encoder_name": "resnet18"},
    "DeepLabV3": {"encoder_name": "resnet18"},
    "DeepLabV3Plus": {"encoder_name": "resnet18"},
    "PSPNet": {"encoder_name": "resnet18"},
    "PAN": {"encoder_name": "resnet18"},
    "Linknet": {"encoder_name": "resnet18"},
    "MAnet": {"encoder_name": "resnet18"},
    "UPerNet": {"encoder_name": "resnet18"},
    "Segformer": {"encoder_name": "mit_b0"},
    "DPT": {"encoder_name": "tu-vit_tiny_patch16_224", "dynamic_img_size": True},
}


def members() -> Iterator[Member]:
    """All of them, and a U-Net on a mobile encoder."""
    for name, options in MODELS.items():
        yield Member(f"smp/{name}", partial(_build, name, options), SIZE, segment)
    yield Member("smp/Unet-mobilenet_v2", partial(_build, "Unet", {"encoder_name": "mobilenet_v2"}), SIZE, segment)


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    import segmentation_models_pytorch as smp

    return getattr(smp, name)(encoder_weights=None, classes=CLASSES, **options)
