"""Models of timm: a small one of every family (module of `timm.models`), more where a family has several kinds."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import nn
from zoo.member import CLASSES, Member, classify

SIZE = (128, 192)
ANY_SIZE = """
caformer_s18 convformer_s18 convmixer_768_32 convnext_zepto_rms convnextv2_atto cpubone_nano cs3darknet_focus_s csatv2
cspnext_tiny cspresnet50 davit_tiny densenet121 dla46x_c dpn48b ecaresnet26t edgenext_xx_small efficientnet_b0
efficientvim_m1 efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf ghostnet_050
hardcorenas_b hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto inception_resnet_v2 inception_v3 inception_v4
lcnet_035 lcnetv2_small legacy_seresnet18 legacy_xception lowformer_b0 mambaout_femto mixnet_s mobilenetv2_035
mobilenetv3_small_050 mobilenetv4_conv_small_035 mobilenetv4_hybrid_medium mvitv2_tiny nextvit_small nf_regnet_b0
nfnet_l0 poolformerv2_s12 pvt_v2_b0 rdnet_tiny regnetx_002 repghostnet_050 res2net50_14w_8s resnest14d resnet10t
resnetv2_18 rexnet_100 sam2_hiera_tiny selecsls42 shvit_s1 skresnet18 starnet_s050 tiny_vit_5m_224 tresnet_m xception41p
"""
"""Built without a size; they take images of any."""
BUILT_FOR_SIZE = """
cait_xxs24_224 coat_lite_tiny coat_tiny coatnet_pico_rw_224 deit_tiny_distilled_patch16_224 deit_tiny_patch16_224
eca_botnext26ts_256 efficientformerv2_s0 efficientvit_m0 eva02_tiny_patch14_224 gcvit_xxtiny gmixer_12_224 gmlp_ti16_224
hiera_tiny_224 lambda_resnet26t levit_128s levit_conv_128s maxvit_pico_rw_256 mixer_s16_224 mobileone_s1 mobilevit_xxs
mobilevitv2_050 pit_ti_224 repvgg_a0 repvit_m1 resmlp_12_224 sequencer2d_s swiftformer_xs swin_s3_tiny_224
swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 swinv2_tiny_window16_256 tnt_s_legacy_patch16_224 twins_pcpvt_small
twins_svt_small visformer_tiny vit_relpos_small_patch16_224 vit_small_patch16_dinov3 vit_srelpos_small_patch16_224
vit_tiny_patch16_224 vit_tiny_r_s16_p8_224 vitamin_small_224 volo_d1_224 xcit_nano_12_p8_224
"""
"""Built with `img_size`."""
SQUARE = {"convit_tiny": 224, "crossvit_tiny_240": 240, "efficientformer_l1": 224, "nest_tiny": 224}
"""Models that take no other images."""
SHORTENED: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "beit_base_patch16_224": (SIZE, {"depth": 4, "embed_dim": 96, "num_heads": 3}),
    "deepseek_vit_412m": ((112, 168), {"depth": 4, "embed_dim": 96, "num_heads": 3}),
    "halonet_h1": ((256, 512), {}),
    "naflexvit_base_patch16_gap": (SIZE, {"depth": 4, "embed_dim": 96, "num_heads": 3}),
    "qwen3_vit_88m": (SIZE, {"depth": 4, "embed_dim": 96, "num_heads": 3}),
    "samvit_base_patch16_224": (SIZE, {"depth": 4, "embed_dim": 96, "num_heads": 3}),
}
"""Families whose smallest member has more than 60 million parameters, with fewer blocks; and one of larger windows."""
LEFT_OUT = {
    "gemma4_vit": "its smallest images have 768 pixels",
    "mobilenetv5": "81 million parameters",
    "nasnet": "85 million parameters",
    "pnasnet": "82 million parameters",
    "vgg": "129 million parameters; torchvision's is in the table",
}
"""Families (modules of `timm.models`) of which no model is in the table, and why."""


def members() -> Iterator[Member]:
    """All of them, in the order of their names."""
    found = {name: (SIZE, {}) for name in ANY_SIZE.split()}
    found |= {name: (SIZE, {"img_size": SIZE}) for name in BUILT_FOR_SIZE.split()}
    found |= {name: ((size, size), {}) for name, size in SQUARE.items()}
    found |= {name: (size, {"img_size": size, **options}) for name, (size, options) in SHORTENED.items()}
    for name, (size, options) in sorted(found.items()):
        yield Member(f"timm/{name}", partial(_build, name, options), size, classify)


def _build(name: str, options: dict[str, Any]) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
