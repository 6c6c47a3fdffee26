"""What a weight file does not say and we take for granted: held in one place, and said wherever a file is opened.

A guess is made where the published models with such tensors agree, and it is said. Where they do not, or where there is
none of that size, a wrong guess would give wrong numbers without an error, so the file is refused until the field is
given (docs/decisions/0020).
"""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from vitrail.checkpoints.infer import Shapes, published_heads
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig

_log = logging.getLogger("vitrail")


class Assumption(NamedTuple):
    """One thing that was taken for granted."""

    field: str
    """The field of `ViTConfig`, or of the preprocessing as preprocess.NAME; "classes" for the names of classes."""
    value: Any
    reason: str

    @property
    def changed_by(self) -> str:
        """What to type to have another value."""
        if self.field == "classes":
            return 'classes=("name", …) of vitrail.load gives others'
        if self.field == "conv_stem.activation":
            return "a stem with another one cannot be opened"
        if self.field == "pre_logits":
            return "a layer with another activation cannot be opened"
        wanted = "N" if isinstance(self.value, int) else "…"
        return f"--override {self.field}={wanted} changes it"

    def __str__(self) -> str:
        return f"{self.field}={_shown(self.value)} ({self.reason}); {self.changed_by}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ("x" if all(isinstance(part, int) for part in value) else ",").join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def announce(assumptions: Iterable[Assumption]) -> None:
    """Say what was assumed, one line each: to the log of `vitrail`, which without a handler is stderr."""
    if os.environ.get("RANK", "0") != "0":  # of several processes one need say it
        return
    for assumption in assumptions:
        _log.warning("assumed: %s", assumption)


def assumed_of_model(
    config: ViTConfig, shapes: Shapes, told: Mapping[str, Any], family: Mapping[str, str]
) -> list[Assumption]:
    """Return what was assumed of the model: fields that neither its shapes, nor a config, nor the caller tells.

    `family` holds the fields that its family only presumes, and why.
    """
    found = []
    if "heads" not in told and not config.qk_norm:
        size = f"{config.head_width} wide, as in the published models of this size"
        found.append(Assumption("heads", config.heads, size))
    for field, reason in family.items():
        if field not in told and _open_question(field, config):
            found.append(Assumption(field, "tanh" if field == "pre_logits" else getattr(config, field), reason))
    if "pos_embed" not in shapes and "image_size" not in told and config.position != "learned_2d":
        found.append(Assumption("image_size", config.image_size, "no table of positions tells it"))
    if config.stem == "conv_stem" and "conv_stem" not in told:
        strides = tuple(layer.stride for layer in config.stem_layers)
        found.append(Assumption("conv_stem", strides, "strides, which no tensor tells"))
        found.append(Assumption("conv_stem.activation", "relu", "no tensor tells it"))
    return found


def _open_question(field: str, config: ViTConfig) -> bool:
    """Say whether tensors leave a field open: a gated MLP, an attention pool and two heads each prove theirs."""
    if field == "activation":
        return config.activation != "swiglu"
    if field == "pool":
        return config.pool != "map" and not config.distillation_token
    if field == "pool_over":
        return config.pool in ("mean", "map") and config.special_tokens > 0
    if field == "class_token":
        return config.class_token != "none"
    if field == "pre_logits":
        return config.representation is not None
    return not (field == "rope_theta" and config.position != "rope_2d")


def assumed_of_images(preprocess: Preprocess, told: Iterable[str], reason: str) -> list[Assumption]:
    """Return what was assumed of the preprocessing, where no config came along: one line for each thing that counts."""
    said = set(told)
    resized = preprocess.resize_to or preprocess.size
    how = f"to {resized[0]}×{resized[1]}, {preprocess.interpolation}"
    values = {"mean": preprocess.mean, "std": preprocess.std, "resize": preprocess.resize}
    reasons = {"mean": reason, "std": "likewise", "resize": f"{how}, likewise"}
    return [
        Assumption(f"preprocess.{name}", value, reasons[name]) for name, value in values.items() if name not in said
    ]


def cannot_be_guessed(config: ViTConfig, shapes: Shapes, told: Mapping[str, Any], family: str) -> dict[str, str]:
    """Return the fields that somebody has to say, each with what is known of it."""
    missing = {}
    if "heads" not in told and not config.qk_norm and published_heads(shapes) is None:
        inner = config.heads * config.head_width
        missing["heads"] = (
            f"its number of heads is in no tensor, and no published ViT has this size (width {config.width}, "
            f"{config.depth} blocks, MLP {config.mlp_hidden}); say it with --override heads=N (heads=N in Python), "
            f"where N divides {inner}"
        )
    if "pos_embed" not in shapes and "position" not in told and config.position == "none":
        missing["position"] = (
            "it has no table of positions, so they are computed (sines, rotary) or it has none, which no tensor tells; "
            "say it with --override position=sincos_2d (or rope_2d, or none)"
        )
    if family != "timm":
        return missing | _strides(config, shapes, told)
    if config.norm_before_blocks and "activation" not in told:
        missing["activation"] = (
            "models with a norm before the blocks (CLIP's) were published with gelu and with quick_gelu, which no "
            "tensor tells; say it with --override activation=quick_gelu (or gelu)"
        )
    if config.norm_before_blocks and "position" not in told and (config.pool == "map" or config.final_norm == "none"):
        missing["position"] = (
            "its tensors are those of a Perception Encoder, whose rotary positions have none and are not ours; if it "
            f"is another model, say so with --override position={config.position}"
        )
    like_rpn = not config.qkv_bias and config.class_token == "none" and config.final_norm == "after_pool"
    if like_rpn and "norm_order" not in told:
        missing["norm_order"] = (
            "its tensors are those of timm's vit_base_patch16_rpn_224, whose norms follow the layers and which is not "
            "ours; if it is another model, say so with --override norm_order=pre"
        )
    return missing


def _strides(config: ViTConfig, shapes: Shapes, told: Mapping[str, Any]) -> dict[str, str]:
    """The strides of early convolutions are told by them, or with a table of positions by the size of the image."""
    if config.stem != "conv_stem" or "conv_stem" in told or ("image_size" in told and "pos_embed" in shapes):
        return {}
    return {
        "image_size": "the strides of its convolutions are in no tensor; say the size of its images with --override "
        "image_size=224, from which they follow"
    }
