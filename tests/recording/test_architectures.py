"""`layers="auto"` on the architectures that people train: maps at sensible depths for each."""

import pytest
import torch
import torch.nn.functional as F
from networks import UNet
from torch import nn

from normgrad_lightning import NormGrad

torchvision = pytest.importorskip("torchvision")
models = torchvision.models


def classifier(name, **options):
    def build():
        return getattr(models, name)(num_classes=7, **options), (64, 96), _classify

    return build


def _classify(model, images):
    output = model(images)
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits, torch.arange(len(images)) % 7)


def unet():
    return UNet(), (64, 96), lambda m, x: F.cross_entropy(m(x), torch.ones(len(x), *x.shape[2:], dtype=torch.long))


def detector():
    model = models.detection.fasterrcnn_mobilenet_v3_large_fpn(
        weights=None, weights_backbone=None, num_classes=3, min_size=64, max_size=96
    )

    def loss(model, images):
        target = {"boxes": torch.tensor([[8.0, 8.0, 40.0, 40.0]]), "labels": torch.tensor([1])}
        return sum(model(list(images), [target] * len(images)).values())

    return model, (64, 96), loss


def vit():
    model = models.VisionTransformer(64, 16, num_layers=6, num_heads=2, hidden_dim=32, mlp_dim=64, num_classes=7)
    nn.init.normal_(model.heads.head.weight)  # torchvision's is zero: at the first step nothing would flow back
    return model, (64, 64), _classify


def maxvit():
    """Attention in windows: what is inside of these is on no grid of the image."""
    model = models.MaxVit(
        (64, 64), 8, 2, block_channels=[8, 16, 24], block_layers=[1, 2, 1], head_dim=4, stochastic_depth_prob=0.1,
        num_classes=7,
    )  # fmt: skip
    return model, (64, 64), _classify


# The grid of each layer that auto takes, on an image of 64 × 96.
DEPTHS = {
    "resnet18": (
        classifier("resnet18"),
        {"relu": 2, "layer1.1": 4, "layer2.1": 8, "layer3.1": 16, "layer4.1": 32},
    ),
    "vgg11": (
        classifier("vgg11", init_weights=False),
        {"features.1": 1, "features.4": 2, "features.9": 4, "features.14": 8, "features.19": 16},
    ),
    "mobilenet_v3": (
        classifier("mobilenet_v3_small"),
        {"features.0": 2, "features.1": 4, "features.3": 8, "features.8": 16, "features.12": 32},
    ),
    "efficientnet": (
        classifier("efficientnet_b0"),
        {"features.1.0": 2, "features.2.1": 4, "features.3.1": 8, "features.5.2": 16, "features.8": 32},
    ),
    "convnext": (
        classifier("convnext_tiny"),
        {"features.1.2": 4, "features.3.2": 8, "features.5.8": 16, "features.7.2": 32},
    ),
    "swin": (classifier("swin_t"), {"features.1.1": 4, "features.3.1": 8, "features.5.5": 16, "features.7.1": 32}),
    "vit": (vit, {f"encoder.layers.encoder_layer_{i}": 16 for i in range(5)}),
    "maxvit": (maxvit, {"stem.1": 2, "blocks.0": 4, "blocks.1": 8, "blocks.2": 16}),
    "densenet": (
        classifier("densenet121"),
        {
            "features.relu0": 2,
            "features.denseblock1": 4,
            "features.denseblock2": 8,
            "features.denseblock3": 16,
            "features.denseblock4": 32,
        },
    ),
    "unet": (unet, {"bottom.2": 4, "merge2.1": 2, "merge1.1": 1}),
    "detector": (
        detector,
        {
            "backbone.body.1": 2,
            "backbone.body.3": 4,
            "backbone.body.6": 8,
            "backbone.body.12": 16,
            "backbone.body.13": 32,
        },
    ),
}


@pytest.fixture(autouse=True)
def _quick_init(monkeypatch):
    """Initialising the weights of large networks takes longer than a step with them."""
    monkeypatch.setattr(
        nn.init, "trunc_normal_", lambda t, mean=0.0, std=1.0, a=-2.0, b=2.0: nn.init.normal_(t, mean, std)
    )


@pytest.mark.parametrize("name", DEPTHS)
def test_auto_gives_maps_at_sensible_depths(name):
    torch.manual_seed(0)
    build, depths = DEPTHS[name]
    model, (height, width), loss = build()
    images = torch.rand(2, 3, height, width)
    with NormGrad(model.train()) as recorder:
        loss(model, images).backward()
    maps = recorder.maps
    assert {n: tuple(m.shape) for n, m in maps.items()} == {
        n: (2, height // stride, width // stride) for n, stride in depths.items()
    }
    assert list(maps) == list(depths)
    assert recorder.images.shape == images.shape
    for layer, m in maps.items():
        assert m.isfinite().all()
        assert m.flatten(1).std(1).min() > 0, f"{layer}: a map with nothing to see"
