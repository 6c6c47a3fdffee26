"""DINOv2 as a backbone: facebook's files (timm's names but for registers and SwiGLU), and transformers' (read only)."""

import re

import torch

from vitrail.checkpoints.family import PLAIN, Family, Hints, strip_prefix
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
    drops=("mask_token",),
    adds=lambda config: {"mask_token": torch.zeros(1, config.width)},
    needs={
        **PLAIN,
        "registers_placed": (False,),
        "registers": (0, 4),
        "activation": ("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        "layer_scale": (1e-5,),
        "classes": (0,),
    },
    nearly={"norm_eps": 1e-6},
)


# ── the way transformers spells it ──

_LAYER = "encoder.layer.{}."
_TRANSFORMERS = KeyMap(
    [
        rule("embeddings.cls_token", "cls_token"),
        rule("embeddings.register_tokens", "reg_token"),
        rule("embeddings.position_embeddings", "pos_embed"),
        *layer_rules("", "", {"embeddings.patch_embeddings.projection": "patch_embed.proj", "layernorm": "norm"}),
        *(
            rule(tuple(f"{_LAYER}attention.{part}_proj.{kind}" for part in "qkv"), f"blocks.{{}}.attn.qkv.{kind}")
            for kind in ("weight", "bias")
        ),
        *layer_rules(_LAYER, "blocks.{}.", {"attention.o_proj": "attn.proj", "norm1": "norm1", "norm2": "norm2"}),
        *layer_rules(_LAYER, "blocks.{}.", {"mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2"}),
        *(rule(f"{_LAYER}layer_scale{i}.lambda1", f"blocks.{{}}.ls{i}.gamma") for i in (1, 2)),
    ]
)
_OLD = {
    ".attention.attention.query.": ".attention.q_proj.",
    ".attention.attention.key.": ".attention.k_proj.",
    ".attention.attention.value.": ".attention.v_proj.",
    ".attention.output.dense.": ".attention.o_proj.",
    ".mlp.weights_in.": ".mlp.fc1.",
    ".mlp.weights_out.": ".mlp.fc2.",
    ".mlp.down_proj.": ".mlp.fc2.",
}


def _recognise_transformers(shapes: Shapes) -> bool:
    return any(re.sub(r"^dinov2(_with_registers)?\.", "", name) == "embeddings.mask_token" for name in shapes)


def _tidy_transformers(weights: Weights, _: Hints) -> Weights:
    tidied: Weights = {}
    for name, tensor in strip_prefix(weights, "dinov2.", "dinov2_with_registers.").items():
        for old, new in _OLD.items():
            name = name.replace(old, new)
        tidied[name] = tensor
    for gate in [name for name in tidied if ".mlp.gate_proj." in name]:
        up = gate.replace("gate_proj", "up_proj")
        if up in tidied:
            tidied[gate.replace("gate_proj", "fc1")] = torch.cat([tidied.pop(gate), tidied.pop(up)])
    return tidied


IN_TRANSFORMERS = Family(
    name="dinov2-transformers",
    recognise=_recognise_transformers,
    table=lambda _: _TRANSFORMERS,
    tidy=_tidy_transformers,
    hints=FAMILY.hints,
    preprocess=FAMILY.preprocess,
    # Its classifier reads the class token beside the mean of the patches, which no head of ours does.
    drops=("embeddings.mask_token", "classifier.weight", "classifier.bias"),
    needs=FAMILY.needs,
    nearly=FAMILY.nearly,
)
