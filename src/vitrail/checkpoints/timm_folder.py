"""Read timm's config.json: every argument is used, implied by the shapes, or an error."""

from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.timm_names import fields_from_name
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "quickgelu": "quick_gelu",
    "relu": "relu",
}
_CROPS = {"squash": "squash", "center": "cover", "border": "contain"}
_POOLS = {"token": "cls", "avg": "mean", "map": "map"}
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
        if pool not in _POOLS:
            raise CheckpointError(f"its config has global_pool {pool!r}, which is not supported")
        hints["pool"] = _POOLS[pool]
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
    if mode not in _CROPS:
        raise CheckpointError(f"its config has crop_mode {mode!r}, which is not supported")
    resize = _CROPS[mode]
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
