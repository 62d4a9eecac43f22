"""Models of diffusers: a denoising U-Net, one with text, and an autoencoder."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo.member import Member

SIZE = (64, 96)


def members() -> Iterator[Member]:
    """All of them."""
    yield Member("diffusers/UNet2DModel", _unet, SIZE, _denoise)
    yield Member("diffusers/UNet2DConditionModel", _unet_with_text, SIZE, _denoise_with_text, channels=4)
    yield Member("diffusers/AutoencoderKL", _autoencoder, SIZE, _autoencode)
    yield Member("diffusers/VQModel", _quantizer, SIZE, _autoencode)
    yield Member("diffusers/DiTTransformer2DModel", _dit, (32, 32), _denoise_class, channels=4)


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        block_out_channels=(32, 32, 64),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
        layers_per_block=2,
    )


def _unet_with_text() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        block_out_channels=(32, 64, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=8,
    )


def _autoencoder() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(32, 32, 64),
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
    )


def _quantizer() -> nn.Module:
    from diffusers import VQModel

    return VQModel(
        block_out_channels=(32, 64),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        num_vq_embeddings=16,
    )


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, num_layers=4, sample_size=32, norm_num_groups=8
    )


def _denoise(model: nn.Module, images: Tensor) -> Tensor:
    noise = torch.randn_like(images)
    return F.mse_loss(model(images + noise, torch.tensor([3] * len(images))).sample, noise)


def _denoise_with_text(model: nn.Module, images: Tensor) -> Tensor:
    noise, text = torch.randn_like(images), torch.randn(len(images), 7, 24)
    return F.mse_loss(model(images + noise, torch.tensor([3] * len(images)), text).sample, noise)


def _denoise_class(model: nn.Module, images: Tensor) -> Tensor:
    times, classes = torch.tensor([3] * len(images)), torch.arange(len(images))
    return model(images, timestep=times, class_labels=classes).sample.square().mean()


def _autoencode(model: nn.Module, images: Tensor) -> Tensor:
    return F.mse_loss(model(images).sample, images)
