"""What a family of checkpoints is: another library's names, layouts and habits, as one value."""

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
"""Fields of `ViTConfig` that are known without looking at shapes."""


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
"""What a plain ViT is: what every family can express. A family states where it goes further."""

ANY: tuple[Any, ...] = ("anything",)
"""Lifts a limit that `PLAIN` sets."""


def _unchanged(weights: Weights, _: Hints) -> Weights:
    return weights


def _nothing(_: ViTConfig) -> Weights:
    return {}


def _no_hints(_: Shapes) -> Hints:
    return {}


def _nothing_follows(_: Hints, __: Shapes) -> Hints:
    return {}


def _no_obstacles(_: ViTConfig) -> list[str]:
    return []


class Reading(NamedTuple):
    """What was read from a family's file."""

    weights: Weights
    """Under our names."""
    unknown: list[str]
    """Names that are not in the family's table."""
    dropped: list[str]
    """Names that were left out on purpose."""
    hints: Hints
    """What the family knows beside the shapes."""
    told: Hints
    """Those among them that are certain: what shapes or a key table tell."""


@dataclass(frozen=True)
class Family:
    """Another library's ViTs: how to know them, read them, and write them."""

    name: str
    recognise: Callable[[Shapes], bool]
    """Whether a file with these names and shapes is of this family."""
    table: Callable[[ViTConfig | None], KeyMap]
    """The key table: for a model to be written, or (None) for whatever is read."""
    preprocess: Preprocess
    """What the family does to an image where nothing better is known; its size is replaced by the model's."""
    preprocess_at: Callable[[tuple[int, int]], Preprocess] | None = None
    """The same by image size, where the family's models of other sizes do otherwise."""
    tidy: Callable[[Weights, Hints], Weights] = _unchanged
    """Bring the forms a file may come in (prefixes, old names) to the one the table knows, by the caller's hints."""
    hints: Callable[[Shapes], Hints] = _no_hints
    """What the family knows beside the shapes (of the tidied weights, with their names)."""
    drops: tuple[str, ...] = ()
    """Names (after tidying) that we have no use for, and that are left out when a file is read."""
    adds: Callable[[ViTConfig], Weights] = _nothing
    """Tensors we have no use for, but which the family's loader wants to find."""
    needs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """The values of config fields that the family can express; any value for fields not named."""
    refuses: Callable[[ViTConfig], list[str]] = _no_obstacles
    """What else the family cannot express, one sentence each."""
    assumes: Mapping[str, str] = field(default_factory=dict)
    """Fields of `ViTConfig` that a bare file leaves open, and why the family's value is the likely one."""
    images: str = ""
    """Why `preprocess` is the likely one."""
    images_told: frozenset[str] = frozenset()
    """Fields of `preprocess` that are certain."""
    follows: Callable[[Hints, Shapes], Hints] = _nothing_follows
    """What follows, in this family, from what the caller or a config says (our names and shapes)."""
    nearly: Mapping[str, Any] = field(default_factory=dict)
    """Fields where another value gives nearly the same numbers, and the family's own value for them."""

    def obstacles(self, config: ViTConfig) -> list[str]:
        """Return what in a config this family cannot express, one sentence each."""
        return [
            f"{name}={getattr(config, name)!r} (it has only {' or '.join(repr(value) for value in allowed)})"
            for name, allowed in self.needs.items()
            if allowed is not ANY and getattr(config, name) not in allowed
        ] + self.refuses(config)

    def read(self, weights: Weights, known: Hints) -> Reading:
        """Turn the family's weights into ours. `weights` is emptied on the way."""
        tidied = self.tidy(weights, known)
        if tidied is not weights:
            weights.clear()  # so that each tensor is held once only while ours are made
        weights = tidied
        hints = self.hints({name: tuple(tensor.shape) for name, tensor in weights.items()})
        dropped = [name for name in weights if name in self.drops]
        for name in dropped:
            del weights[name]
        ours, unknown = self.table(None).read(weights)
        return Reading(ours, unknown, dropped, hints, {k: v for k, v in hints.items() if k not in self.assumes})

    def write(self, weights: Mapping[str, Tensor], config: ViTConfig) -> Weights:
        """Turn our weights into the family's, or say which field stands in the way."""
        if found := self.obstacles(config):
            raise CheckpointError(f"{self.name} cannot express {'; '.join(found)}")
        return self.table(config).write(weights, config) | self.adds(config)


def refuse_no_layer_scale(config: ViTConfig) -> list[str]:
    """For a family whose models all have LayerScale, whatever it began with."""
    return ["layer_scale=None (it has only models with LayerScale)"] if config.layer_scale is None else []


def strip_prefix(weights: Weights, *prefixes: str) -> Weights:
    """Remove the first of `prefixes` that any name begins with, from every name that has it."""
    for prefix in prefixes:
        if any(name.startswith(prefix) for name in weights):
            return {name.removeprefix(prefix): tensor for name, tensor in weights.items()}
    return weights
