"""Infer the architecture of a ViT from the shapes of its weights.

Shapes determine nearly everything. The rest (heads, LayerNorm's eps, which GELU) comes from the family of the file or
from the caller; the number of heads defaults to that of the published models of the same size.
`vitrail.checkpoints.assumptions` decides which of these guesses are reported, and which are errors.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
from vitrail.models.variants import SIZES

Shapes = Mapping[str, tuple[int, ...]]
HEAD_WIDTH = 64
"""The head width of nearly every published ViT."""
PUBLISHED = {(size.width, size.depth, size.mlp_width): size.heads for size in SIZES.values()} | {
    (256, 10, 1024): 4,
    (256, 14, 1280): 4,
    (320, 14, 1792): 5,
    (384, 36, 1536): 6,
    (512, 12, 2048): 8,
    (512, 20, 2048): 8,
    (640, 12, 2560): 10,
    (832, 21, 2176): 13,
    (896, 12, 3584): 14,
    (896, 18, 2304): 14,
    (1152, 27, 4304): 16,
    (1536, 40, 4096): 24,
    (1536, 40, 6144): 16,
}
"""(width, depth, MLP width) of published ViTs, of the papers and in timm, and their number of heads."""


def infer_config(shapes: Shapes, hints: Mapping[str, Any]) -> ViTConfig:
    """Return the config of the model whose parameters have these names and shapes (ours).

    `hints` are fields of `ViTConfig` from other sources; they take precedence. "resnet_numerics" is `ResNet.numerics`.
    "target_size" is the requested image size; it decides if the position table is not square.
    """
    _check_axes(shapes)
    fields: dict[str, Any] = {}
    fields |= _stem(shapes, hints) if "stem" not in hints else {}
    fields |= _encoder(shapes, hints)
    fields |= _tokens(shapes)
    fields |= _output(shapes, fields)
    fields |= {k: v for k, v in hints.items() if k in ViTConfig.model_fields and k != "image_size"}
    if fields.get("stem") == "resnet" and "resnet_numerics" in hints and "resnet" not in hints:
        fields["resnet"] = {**fields["resnet"], "numerics": hints["resnet_numerics"]}
    if _need(shapes, "blocks.0.mlp.fc1.weight")[0] == 2 * _need(shapes, "blocks.0.mlp.fc2.weight")[1]:
        fields["activation"] = "swiglu"  # shapes take precedence over the family's assumption
    fields |= _position(shapes, fields, hints)
    return ViTConfig.model_validate(fields)


def _need(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise CheckpointError(
            f"no {name} among the weights: this is not a Vision Transformer, or the file is truncated"
        )
    return shapes[name]


_AXES = {
    "patch_embed.proj.weight": 4,
    "blocks.0.attn.qkv.weight": 2,
    "blocks.0.attn.q_norm.weight": 1,
    "blocks.0.mlp.fc1.weight": 2,
    "blocks.0.mlp.fc2.weight": 2,
    "reg_token": 3,
    "pos_embed": 3,
    "pre_logits.fc.weight": 2,
    "head.weight": 2,
}
"""The number of axes of the tensors that the config is inferred from."""


def _check_axes(shapes: Shapes) -> None:
    for name, axes in _AXES.items():
        if name in shapes and (len(shapes[name]) != axes or 0 in shapes[name]):
            raise CheckpointError(f"{name} is {shapes[name]}, expected {axes} non-empty axes")


def _stem(shapes: Shapes, hints: Mapping[str, Any]) -> dict[str, Any]:
    _, channels, *patch = _need(shapes, "patch_embed.proj.weight")
    fields: dict[str, Any] = {"patch_bias": "patch_embed.proj.bias" in shapes}
    if "patch_embed.norm_in.weight" in shapes:
        return fields | {"stem": "linear_norm", "patch_size": tuple(patch), "channels": channels}
    if "patch_embed.backbone.stem.conv.weight" in shapes:
        return fields | _resnet(shapes, patch)
    if "patch_embed.backbone.0.conv.weight" in shapes:
        return fields | _conv_stem(shapes, hints)
    return fields | {"stem": "conv", "patch_size": tuple(patch), "channels": channels}


def _resnet(shapes: Shapes, patch: list[int]) -> dict[str, Any]:
    root = shapes["patch_embed.backbone.stem.conv.weight"]
    blocks: dict[int, int] = {}
    for name in shapes:
        if match := re.match(r"patch_embed\.backbone\.stages\.(\d+)\.blocks\.(\d+)\.", name):
            stage, block = int(match[1]), int(match[2])
            blocks[stage] = max(blocks.get(stage, 0), block + 1)
    depths = tuple(blocks[stage] for stage in sorted(blocks))
    stride = 4 << max(0, len(depths) - 1)
    return {
        "stem": "resnet",
        "resnet": {"depths": depths, "width_factor": root[0] / 64},
        "patch_size": (patch[0] * stride, patch[1] * stride),
        "channels": root[1],
    }


def _conv_stem(shapes: Shapes, hints: Mapping[str, Any]) -> dict[str, Any]:
    """Infer the conv stem. Its strides are not in the weights: they follow from the position table if the image size is
    known, else every stride is assumed to be 2."""
    layers: list[dict[str, int]] = []
    while (name := f"patch_embed.backbone.{len(layers)}.conv.weight") in shapes:
        layers.append({"channels": shapes[name][0], "kernel": shapes[name][2], "stride": 2})
    total = 2 ** len(layers)
    if "conv_stem" in hints:
        total = math.prod(layer.stride for layer in hints["conv_stem"])
    elif (size := hints.get("image_size")) and "pos_embed" in shapes:
        total = size[0] // math.isqrt(shapes["pos_embed"][1]) or 1
        _set_strides(layers, total)
    return {
        "stem": "conv_stem",
        "conv_stem": tuple(layers),
        "patch_size": (total, total),
        "channels": shapes["patch_embed.backbone.0.conv.weight"][1],
    }


def _set_strides(layers: list[dict[str, int]], total: int) -> None:
    """Find strides that multiply to `total`: 2, and 1 for layers that keep the number of channels."""
    if total == 2 ** len(layers):
        return
    kept = [i for i, layer in enumerate(layers) if i and layer["channels"] == layers[i - 1]["channels"]]
    if total != 2 ** (len(layers) - len(kept)):
        raise CheckpointError(
            f"its {len(layers)} convolutions have a total stride of {total}, but their strides are not in the weights; "
            f"set conv_stem = [{{channels = …, kernel = …, stride = …}}, …] under [config] of a key table, or in "
            f"Python overrides={{'conv_stem': …}}"
        )
    for i in kept:
        layers[i]["stride"] = 1


def _encoder(shapes: Shapes, hints: Mapping[str, Any]) -> dict[str, Any]:
    inner = _need(shapes, "blocks.0.attn.qkv.weight")[0] // 3
    width = shapes["blocks.0.attn.qkv.weight"][1]
    layers = {int(match[1]) for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))}
    if layers != set(range(len(layers))):
        missing = next(number for number in range(len(layers)) if number not in layers)
        raise CheckpointError(
            f"layer {missing} of {max(layers) + 1} is missing from the weights; is the file truncated?"
        )
    qk_norm = shapes.get("blocks.0.attn.q_norm.weight")
    heads = hints.get("heads") or (inner // qk_norm[0] if qk_norm else published_heads(shapes) or _default_heads(inner))
    if inner % heads:
        raise CheckpointError(
            f"{heads} heads do not divide the attention's width {inner}; set another number with --override heads=N"
        )
    head_dim = inner // heads
    hidden = _need(shapes, "blocks.0.mlp.fc2.weight")[1]
    return {
        "width": width,
        "depth": len(layers),
        "heads": heads,
        "head_dim": None if head_dim * heads == width else head_dim,
        "mlp_width": None if hidden == 4 * width else hidden,
        "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
        "out_proj": "blocks.0.attn.proj.weight" in shapes,
        "proj_bias": "blocks.0.attn.proj.bias" in shapes or "blocks.0.attn.proj.weight" not in shapes,
        "qk_norm": qk_norm is not None,
        "layer_scale": 1e-5 if "blocks.0.ls1.gamma" in shapes else None,
        "mlp_bias": "blocks.0.mlp.fc1.bias" in shapes,
        "norm_before_blocks": "norm_pre.weight" in shapes,
    }


def published_heads(shapes: Shapes) -> int | None:
    """Return the number of heads of the published models of this size; None if there is none."""
    inner, width = shapes["blocks.0.attn.qkv.weight"][0] // 3, shapes["blocks.0.attn.qkv.weight"][1]
    depth = len({match[1] for name in shapes if (match := re.match(r"blocks\.(\d+)\.", name))})
    heads = PUBLISHED.get((width, depth, shapes["blocks.0.mlp.fc2.weight"][1]))
    return heads if inner == width else None


def _default_heads(width: int) -> int:
    return width // HEAD_WIDTH if width % HEAD_WIDTH == 0 else 1


def _tokens(shapes: Shapes) -> dict[str, Any]:
    return {
        "class_token": "first" if "cls_token" in shapes else "none",
        "distillation_token": "dist_token" in shapes,
        "registers": shapes["reg_token"][1] if "reg_token" in shapes else 0,
    }


def _output(shapes: Shapes, fields: Mapping[str, Any]) -> dict[str, Any]:
    if "attn_pool.latent" in shapes:
        pool = "map"
    elif fields["distillation_token"]:
        pool = "cls"
    else:
        pool = "mean" if "fc_norm.weight" in shapes or fields["class_token"] == "none" else "cls"
    final = "before_pool" if "norm.weight" in shapes else "after_pool" if "fc_norm.weight" in shapes else "none"
    return {
        "pool": pool,
        "final_norm": final,
        "representation": shapes["pre_logits.fc.weight"][0] if "pre_logits.fc.weight" in shapes else None,
        "classes": shapes["head.weight"][0] if "head.weight" in shapes else 0,
    }


def _position(shapes: Shapes, fields: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Infer the patch grid: from the image size if known, else the square that fits the position table."""
    patch = fields["patch_size"]
    if "pos_embed" not in shapes:
        size = hints.get("image_size") or tuple(224 - 224 % side or side for side in patch)
        return {"position": hints.get("position", "none"), "image_size": size}
    rows = shapes["pos_embed"][1]
    first = int(fields["class_token"] != "none") + int(fields["distillation_token"])
    covers = {"all": first + fields["registers"], "class": first, "patches": 0}
    requested = hints.get("position_covers")
    choices = {name: rows - special for name, special in covers.items() if requested in (None, name)}
    if size := hints.get("image_size"):
        height, width = size
        patches = (height // patch[0]) * (width // patch[1])
        fitting = [name for name, count in choices.items() if count == patches]
        if not fitting:
            raise CheckpointError(
                f"the position table has {rows} rows, which do not fit an image of {height}×{width} in patches "
                f"of {patch[0]}×{patch[1]} ({patches} patches and {first + fields['registers']} other tokens)"
            )
        return {"image_size": (height, width), "position_covers": _covers(fitting[0], first, fields)}
    for name, count in choices.items():
        side = math.isqrt(max(0, count))
        if side and side * side == count:
            return {"image_size": (side * patch[0], side * patch[1]), "position_covers": _covers(name, first, fields)}
    if target_size := hints.get("target_size"):
        return _position(shapes, fields, {**hints, "image_size": target_size})
    raise CheckpointError(
        f"the position table has {rows} rows, which are not a square grid; set the image size with --override "
        f"image_size=192x384 (height first)"
    )


def _covers(name: str, first: int, fields: Mapping[str, Any]) -> str | None:
    """Return None if the default is equivalent."""
    same_as_all = (
        name == "all" or (name == "class" and not fields["registers"]) or (not first and not fields["registers"])
    )
    return None if same_as_all else name
