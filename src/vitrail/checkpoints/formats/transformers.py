"""transformers' ViT and DeiT, with the names of version 5 and the older ones of most files on the hub."""

import re

from vitrail.checkpoints.family import ANY, PLAIN, Family, Hints, strip_prefix
from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights, layer_rules, rule
from vitrail.data.preprocess import HALF, Preprocess
from vitrail.models.config import ViTConfig

_LAYER = "layers.{}."
_BODY = [
    rule("embeddings.cls_token", "cls_token"),
    rule("embeddings.distillation_token", "dist_token"),
    rule("embeddings.position_embeddings", "pos_embed"),
    *layer_rules("", "", {"embeddings.patch_embeddings.projection": "patch_embed.proj"}),
    *(
        rule(
            tuple(f"{_LAYER}attention.{part}_proj.{kind}" for part in ("q", "k", "v")),
            f"blocks.{{}}.attn.qkv.{kind}",
        )
        for kind in ("weight", "bias")
    ),
    *layer_rules(
        _LAYER,
        "blocks.{}.",
        {
            "attention.o_proj": "attn.proj",
            "layernorm_before": "norm1",
            "layernorm_after": "norm2",
            "mlp.fc1": "mlp.fc1",
            "mlp.fc2": "mlp.fc2",
        },
    ),
    *layer_rules("", "", {"layernorm": "norm", "pooler.dense": "pre_logits.fc"}),
]
_READ = KeyMap(
    [
        *_BODY,
        rule("embeddings.register", "reg_token"),
        *layer_rules("", "", {"classifier": "head", "distillation_classifier": "head_dist"}),
    ],
)
_OLD = {
    r"encoder\.layer\.(\d+)\.attention\.attention\.query\.": r"layers.\1.attention.q_proj.",
    r"encoder\.layer\.(\d+)\.attention\.attention\.key\.": r"layers.\1.attention.k_proj.",
    r"encoder\.layer\.(\d+)\.attention\.attention\.value\.": r"layers.\1.attention.v_proj.",
    r"encoder\.layer\.(\d+)\.attention\.output\.dense\.": r"layers.\1.attention.o_proj.",
    r"encoder\.layer\.(\d+)\.intermediate\.dense\.": r"layers.\1.mlp.fc1.",
    r"encoder\.layer\.(\d+)\.output\.dense\.": r"layers.\1.mlp.fc2.",
    r"encoder\.layer\.(\d+)\.": r"layers.\1.",
    r"cls_classifier\.": "classifier.",
}
"""The names before version 5, mapped to the current ones."""


def _recognise(shapes: Shapes) -> bool:
    names = {re.sub(r"^(vit|deit)\.", "", name) for name in shapes}
    dinov2 = any(".layer_scale1." in name for name in names)
    return "embeddings.patch_embeddings.projection.weight" in names and not dinov2


def _tidy(weights: Weights, _: Hints) -> Weights:
    tidied = {}
    for name, tensor in strip_prefix(weights, "vit.", "deit.").items():
        for pattern, replacement in _OLD.items():
            name, changed = re.subn(rf"^{pattern}", replacement, name)
            if changed:
                break
        tidied[name] = tensor
    if "embeddings.distillation_token" in tidied and "distillation_classifier.weight" not in tidied:
        # DeiT without its second head does not use the distillation token's output, so the token is a register.
        tidied["embeddings.register"] = tidied.pop("embeddings.distillation_token")
    return tidied


def _written(config: ViTConfig) -> KeyMap:
    """A model with a head has a prefix for its backbone; a bare one has none."""
    if not config.classes:
        return KeyMap(_BODY)
    body = "deit." if config.distillation_token else "vit."
    heads = (
        {"cls_classifier": "head", "distillation_classifier": "head_dist"}
        if config.distillation_token
        else {"classifier": "head"}
    )
    prefixed = [r._replace(theirs=tuple(body + name for name in r.theirs)) for r in _BODY]
    return KeyMap([*prefixed, *layer_rules("", "", heads)])


def _check_head(config: ViTConfig) -> list[str]:
    """Its tanh layer is the pooler of the headless model; a distillation token needs a second head."""
    if config.distillation_token and not config.classes:
        return ["distillation_token=True without a head (supported: in models with two heads)"]
    if config.representation is None or (config.classes == 0 and config.representation == config.width):
        return []
    return [f"representation={config.representation} (supported: in a model without a head, as wide as the model)"]


FAMILY = Family(
    name="transformers",
    recognise=_recognise,
    table=lambda config: _READ if config is None else _written(config),
    tidy=_tidy,
    hints=lambda _: {"norm_eps": 1e-12, "activation": "gelu"},
    drops=("embeddings.mask_token",),
    limits=_check_head,
    preprocess=Preprocess(resize="squash", interpolation="bilinear", mean=HALF, std=HALF),
    images="the default of transformers' ViTImageProcessor; DeiT's differs",
    assumes={
        "activation": "transformers' default; its config.json would tell",
        "norm_eps": "transformers' default; its config.json would tell",
        "pool": "as transformers' image classification does",
        "pre_logits": "the default of transformers' pooler; its config.json would tell",
    },
    needs={
        **PLAIN,
        "distillation_token": (False, True),
        "qkv_bias": (True, False),
        "activation": ("gelu", "gelu_tanh", "quick_gelu", "relu"),
        "representation": ANY,
    },
)
