"""vit-pytorch's `ViT`: current names, older names with `fn`, and the first version without patch norms."""

import math
import re

from vitrail.checkpoints.family import ANY, PLAIN, Family, Hints
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights, layer_rules, rule
from vitrail.data.preprocess import HALF, Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

_LAYER = "transformer.layers.{}."
_COMMON = [
    rule("cls_token", "cls_token", shape="1 D"),
    rule("pos_embedding", "pos_embed", shape="T D"),
    rule(f"{_LAYER}0.to_qkv.weight", "blocks.{}.attn.qkv.weight"),
    *layer_rules(
        _LAYER,
        "blocks.{}.",
        {"0.norm": "norm1", "0.to_out.0": "attn.proj", "1.net.0": "norm2", "1.net.1": "mlp.fc1", "1.net.4": "mlp.fc2"},
    ),
    *layer_rules("", "", {"transformer.norm": "norm", "mlp_head": "head"}),
]
# A flattened patch is channels-last: (D, p1·p2·c) is a kernel (D, c, p1, p2), reshaped and permuted.
_PATCH = rule("to_patch_embedding.2.weight", "patch_embed.proj.weight", shape="D PQC", permute=(0, 3, 1, 2))
_WRITE = KeyMap(
    [
        *_COMMON,
        _PATCH,
        rule("to_patch_embedding.2.bias", "patch_embed.proj.bias"),
        *layer_rules("", "", {"to_patch_embedding.1": "patch_embed.norm_in"}),
        *layer_rules("", "", {"to_patch_embedding.3": "patch_embed.norm_out"}),
    ]
)
_READ = KeyMap([*_WRITE.rules, *layer_rules("", "", {"mlp_head_norm": "fc_norm"})])


def _recognise(shapes: Shapes) -> bool:
    return any(name.startswith("to_patch_embedding.") for name in shapes) and any(
        re.match(r"transformer\.layers\.0\.0\.", name) for name in shapes
    )


def _tidy(weights: Weights, hints: Hints) -> Weights:
    """Convert older names to the current ones, and unflatten the patch projection."""
    tidied: Weights = {}
    first_form = "to_patch_embedding.2.weight" not in weights
    layered_head = "mlp_head.1.weight" in weights
    for name, tensor in weights.items():
        # 0.fn.to_qkv and 1.fn.net.0 next to their norm: the older pre-norm wrapper.
        name = re.sub(r"^(transformer\.layers\.\d+\.0)\.fn\.", r"\1.", name)
        name = re.sub(r"^(transformer\.layers\.\d+\.1)\.norm\.", r"\1.net.0.", name)
        name = re.sub(r"^(transformer\.layers\.\d+\.1)\.fn\.net\.0\.", r"\1.net.1.", name)
        name = re.sub(r"^(transformer\.layers\.\d+\.1)\.fn\.net\.3\.", r"\1.net.4.", name)
        if first_form:
            name = re.sub(r"^to_patch_embedding\.1\.", "to_patch_embedding.2.", name)
        if layered_head:
            name = name.replace("mlp_head.0.", "mlp_head_norm.").replace("mlp_head.1.", "mlp_head.")
        if name in ("cls_token", "pos_embedding"):
            tensor = tensor.reshape(1, -1, tensor.shape[-1])
            if not tensor.numel():
                continue  # with pool="mean" the class token is an empty tensor
        tidied[name] = tensor
    kernel = tidied.get("to_patch_embedding.2.weight")
    if kernel is not None:
        tidied["to_patch_embedding.2.weight"] = kernel.reshape(kernel.shape[0], *_patch(kernel.shape[1], hints))
    return tidied


def _patch(numbers: int, hints: Hints) -> tuple[int, int, int]:
    """Return height, width and channels of a flattened patch."""
    channels = hints.get("channels", 3)
    if "patch_size" in hints:
        height, width = hints["patch_size"]
    else:
        height = width = math.isqrt(numbers // channels)
    if height * width * channels != numbers:
        raise CheckpointError(
            f"a patch has {numbers} values, which are not {channels} channels of a square; set them with --override "
            f"patch_size=8 --override channels=1 (overrides={{...}})"
        )
    return height, width, channels


def _hints(shapes: Shapes) -> Hints:
    hints: Hints = {"norm_eps": 1e-5, "activation": "gelu"}
    if "to_patch_embedding.1.weight" not in shapes:
        hints["stem"] = "linear"
        _, *patch, channels = shapes["to_patch_embedding.2.weight"]
        hints |= {"patch_size": tuple(patch), "channels": channels}
    if "cls_token" in shapes and "mlp_head_norm.weight" in shapes:
        hints["pool"] = "cls"  # the first version used the class token unless pool="mean" was set
    return hints


def _follows(hints: Hints, shapes: Shapes) -> Hints:
    """Its mean pooling averages all tokens, including a class token."""
    return {"pool_over": "all"} if hints.get("pool") == "mean" and "cls_token" in shapes else {}


def _require_pool_over_all(config: ViTConfig) -> list[str]:
    if config.pool == "mean" and config.pool_over == "patches" and config.class_token != "none":
        return ["pool_over='patches' with a class token (supported: all tokens)"]
    return []


def _table(config: ViTConfig | None) -> KeyMap:
    return _READ if config is None else _WRITE


FAMILY = Family(
    name="lucidrains",
    recognise=_recognise,
    table=_table,
    tidy=_tidy,
    hints=_hints,
    preprocess=Preprocess(resize="squash", interpolation="bilinear", mean=HALF, std=HALF),
    images="vit-pytorch does not define any",
    assumes={"pool": "vit-pytorch's default for such tensors; its pool='mean' averages all tokens"},
    follows=_follows,
    limits=_require_pool_over_all,
    needs={
        **PLAIN,
        "stem": ("linear_norm",),
        "class_token": ("first", "none"),
        "heads_fill_width": ANY,
        "qkv_bias": (False,),
        "out_proj": (True, False),
        "pool": ("cls", "mean"),
    },
    nearly={"norm_eps": 1e-5, "activation": "gelu"},
)
