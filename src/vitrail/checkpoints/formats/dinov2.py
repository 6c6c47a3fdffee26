"""DINOv2 as a backbone: Meta's files (timm's names except for registers and SwiGLU), and transformers'."""

import re

import torch

from vitrail.checkpoints.family import ANY, PLAIN, Family, Hints, require_layer_scale, strip_prefix
from vitrail.checkpoints.formats.timm import TABLE as TIMM
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights, layer_rules, rule
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.config import ViTConfig

_PLAIN = KeyMap([*(r for r in TIMM.rules if r.ours != "reg_token"), rule("register_tokens", "reg_token")])
_GATED = KeyMap(
    [r._replace(theirs=(r.theirs[0].replace("mlp.fc1", "mlp.w12").replace("mlp.fc2", "mlp.w3"),)) for r in _PLAIN.rules]
)


def _recognise(shapes: Shapes) -> bool:
    special = {"mask_token", "register_tokens"} & set(shapes) or any(".mlp.w12." in name for name in shapes)
    return "patch_embed.proj.weight" in shapes and bool(special)


def _tidy(weights: Weights, _: Hints) -> Weights:
    """Large models were trained in chunks: blocks.0.11.norm1 is layer 11."""
    return {
        re.sub(r"^blocks\.\d+\.(\d+)\.", r"blocks.\1.", name)
        .replace(".mlp.w12.", ".mlp.fc1.")
        .replace(".mlp.w3.", ".mlp.fc2."): tensor
        for name, tensor in weights.items()
    }


def _table(config: ViTConfig | None) -> KeyMap:
    return _GATED if config is not None and config.activation == "swiglu" else _PLAIN


FAMILY = Family(
    name="dinov2",
    recognise=_recognise,
    table=_table,
    tidy=_tidy,
    hints=lambda _: {"norm_eps": 1e-6, "activation": "gelu", "position_covers": "class"},
    preprocess=Preprocess(
        resize="cover", resize_to=(256, 256), interpolation="bicubic", mean=IMAGENET_MEAN, std=IMAGENET_STD
    ),
    images="as DINOv2 was evaluated",
    drops=("mask_token",),
    adds=lambda config: {"mask_token": torch.zeros(1, config.width)},
    needs={
        **PLAIN,
        "registers_placed": (False,),
        "registers": (0, 4),
        "activation": ("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        "layer_scale": ANY,
        "classes": (0,),
    },
    limits=require_layer_scale,
    nearly={"norm_eps": 1e-6},
)


# ── in transformers ──

_LAYER = "encoder.layer.{}."
_QKV = tuple(f"{_LAYER}attention.attention.{part}." for part in ("query", "key", "value"))


def _transformers_table(fc1: str, fc2: str) -> KeyMap:
    """Return the key table with the names that every version of transformers writes to files."""
    leaves = {"attention.output.dense": "attn.proj", "norm1": "norm1", "norm2": "norm2", fc1: "mlp.fc1", fc2: "mlp.fc2"}
    return KeyMap(
        [
            rule("embeddings.cls_token", "cls_token"),
            rule("embeddings.register_tokens", "reg_token"),
            rule("embeddings.position_embeddings", "pos_embed"),
            *layer_rules("", "", {"embeddings.patch_embeddings.projection": "patch_embed.proj", "layernorm": "norm"}),
            *(rule(tuple(part + kind for part in _QKV), f"blocks.{{}}.attn.qkv.{kind}") for kind in ("weight", "bias")),
            *layer_rules(_LAYER, "blocks.{}.", leaves),
            *(rule(f"{_LAYER}layer_scale{i}.lambda1", f"blocks.{{}}.ls{i}.gamma") for i in (1, 2)),
        ]
    )


_IN_TRANSFORMERS = _transformers_table("mlp.fc1", "mlp.fc2")
_IN_TRANSFORMERS_GATED = _transformers_table("mlp.weights_in", "mlp.weights_out")
_IN_MEMORY = {
    ".attention.q_proj.": ".attention.attention.query.",
    ".attention.k_proj.": ".attention.attention.key.",
    ".attention.v_proj.": ".attention.attention.value.",
    ".attention.o_proj.": ".attention.output.dense.",
    ".mlp.weights_in.": ".mlp.fc1.",
    ".mlp.weights_out.": ".mlp.fc2.",
    ".mlp.down_proj.": ".mlp.fc2.",
}
"""The names in version 5's `state_dict()`, which people save too; and one name for both kinds of MLP."""


def _recognise_transformers(shapes: Shapes) -> bool:
    names = {re.sub(r"^dinov2(_with_registers)?\.", "", name) for name in shapes}
    return "embeddings.mask_token" in names and any(".layer_scale1." in name for name in names)


def _tidy_transformers(weights: Weights, _: Hints) -> Weights:
    tidied: Weights = {}
    for name, tensor in strip_prefix(weights, "dinov2.", "dinov2_with_registers.").items():
        for old, new in _IN_MEMORY.items():
            name = name.replace(old, new)
        tidied[name] = tensor
    for gate in [name for name in tidied if ".mlp.gate_proj." in name]:
        up = gate.replace("gate_proj", "up_proj")
        if up in tidied:
            tidied[gate.replace("gate_proj", "fc1")] = torch.cat([tidied.pop(gate), tidied.pop(up)])
    return tidied


def _written_in_transformers(config: ViTConfig | None) -> KeyMap:
    gated = config is not None and config.activation == "swiglu"
    return _IN_TRANSFORMERS_GATED if gated else _IN_TRANSFORMERS


def integer_ratio(config: ViTConfig) -> int | None:
    """Return `mlp_ratio` for transformers: an integer multiple of the width, which for a gated MLP is then reduced to
    two thirds and rounded up to a multiple of 8. None if no integer fits."""
    for ratio in range(1, 17):
        hidden = config.width * ratio
        if config.activation == "swiglu":
            hidden = -(-(hidden * 2 // 3) // 8) * 8
        if hidden == config.mlp_hidden:
            return ratio
    return None


def _require_integer_ratio(config: ViTConfig) -> list[str]:
    if integer_ratio(config) is not None:
        return require_layer_scale(config)
    supported = (
        "two thirds of a multiple of the width, rounded up to a multiple of 8"
        if config.activation == "swiglu"
        else "integer multiples"
    )
    return [f"mlp_width={config.mlp_hidden} with width={config.width} (supported: {supported})"]


IN_TRANSFORMERS = Family(
    name="dinov2-transformers",
    recognise=_recognise_transformers,
    table=_written_in_transformers,
    tidy=_tidy_transformers,
    hints=FAMILY.hints,
    preprocess=FAMILY.preprocess,
    images=FAMILY.images,
    assumes={
        "activation": "as in the published DINOv2 models; its config.json would tell",
        "norm_eps": "as in the published DINOv2 models; its config.json would tell",
    },
    # Its classifier takes the class token and the mean of the patches, which no head of ours does.
    drops=("embeddings.mask_token", "classifier.weight", "classifier.bias"),
    adds=lambda config: {"embeddings.mask_token": torch.zeros(1, config.width)},
    needs={**FAMILY.needs, "registers": ANY},
    limits=_require_integer_ratio,
)
