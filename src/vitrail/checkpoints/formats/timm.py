"""timm's `VisionTransformer`, whose names we share (as do DeiT's files), and its ViTs with RoPE."""

import re

from vitrail.checkpoints.family import ANY, PLAIN, Family, Hints, require_layer_scale, strip_prefix
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights, layer_rules, rule
from vitrail.data.preprocess import HALF, IMAGENET_MEAN, IMAGENET_STD, Preprocess
from vitrail.models.config import ViTConfig

_UNIT = "patch_embed.backbone.stages.{}.blocks.{}."
_SAME = [
    *("cls_token", "dist_token", "reg_token", "pos_embed", "attn_pool.latent"),
    *(f"patch_embed.proj.{kind}" for kind in ("weight", "bias")),
    *("blocks.{}.ls1.gamma", "blocks.{}.ls2.gamma"),
    *(f"patch_embed.backbone.stem.{leaf}" for leaf in ("conv.weight", "norm.weight", "norm.bias")),
    *(f"{_UNIT}conv{i}.weight" for i in (1, 2, 3)),
    *(f"{_UNIT}norm{i}.{kind}" for i in (1, 2, 3) for kind in ("weight", "bias")),
    *(f"{_UNIT}downsample.{leaf}" for leaf in ("conv.weight", "norm.weight", "norm.bias")),
]
_LAYERS = ("norm1", "attn.qkv", "attn.q_norm", "attn.k_norm", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_ENDS = ("norm_pre", "norm", "fc_norm", "head", "head_dist", "pre_logits.fc")
_POOL = ("q", "kv", "proj", "norm", "mlp.fc1", "mlp.fc2")
TABLE = KeyMap(
    [
        *(rule(name, name) for name in _SAME),
        *layer_rules("blocks.{}.", "blocks.{}.", {leaf: leaf for leaf in _LAYERS}),
        *layer_rules("attn_pool.", "attn_pool.", {leaf: leaf for leaf in _POOL}),
        *layer_rules("", "", {leaf: leaf for leaf in _ENDS}),
    ]
)


_ROOT_ALONE = KeyMap([r._replace(theirs=(r.theirs[0].replace("backbone.stem.", "backbone."),)) for r in TABLE.rules])


def _recognise(shapes: Shapes) -> bool:
    names = {name.removeprefix("module.") for name in shapes}
    dinov2 = {"mask_token", "register_tokens"} & names
    blocks = any(re.fullmatch(r"blocks\.\d+\.attn\.qkv\.weight", name) for name in names)
    return "patch_embed.proj.weight" in names and blocks and not dinov2 and not _recognise_rope(shapes)


def _tidy(weights: Weights, _: Hints) -> Weights:
    """A hybrid with only a root has no stages, and timm then omits `stem` from the names."""
    return {
        name.replace("patch_embed.backbone.conv.", "patch_embed.backbone.stem.conv.").replace(
            "patch_embed.backbone.norm.", "patch_embed.backbone.stem.norm."
        ): tensor
        for name, tensor in strip_prefix(weights, "module.").items()
    }


def _table(config: ViTConfig | None) -> KeyMap:
    if config is not None and config.stem == "resnet" and not config.stem_resnet.depths:
        return _ROOT_ALONE
    return TABLE


_PREPROCESS = Preprocess(resize="cover", resize_to=(248, 248), interpolation="bicubic", mean=HALF, std=HALF)
FAMILY = Family(
    name="timm",
    recognise=_recognise,
    table=_table,
    tidy=_tidy,
    hints=lambda _: {"norm_eps": 1e-6, "activation": "gelu", "resnet_numerics": "timm"},
    preprocess=_PREPROCESS,
    images="as for most of timm's ViTs; DeiT's have mean 0.485,0.456,0.406 and std 0.229,0.224,0.225, CLIP's others",
    assumes={
        "activation": "timm's default; a file does not record quick_gelu, gelu_tanh or relu",
        "norm_eps": "timm's default; CLIP's models have 1e-5",
        "pool": "timm's default for such tensors; timm's avg is mean here, its max is not supported",
        "pool_over": "timm's default",
    },
    needs={
        **PLAIN,
        "stem": ("conv", "linear", "resnet"),
        "resnet_numerics": (None, "timm"),
        "patch_bias": ANY,
        "class_token": ("first", "none"),
        "registers": ANY,
        "distillation_token": (False, True),
        "activation": ANY,
        "norm_before_blocks": ANY,
        "qkv_bias": ANY,
        "proj_bias": ANY,
        "mlp_bias": ANY,
        "qk_norm": ANY,
        "layer_scale": ANY,
        "pool": ("cls", "mean", "map"),
        "final_norm": ("before_pool", "after_pool"),
    },
)


# ── timm's ViTs with rotary positions (vit_*_patch16_rope_224), a separate class in timm ──

_ROPE_TABLE = KeyMap([r._replace(theirs=(re.sub(r"ls([12])\.gamma", r"gamma_\1", r.theirs[0]),)) for r in TABLE.rules])


def _recognise_rope(shapes: Shapes) -> bool:
    """Exclude timm's other models with gamma_1 (EVA, DINOv3, learned frequencies), whose RoPE differs from ours.

    They have a position table, frequencies, registers, or keys without a bias.
    """
    names = {name.removeprefix("module.") for name in shapes}
    other = {"pos_embed", "rope.freqs", "reg_token", "fc_norm.weight", "blocks.0.attn.q_bias"} & names
    return {"blocks.0.gamma_1", "blocks.0.attn.qkv.bias", "cls_token"} <= names and not other


ROPE = Family(
    name="timm-rope",
    recognise=_recognise_rope,
    table=lambda _: _ROPE_TABLE,
    tidy=lambda weights, _: strip_prefix(weights, "module."),
    hints=lambda _: {"norm_eps": 1e-6, "activation": "gelu", "position": "rope_2d", "rope_theta": 100.0},
    preprocess=_PREPROCESS.replace(mean=IMAGENET_MEAN, std=IMAGENET_STD),
    images="as for timm's ViTs with rotary positions",
    assumes={"norm_eps": "timm's default", "rope_theta": "as in timm's vit_*_patch16_rope_224"},
    needs={
        **PLAIN,
        "stem": ("conv", "linear"),
        "activation": ("gelu",),
        "position": ("rope_2d",),
        "rope_theta": (100.0,),
        "layer_scale": ANY,
    },
    limits=require_layer_scale,
    nearly={"norm_eps": 1e-6},
)
