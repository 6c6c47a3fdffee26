"""torchvision's `VisionTransformer`."""

import re

from vitrail.checkpoints.family import ANY, PLAIN, Family, Hints
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights, layer_rules, rule
from vitrail.data.preprocess import IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.config import ViTConfig

_LAYER = "encoder.layers.encoder_layer_{}."
_BATCH_NORM = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
_COMMON = [
    rule("class_token", "cls_token"),
    rule("encoder.pos_embedding", "pos_embed"),
    *layer_rules(_LAYER, "blocks.{}.", {"ln_1": "norm1", "ln_2": "norm2", "mlp.0": "mlp.fc1", "mlp.3": "mlp.fc2"}),
    rule(f"{_LAYER}self_attention.in_proj_weight", "blocks.{}.attn.qkv.weight"),
    rule(f"{_LAYER}self_attention.in_proj_bias", "blocks.{}.attn.qkv.bias"),
    *layer_rules(_LAYER, "blocks.{}.", {"self_attention.out_proj": "attn.proj"}),
    *layer_rules("", "", {"encoder.ln": "norm", "heads.pre_logits": "pre_logits.fc", "heads.head": "head"}),
]
_PLAIN = KeyMap([*_COMMON, *layer_rules("", "", {"conv_proj": "patch_embed.proj"})])
_EARLY = KeyMap(
    [
        *_COMMON,
        rule("conv_proj.conv_bn_relu_{}.0.weight", "patch_embed.backbone.{}.conv.weight"),
        *layer_rules("conv_proj.conv_bn_relu_{}.", "patch_embed.backbone.{}.", {"1": "norm"}, _BATCH_NORM),
        *layer_rules("", "", {"conv_proj.conv_last": "patch_embed.proj"}),
    ]
)
_EITHER = KeyMap([*_PLAIN.rules, *(r for r in _EARLY.rules if r.ours.startswith("patch_embed.backbone"))])


def _recognise(shapes: Shapes) -> bool:
    return "class_token" in shapes and "encoder.layers.encoder_layer_0.ln_1.weight" in shapes


def _tidy(weights: Weights, _: Hints) -> Weights:
    """Old files name the MLP's layers linear_1 and linear_2; a conv stem ends in conv_last."""
    names = {".mlp.linear_1.": ".mlp.0.", ".mlp.linear_2.": ".mlp.3.", "conv_proj.conv_last.": "conv_proj."}
    return {
        re.sub("|".join(map(re.escape, names)), lambda match: names[match[0]], name): tensor
        for name, tensor in weights.items()
    }


def _table(config: ViTConfig | None) -> KeyMap:
    if config is None:
        return _EITHER
    return _EARLY if config.stem == "conv_stem" else _PLAIN


_PREPROCESS = Preprocess(resize="cover", resize_to=(256, 256), mean=IMAGENET_MEAN, std=IMAGENET_STD)


def _preprocess_at(size: tuple[int, int]) -> Preprocess:
    """Its models at other sizes than 224 are all from SWAG, which does not crop and resizes bicubically."""
    if size == (224, 224):
        return _PREPROCESS
    return _PREPROCESS.replace(size=size, resize_to=None, interpolation="bicubic")


FAMILY = Family(
    name="torchvision",
    recognise=_recognise,
    table=_table,
    tidy=_tidy,
    hints=lambda _: {"norm_eps": 1e-6, "activation": "gelu"},
    preprocess=_PREPROCESS,
    images="as for torchvision's weights of this size",
    assumes={"norm_eps": "torchvision's default"},
    preprocess_at=_preprocess_at,
    needs={**PLAIN, "stem": ("conv", "linear", "conv_stem"), "representation": ANY},
    nearly={"norm_eps": 1e-6, "activation": "gelu"},
)
