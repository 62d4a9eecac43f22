"""Models of monai, in two and three dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import nn
from zoo.member import CLASSES, Member, Step, classify, reconstruct, segment

FLAT, VOLUME = (96, 128), (16, 32, 48)
UNET = {"channels": (8, 16, 32, 64), "strides": (2, 2, 2), "num_res_units": 2}
VIT = {"hidden_size": 96, "mlp_dim": 192, "num_heads": 3}


def members() -> Iterator[Member]:
    """All of them."""
    for axes, size in ((2, FLAT), (3, VOLUME)):
        common = {"spatial_dims": axes, "in_channels": 1}
        maps = {**common, "out_channels": CLASSES}
        deep = (64, 96) if axes == 2 else (32, 32, 64)
        yield _member("UNet", axes, size, segment, {**maps, **UNET})
        yield _member("BasicUNet", axes, size, segment, {**maps, "features": (8, 8, 16, 32, 64, 8)})
        yield _member("AttentionUnet", axes, size, segment, {**maps, "channels": (8, 16, 32), "strides": (2, 2)})
        yield _member("DynUNet", axes, size, segment, {**maps, **_dynamic(), "res_block": True})
        yield _member("SegResNet", axes, size, segment, {**maps, "init_filters": 8})
        yield (
            _member("VNet", axes, size, segment, maps)
            if axes == 3
            else _member("FlexibleUNet", 2, FLAT, segment, {**maps, "backbone": "efficientnet-b0"})
        )
        yield _member("DenseNet121", axes, deep, classify, {**common, "out_channels": CLASSES})
        yield _member(
            "EfficientNetBN",
            axes,
            deep,
            classify,
            {**common, "model_name": "efficientnet-b0", "num_classes": CLASSES, "pretrained": False},
        )
        yield _member("UNETR", axes, deep, segment, {**maps, "img_size": deep, "feature_size": 8, **VIT})
        yield _member("SwinUNETR", axes, deep, segment, {**maps, "feature_size": 12})
        yield _member(
            "ViT",
            axes,
            deep,
            classify,
            {
                **common,
                "img_size": deep,
                "patch_size": (16,) * axes,
                "classification": True,
                "num_classes": CLASSES,
                "num_layers": 6,
                **VIT,
            },
        )
        yield _member(
            "AutoEncoder",
            axes,
            size,
            reconstruct,
            {**common, "out_channels": 1, "channels": (8, 16, 32), "strides": (2, 2, 2)},
        )


def _dynamic() -> dict[str, Any]:
    return {"kernel_size": (3, 3, 3), "strides": (1, 2, 2), "upsample_kernel_size": (2, 2), "filters": (8, 16, 32)}


def _member(name: str, axes: int, size: tuple[int, ...], loss: Step, options: dict[str, Any]) -> Member:
    return Member(f"monai/{name}-{axes}d", partial(_build, name, options), size, loss, channels=1)


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    from monai.networks import nets

    make: Callable[..., nn.Module] = getattr(nets, name)
    return make(**options)
