"""What a reader of the table should know about a line: one sentence for each whose layers need a word, or cannot tell.

A note on layers that are known to be wrong begins with "Wrong". There must be none: make a rule, or refuse the layers.
"""

_FROZEN = "The library freezes the whole backbone, so only what comes after it has gradients."
_WINDOWS = "The encoder works on windows, as if they were images, so the projector behind it is read."
_PYRAMID = "The encoder's stages are taken; the decoder's layers, which skips go around, have the same grids."
_MASKED = "The encoder sees a random subset of patches, which is no grid: only the patch embedding is read."

NOTES: dict[str, str] = {
    "timm/cpubone_nano": "`head.in_conv` is the first convolution of the head, `stages.3` before it is as good.",
    "timm/crossvit_tiny_240": "A block gives two grids at once: the last block of the finer branch stands for each.",
    "timm/efficientvit_b0": "`head.in_conv` is the first convolution of the head, `stages.3` before it is as good.",
    "timm/hiera_tiny_224": "Hiera unrolls its tokens by windows, which is no grid: only the patch embedding is read.",
    "transformers/ConditionalDetrForObjectDetection": _FROZEN,
    "transformers/DeformableDetrForObjectDetection": _FROZEN,
    "transformers/DetrForObjectDetection": _FROZEN,
    "transformers/GLPNForDepthEstimation": (
        "The encoder's stages are taken, and of the decoder, whose skips go around the rest, the last."
    ),
    "transformers/GroupViTModel": (
        "Its 8 group tokens stand after the patches: set `token_grid`; only the patch embedding is read without it."
    ),
    "transformers/HieraBackbone": (
        "It pools tokens that nothing has sorted into windows, which mixes rows: only the first stage is read."
    ),
    "transformers/HieraForImageClassification": (
        "Hiera unrolls its tokens by windows, which is no grid: only the patch embedding is read."
    ),
    "transformers/HieraForPreTraining": (
        "Masked patches are hidden before the embedding, so a change there changes nothing."
    ),
    "transformers/LwDetrForObjectDetection": _WINDOWS,
    "transformers/RfDetrForObjectDetection": _WINDOWS,
    "transformers/Siglip2Model": (
        "Its images are packed patches `(N, patches, pixels)`, which the recorder does not take for images."
    ),
    "transformers/Swin2SRForImageSuperResolution": "`upsample` makes the larger picture, without its last convolution.",
    "transformers/TableTransformerForObjectDetection": _FROZEN,
    "transformers/TimesformerForVideoClassification": (
        "Frames and places share an axis, which is no grid: only the patch embedding is read."
    ),
    "transformers/VideoMAEForPreTraining": _MASKED,
    "transformers/ViTMAEForPreTraining": _MASKED,
    "transformers/YolosForObjectDetection": (
        "Detection tokens stand after the patches: set `token_grid`; only the patch embedding is read without it."
    ),
    "smp/FPN": _PYRAMID,
    "smp/Unet": "The decoder's last block, 128 × 192, is the sixth resolution and left out.",
    "smp/UnetPlusPlus": (
        "The encoder's stages are taken, and of the decoder, whose skips go around the rest, the last but one."
    ),
    "torchvision/fcos_resnet50_fpn": _PYRAMID,
    "torchvision/keypointrcnn_resnet50_fpn": _PYRAMID,
    "torchvision/maskrcnn_resnet50_fpn": _PYRAMID,
    "torchvision/retinanet_resnet50_fpn": _PYRAMID,
}
