"""What timm's config.json says of a model: every argument of it is followed, checked by the shapes, or refused."""

from typing import Any

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.timm_names import told_by_name
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
"""Arguments that tensors tell as well: their presence, their number or their shape."""
_IN_TRAINING = {
    *("drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"),
    *("weight_init", "fix_init", "device", "dtype"),
}
"""Arguments that change nothing in a model that predicts."""
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
"""The values of other arguments that mean a plain ViT; None, timm's word for its default, is one of each."""
_FOLLOWED = {"num_heads", "img_size", "act_layer", "global_pool", "pool_include_prefix"}


def hints_from_timm(config: dict[str, Any]) -> Hints:
    """Return the fields of `ViTConfig` that timm's config tells; what it says and we cannot be is refused by name."""
    arguments = config.get("model_args") or {}
    if not isinstance(arguments, dict):
        raise CheckpointError(f"its config should have an object as model_args, found {arguments!r}")
    for name, value in arguments.items():
        _check(name, value)
    hints: Hints = told_by_name(str(config["architecture"]))
    if arguments.get("num_heads") is not None:
        hints["heads"] = int(arguments["num_heads"])
    if arguments.get("img_size") is not None:
        hints["image_size"] = as_size(arguments["img_size"])
    if arguments.get("act_layer") is not None:
        hints["activation"] = known_activation(arguments["act_layer"])
    if arguments.get("norm_layer") is not None:
        hints["norm_eps"] = 1e-6  # its LayerNorm by that name
    if arguments.get("pos_embed") in ("none", ""):
        hints["position"] = "none"
    pool = arguments.get("global_pool", config.get("global_pool"))
    if pool is not None:
        if pool not in _POOLS:
            raise CheckpointError(f"its config says global_pool {pool!r}, which we do not have")
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
        raise CheckpointError(f"its config says {name}={value!r}, an argument of timm's that we do not know")
    if value is not None and value not in _ONLY[name]:
        raise CheckpointError(f"its config says {name}={value!r}, which we do not have")


def known_activation(name: Any) -> str:
    """Return our name of an activation."""
    if name not in ACTIVATIONS:
        raise CheckpointError(f"its config says activation {name!r}, which we do not have")
    return ACTIVATIONS[name]


def as_size(size: Any) -> tuple[int, int]:
    """Read 224, or [224, 448]."""
    height, width = (size, size) if isinstance(size, int) else size
    return int(height), int(width)


def preprocess_from_timm(config: dict[str, Any]) -> Preprocess | None:
    """Return what timm's `pretrained_cfg` says of the images, where it says so."""
    if "input_size" not in config or "mean" not in config:
        return None
    channels, height, width = config["input_size"]
    share = config.get("crop_pct") or 0.875
    box = int(height / share), int(width / share)
    mode = config.get("crop_mode") or "center"
    if mode not in _CROPS:
        raise CheckpointError(f"its config says crop_mode {mode!r}, which we do not have")
    resize = _CROPS[mode]
    # For an oblong image timm's `center` resizes bilinearly whatever the config says.
    plain = resize != "cover" or box[0] == box[1]
    mean, std = (list(config[name]) for name in ("mean", "std"))
    if len(mean) != channels:  # timm keeps three numbers for a model of other channels
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
