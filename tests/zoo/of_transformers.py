"""Models of transformers: every vision architecture that a tiny config can build."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo.member import CLASSES, Member, Step, labels_of

SIZE, LARGE, SQUARE, VIDEO = (64, 96), (128, 192), (64, 64), (4, 64, 96)
WIDTHS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
VIT = {**WIDTHS, "image_size": SIZE, "patch_size": 8}
SQUARE_VIT = {**VIT, "image_size": 64}
TEXT = {**WIDTHS, "vocab_size": 99, "max_position_embeddings": 32, "bos_token_id": 0, "eos_token_id": 2}
CONV = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
SWIN = {
    "image_size": SIZE,
    "patch_size": 4,
    "embed_dim": 16,
    "depths": [2, 2, 2],
    "num_heads": [1, 2, 4],
    "window_size": 4,
}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "layer_type": "basic"}
DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "num_queries": 12,
}


def classify(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of a classifier."""
    output = model(pixel_values=images)
    logits = output.logits if "logits" in output else output.last_hidden_state
    return F.cross_entropy(logits, torch.arange(len(images)) % CLASSES)


def classify_video(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of a video's class; frames come before channels."""
    return model(pixel_values=images.transpose(1, 2), labels=torch.arange(len(images)) % CLASSES).loss


def classify_frames(model: nn.Module, images: Tensor) -> Tensor:
    """The same, for a model with another name for videos."""
    logits = model(pixel_values_videos=images.transpose(1, 2)).logits
    return F.cross_entropy(logits, torch.arange(len(images)) % CLASSES)


def segment(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of each pixel's class."""
    return model(pixel_values=images, labels=labels_of(images, CLASSES)).loss


def detect(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of a detector."""
    boxes = torch.tensor([[0.4, 0.5, 0.3, 0.4], [0.7, 0.3, 0.2, 0.2]])
    return model(
        pixel_values=images, labels=[{"class_labels": torch.tensor([1, 2]), "boxes": boxes}] * len(images)
    ).loss


def segment_queries(model: nn.Module, images: Tensor, **more: Any) -> Tensor:
    """The loss of masks and their classes."""
    masks = torch.zeros(2, *images.shape[2:])
    masks[0, 10:30, 20:50], masks[1, 30:50, 40:60] = 1, 1
    count = len(images)
    return model(
        pixel_values=images, mask_labels=[masks] * count, class_labels=[torch.tensor([1, 2])] * count, **more
    ).loss


def estimate_depth(model: nn.Module, images: Tensor) -> Tensor:
    """The squared error of the depth."""
    return (model(pixel_values=images).predicted_depth - 1).square().mean()


def fill_in(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of patches that are masked."""
    config = model.config
    patches = [size // config.patch_size for size in images.shape[2:]]
    mask = torch.rand(len(images), patches[0] * patches[1]) < 0.5
    return model(pixel_values=images, bool_masked_pos=mask).loss


def fill_in_codes(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of the codes of patches that are masked."""
    mask = torch.rand(len(images), (images.shape[2] // 8) * (images.shape[3] // 8)) < 0.5
    return model(images, bool_masked_pos=mask, labels=torch.randint(50, (int(mask.sum()),))).loss


def fill_in_video(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of tubes of a video that are masked."""
    mask = torch.zeros(len(images), 2 * 8 * 12, dtype=torch.bool)
    mask[:, 64:] = True
    return model(images.transpose(1, 2), bool_masked_pos=mask).loss


def pretrain(model: nn.Module, images: Tensor) -> Tensor:
    """The model's own loss."""
    return model(pixel_values=images).loss


def align(model: nn.Module, images: Tensor) -> Tensor:
    """The contrastive loss of images and their texts."""
    words = torch.randint(3, 90, (len(images), 8))
    words[:, -1] = 2
    return model(input_ids=words, pixel_values=images, return_loss=True).loss


def align_patches(model: nn.Module, images: Tensor) -> Tensor:
    """The contrastive loss of texts and images that are given as patches."""
    count, _, height, width = images.shape
    patches = images.unfold(2, 8, 8).unfold(3, 8, 8).permute(0, 2, 3, 4, 5, 1).reshape(count, -1, 8 * 8 * 3)
    more = {
        "pixel_values": patches,
        "pixel_attention_mask": torch.ones(patches.shape[:2], dtype=torch.long),
        "spatial_shapes": torch.tensor([[height // 8, width // 8]] * count),
    }
    return model(input_ids=torch.randint(3, 90, (count, 8)), return_loss=True, **more).loss


def segment_by_text(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of a mask that a text asks for."""
    return model(input_ids=torch.randint(3, 90, (len(images), 8)), pixel_values=images).logits.square().mean()


def detect_by_text(model: nn.Module, images: Tensor) -> Tensor:
    """A loss of the boxes and classes that a text asks for."""
    output = model(input_ids=torch.randint(3, 90, (len(images) * 2, 8)), pixel_values=images)
    return output.pred_boxes.square().mean() + output.logits.square().mean()


def detect_by_sentence(model: nn.Module, images: Tensor) -> Tensor:
    """A loss of the boxes that a sentence asks for."""
    output = model(pixel_values=images, input_ids=torch.randint(3, 90, (len(images), 8)))
    return output.pred_boxes.square().mean()


def segment_at_point(model: nn.Module, images: Tensor) -> Tensor:
    """A loss of the mask at a point."""
    points = torch.tensor([[[[30.0, 40.0]]]] * len(images))
    return model(pixel_values=images, input_points=points, multimask_output=False).pred_masks.square().mean()


def describe(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of the words that follow the image."""
    words = torch.randint(3, 90, (len(images), 6))
    return model(pixel_values=images, labels=words).loss


def describe_in_context(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of the words after the image's tokens."""
    patches = (images.shape[2] // 8) * (images.shape[3] // 8)
    words = torch.cat([torch.full((len(images), patches), 90), torch.randint(3, 90, (len(images), 6))], dim=1)
    return model(input_ids=words, pixel_values=images, labels=words).loss


def caption(model: nn.Module, images: Tensor) -> Tensor:
    """The loss of a caption."""
    words = torch.randint(3, 90, (len(images), 6))
    return model(pixel_values=images, input_ids=words, labels=words).loss


def use_features(model: nn.Module, images: Tensor) -> Tensor:
    """A loss of all feature maps of a backbone, as a detector's neck has."""
    return sum(feature.square().mean() for feature in model(images).feature_maps)


def restore(model: nn.Module, images: Tensor) -> Tensor:
    """The squared error of a larger picture."""
    return model(images).reconstruction.square().mean()


def find_pose(model: nn.Module, images: Tensor) -> Tensor:
    """The squared error of heat maps."""
    return model(images).heatmaps.square().mean()


def cut_out(model: nn.Module, images: Tensor) -> Tensor:
    """The squared error of alphas."""
    return (model(images).alphas - 0.3).square().mean()


def _classifiers() -> dict[str, dict[str, Any]]:
    clip = {"vision_config": SQUARE_VIT, "text_config": TEXT, "projection_dim": 32}
    mobile = {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64], "num_attention_heads": 2}
    return {
        "BeitForImageClassification": VIT,
        "BitForImageClassification": {**CONV, "embedding_size": 16, "num_groups": 4},
        "CLIPForImageClassification": clip,
        "ConvNextForImageClassification": CONV,
        "ConvNextV2ForImageClassification": CONV,
        "CvtForImageClassification": {"embed_dim": [16, 32, 64], "num_heads": [1, 2, 4], "depth": [1, 2, 4]},
        "Data2VecVisionForImageClassification": VIT,
        "DeiTForImageClassification": VIT,
        "Dinov2ForImageClassification": SQUARE_VIT,
        "Dinov2WithRegistersForImageClassification": SQUARE_VIT,
        "DonutSwinForImageClassification": SWIN,
        "EfficientNetForImageClassification": {"width_coefficient": 0.5, "depth_coefficient": 0.4, "hidden_dim": 640},
        "FocalNetForImageClassification": {"embed_dim": 16, "depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 128]},
        "HGNetV2ForImageClassification": {},
        "HieraForImageClassification": _hiera(),
        "IJepaForImageClassification": VIT,
        "LevitForImageClassification": {
            "image_size": 224,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [1, 2, 3],
            "depths": [2, 2, 2],
            "key_dim": [8, 8, 8],
        },
        "MetaClip2ForImageClassification": clip,
        "MobileNetV1ForImageClassification": {"depth_multiplier": 0.25},
        "MobileNetV2ForImageClassification": {"depth_multiplier": 0.35},
        "MobileViTForImageClassification": mobile,
        "MobileViTV2ForImageClassification": {"width_multiplier": 0.25},
        "PerceiverForImageClassificationConvProcessing": {
            "num_latents": 16,
            "d_latents": 32,
            "num_blocks": 1,
            "num_self_attends_per_block": 2,
            "num_self_attention_heads": 2,
            "num_cross_attention_heads": 1,
        },
        "PoolFormerForImageClassification": {"depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 48, 64]},
        "PPLCNetForImageClassification": {"scale": 0.25},
        "PvtForImageClassification": {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 2, 2],
            "num_attention_heads": [1, 2, 3, 4],
        },
        "PvtV2ForImageClassification": {
            "image_size": SIZE,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 2, 2],
            "num_attention_heads": [1, 2, 3, 4],
        },
        "RegNetForImageClassification": {
            "embedding_size": 16,
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 2, 1],
            "groups_width": 8,
        },
        "ResNetForImageClassification": RESNET,
        "SegformerForImageClassification": {
            "hidden_sizes": [16, 32, 48, 64],
            "depths": [1, 1, 2, 2],
            "num_attention_heads": [1, 2, 3, 4],
        },
        "SiglipForImageClassification": {"vision_config": SQUARE_VIT, "text_config": TEXT},
        "SwiftFormerForImageClassification": {"depths": [1, 1, 2, 1], "embed_dims": [16, 32, 48, 64]},
        "SwinForImageClassification": SWIN,
        "Swinv2ForImageClassification": SWIN,
        "TextNetForImageClassification": {},
        "TimmWrapperForImageClassification": {"architecture": "resnet10t"},
        "ViTForImageClassification": VIT,
        "ViTMSNForImageClassification": VIT,
    }


def _detectors() -> dict[str, dict[str, Any]]:
    from transformers import HGNetV2Config, LwDetrViTConfig, ResNetConfig, RfDetrConfig, RTDetrResNetConfig

    last = {"backbone_config": ResNetConfig(**RESNET, out_features=["stage4"]), "use_timm_backbone": False, **DETR}
    three = ["stage2", "stage3", "stage4"]
    several = {**last, "backbone_config": ResNetConfig(**RESNET, out_features=three)}
    real_time = {
        **DETR,
        "backbone_config": RTDetrResNetConfig(**RESNET, out_features=three),
        "encoder_hidden_dim": 32,
        "encoder_in_channels": [32, 48, 64],
        "decoder_in_channels": [32, 32, 32],
        "encoder_layers": 1,
        "num_denoising": 0,
    }
    fine = {
        **real_time,
        "backbone_config": HGNetV2Config(
            stem_channels=[3, 8, 8],
            hidden_sizes=[16, 32, 48, 64],
            stage_in_channels=[8, 16, 32, 48],
            stage_mid_channels=[8, 8, 16, 16],
            stage_out_channels=[16, 32, 48, 64],
            stage_num_blocks=[1, 1, 1, 1],
            stage_numb_of_layers=[2, 2, 2, 2],
            out_features=three,
        ),
    }
    decoder = {
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_self_attention_heads": 2,
        "decoder_cross_attention_heads": 4,
        "decoder_ffn_dim": 64,
        "num_queries": 12,
        "group_detr": 1,
    }
    two = {**WIDTHS, "image_size": 64, "patch_size": 8, "out_features": ["stage2", "stage4"]}
    light = LwDetrViTConfig(**two, pretrain_image_size=64, num_windows=4, window_block_indices=[0, 2])
    flow = RfDetrConfig().backbone_config.__class__(**two, num_windows=2)
    return {
        "ConditionalDetrForObjectDetection": last,
        "DabDetrForObjectDetection": {**last, "hidden_size": 32},
        "DeformableDetrForObjectDetection": {**several, "num_feature_levels": 3},
        "DetrForObjectDetection": last,
        "TableTransformerForObjectDetection": last,
        "RTDetrForObjectDetection": real_time,
        "RTDetrV2ForObjectDetection": real_time,
        "DFineForObjectDetection": fine,
        "Deimv2ForObjectDetection": fine,
        "LwDetrForObjectDetection": {**decoder, "backbone_config": light, "projector_scale_factors": [1.0]},
        "RfDetrForObjectDetection": {**decoder, "backbone_config": flow},
        "YolosForObjectDetection": {**VIT, "num_detection_tokens": 12},
    }


def _segmenters() -> dict[str, dict[str, Any]]:
    from transformers import ConvNextConfig

    four = ["stage1", "stage2", "stage3", "stage4"]
    neck = {**VIT, "out_indices": [0, 1, 2, 3], "neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16}
    beit = {**VIT, "out_indices": [1, 2, 3, 4], "use_auxiliary_head": False}
    return {
        "BeitForSemanticSegmentation": beit,
        "Data2VecVisionForSemanticSegmentation": {**beit, "image_size": 64},
        "DPTForSemanticSegmentation": {**neck, "image_size": 64, "backbone_out_indices": [0, 1, 2, 3]},
        "MobileNetV2ForSemanticSegmentation": {"depth_multiplier": 0.35},
        "MobileViTForSemanticSegmentation": _mobile(),
        "MobileViTV2ForSemanticSegmentation": {"width_multiplier": 0.25},
        "SegformerForSemanticSegmentation": {**_pyramid(), "decoder_hidden_size": 32},
        "UperNetForSemanticSegmentation": {
            "backbone_config": ConvNextConfig(**CONV, out_features=four),
            "hidden_size": 32,
            "auxiliary_in_channels": 48,
        },
    }


def _universal() -> dict[str, dict[str, Any]]:
    from transformers import DetrConfig, ResNetConfig, SwinConfig

    four = ["stage1", "stage2", "stage3", "stage4"]
    swin = SwinConfig(**{**SWIN, "depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4]}, out_features=four)
    mask = {
        "backbone_config": swin,
        "feature_size": 32,
        "mask_feature_size": 32,
        "hidden_dim": 32,
        "encoder_feedforward_dim": 64,
        "dim_feedforward": 64,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "num_attention_heads": 2,
        "num_queries": 12,
        "train_num_points": 64,
    }
    detr = {**DETR, "backbone_config": ResNetConfig(**RESNET, out_features=["stage4"]), "use_timm_backbone": False}
    return {
        "Mask2FormerForUniversalSegmentation": mask,
        "MaskFormerForInstanceSegmentation": {
            "backbone_config": swin,
            "decoder_config": DetrConfig(**detr),
            "fpn_feature_size": 32,
            "mask_feature_size": 32,
        },
        "EomtForUniversalSegmentation": {**SQUARE_VIT, "num_blocks": 1, "num_queries": 12, "train_num_points": 64},
    }


def _depth() -> dict[str, dict[str, Any]]:
    from transformers import BeitConfig, Dinov2Config

    beit = BeitConfig(**SQUARE_VIT, out_indices=[1, 2, 3, 4], reshape_hidden_states=False)
    dino = Dinov2Config(**SQUARE_VIT, out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False)
    anything = {
        "backbone_config": dino,
        "reassemble_hidden_size": 32,
        "patch_size": 8,
        "neck_hidden_sizes": [16, 16, 16, 16],
        "fusion_hidden_size": 16,
        "head_hidden_size": 8,
    }
    return {
        "DepthAnythingForDepthEstimation": anything,
        "DPTForDepthEstimation": _segmenters()["DPTForSemanticSegmentation"],
        "GLPNForDepthEstimation": {**_pyramid(), "decoder_hidden_size": 16},
        "PromptDepthAnythingForDepthEstimation": anything,
        "ZoeDepthForDepthEstimation": {
            "backbone_config": beit,
            "neck_hidden_sizes": [16, 16, 16, 16],
            "fusion_hidden_size": 16,
            "bottleneck_features": 16,
            "num_relative_features": 8,
            "patch_transformer_hidden_size": 16,
            "patch_transformer_intermediate_size": 32,
            "patch_transformer_num_attention_heads": 2,
            "bin_configurations": [{"n_bins": 8, "min_depth": 0.1, "max_depth": 10.0, "name": None}],
            "bin_embedding_dim": 16,
            "num_attractors": [4, 4, 2, 1],
        },
    }


def _dual() -> dict[str, tuple[dict[str, Any], Step]]:
    clip = {"vision_config": SQUARE_VIT, "text_config": TEXT, "projection_dim": 32}
    vision_of_align = {"image_size": 64, "width_coefficient": 0.5, "depth_coefficient": 0.4, "hidden_dim": 640}
    return {
        "AlignModel": ({"vision_config": vision_of_align, "text_config": TEXT, "projection_dim": 160}, align),
        "AltCLIPModel": ({**clip, "text_config": {**TEXT, "project_dim": 32, "pad_token_id": 1}}, align),
        "BlipModel": (clip, align),
        "BlipForConditionalGeneration": (clip, caption),
        "ChineseCLIPModel": (clip, align),
        "CLIPModel": (clip, align),
        "CLIPSegForImageSegmentation": (
            {
                **clip,
                "extract_layers": [0, 1, 2],
                "reduce_dim": 16,
                "decoder_num_attention_heads": 2,
                "decoder_intermediate_size": 32,
            },
            segment_by_text,
        ),
        "GroupViTModel": (
            {
                **clip,
                "vision_config": {
                    **SQUARE_VIT,
                    "depths": [2, 2],
                    "num_group_tokens": [8, 0],
                    "num_output_groups": [8, 4],
                },
                "projection_intermediate_dim": 64,
            },
            align,
        ),
        "MetaClip2Model": (clip, align),
        "SiglipModel": ({"vision_config": SQUARE_VIT, "text_config": TEXT}, align),
        "Siglip2Model": (
            {"vision_config": {**WIDTHS, "patch_size": 8, "num_patches": 64}, "text_config": TEXT},
            align_patches,
        ),
        "OwlViTForObjectDetection": (clip, detect_by_text),
        "Owlv2ForObjectDetection": (clip, detect_by_text),
        "LlavaForConditionalGeneration": (
            {
                "vision_config": {**SQUARE_VIT, "model_type": "clip_vision_model"},
                "text_config": {**TEXT, "model_type": "llama", "num_key_value_heads": 2},
                "image_token_index": 90,
                "vision_feature_layer": -2,
            },
            describe_in_context,
        ),
    }


def _pretrained() -> dict[str, tuple[dict[str, Any], Step]]:
    swin = {**SWIN, "image_size": 64, "encoder_stride": 16}
    decoder = {
        "decoder_hidden_size": 32,
        "decoder_num_hidden_layers": 2,
        "decoder_num_attention_heads": 2,
        "decoder_intermediate_size": 64,
    }
    return {
        "BeitForMaskedImageModeling": ({**VIT, "use_mask_token": True, "vocab_size": 50}, fill_in_codes),
        "DeiTForMaskedImageModeling": ({**SQUARE_VIT, "encoder_stride": 8}, fill_in),
        "FocalNetForMaskedImageModeling": (
            {
                "image_size": 64,
                "embed_dim": 16,
                "depths": [1, 1, 2, 1],
                "hidden_sizes": [16, 32, 64, 128],
                "encoder_stride": 32,
            },
            fill_in,
        ),
        "HieraForPreTraining": (
            {**_hiera(), "decoder_hidden_size": 32, "decoder_depth": 1, "decoder_num_heads": 2},
            pretrain,
        ),
        "SwinForMaskedImageModeling": (swin, fill_in),
        "Swinv2ForMaskedImageModeling": (swin, fill_in),
        "ViTForMaskedImageModeling": ({**SQUARE_VIT, "encoder_stride": 8}, fill_in),
        "ViTMAEForPreTraining": ({**SQUARE_VIT, **decoder, "mask_ratio": 0.5}, pretrain),
    }


def _videos() -> dict[str, tuple[dict[str, Any], Step]]:
    video = {**VIT, "num_frames": 4}
    return {
        "TimesformerForVideoClassification": ({**video, "image_size": 64}, classify_video),
        "VideoMAEForVideoClassification": ({**video, "tubelet_size": 2}, classify_video),
        "VideoMAEForPreTraining": (
            {
                **video,
                "tubelet_size": 2,
                "decoder_num_hidden_layers": 2,
                "decoder_hidden_size": 32,
                "decoder_num_attention_heads": 2,
                "decoder_intermediate_size": 64,
            },
            fill_in_video,
        ),
        "VJEPA2ForVideoClassification": (
            {
                "image_size": 64,
                "crop_size": 64,
                "patch_size": 8,
                "frames_per_clip": 4,
                "tubelet_size": 2,
                "hidden_size": 48,
                "num_attention_heads": 2,
                "num_hidden_layers": 4,
                "pred_hidden_size": 48,
                "pred_num_attention_heads": 2,
                "pred_num_hidden_layers": 2,
                "num_pooler_layers": 1,
            },
            classify_frames,
        ),
        "VivitForVideoClassification": ({**video, "tubelet_size": [2, 8, 8], "image_size": 64}, classify_video),
    }


def _backbones() -> dict[str, dict[str, Any]]:
    four = {"out_features": ["stage1", "stage2", "stage3", "stage4"]}
    two = {"out_features": ["stage2", "stage4"]}
    return {
        "BeitBackbone": {**VIT, **two},
        "BitBackbone": {**CONV, "embedding_size": 16, "num_groups": 4, **four},
        "ConvNextBackbone": {**CONV, **four},
        "ConvNextV2Backbone": {**CONV, **four},
        "Dinov2Backbone": {**SQUARE_VIT, **two},
        "Dinov2WithRegistersBackbone": {**SQUARE_VIT, **two},
        "DINOv3ConvNextBackbone": {**CONV, **four},
        "DINOv3ViTBackbone": {**VIT, "num_register_tokens": 4, **two},
        "FocalNetBackbone": {"embed_dim": 16, "depths": [1, 1, 2, 1], "hidden_sizes": [16, 32, 64, 128], **four},
        "HieraBackbone": {**_hiera(), **four},
        "MaskFormerSwinBackbone": {**SWIN, "out_features": ["stage1", "stage2", "stage3"]},
        "PvtV2Backbone": {**_pyramid(), "image_size": SIZE, **four},
        "ResNetBackbone": {**RESNET, **four},
        "RTDetrResNetBackbone": {**RESNET, **four},
        "SwinBackbone": {**SWIN, "out_features": ["stage1", "stage2", "stage3"]},
        "Swinv2Backbone": {**SWIN, "out_features": ["stage1", "stage2", "stage3"]},
        "VitDetBackbone": {
            **WIDTHS,
            "image_size": 64,
            "pretrain_image_size": 64,
            "patch_size": 8,
            "window_size": 4,
            "window_block_indices": [0, 2],
            **two,
        },
    }


def _others() -> dict[str, tuple[dict[str, Any], Step]]:
    from transformers import BertConfig, SwinConfig, VitDetConfig, VitPoseBackboneConfig

    stages = {"depths": [1, 1, 2, 1], "num_heads": [1, 2, 2, 4], "out_features": ["stage2", "stage3", "stage4"]}
    swin = SwinConfig(**{**SWIN, **stages})
    det = VitDetConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_channels=4,
        image_size=64,
        pretrain_image_size=64,
        patch_size=16,
        out_features=["stage4"],
    )
    pose = VitPoseBackboneConfig(
        hidden_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=list(SIZE),
        patch_size=[8, 8],
        out_indices=[4],
    )
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "mlp_dim": 64,
        "image_size": 64,
        "patch_size": 8,
        "output_channels": 16,
        "num_pos_feats": 8,
        "window_size": 4,
        "global_attn_indexes": [1, 3],
    }
    sam = {
        "vision_config": vision,
        "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 8, "mask_input_channels": 4},
        "mask_decoder_config": {"hidden_size": 16, "num_attention_heads": 2, "mlp_dim": 32, "iou_head_hidden_dim": 16},
    }
    return {
        "SamModel": (sam, segment_at_point),
        "SamHQModel": ({**sam, "mask_decoder_config": {**sam["mask_decoder_config"], "vit_dim": 32}}, segment_at_point),
        "GroundingDinoForObjectDetection": (
            {
                **DETR,
                "backbone_config": swin,
                "text_config": BertConfig(**TEXT),
                "max_text_len": 8,
                "num_feature_levels": 3,
            },
            detect_by_sentence,
        ),
        "VisionEncoderDecoderModel": ({}, describe),
        "Swin2SRForImageSuperResolution": (
            {"image_size": 64, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 2], "window_size": 8},
            restore,
        ),
        "VitPoseForPoseEstimation": ({"backbone_config": pose, "num_labels": 5}, find_pose),
        "VitMatteForImageMatting": (
            {
                "backbone_config": det,
                "hidden_size": 32,
                "convstream_hidden_sizes": [8, 8, 16],
                "fusion_hidden_sizes": [32, 16, 16, 8],
            },
            cut_out,
        ),
    }


def _pyramid() -> dict[str, Any]:
    return {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 2], "num_attention_heads": [1, 2, 3, 4]}


def _mobile() -> dict[str, Any]:
    return {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64], "num_attention_heads": 2}


def _hiera() -> dict[str, Any]:
    return {"embed_dim": 16, "depths": [1, 1, 2, 1], "image_size": [64, 96]}


LEFT_OUT = {
    "Dinat": "it needs the package natten, which has no wheel for CPUs",
    "ImageGPT": "its images are words: numbers of colours, no floating-point tensor",
    "OneFormer": "its text tower has a fixed width that no tiny config fits; its vision part is Mask2Former's",
    "Sam2, EdgeTam, Sam3": "their tiny configs fail inside the library; timm's sam2_hiera_tiny is in the table",
    "DepthPro": "it cuts images of 1,536 pixels into patches",
    "SuperPoint, SuperGlue, LightGlue, EfficientLoFTR": "they are published without a loss to train them with",
    "PP-OCR, PP-DocLayout, UVDoc": "they are published for inference; their backbones are in the table",
    "Sapiens2, Tipsv2, Pixio, CHMv2, VideoPrism, Videomt": "variants of DINOv2's and DINOv3's encoders",
    "image-text-to-text models but Llava": "their vision towers are CLIP's, SigLIP's, or take packed patches",
}
"""Architectures that are not in the table, and why."""
MAKERS = {  # returns options by class, the loss where all have the same one
    "classifiers": (_classifiers, classify),
    "detectors": (_detectors, detect),
    "segmenters": (_segmenters, segment),
    "universal": (_universal, segment_queries),
    "depth": (_depth, estimate_depth),
    "dual": (_dual, None),
    "pretrained": (_pretrained, None),
    "videos": (_videos, None),
    "backbones": (_backbones, use_features),
    "others": (_others, None),
}


def members() -> Iterator[Member]:
    """All of them."""
    for make, common_loss in MAKERS.values():
        for name, entry in make().items():
            options, loss = (entry, common_loss) if common_loss is not None else entry
            yield Member(
                f"transformers/{name}",
                partial(_build, name, options),
                _size(name, options),
                loss,
                channels=4 if "Matte" in name else 3,
            )


def _size(name: str, options: dict[str, Any]) -> tuple[int, ...]:
    if name in _videos():
        return (4, 64, 64) if options["image_size"] == 64 else VIDEO
    if "Perceiver" in name or "Levit" in name:
        return (224, 224)
    square = (
        "CLIP",
        "Clip",
        "Siglip",
        "OwlV",
        "Owlv",
        "Blip",
        "Llava",
        "GroupViT",
        "Align",
        "Eomt",
        "Sam",
        "DPT",
        "Pvt",
        "RfDetr",
        "MAE",
        "Zoe",
    )
    if "PvtV2" not in name and (any(part in name for part in square) or options.get("image_size") == 64):
        return SIZE if name.endswith("Backbone") or name == "Swin2SRForImageSuperResolution" else SQUARE
    of_one_size = "image_size" in options or name in ("VisionEncoderDecoderModel", "VitPoseForPoseEstimation")
    return SIZE if of_one_size else LARGE


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    make = getattr(transformers, name)
    if name == "VisionEncoderDecoderModel":
        return make(_reader())
    return make(make.config_class(**{"num_labels": CLASSES, **options}))


def _reader() -> Any:
    """The config of a model that reads text in images (TrOCR)."""
    from transformers import TrOCRConfig, VisionEncoderDecoderConfig, ViTConfig

    words = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64, "vocab_size": 99}
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(
        ViTConfig(**VIT), TrOCRConfig(**words, max_position_embeddings=32)
    )
    config.decoder_start_token_id, config.pad_token_id = 0, 1
    return config
