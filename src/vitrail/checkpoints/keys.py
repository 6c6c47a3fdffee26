"""Two-way key tables: map the names and layouts of another library's weights to ours and back.

A rule describes how one of our tensors is built from one or more of theirs. Every step is invertible, so one table
both reads and writes, and a round trip is bit-identical.
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
    """How one of our tensors is built from theirs. `{}` in a name is the layer index."""

    theirs: tuple[str, ...]
    """Their names; several are concatenated along our first axis."""
    ours: str
    shape: tuple[str, ...] | None = None
    """Their axes, by name (see `sizes`), if they differ from ours. Used for writing."""
    fold: tuple[tuple[int, ...], ...] | None = None
    """Groups of their axes to merge into ours: ((0,), (1, 2)) folds (D, H, h) to (D, H·h)."""
    permute: tuple[int, ...] | None = None
    """The permutation of the folded axes."""
    reshape: tuple[int, ...] | None = None
    """The shape to give each tensor before `permute`; one side may be -1."""
    their_shape: tuple[int, ...] | None = None
    """The original shape before `reshape`, for writing."""
    scales: tuple[float, ...] | None = None
    """The factor for each of their tensors."""

    def read(self, tensors: list[Tensor]) -> Tensor:
        """Build our tensor from theirs."""
        if self.scales is not None:
            tensors = [tensor * scale for tensor, scale in zip(tensors, self.scales, strict=True)]
        made = [self._read_one(tensor) for tensor in tensors]
        return made[0] if len(made) == 1 else torch.cat(made)

    def write(self, tensor: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
        """Build their tensors from ours."""
        chunks = tensor.chunk(len(self.theirs)) if len(self.theirs) > 1 else [tensor]
        made = [self._write_one(chunk, sizes) for chunk in chunks]
        if self.scales is None:
            return made
        return [tensor / scale for tensor, scale in zip(made, self.scales, strict=True)]

    def _read_one(self, tensor: Tensor) -> Tensor:
        if self.reshape is not None:
            tensor = self._reshaped(tensor, self.reshape)
        expected = max(map(max, self.fold)) + 1 if self.fold is not None else len(self.permute or tensor.shape)
        if tensor.ndim != expected:
            raise CheckpointError(
                f"{self.theirs[0]} has {tensor.ndim} axes, {tuple(tensor.shape)}, expected {expected}"
            )
        if self.fold is not None:
            axes = [torch.Size([tensor.shape[axis] for axis in group]).numel() for group in self.fold]
            tensor = tensor.reshape(axes)
        return tensor if self.permute is None else tensor.permute(self.permute).contiguous()

    def _write_one(self, tensor: Tensor, sizes: Mapping[str, int]) -> Tensor:
        if self.permute is not None:
            tensor = tensor.permute([self.permute.index(axis) for axis in range(len(self.permute))])
        if self.shape is not None:
            tensor = tensor.reshape([sizes[axis] for axis in self.shape])
        if self.reshape is not None:
            if self.their_shape is None:
                raise CheckpointError(
                    f"{self.theirs[0]} is reshaped on reading, and the table does not give its original shape; add "
                    f"shape = […] to write it"
                )
            tensor = self._reshaped(tensor, self.their_shape)
        return tensor.contiguous()

    def _reshaped(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        try:
            return tensor.reshape(shape)
        except RuntimeError:
            raise CheckpointError(
                f"{self.theirs[0]} is {tuple(tensor.shape)}, which cannot be reshaped to {shape}"
            ) from None


def rule(
    theirs: str | tuple[str, ...],
    ours: str,
    *,
    shape: str | None = None,
    fold: tuple[tuple[int, ...], ...] | None = None,
    permute: tuple[int, ...] | None = None,
) -> Rule:
    """Build a rule from short forms: a single name without a tuple, the axes of `shape` as one string."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Rule(names, ours, tuple(shape.split()) if shape is not None else None, fold, permute)


def layer_rules(
    theirs: str, ours: str, leaves: Mapping[str, str], kinds: Iterable[str] = ("weight", "bias")
) -> list[Rule]:
    """Return rules for submodules of a layer that differ only in name, each with weight and bias."""
    return [
        rule(f"{theirs}{leaf}.{kind}", f"{ours}{our_leaf}.{kind}")
        for leaf, our_leaf in leaves.items()
        for kind in kinds
    ]


def sizes(config: ViTConfig) -> dict[str, int]:
    """Return the size of each named axis for a model."""
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
    """A table of rules in which every name is unique."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self.rules = tuple(rules)
        for side in ("theirs", "ours"):
            names = [n for r in self.rules for n in (r.theirs if side == "theirs" else (r.ours,))]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise CheckpointError(
                    f"the key table names {', '.join(twice)} twice among {side}; names must be unique"
                )

    @cached_property
    def _theirs(self) -> list[tuple[re.Pattern[str], Rule, int]]:
        return [(_pattern(name), r, i) for r in self.rules for i, name in enumerate(r.theirs)]

    @cached_property
    def _ours(self) -> list[tuple[re.Pattern[str], Rule]]:
        return [(_pattern(r.ours), r) for r in self.rules]

    def read(self, weights: Weights) -> tuple[Weights, list[str]]:
        """Convert their weights to ours; return ours, and the names that are not in the table.

        `weights` is emptied, so that no second copy of the model is held.
        """
        pieces: dict[str, dict[int, Tensor]] = {}
        origin: dict[str, Rule] = {}
        unknown = []
        for name in list(weights):
            for pattern, matching, index in self._theirs:
                if match := pattern.fullmatch(name):
                    ours = _fill(matching.ours, match.groups())
                    pieces.setdefault(ours, {})[index] = weights.pop(name)
                    origin[ours] = matching
                    break
            else:
                unknown.append(name)
        made = {}
        for ours, tensors in list(pieces.items()):
            expected = len(origin[ours].theirs)
            if len(tensors) < expected:
                names = [n for i, n in enumerate(origin[ours].theirs) if i not in tensors]
                raise CheckpointError(
                    f"{ours} needs {', '.join(names)}, which the file does not have; is it truncated?"
                )
            made[ours] = origin[ours].read([pieces[ours][i] for i in range(expected)])
            del pieces[ours]
        return made, unknown

    def write(self, weights: Mapping[str, Tensor], config: ViTConfig) -> Weights:
        """Convert our weights to theirs; a name that is not in the table is an error."""
        axes = sizes(config)
        made: Weights = {}
        for name, tensor in weights.items():
            for pattern, matching in self._ours:
                if match := pattern.fullmatch(name):
                    names = [_fill(theirs, match.groups()) for theirs in matching.theirs]
                    made.update(zip(names, matching.write(tensor, axes), strict=True))
                    break
            else:
                raise CheckpointError(f"this format cannot store {name}")
        return made


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(re.escape(piece) for piece in template.split("{}")))


def _fill(template: str, layers: tuple[str, ...]) -> str:
    return template.format(*layers)
