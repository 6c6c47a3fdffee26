"""Assumptions about fields that a weight file does not record, and the caller's overrides of them.

A field is assumed if all published models with such tensors agree on it. If they do not, or if no model of that
size is published, a wrong guess would silently give wrong outputs, so opening the file fails until the field is set
(docs/decisions/0020).
"""

import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vitrail.checkpoints.family import Hints
from vitrail.checkpoints.infer import Shapes, published_heads
from vitrail.data.preprocess import Preprocess
from vitrail.errors import ConfigError, suggest
from vitrail.models.config import ViTConfig
from vitrail.schema import Frozen

_log = logging.getLogger("vitrail")


class Assumption(NamedTuple):
    """One assumed field."""

    field: str
    """The field of `ViTConfig`, or of the preprocessing as preprocess.NAME; "classes" for the class names."""
    value: Any
    reason: str

    @property
    def changed_by(self) -> str:
        """How to set another value."""
        if self.field == "classes":
            return 'set others with vitrail.load(…, classes=("name", …))'
        if self.field == "conv_stem.activation":
            return "a stem with another activation cannot be opened"
        if self.field == "pre_logits":
            return "a layer with another activation cannot be opened"
        placeholder = "N" if isinstance(self.value, int) else "…"
        return f"change it with --override {self.field}={placeholder}"

    def __str__(self) -> str:
        return f"{self.field}={_shown(self.value)} ({self.reason}); {self.changed_by}"


def announce(assumptions: Iterable[Assumption]) -> None:
    """Log each assumption as a warning of the `vitrail` logger; without a handler it goes to stderr."""
    if os.environ.get("RANK", "0") != "0":  # rank 0 only
        return
    for assumption in assumptions:
        _log.warning("assumed: %s", assumption)


def assumed_of_model(
    config: ViTConfig, shapes: Shapes, stated: Mapping[str, Any], family: Mapping[str, str]
) -> list[Assumption]:
    """Return the assumed fields of the model: those that neither its shapes, nor a config, nor the caller gives.

    `family` maps the fields that its family assumes to the reason.
    """
    assumptions = []
    if "heads" not in stated and not config.qk_norm:
        size = f"{config.head_width} wide, as in the published models of this size"
        assumptions.append(Assumption("heads", config.heads, size))
    for field, reason in family.items():
        if field not in stated and _is_ambiguous(field, config):
            assumptions.append(Assumption(field, "tanh" if field == "pre_logits" else getattr(config, field), reason))
    if "pos_embed" not in shapes and "image_size" not in stated and config.position != "learned_2d":
        assumptions.append(
            Assumption("image_size", config.image_size, "the model has no position table to infer it from")
        )
    if config.stem == "conv_stem" and "conv_stem" not in stated:
        strides = tuple(layer.stride for layer in config.stem_layers)
        assumptions.append(Assumption("conv_stem", strides, "strides, which are not in the weights"))
        assumptions.append(Assumption("conv_stem.activation", "relu", "it is not in the weights"))
    return assumptions


def assumed_of_images(preprocess: Preprocess, stated: Iterable[str], reason: str) -> list[Assumption]:
    """Return the assumed fields of the preprocessing, if the config is missing."""
    stated_fields = set(stated)
    resized = preprocess.resize_to or preprocess.size
    how = f"to {resized[0]}×{resized[1]}, {preprocess.interpolation}"
    values = {"mean": preprocess.mean, "std": preprocess.std, "resize": preprocess.resize}
    reasons = {"mean": reason, "std": "likewise", "resize": f"{how}, likewise"}
    return [
        Assumption(f"preprocess.{name}", value, reasons[name])
        for name, value in values.items()
        if name not in stated_fields
    ]


def cannot_be_guessed(config: ViTConfig, shapes: Shapes, stated: Mapping[str, Any], family: str) -> dict[str, str]:
    """Return the fields that the caller must set, each with an error message."""
    missing = {}
    if "heads" not in stated and not config.qk_norm and published_heads(shapes) is None:
        inner = config.heads * config.head_width
        missing["heads"] = (
            f"its number of heads is not in the weights, and no published ViT has this size (width {config.width}, "
            f"{config.depth} blocks, MLP {config.mlp_hidden}); set it with --override heads=N (heads=N in Python), "
            f"where N divides {inner}"
        )
    if "pos_embed" not in shapes and "position" not in stated and config.position == "none":
        missing["position"] = (
            "it has no position table, so its positions are computed (sine, rotary) or absent; "
            "set it with --override position=sincos_2d (or rope_2d, or none)"
        )
    if family != "timm":
        return missing | _strides(config, shapes, stated)
    if config.norm_before_blocks and "activation" not in stated:
        missing["activation"] = (
            "models with a norm before the blocks (CLIP) were published with gelu and with quick_gelu; "
            "set it with --override activation=quick_gelu (or gelu)"
        )
    if config.norm_before_blocks and "position" not in stated and (config.pool == "map" or config.final_norm == "none"):
        missing["position"] = (
            "its tensors match a Perception Encoder, whose rotary positions are not supported; if it "
            f"is another model, set --override position={config.position}"
        )
    like_rpn = not config.qkv_bias and config.class_token == "none" and config.final_norm == "after_pool"
    if like_rpn and "norm_order" not in stated:
        missing["norm_order"] = (
            "its tensors match timm's vit_base_patch16_rpn_224, which has post-norm layers and is not supported; if it "
            "is another model, set --override norm_order=pre"
        )
    return missing


def _shown(value: Any) -> str:
    if isinstance(value, tuple | list):
        return ("x" if all(isinstance(item, int) for item in value) else ",").join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _is_ambiguous(field: str, config: ViTConfig) -> bool:
    """Return whether the tensors leave a field open; a gated MLP, an attention pool or two heads decide theirs."""
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


def _strides(config: ViTConfig, shapes: Shapes, stated: Mapping[str, Any]) -> dict[str, str]:
    """Require the image size for a conv stem, unless its strides are set or can be inferred."""
    if config.stem != "conv_stem" or "conv_stem" in stated or ("image_size" in stated and "pos_embed" in shapes):
        return {}
    return {
        "image_size": "the strides of its convolutions are not in the weights; set the image size with --override "
        "image_size=224 to infer them"
    }


# ── overrides ──

IMAGES = "preprocess."
"""The prefix of preprocessing fields."""


def checked_overrides(fields: Mapping[str, Any]) -> Hints:
    """Validate the fields against `ViTConfig` and `Preprocess`: a size of 8 becomes (8, 8).

    An unknown field or an invalid value is an error.
    """
    return {name: _checked(name, value) for name, value in fields.items()}


def of_model(fields: Mapping[str, Any]) -> Hints:
    """Return the fields of the model."""
    return {name: value for name, value in fields.items() if not name.startswith(IMAGES)}


def of_images(fields: Mapping[str, Any]) -> Hints:
    """Return the fields of the preprocessing, without their prefix."""
    return {name.removeprefix(IMAGES): value for name, value in fields.items() if name.startswith(IMAGES)}


def spread(fields: Hints, channels: int) -> Hints:
    """Repeat a single mean or std for every channel."""
    return {
        name: value[:1] * channels if name in ("mean", "std") and len(set(value)) == 1 else value
        for name, value in fields.items()
    }


def _checked(name: str, value: Any) -> Any:
    kind: type[Frozen] = Preprocess if name.startswith(IMAGES) else ViTConfig
    field = name.removeprefix(IMAGES)
    if field not in kind.model_fields:
        names = [*ViTConfig.model_fields, *(IMAGES + valid for valid in Preprocess.model_fields)]
        raise ConfigError(f"{kind.__name__} has no option {field!r}{suggest(name, names)}")
    info = kind.model_fields[field]
    adapter: TypeAdapter[Any] = TypeAdapter(
        Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation,  # type: ignore[arg-type]
        config=ConfigDict(strict=True, allow_inf_nan=False),
    )
    if field in ("mean", "std") and isinstance(value, int | float):
        value = (float(value),) * 3  # one number for all channels
    try:
        if isinstance(value, str) and value == "none":  # the literal "none" in some fields, None in others
            with suppress(ValidationError):
                return adapter.validate_python(None)
        return adapter.validate_python(value)
    except ValidationError as error:
        message = error.errors()[0]["msg"]
        raise ConfigError(f"{name} is {value!r}: {message[:1].lower()}{message[1:]}") from None
