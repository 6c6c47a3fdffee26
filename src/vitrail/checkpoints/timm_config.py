"""timm's config.json: what its names imply, the keys that timm needs, and reading every argument.

A name that is not listed is another architecture, or untested; it may differ in ways that tensors do not show (rotary
positions, other norms), so opening a timm folder with such a name is an error.
"""

import re
from collections.abc import Sequence
from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

# ── names ──

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


# ── writing ──

ARCHITECTURE = "vit_base_patch16_224"
"""Any registered plain ViT works, because `model_args` overrides everything that differs."""

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "quick_gelu": "quick_gelu", "relu": "relu"}
_POOLS = {"cls": "token", "mean": "avg", "map": "map"}
_CROPS = {"squash": "squash", "cover": "center", "contain": "border"}


def expressible(config: ViTConfig) -> bool:
    """Return whether timm's `VisionTransformer` can express this model exactly."""
    return (
        config.stem in ("conv", "linear")
        and config.class_token != "last"
        and not config.distillation_token
        and config.position == "learned_1d"
        and config.position_at == "stem"
        and (config.covers != "class" or config.registers == 0)
        and config.heads_fill_width
        and config.activation in _ACTIVATIONS
        and config.norm_order == "pre"
        and config.norm_eps == 1e-6
        and config.patch_bias != config.norm_before_blocks
        and config.out_proj
        and config.proj_bias == config.mlp_bias
        and config.pool in _POOLS
        and config.final_norm != "none"
        and config.representation is None
    )


def timm_config(config: ViTConfig, preprocess: Preprocess, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the entries for timm; none if timm cannot express the model."""
    if not expressible(config):
        return {}
    arguments = {
        "img_size": list(config.image_size),
        "patch_size": list(config.patch_size),
        "in_chans": config.channels,
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": _ratio(config.mlp_hidden, config.width),
        "qkv_bias": config.qkv_bias,
        "qk_norm": config.qk_norm,
        "proj_bias": config.proj_bias,
        "init_values": config.layer_scale,
        "class_token": config.class_token == "first",
        "no_embed_class": config.covers == "patches",
        "reg_tokens": config.registers,
        "pre_norm": config.norm_before_blocks,
        "global_pool": _POOLS[config.pool],
        "pool_include_prefix": config.pool_over == "all",
        "fc_norm": config.final_norm == "after_pool",
        "act_layer": _ACTIVATIONS[config.activation],
    }
    height, width = preprocess.size
    named = {} if classes is None else {"label_names": list(classes)}
    return {
        "architecture": ARCHITECTURE,
        "num_classes": config.classes,
        "num_features": config.width,
        "model_args": {name: value for name, value in arguments.items() if value is not None},
        "pretrained_cfg": {
            "input_size": [config.channels, height, width],
            "fixed_input_size": True,
            "interpolation": preprocess.interpolation,
            "crop_mode": _CROPS[preprocess.resize],
            "crop_pct": _crop_fraction(height, (preprocess.resize_to or preprocess.size)[0]),
            "mean": list(preprocess.mean),
            "std": list(preprocess.std),
            "num_classes": config.classes,
            "pool_size": None,
            "classifier": "head",
            # With a name, timm would convert kernels that do not have three channels.
            "first_conv": "patch_embed.proj" if config.channels == 3 else None,
            **named,
        },
        **named,
    }


def _crop_fraction(side: int, box: int) -> float:
    """Return a crop fraction from which timm, which rounds down, recovers the box."""
    return side / box if int(side / (side / box)) == box else side / (box + 0.5)


def _ratio(hidden: int, width: int) -> float:
    """Return a ratio from which timm, which rounds down, recovers `hidden`."""
    ratio = hidden / width
    return ratio if int(width * ratio) == hidden else (hidden + 0.5) / width


# ── reading ──

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "quickgelu": "quick_gelu",
    "relu": "relu",
}
_CROPS_READ = {"squash": "squash", "center": "cover", "border": "contain"}
_POOLS_READ = {"token": "cls", "avg": "mean", "map": "map"}
_IN_SHAPES = {
    *("patch_size", "in_chans", "num_classes", "embed_dim", "depth", "mlp_ratio", "qkv_bias", "qk_norm", "proj_bias"),
    *("init_values", "class_token", "no_embed_class", "reg_tokens", "pre_norm", "final_norm", "fc_norm"),
}
"""Arguments that are implied by the presence, number or shape of tensors."""
_IN_TRAINING = {
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("weight_init", "fix_init", "device", "dtype"),
}
"""Arguments without effect at inference."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "scale_attn_norm": (False,),
    "scale_mlp_norm": (False,),
    "pos_embed": ("learn", "none", ""),
    "dynamic_img_size": (False, True),
    "dynamic_img_pad": (False, True),
    "norm_layer": ("layernorm",),
    "embed_norm_layer": (),
    "embed_layer": (),
    "block_fn": (),
    "mlp_layer": (),
    "attn_layer": (),
}
"""The values of other arguments that give a plain ViT; None, timm's default, is always allowed."""
_FOLLOWED = {"num_heads", "img_size", "act_layer", "global_pool", "pool_include_prefix"}


def hints_from_timm(config: dict[str, Any]) -> Hints:
    """Return the fields of `ViTConfig` in timm's config; an unsupported argument is an error."""
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise CheckpointError(f"model_args in its config should be an object, found {arguments!r}")
    for name, value in arguments.items():
        _check(name, value)
    hints: Hints = fields_from_name(str(config["architecture"]))
    if arguments.get("num_heads") is not None:
        hints["heads"] = int(arguments["num_heads"])
    if arguments.get("img_size") is not None:
        hints["image_size"] = as_size(arguments["img_size"])
    if arguments.get("act_layer") is not None:
        hints["activation"] = activation_name(arguments["act_layer"])
    if arguments.get("norm_layer") is not None:
        hints["norm_eps"] = 1e-6  # timm's LayerNorm
    if arguments.get("pos_embed") in ("none", ""):
        hints["position"] = "none"
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool is not None:
        if pool not in _POOLS_READ:
            raise CheckpointError(f"its config has global_pool {pool!r}, which is not supported")
        hints["pool"] = _POOLS_READ[pool]
    if "pool_include_prefix" in arguments:
        hints.pop("pool_over", None)
        if arguments["pool_include_prefix"]:
            hints["pool_over"] = "all"
    return hints


def _check(name: str, value: Any) -> None:
    if name in _IN_SHAPES or name in _IN_TRAINING or name in _FOLLOWED:
        return
    if name not in _ONLY:
        raise CheckpointError(f"its config has {name}={value!r}, an unknown argument of timm")
    if value is not None and value not in _ONLY[name]:
        raise CheckpointError(f"its config has {name}={value!r}, which is not supported")


def activation_name(name: Any) -> str:
    """Return our name for an activation."""
    if name not in ACTIVATIONS:
        raise CheckpointError(f"its config has activation {name!r}, which is not supported")
    return ACTIVATIONS[name]


def as_size(size: Any) -> tuple[int, int]:
    """Parse 224 or [224, 448]."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def preprocess_from_timm(config: dict[str, Any]) -> Preprocess | None:
    """Return the preprocessing in timm's `pretrained_cfg`, if there is any."""
    if "input_size" not in config or "mean" not in config:
        return None
    channels, height, width = config["input_size"]
    fraction = config.get("crop_pct") or 0.875
    box = int(height / fraction), int(width / fraction)
    mode = config.get("crop_mode") or "center"
    if mode not in _CROPS_READ:
        raise CheckpointError(f"its config has crop_mode {mode!r}, which is not supported")
    resize = _CROPS_READ[mode]
    # For a non-square size, timm's `center` always resizes bilinearly.
    plain = resize != "cover" or box[0] == box[1]
    mean, std = (list(config[name]) for name in ("mean", "std"))
    if len(mean) != channels:  # timm keeps three values also for other numbers of channels
        mean, std = ([sum(n) / len(n)] * channels for n in (mean, std))
    return Preprocess(
        size=(height, width),
        resize=resize,  # type: ignore[arg-type]
        resize_to=box,
        interpolation=config.get("interpolation", "bilinear") if plain else "bilinear",
        channels=channels,
        mean=mean,  # type: ignore[arg-type]
        std=std,  # type: ignore[arg-type]
    )
