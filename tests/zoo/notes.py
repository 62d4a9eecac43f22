"""What a reader of the table should know about a line: one sentence for each that is wrong or cannot tell.

Those that are wrong begin with "Wrong". Most of them show true features, but others than a person would name.
"""

_DECODER_OF_DETR = "Wrong: the backbone's stages are left out, as only the encoder's resolution is cut by nothing."
_FUSION = (
    "Wrong: a person would name `fusion_stage.layers`; each of them ends on the next grid, so its inside is taken."
)
_MASKED = "The encoder sees a random subset of patches, which is no grid: only the patch embedding is read."

NOTES: dict[str, str] = {
    "timm/cpubone_nano": "`head.in_conv` is the first convolution of the head, `stages.3` before it is as good.",
    "timm/crossvit_tiny_240": "Wrong: a block gives two grids at once, so the insides of one branch are taken.",
    "timm/efficientvim_m1": "Wrong: its blocks work on sequences, so the convolutions between them are taken.",
    "timm/efficientvit_b0": "`head.in_conv` is the first convolution of the head, `stages.3` before it is as good.",
    "timm/hiera_tiny_224": "Hiera unrolls its tokens by windows, which is no grid: only the patch embedding is read.",
    "timm/sequencer2d_s": "Wrong: the blocks of the first resolution, 18 × 27, are left out.",
    "timm/vitamin_small_224": "Wrong: the convolutional stages before the blocks, 64 × 96 to 16 × 24, are left out.",
    "timm/volo_d1_224": "Wrong: the blocks of the first resolution, `network.0`, are left out.",
    "transformers/BeitForSemanticSegmentation": "Wrong: `embeddings` stands for 8 × 12, where `layers.3` is the last.",
    "transformers/ConditionalDetrForObjectDetection": _DECODER_OF_DETR,
    "transformers/DPTForDepthEstimation": _FUSION,
    "transformers/DPTForSemanticSegmentation": _FUSION,
    "transformers/Data2VecVisionForSemanticSegmentation": (
        "Wrong: `embeddings` stands for 8 × 8, where `layer.3` is the last."
    ),
    "transformers/DeformableDetrForObjectDetection": (
        "Wrong: the projections after the backbone's stages are taken, not the stages."
    ),
    "transformers/DepthAnythingForDepthEstimation": _FUSION,
    "transformers/DetrForObjectDetection": _DECODER_OF_DETR,
    "transformers/FocalNetBackbone": "Wrong: the steps between stages are taken, as a stage gives two tensors.",
    "transformers/GLPNForDepthEstimation": (
        "Wrong: a person would name `decoder.stages`; each of them ends on the next grid."
    ),
    "transformers/GroupViTModel": (
        "Its 8 group tokens stand after the patches: set `token_grid`; only the patch embedding is read without it."
    ),
    "transformers/HieraBackbone": "Wrong: Hiera unrolls its tokens by windows, so these maps are scrambled.",
    "transformers/HieraForImageClassification": (
        "Hiera unrolls its tokens by windows, which is no grid: only the patch embedding is read."
    ),
    "transformers/HieraForPreTraining": (
        "Masked patches are hidden before the embedding, so a change there changes nothing."
    ),
    "transformers/LwDetrForObjectDetection": (
        "Wrong: its encoder sorts tokens into windows; of the projector, insides are taken."
    ),
    "transformers/PromptDepthAnythingForDepthEstimation": _FUSION,
    "transformers/RfDetrForObjectDetection": (
        "Wrong: its encoder sorts tokens into windows; of the projector, insides are taken."
    ),
    "transformers/Siglip2Model": (
        "Its images are packed patches `(N, patches, pixels)`, which the recorder does not take for images."
    ),
    "transformers/Swin2SRForImageSuperResolution": "`upsample` makes the larger picture, without its last convolution.",
    "transformers/TableTransformerForObjectDetection": _DECODER_OF_DETR,
    "transformers/TimesformerForVideoClassification": (
        "Wrong: frames and places share an axis in most layers, so the insides of attention are taken."
    ),
    "transformers/VideoMAEForPreTraining": _MASKED,
    "transformers/ViTMAEForPreTraining": _MASKED,
    "transformers/YolosForObjectDetection": (
        "Detection tokens stand after the patches: set `token_grid`; only the patch embedding is read without it."
    ),
    "transformers/ZoeDepthForDepthEstimation": "Wrong: `conditional_log_binomial` gives probabilities of depths.",
    "smp/DPT": (
        "Wrong: a person would name `fusion_blocks`, each of which ends on the next grid; `segmentation_head` "
        "makes the logits."
    ),
    "smp/FPN": "Wrong: the decoder is left out, as skips go around it.",
    "smp/MAnet": "Wrong: the insides of decoder blocks are taken; a person would name the blocks.",
    "smp/Unet": "The decoder's last block, 128 × 192, is the sixth resolution and left out.",
    "smp/UnetPlusPlus": "Wrong: of the decoder, only one resolution is taken.",
    "torchvision/fcos_resnet50_fpn": "Wrong: the pyramid's layers are left out, as skips go around them.",
    "torchvision/keypointrcnn_resnet50_fpn": "Wrong: the pyramid's layers are left out, as skips go around them.",
    "torchvision/lraspp_mobilenet_v3_large": "Wrong: five blocks of one resolution are taken, the others are left out.",
    "torchvision/maskrcnn_resnet50_fpn": "Wrong: the pyramid's layers are left out, as skips go around them.",
    "torchvision/retinanet_resnet50_fpn": "Wrong: the pyramid's layers are left out, as skips go around them.",
}
