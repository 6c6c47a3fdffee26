"""One table, both directions: the names and layouts of another library's weights beside ours.

A rule says how one of our tensors is made of one or more of theirs. Everything in it can be undone, so a table that
reads also writes, and what was read and written again is the same to the bit.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

Weights = dict[str, Tensor]


class Rule(NamedTuple):
    """How one tensor of ours is made of theirs. `{}` in a name stands for the number of a layer."""

    theirs: tuple[str, ...]
    """Their names; several are joined along our first axis."""
    ours: str
    shape: tuple[str, ...] | None = None
    """Their axes, by name (see `sizes`), where they have other axes than ours. Used to write."""
    fold: tuple[tuple[int, ...], ...] | None = None
    """Which of their axes are taken together, in order, to get ours: ((0,), (1, 2)) folds (D, H, h) to (D, H·h)."""
    permute: tuple[int, ...] | None = None
    """The order of the folded axes in ours."""
    reshape: tuple[int, ...] | None = None
    """The shape that each of theirs gets before it is turned, in numbers; one may be -1."""
    their_shape: tuple[int, ...] | None = None
    """The shape of theirs before `reshape`, to write it again."""
    scales: tuple[float, ...] | None = None
    """What each of theirs is multiplied by."""

    def read(self, parts: list[Tensor]) -> Tensor:
        """Make our tensor of theirs."""
        if self.scales is not None:
            parts = [part * scale for part, scale in zip(parts, self.scales, strict=True)]
        made = [self._read_one(part) for part in parts]
        return made[0] if len(made) == 1 else torch.cat(made)

    def write(self, tensor: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
        """Make their tensors of ours."""
        parts = tensor.chunk(len(self.theirs)) if len(self.theirs) > 1 else [tensor]
        made = [self._write_one(part, sizes) for part in parts]
        if self.scales is None:
            return made
        return [part / scale for part, scale in zip(made, self.scales, strict=True)]

    def _read_one(self, part: Tensor) -> Tensor:
        if self.reshape is not None:
            part = self._reshaped(part, self.reshape)
        wanted = max(map(max, self.fold)) + 1 if self.fold is not None else len(self.permute or part.shape)
        if part.ndim != wanted:
            raise CheckpointError(
                f"{self.theirs[0]} has {part.ndim} axes, {tuple(part.shape)}, where {wanted} are expected"
            )
        if self.fold is not None:
            axes = [torch.Size([part.shape[axis] for axis in group]).numel() for group in self.fold]
            part = part.reshape(axes)
        return part if self.permute is None else part.permute(self.permute).contiguous()

    def _write_one(self, part: Tensor, sizes: Mapping[str, int]) -> Tensor:
        if self.permute is not None:
            part = part.permute([self.permute.index(axis) for axis in range(len(self.permute))])
        if self.shape is not None:
            part = part.reshape([sizes[axis] for axis in self.shape])
        if self.reshape is not None:
            if self.their_shape is None:
                raise CheckpointError(
                    f"{self.theirs[0]} is reshaped when it is read, and the table does not say from what; add shape = "
                    f"[…], its own, to write it"
                )
            part = self._reshaped(part, self.their_shape)
        return part.contiguous()

    def _reshaped(self, part: Tensor, shape: tuple[int, ...]) -> Tensor:
        try:
            return part.reshape(shape)
        except RuntimeError:
            raise CheckpointError(
                f"{self.theirs[0]} is {tuple(part.shape)}, which cannot be reshaped to {shape}"
            ) from None


def rule(
    theirs: str | tuple[str, ...],
    ours: str,
    *,
    shape: str | None = None,
    fold: tuple[tuple[int, ...], ...] | None = None,
    permute: tuple[int, ...] | None = None,
) -> Rule:
    """Write a rule down briefly: one name without a tuple, the axes of `shape` in one string."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Rule(names, ours, tuple(shape.split()) if shape is not None else None, fold, permute)


def layer_rules(
    theirs: str, ours: str, leaves: Mapping[str, str], kinds: Iterable[str] = ("weight", "bias")
) -> list[Rule]:
    """Return the rules for parts of a layer that differ by name only, each with weight and bias."""
    return [
        rule(f"{theirs}{leaf}.{kind}", f"{ours}{our_leaf}.{kind}")
        for leaf, our_leaf in leaves.items()
        for kind in kinds
    ]


def sizes(config: ViTConfig) -> dict[str, int]:
    """Return what the names of axes mean for a model."""
    return {
        "1": 1,
        "D": config.width,
        "H": config.heads,
        "h": config.head_width,
        "I": config.heads * config.head_width,
        "M": config.mlp_hidden,
        "K": config.classes,
        "C": config.channels,
        "P": config.patch_size[0],
        "Q": config.patch_size[1],
        "N": config.patches,
        "T": config.tokens,
        "PQC": config.patch_size[0] * config.patch_size[1] * config.channels,
    }


class KeyMap:
    """A table of rules that no two names fit twice."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        for side in ("theirs", "ours"):
            names = [n for r in self.rules for n in (r.theirs if side == "theirs" else (r.ours,))]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise CheckpointError(f"the key table names {', '.join(twice)} twice among {side}; each may stand once")

    @cached_property
    def _theirs(self) -> list[tuple[re.Pattern[str], Rule, int]]:
        return [(_pattern(name), r, i) for r in self.rules for i, name in enumerate(r.theirs)]

    @cached_property
    def _ours(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(r.ours), r) for r in self.rules]

    def knows(self, name: str) -> bool:
        """Say whether one of their names is in the table."""
        return any(pattern.fullmatch(name) for pattern, _, _ in self._theirs)

    def read(self, weights: Weights) -> tuple[Weights, list[str]]:
        """Turn their weights into ours; return ours, and the names that the table does not know.

        `weights` is emptied on the way, so that no second copy of the model is held.
        """
        found: dict[str, dict[int, Tensor]] = {}
        origin: dict[str, Rule] = {}
        unknown = []
        for name in list(weights):
            for pattern, found_rule, part in self._theirs:
                if match := pattern.fullmatch(name):
                    ours = _fill(found_rule.ours, match.groups())
                    found.setdefault(ours, {})[part] = weights.pop(name)
                    origin[ours] = found_rule
                    break
            else:
                unknown.append(name)
        made = {}
        for ours, parts in list(found.items()):
            wanted = len(origin[ours].theirs)
            if len(parts) < wanted:
                names = [n for i, n in enumerate(origin[ours].theirs) if i not in parts]
                raise CheckpointError(
                    f"{ours} needs {', '.join(names)}, which the file does not have; is it cut short?"
                )
            made[ours] = origin[ours].read([found[ours][i] for i in range(wanted)])
            del found[ours]
        return made, unknown

    def write(self, weights: Mapping[str, Tensor], config: ViTConfig) -> Weights:
        """Turn our weights into theirs; a name of ours that the table does not know is an error."""
        axes = sizes(config)
        made: Weights = {}
        for name, tensor in weights.items():
            for pattern, found_rule in self._ours:
                if match := pattern.fullmatch(name):
                    names = [_fill(theirs, match.groups()) for theirs in found_rule.theirs]
                    made.update(zip(names, found_rule.write(tensor, axes), strict=True))
                    break
            else:
                raise CheckpointError(f"this format has no place for {name}")
        return made


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(re.escape(part) for part in template.split("{}")))


def _fill(template: str, layers: tuple[str, ...]) -> str:
    return template.format(*layers)
