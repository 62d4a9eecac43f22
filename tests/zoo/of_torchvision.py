"""Models of torchvision: one of each family of classifiers, its segmenters, detectors and video networks.

The other classifiers have no line in the table; `others` gives them, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from zoo.member import CLASSES, Member, classify, segment

SIZE = (128, 192)
CLASSIFIERS: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "alexnet": (SIZE, {}),
    "convnext_tiny": (SIZE, {}),
    "densenet121": (SIZE, {}),
    "efficientnet_b0": (SIZE, {}),
    "efficientnet_v2_s": (SIZE, {}),
    "googlenet": (SIZE, {"init_weights": False}),
    "inception_v3": ((160, 224), {"init_weights": False, "aux_logits": False}),
    "maxvit_t": ((224, 224), {"input_size": (224, 224)}),
    "mnasnet0_5": (SIZE, {}),
    "mobilenet_v2": (SIZE, {}),
    "mobilenet_v3_small": (SIZE, {}),
    "regnet_y_400mf": (SIZE, {}),
    "resnet18": (SIZE, {}),
    "shufflenet_v2_x0_5": (SIZE, {}),
    "squeezenet1_1": (SIZE, {}),
    "swin_t": ((112, 224), {}),
    "swin_v2_t": ((128, 256), {}),
    "vgg11_bn": (SIZE, {"init_weights": False}),
    "vit_b_16": ((128, 128), {"image_size": 128, "num_layers": 6, "hidden_dim": 96, "mlp_dim": 192, "num_heads": 3}),
}
MOST_PARAMETERS = 100_000_000
"""Of a classifier; larger ones take minutes."""
SEGMENTERS = ("fcn_resnet50", "deeplabv3_mobilenet_v3_large", "lraspp_mobilenet_v3_large")
DETECTORS = (
    "fasterrcnn_mobilenet_v3_large_fpn",
    "fcos_resnet50_fpn",
    "keypointrcnn_resnet50_fpn",
    "maskrcnn_resnet50_fpn",
    "retinanet_resnet50_fpn",
    "ssd300_vgg16",
    "ssdlite320_mobilenet_v3_large",
)
LEFT_OUT = {"s3d, mvit": "their videos have 16 frames of 224 × 224, which takes minutes; timm's MViT is in the table"}
"""Models that are not in the table, and why."""
VIDEO: dict[str, tuple[int, int, int]] = {
    "r3d_18": (8, 64, 96),
    "mc3_18": (8, 64, 96),
    "r2plus1d_18": (8, 64, 96),
    "swin3d_t": (8, 64, 128),
}


def members() -> Iterator[Member]:
    """All of them."""
    for name, (size, options) in CLASSIFIERS.items():
        yield Member(f"torchvision/{name}", partial(_classifier, name, options), size, classify)
    for name in SEGMENTERS:
        yield Member(f"torchvision/{name}", partial(_segmenter, name), SIZE, segment)
    for name in DETECTORS:
        yield Member(f"torchvision/{name}", partial(_detector, name), SIZE, _detect, run=_find)
    for name, video in VIDEO.items():
        yield Member(f"torchvision/{name}", partial(_model, name, {}), video, classify)


def others() -> list[str]:
    """The names of all other classifiers of up to `MOST_PARAMETERS`."""
    if find_spec("torchvision") is None:
        return []
    from torchvision import models

    names = (name for name in models.list_models(module=models) if name not in CLASSIFIERS)
    return [name for name in names if models.get_model_weights(name).DEFAULT.meta["num_params"] < MOST_PARAMETERS]


def other(name: str) -> Member:
    """One of these, on small images."""
    options: dict[str, dict[str, Any]] = {"vgg": {"init_weights": False}, "vit": {"image_size": 64}}
    size = (64, 128) if name.startswith("swin") else (64, 64) if name.startswith("vit") else (64, 96)
    return Member(f"torchvision/{name}", partial(_model, name, options.get(name[:3], {})), size, classify)


def _model(name: str, options: dict[str, Any]) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=CLASSES, **options)


def _classifier(name: str, options: dict[str, Any]) -> nn.Module:
    from torchvision import models

    if name == "vit_b_16":
        return models.VisionTransformer(patch_size=16, num_classes=CLASSES, **options)
    return _model(name, options)


def _segmenter(name: str) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES)


def _detector(name: str) -> nn.Module:
    from torchvision import models

    sizes = {} if "ssd" in name else {"min_size": SIZE[0], "max_size": SIZE[1]}
    if "rcnn" in name:  # random weights propose everything
        sizes |= {"rpn_post_nms_top_n_train": 40, "rpn_post_nms_top_n_test": 4, "box_detections_per_img": 2}
    return models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **sizes)


def _detect(model: nn.Module, images: Tensor) -> Tensor:
    height, width = images.shape[2:]
    box = torch.tensor([[0.2 * width, 0.3 * height, 0.7 * width, 0.8 * height]])
    keypoints = torch.tensor([[[0.5 * width, 0.5 * height, 1.0]] * 17])
    target = {"boxes": box, "labels": torch.tensor([1]), "keypoints": keypoints}
    target["masks"] = torch.zeros(1, height, width, dtype=torch.uint8)
    target["masks"][:, height // 3 : height // 2, width // 3 : width // 2] = 1
    return sum(model(list(images), [target] * len(images)).values())


def _find(model: nn.Module, images: Tensor) -> Any:
    return model(list(images))
