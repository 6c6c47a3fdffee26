"""Google's `.npz` files: original, AugReg and linen numbering, scanned blocks, all prefixes, and hybrids."""

import re

import torch
from torch import Tensor

from vitrail.checkpoints.family import ANY, PLAIN, Family, Hints
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Rule, Weights, rule
from vitrail.data.preprocess import HALF, Preprocess
from vitrail.models.config import ViTConfig

_LAYER = "Transformer/encoderblock_{}/"
_OUT = ((0, 1), (2,))
_IN = ((0,), (1, 2))


def _dense(theirs: str, ours: str) -> list[Rule]:
    """JAX stores kernels as (inputs, outputs)."""
    return [rule(f"{theirs}/kernel", f"{ours}.weight", permute=(1, 0)), rule(f"{theirs}/bias", f"{ours}.bias")]


def _norm(theirs: str, ours: str) -> list[Rule]:
    return [rule(f"{theirs}/scale", f"{ours}.weight"), rule(f"{theirs}/bias", f"{ours}.bias")]


def _conv(theirs: str, ours: str) -> Rule:
    """JAX stores convolution kernels as (height, width, inputs, outputs)."""
    return rule(f"{theirs}/kernel", f"{ours}.weight", permute=(3, 2, 0, 1))


def _attention(theirs: str, ours: str) -> list[Rule]:
    """JAX stores the heads as a separate axis."""
    parts = [f"{theirs}/{part}" for part in ("query", "key", "value")]
    return [
        rule(tuple(f"{p}/kernel" for p in parts), f"{ours}.qkv.weight", shape="D H h", fold=_IN, permute=(1, 0)),
        rule(tuple(f"{p}/bias" for p in parts), f"{ours}.qkv.bias", shape="H h", fold=((0, 1),)),
        rule(f"{theirs}/out/kernel", f"{ours}.proj.weight", shape="H h D", fold=_OUT, permute=(1, 0)),
        rule(f"{theirs}/out/bias", f"{ours}.proj.bias"),
    ]


def _map_head(theirs: str, ours: str) -> list[Rule]:
    attention = f"{theirs}/MultiHeadDotProductAttention_0"
    pair = (f"{attention}/key", f"{attention}/value")
    return [
        rule(f"{theirs}/probe", f"{ours}.latent"),
        rule(f"{attention}/query/kernel", f"{ours}.q.weight", shape="D H h", fold=_IN, permute=(1, 0)),
        rule(f"{attention}/query/bias", f"{ours}.q.bias", shape="H h", fold=((0, 1),)),
        rule(tuple(f"{p}/kernel" for p in pair), f"{ours}.kv.weight", shape="D H h", fold=_IN, permute=(1, 0)),
        rule(tuple(f"{p}/bias" for p in pair), f"{ours}.kv.bias", shape="H h", fold=((0, 1),)),
        rule(f"{attention}/out/kernel", f"{ours}.proj.weight", shape="H h D", fold=_OUT, permute=(1, 0)),
        rule(f"{attention}/out/bias", f"{ours}.proj.bias"),
        *_norm(f"{theirs}/LayerNorm_0", f"{ours}.norm"),
        *_dense(f"{theirs}/MlpBlock_0/Dense_0", f"{ours}.mlp.fc1"),
        *_dense(f"{theirs}/MlpBlock_0/Dense_1", f"{ours}.mlp.fc2"),
    ]


_BACKBONE = "patch_embed.backbone."
_UNIT = f"{_BACKBONE}stages.{{}}.blocks.{{}}."
_TABLE = KeyMap(
    [
        _conv("embedding", "patch_embed.proj"),
        rule("embedding/bias", "patch_embed.proj.bias"),
        rule("cls", "cls_token"),
        rule("Transformer/posembed_input/pos_embedding", "pos_embed"),
        *_norm(f"{_LAYER}LayerNorm_0", "blocks.{}.norm1"),
        *_attention(f"{_LAYER}MultiHeadDotProductAttention_1", "blocks.{}.attn"),
        *_norm(f"{_LAYER}LayerNorm_2", "blocks.{}.norm2"),
        *_dense(f"{_LAYER}MlpBlock_3/Dense_0", "blocks.{}.mlp.fc1"),
        *_dense(f"{_LAYER}MlpBlock_3/Dense_1", "blocks.{}.mlp.fc2"),
        *_norm("Transformer/encoder_norm", "norm"),
        *_map_head("MAPHead_0", "attn_pool"),
        *_dense("pre_logits", "pre_logits.fc"),
        *_dense("head", "head"),
        # The hybrid's ResNet; Google counts stages and units from 1, see `_tidy` and `_count`.
        _conv("conv_root", f"{_BACKBONE}stem.conv"),
        *_norm("gn_root", f"{_BACKBONE}stem.norm"),
        *(_conv(f"block{{}}/unit{{}}/conv{i}", f"{_UNIT}conv{i}") for i in (1, 2, 3)),
        *(r for i in (1, 2, 3) for r in _norm(f"block{{}}/unit{{}}/gn{i}", f"{_UNIT}norm{i}")),
        _conv("block{}/unit{}/conv_proj", f"{_UNIT}downsample.conv"),
        *_norm("block{}/unit{}/gn_proj", f"{_UNIT}downsample.norm"),
    ]
)


def _recognise(shapes: Shapes) -> bool:
    return any(name.endswith("embedding/kernel") for name in shapes) and any("encoderblock" in name for name in shapes)


def _tidy(weights: Weights, _: Hints) -> Weights:
    """Normalise all variants of the files: prefixes, linen's numbering, scanned blocks, old shapes."""
    prefix = next(name for name in weights if name.endswith("embedding/kernel")).removesuffix("embedding/kernel")
    weights = {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    tidied: Weights = {}
    for name, tensor in weights.items():
        if re.match(r"(gn_root|block\d+/unit\d+/gn)", name):
            tensor = tensor.reshape(-1)  # old files store GroupNorm's vectors as (1, 1, 1, C)
        if name.startswith("Transformer/encoderblock/"):
            leaf = name.removeprefix("Transformer/encoderblock/")
            tidied |= {f"Transformer/encoderblock_{i}/{_renumber(leaf)}": part for i, part in enumerate(tensor)}
        elif match := re.match(r"(Transformer/encoderblock_\d+/)(.*)", name):
            tidied[match[1] + _renumber(match[2])] = tensor
        else:
            tidied[_shift(name, -1)] = tensor
    return _place(tidied)


def _renumber(leaf: str) -> str:
    """linen numbers each type of layer separately; older files number them all together."""
    leaf = leaf.replace("MultiHeadDotProductAttention_0/", "MultiHeadDotProductAttention_1/")
    return leaf.replace("LayerNorm_1/", "LayerNorm_2/").replace("MlpBlock_0/", "MlpBlock_3/")


def _shift(name: str, by: int) -> str:
    """Shift the indices of the ResNet's stages and units by `by`."""
    return re.sub(r"^block(\d+)/unit(\d+)/", lambda match: f"block{int(match[1]) + by}/unit{int(match[2]) + by}/", name)


def _place(weights: Weights) -> Weights:
    """Find the position table under one of its three names; the third has no row for the class token."""
    home = "Transformer/posembed_input/pos_embedding"
    for name in ("Transformer/pos_embedding", "pos_embedding"):
        if name in weights:
            table = weights.pop(name)
            if "cls" in weights and _is_square(table.shape[1]):
                table = torch.cat([torch.zeros_like(weights["cls"]), table], dim=1)
            weights[home] = table
    return weights


def _is_square(number: int) -> bool:
    return int(number**0.5 + 0.5) ** 2 == number


def _hints(shapes: Shapes) -> Hints:
    heads = shapes["Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query/kernel"][1]
    return {"norm_eps": 1e-6, "activation": "gelu_tanh", "heads": heads}


class _GoogleNumbering(KeyMap):
    """The key table with Google's ResNet numbering, for writing."""

    def write(self, weights: dict[str, Tensor], config: ViTConfig) -> Weights:  # type: ignore[override]
        """Write, then number the ResNet's stages and units from 1."""
        return {_shift(name, 1): tensor for name, tensor in super().write(weights, config).items()}


FAMILY = Family(
    name="google",
    recognise=_recognise,
    table=lambda config: _TABLE if config is None else _GoogleNumbering(_TABLE.rules),
    tidy=_tidy,
    hints=_hints,
    preprocess=Preprocess(resize="squash", interpolation="bilinear", mean=HALF, std=HALF),
    images="as in Google's code",
    needs={
        **PLAIN,
        "stem": ("conv", "linear", "resnet"),
        "resnet_numerics": (None, "google"),
        "class_token": ("first", "none"),
        "representation": ANY,
        "pool": ("cls", "mean", "map"),
    },
    nearly={"norm_eps": 1e-6, "activation": "gelu_tanh"},
)
