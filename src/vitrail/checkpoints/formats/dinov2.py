"""facebook's DINOv2, as a backbone: timm's names but for registers and SwiGLU."""

import re

from vitrail.checkpoints.family import PLAIN, Family, Hints
from vitrail.checkpoints.formats.timm import TABLE as TIMM
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights, rule
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
    needs={
        **PLAIN,
        "registers": (0, 4),
        "activation": ("gelu", "gelu_tanh", "quick_gelu", "swiglu"),
        "layer_scale": (1e-5,),
        "classes": (0,),
    },
    nearly={"norm_eps": 1e-6},
)
