"""timm's names of plain ViTs: the fields that a name implies and tensors do not. A test checks every name.

A name that is not listed is another architecture, or untested; it may differ in ways that tensors do not show (rotary
positions, other norms), so opening a timm folder with such a name is an error.
"""

import re
from typing import Any

from vitrail.errors import CheckpointError

_HEADS = {
    2: "test_vit test_vit2",
    3: """
        deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 test_vit3 vit_tiny_patch16_224 vit_tiny_patch16_384
        vit_tiny_r_s16_p8_224 vit_tiny_r_s16_p8_384
    """,
    4: "vit_wee_patch16_reg1_gap_256 vit_xsmall_patch16_clip_224",
    5: "vit_little_patch16_reg1_gap_256 vit_little_patch16_reg4_gap_256",
    6: """
        deit3_small_patch16_224 deit3_small_patch16_384 deit_small_distilled_patch16_224 deit_small_patch16_224
        flexivit_small vit_small_patch14_dinov2 vit_small_patch14_reg4_dinov2 vit_small_patch16_224
        vit_small_patch16_36x1_224 vit_small_patch16_384 vit_small_patch16_rope_224 vit_small_patch32_224
        vit_small_patch32_384 vit_small_patch8_224 vit_small_r26_s32_224 vit_small_r26_s32_384
    """,
    8: """
        deit3_medium_patch16_224 vit_medium_patch16_clip_224 vit_medium_patch16_gap_240 vit_medium_patch16_gap_256
        vit_medium_patch16_gap_384 vit_medium_patch16_reg1_gap_256 vit_medium_patch16_reg4_gap_256
        vit_medium_patch32_clip_224 vit_mediumd_patch16_reg4_gap_256 vit_mediumd_patch16_reg4_gap_384
    """,
    10: """
        vit_betwixt_patch16_gap_256 vit_betwixt_patch16_reg1_gap_256 vit_betwixt_patch16_reg4_gap_256
        vit_betwixt_patch16_reg4_gap_384 vit_betwixt_patch32_clip_224
    """,
    12: """
        deit3_base_patch16_224 deit3_base_patch16_384 deit_base_distilled_patch16_224 deit_base_distilled_patch16_384
        deit_base_patch16_224 deit_base_patch16_384 flexivit_base vit_base_patch14_dinov2 vit_base_patch14_reg1_tipsv2
        vit_base_patch14_reg4_dinov2 vit_base_patch16_224 vit_base_patch16_224_miil vit_base_patch16_384
        vit_base_patch16_clip_224 vit_base_patch16_clip_384 vit_base_patch16_clip_quickgelu_224
        vit_base_patch16_reg4_gap_256 vit_base_patch16_rope_224 vit_base_patch16_siglip_224 vit_base_patch16_siglip_256
        vit_base_patch16_siglip_384 vit_base_patch16_siglip_512 vit_base_patch16_siglip_gap_224
        vit_base_patch16_siglip_gap_256 vit_base_patch16_siglip_gap_384 vit_base_patch16_siglip_gap_512
        vit_base_patch32_224 vit_base_patch32_384 vit_base_patch32_clip_224 vit_base_patch32_clip_256
        vit_base_patch32_clip_384 vit_base_patch32_clip_448 vit_base_patch32_clip_quickgelu_224
        vit_base_patch32_siglip_256 vit_base_patch32_siglip_gap_256 vit_base_patch8_224 vit_base_r26_s32_224
        vit_base_r50_s16_224 vit_base_r50_s16_384
    """,
    13: """
        vit_so150m2_patch16_reg1_gap_256 vit_so150m2_patch16_reg1_gap_384 vit_so150m2_patch16_reg1_gap_448
    """,
    14: """
        vit_base_patch16_plus_240 vit_base_patch16_plus_clip_240 vit_base_patch32_plus_256
        vit_so150m_patch16_reg4_gap_256 vit_so150m_patch16_reg4_gap_384 vit_so150m_patch16_reg4_map_256
    """,
    16: """
        deit3_huge_patch14_224 deit3_large_patch16_224 deit3_large_patch16_384 eva_large_patch14_196
        eva_large_patch14_336 flexivit_large vit_base_patch16_gap_224 vit_giant_patch14_224 vit_giant_patch14_clip_224
        vit_giant_patch16_gap_224 vit_giantopt_patch16_siglip_256 vit_giantopt_patch16_siglip_384
        vit_giantopt_patch16_siglip_gap_256 vit_giantopt_patch16_siglip_gap_384 vit_gigantic_patch14_224
        vit_gigantic_patch14_clip_224 vit_gigantic_patch14_clip_378 vit_gigantic_patch14_clip_quickgelu_224
        vit_huge_patch14_224 vit_huge_patch14_clip_224 vit_huge_patch14_clip_336 vit_huge_patch14_clip_378
        vit_huge_patch14_clip_quickgelu_224 vit_huge_patch14_clip_quickgelu_378 vit_huge_patch14_gap_224
        vit_huge_patch16_gap_448 vit_intern300m_patch14_448 vit_large_patch14_224 vit_large_patch14_clip_224
        vit_large_patch14_clip_336 vit_large_patch14_clip_quickgelu_224 vit_large_patch14_clip_quickgelu_336
        vit_large_patch14_dinov2 vit_large_patch14_reg1_tipsv2 vit_large_patch14_reg4_dinov2 vit_large_patch16_224
        vit_large_patch16_384 vit_large_patch16_rope_224 vit_large_patch16_siglip_256 vit_large_patch16_siglip_384
        vit_large_patch16_siglip_512 vit_large_patch16_siglip_gap_256 vit_large_patch16_siglip_gap_384
        vit_large_patch16_siglip_gap_512 vit_large_patch32_224 vit_large_patch32_384 vit_large_r50_s32_224
        vit_large_r50_s32_384 vit_so400m_patch14_reg1_tipsv2 vit_so400m_patch14_siglip_224 vit_so400m_patch14_siglip_378
        vit_so400m_patch14_siglip_384 vit_so400m_patch14_siglip_gap_224 vit_so400m_patch14_siglip_gap_378
        vit_so400m_patch14_siglip_gap_384 vit_so400m_patch14_siglip_gap_448 vit_so400m_patch14_siglip_gap_896
        vit_so400m_patch16_siglip_256 vit_so400m_patch16_siglip_384 vit_so400m_patch16_siglip_512
        vit_so400m_patch16_siglip_gap_256 vit_so400m_patch16_siglip_gap_384 vit_so400m_patch16_siglip_gap_512
    """,
    24: "vit_giant_patch14_dinov2 vit_giant_patch14_reg1_tipsv2 vit_giant_patch14_reg4_dinov2",
}
"""The number of heads by name."""
_NAMES = {name: heads for heads, names in _HEADS.items() for name in names.split()}
_EXCEPTIONS: dict[str, dict[str, Any]] = {
    r"_quickgelu": {"activation": "quick_gelu"},
    r"_clip_": {"norm_eps": 1e-5},
    r"_patch32_siglip_|_large_patch16_siglip_(gap_)?512|_so400m_patch16_siglip_|_giantopt_": {
        "activation": "gelu_tanh"
    },
    r"^test_vit3$": {"pool_over": "all"},
}
"""Fields that differ from the defaults, by pattern."""


def fields_from_name(name: str) -> dict[str, Any]:
    """Return the fields of `ViTConfig` implied by timm's architecture name."""
    if name not in _NAMES:
        raise CheckpointError(
            f"timm's {name} is not a plain ViT, or unknown to vitrail; it may differ in ways that the weights do not "
            f"show, such as rotary positions, so it was not opened"
        )
    fields: dict[str, Any] = {"heads": _NAMES[name], "activation": "gelu", "norm_eps": 1e-6, "norm_order": "pre"}
    for pattern, changes in _EXCEPTIONS.items():
        if re.search(pattern, name):
            fields |= changes
    return fields
