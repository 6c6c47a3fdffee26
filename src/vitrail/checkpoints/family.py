"""`Family`: the tensor names, layouts and conventions of another library's checkpoints, as one value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from vitrail.checkpoints.infer import Shapes
from vitrail.checkpoints.keys import KeyMap, Weights
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

Hints = dict[str, Any]
"""Fields of `ViTConfig` that are known from other sources than shapes."""


PLAIN: Mapping[str, tuple[Any, ...]] = {
    "stem": ("conv", "linear"),
    "patch_bias": (True,),
    "class_token": ("first",),
    "registers": (0,),
    "distillation_token": (False,),
    "position": ("learned_1d",),
    "position_at": ("stem",),
    "heads_fill_width": (True,),
    "activation": ("gelu", "gelu_tanh", "quick_gelu"),
    "norm_order": ("pre",),
    "norm_before_blocks": (False,),
    "qkv_bias": (True,),
    "qk_norm": (False,),
    "out_proj": (True,),
    "proj_bias": (True,),
    "mlp_bias": (True,),
    "layer_scale": (None,),
    "pool": ("cls",),
    "final_norm": ("before_pool",),
    "representation": (None,),
}
"""The values that every family supports: a plain ViT. Each family lists where it supports more."""

ANY: tuple[Any, ...] = ("anything",)
"""Removes a restriction of `PLAIN`."""


def _unchanged(weights: Weights, _: Hints) -> Weights:
    return weights


def _nothing(_: ViTConfig) -> Weights:
    return {}


def _no_hints(_: Shapes) -> Hints:
    return {}


def _nothing_follows(_: Hints, __: Shapes) -> Hints:
    return {}


def _no_limits(_: ViTConfig) -> list[str]:
    return []


class Reading(NamedTuple):
    """The content of a file, converted to our names."""

    weights: Weights
    """Under our names."""
    unknown: list[str]
    """Names that are not in the family's key table."""
    dropped: list[str]
    """Names that were dropped on purpose."""
    hints: Hints
    """Fields that the family provides."""
    stated: Hints
    """The subset of `hints` that is certain, not assumed."""


@dataclass(frozen=True)
class Family:
    """Another library's ViTs: how to recognise, read and write them."""

    name: str
    recognise: Callable[[Shapes], bool]
    """Whether a file with these names and shapes belongs to this family."""
    table: Callable[[ViTConfig | None], KeyMap]
    """The key table: for writing a config, or (None) for reading any file."""
    preprocess: Preprocess
    """The family's default preprocessing; its size is replaced by the model's."""
    preprocess_at: Callable[[tuple[int, int]], Preprocess] | None = None
    """The same by image size, if it differs between the family's models."""
    tidy: Callable[[Weights, Hints], Weights] = _unchanged
    """Normalise the variants of a file (prefixes, old names) to the names in the key table."""
    hints: Callable[[Shapes], Hints] = _no_hints
    """The fields that the family provides, given the tidied names and shapes."""
    drops: tuple[str, ...] = ()
    """Names (after tidying) that are dropped when reading."""
    adds: Callable[[ViTConfig], Weights] = _nothing
    """Tensors that we do not use, but that the family's loader expects."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The supported values of config fields; fields not listed may have any value."""
    limits: Callable[[ViTConfig], list[str]] = _no_limits
    """Further limits, one sentence each."""
    assumes: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ViTConfig` that a bare file does not record, and why the family's value is assumed."""
    images: str = ""
    """Why `preprocess` is assumed."""
    images_stated: frozenset[str] = frozenset()
    """Fields of `preprocess` that are certain."""
    follows: Callable[[Hints, Shapes], Hints] = _nothing_follows
    """Fields that follow, in this family, from the caller's or a config's hints (our names and shapes)."""
    nearly: Mapping[str, Any] = field(default_factory=dict)
    """Fields where another value gives nearly the same outputs, and the family's value for them."""

    def unsupported(self, config: ViTConfig) -> list[str]:
        """Return what this family cannot express in a config, one sentence each."""
        return [
            f"{name}={getattr(config, name)!r} (supported: {' or '.join(repr(value) for value in allowed)})"
            for name, allowed in self.needs.items()
            if allowed is not ANY and getattr(config, name) not in allowed
        ] + self.limits(config)

    def read(self, weights: Weights, hints: Hints) -> Reading:
        """Convert the family's weights to ours. `weights` is emptied."""
        tidied = self.tidy(weights, hints)
        if tidied is not weights:
            weights.clear()  # hold each tensor only once
        weights = tidied
        provided = self.hints({name: tuple(tensor.shape) for name, tensor in weights.items()})
        dropped = [name for name in weights if name in self.drops]
        for name in dropped:
            del weights[name]
        ours, unknown = self.table(None).read(weights)
        return Reading(ours, unknown, dropped, provided, {k: v for k, v in provided.items() if k not in self.assumes})

    def write(self, weights: Mapping[str, Tensor], config: ViTConfig) -> Weights:
        """Convert our weights to the family's; raise if it cannot express the config."""
        if unsupported := self.unsupported(config):
            raise CheckpointError(f"{self.name} cannot express {'; '.join(unsupported)}")
        return self.table(config).write(weights, config) | self.adds(config)


def require_layer_scale(config: ViTConfig) -> list[str]:
    """For a family whose models all have LayerScale."""
    return ["layer_scale=None (supported: models with LayerScale)"] if config.layer_scale is None else []


def strip_prefix(weights: Weights, *prefixes: str) -> Weights:
    """Remove the first of `prefixes` that occurs, from all names that have it."""
    for prefix in prefixes:
        if any(name.startswith(prefix) for name in weights):
            return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights
