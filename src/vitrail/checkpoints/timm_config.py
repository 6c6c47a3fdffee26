"""The keys in `config.json` that timm needs for `timm.create_model("local-dir:FOLDER", pretrained=True)`."""

from collections.abc import Sequence
from typing import Any

from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig

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
