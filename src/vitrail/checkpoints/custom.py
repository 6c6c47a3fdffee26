"""Key tables: a TOML file that maps the tensor names of a custom ViT to ours, for reading and writing.

[config]                                  # fields of ViTConfig that cannot be inferred from shapes
heads = 3
norm_eps = 1e-5

[[keys]]                                  # {} is the layer index
theirs = "enc.{}.norm_a.gain"
ours = "blocks.{}.norm1.weight"

[[keys]]
theirs = ["enc.{}.q.w", "enc.{}.k.w", "enc.{}.v.w"]   # concatenated along our first axis
ours = "blocks.{}.attn.qkv.weight"
transpose = [1, 0]

[[keys]]
theirs = "where"                          # 197×768 in the file
ours = "pos_embed"
reshape = [1, 197, 768]                   # integers; -1 is inferred
shape = [197, 768]                        # the original shape, needed for writing
scale = 0.5                               # multiplied on reading, divided on writing; [8, 1, 1] for three tensors

[preprocess]                              # fields of Preprocess; the size follows from the model
mean = [0.1307, 0.1307, 0.1307]
std = [0.3081, 0.3081, 0.3081]

[[splits]]                                # applied first: split one tensor into equal chunks
theirs = "enc.{}.kv.w"
into = ["enc.{}.k.w", "enc.{}.v.w"]
axis = 1
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor

from vitrail.checkpoints.assumptions import IMAGES, checked_overrides, of_images
from vitrail.checkpoints.family import Family, Hints
from vitrail.checkpoints.keys import KeyMap, Rule, Weights
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.io import ContentError, read_toml
from vitrail.models.config import ViTConfig
from vitrail.schema import Frozen, Sequence

Names = Annotated[tuple[str, ...], Sequence]


class Key(Frozen):
    """One rule of a key table."""

    theirs: str | Names
    ours: str
    reshape: Annotated[tuple[int, ...], Sequence] | None = None
    """The shape to give each tensor first, before `transpose`."""
    transpose: Annotated[tuple[int, ...], Sequence] | None = None
    scale: float | Annotated[tuple[float, ...], Sequence] = 1.0
    """The factor for their tensor: one number, or one per concatenated tensor."""
    shape: Annotated[tuple[int, ...], Sequence] | None = None
    """The original shape of a tensor that `reshape` changes, for writing."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their names as a tuple, also for a single name."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def scales(self) -> tuple[float, ...]:
        """One factor per name."""
        return self.scale if isinstance(self.scale, tuple) else (self.scale,) * len(self.names)


class Split(Frozen):
    """One of their tensors, to be split into several."""

    theirs: str
    into: Names
    axis: int = 0


class KeyTable(Frozen):
    """A key table file."""

    keys: Annotated[tuple[Key, ...], Sequence]
    splits: Annotated[tuple[Split, ...], Sequence] = ()
    config: dict[str, Any] = Field(default_factory=dict)
    preprocess: dict[str, Any] = Field(default_factory=dict)


def read_key_table(path: str | Path) -> Family:
    """Read a key table, and return the family that it describes."""
    file = Path(path)
    try:
        content = read_toml(file)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
    except ContentError as error:
        raise CheckpointError(f"{path} {error}") from None
    try:
        table = KeyTable.model_validate(content)
        config = checked_overrides(table.config)
        images = of_images(checked_overrides({f"{IMAGES}{name}": value for name, value in table.preprocess.items()}))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for key in table.keys:
        if problem := _problem(key):
            raise CheckpointError(f"{path}: {problem}")
    keys = _SplittingMap([_rule(key) for key in table.keys], table.splits)
    return Family(
        name=f"the key table {file.name}",
        recognise=lambda _: True,
        table=lambda _: keys,
        tidy=lambda weights, _: _split(weights, table.splits),
        hints=lambda _: config,
        preprocess=_images(images, file),
        images=f"{file.name} has no [preprocess]",
        images_stated=frozenset(images),
        assumes={name: reason for name, reason in _ASSUMES.items() if name not in config},
    )


def _rule(key: Key) -> Rule:
    scales = None if set(key.scales) == {1.0} else key.scales
    return Rule(key.names, key.ours, permute=key.transpose, reshape=key.reshape, their_shape=key.shape, scales=scales)


_ASSUMES = {
    "activation": "the key table's [config] does not set it",
    "norm_eps": "the key table's [config] does not set it; torch's LayerNorm has 1e-5",
    "pool": "the key table's [config] does not set it",
    "pool_over": "the key table's [config] does not set it; others average the class token too",
    "norm_order": "the key table's [config] does not set it",
    "class_token": "the key table's [config] does not set it",
    "pre_logits": "ours is a linear layer with tanh",
}


def _images(fields: Hints, file: Path) -> Preprocess:
    """Return the preprocessing of a key table; the number of channels follows from mean and std."""
    counts = {len(fields[name]) for name in ("mean", "std") if name in fields}
    channels = fields.get("channels", counts.pop() if len(counts) == 1 else 3)
    spread = {name: (value[0],) * channels for name, value in (("mean", (0.5,)), ("std", (0.5,))) if name not in fields}
    try:
        return Preprocess(**{**spread, "channels": channels, **fields})
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _problem(key: Key) -> str | None:
    """Return what is wrong with a rule; None if nothing is."""
    theirs = key.names
    for name in (*theirs, key.ours):
        if re.search(r"[{}]", name.replace("{}", "")):
            return f"{name!r} has a brace that is not {{}}, the layer index"
    if len({name.count("{}") for name in (*theirs, key.ours)}) > 1:
        return f"{', '.join(theirs)} and {key.ours} differ in their number of {{}}; they must have the same number"
    if (key.transpose is not None and sorted(key.transpose) != list(range(len(key.transpose)))) or key.transpose == ():
        return f"transpose = {list(key.transpose or ())} of {key.ours} is not a permutation of axes, such as [1, 0]"
    if len(key.scales) != len(theirs) or 0 in key.scales:
        return f"scale = {key.scale} of {key.ours} should be one non-zero number, or {len(theirs)} of them"
    if key.reshape is not None and (key.reshape.count(-1) > 1 or any(side < 1 and side != -1 for side in key.reshape)):
        return f"reshape = {list(key.reshape)} of {key.ours} should be positive integers, one of which may be -1"
    if key.shape is not None and key.reshape is None:
        return f"shape = {list(key.shape)} of {key.ours} has no effect without reshape; add reshape"
    return None


def _split(weights: Weights, splits: tuple[Split, ...]) -> Weights:
    """Split the tensors listed in `splits`."""
    result: Weights = {}
    for name, tensor in weights.items():
        for split in splits:
            if match := _pattern(split.theirs).fullmatch(name):
                chunks = tensor.chunk(len(split.into), dim=split.axis)
                result |= {into.format(*match.groups()): chunk for into, chunk in zip(split.into, chunks, strict=True)}
                break
        else:
            result[name] = tensor
    return result


class _SplittingMap(KeyMap):
    """A key map that, on writing, concatenates what was split on reading."""

    def __init__(self, rules: list[Rule], splits: tuple[Split, ...]) -> None:
        super().__init__(rules)
        self.splits = splits

    def write(self, weights: Mapping[str, Tensor], config: ViTConfig) -> Weights:
        """Write, then concatenate the chunks of each split."""
        written = super().write(weights, config)
        for split in self.splits:
            for name in list(written):
                if match := _pattern(split.into[0]).fullmatch(name):
                    chunks = [written.pop(into.format(*match.groups())) for into in split.into]
                    written[split.theirs.format(*match.groups())] = torch.cat(chunks, dim=split.axis)
        return written


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(re.escape(piece) for piece in template.split("{}")))
