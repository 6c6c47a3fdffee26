"""A home-made ViT's names, as a table its owner writes in TOML: it reads and, the other way round, writes.

[config]                                  # fields of ViTConfig that shapes do not tell
heads = 3
norm_eps = 1e-5

[[keys]]                                  # {} stands for the number of a layer
theirs = "enc.{}.norm_a.gain"
ours = "blocks.{}.norm1.weight"

[[keys]]
theirs = ["enc.{}.q.w", "enc.{}.k.w", "enc.{}.v.w"]   # joined along our first axis
ours = "blocks.{}.attn.qkv.weight"
transpose = [1, 0]

[[keys]]
theirs = "where"                          # 197×768 there
ours = "pos_embed"
reshape = [1, 197, 768]                   # numbers alone; -1 is whatever is left
shape = [197, 768]                        # theirs, for writing; without it the table only reads
scale = 0.5                               # multiplied when read, divided when written; [8, 1, 1] for three that join

[preprocess]                              # fields of Preprocess; the size is the model's
mean = [0.1307, 0.1307, 0.1307]
std = [0.3081, 0.3081, 0.3081]

[[splits]]                                # before the table is used, one tensor is cut into equal parts
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

from vitrail.checkpoints.family import Family, Hints
from vitrail.checkpoints.keys import KeyMap, Rule, Weights
from vitrail.checkpoints.overrides import IMAGES, checked_overrides, of_images
from vitrail.data.preprocess import Preprocess
from vitrail.errors import CheckpointError, ConfigError
from vitrail.io import ContentError, read_toml
from vitrail.models.config import ViTConfig
from vitrail.schema import Frozen, Sequence

Names = Annotated[tuple[str, ...], Sequence]


class Key(Frozen):
    """One rule of the table."""

    theirs: str | Names
    ours: str
    reshape: Annotated[tuple[int, ...], Sequence] | None = None
    """The shape each of theirs gets first, before it is turned."""
    transpose: Annotated[tuple[int, ...], Sequence] | None = None
    scale: float | Annotated[tuple[float, ...], Sequence] = 1.0
    """What theirs is multiplied by: one number, or one for each that is joined."""
    shape: Annotated[tuple[int, ...], Sequence] | None = None
    """The shape of theirs where `reshape` changes it, for writing."""

    @property
    def names(self) -> tuple[str, ...]:
        """Their names, also where it is one."""
        return (self.theirs,) if isinstance(self.theirs, str) else self.theirs

    @property
    def scales(self) -> tuple[float, ...]:
        """One number for each of their names."""
        return self.scale if isinstance(self.scale, tuple) else (self.scale,) * len(self.names)


class Split(Frozen):
    """One tensor of theirs that is several."""

    theirs: str
    into: Names
    axis: int = 0


class KeyTable(Frozen):
    """The whole file."""

    keys: Annotated[tuple[Key, ...], Sequence]
    splits: Annotated[tuple[Split, ...], Sequence] = ()
    config: dict[str, Any] = Field(default_factory=dict)
    preprocess: dict[str, Any] = Field(default_factory=dict)


def read_key_table(path: str | Path) -> Family:
    """Read a table, and return the family it describes."""
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
        if fault := _fault(key):
            raise CheckpointError(f"{path}: {fault}")
    keys = _SplittingMap([_rule(key) for key in table.keys], table.splits)
    return Family(
        name=f"the key table {file.name}",
        recognise=lambda _: True,
        table=lambda _: keys,
        tidy=lambda weights, _: _cut(weights, table.splits),
        hints=lambda _: config,
        preprocess=_images(images, file),
        images=f"{file.name} has no [preprocess]",
        images_told=frozenset(images),
        assumes={name: reason for name, reason in _ASSUMES.items() if name not in config},
    )


def _rule(key: Key) -> Rule:
    scales = None if set(key.scales) == {1.0} else key.scales
    return Rule(key.names, key.ours, permute=key.transpose, reshape=key.reshape, their_shape=key.shape, scales=scales)


_ASSUMES = {
    "activation": "the key table's [config] does not say it",
    "norm_eps": "the key table's [config] does not say it; torch's own LayerNorm has 1e-5",
    "pool": "the key table's [config] does not say it",
    "pool_over": "the key table's [config] does not say it; others average the class token too",
    "norm_order": "the key table's [config] does not say it",
    "class_token": "the key table's [config] does not say it",
    "pre_logits": "ours is a linear layer and tanh",
}


def _images(fields: Hints, file: Path) -> Preprocess:
    """Return the preprocessing that a table says; statistics for one channel make it one of one channel."""
    counts = {len(fields[name]) for name in ("mean", "std") if name in fields}
    channels = fields.get("channels", counts.pop() if len(counts) == 1 else 3)
    spread = {name: (value[0],) * channels for name, value in (("mean", (0.5,)), ("std", (0.5,))) if name not in fields}
    try:
        return Preprocess(**{**spread, "channels": channels, **fields})
    except ConfigError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _fault(key: Key) -> str | None:
    """Say what is wrong with a rule, if anything is."""
    theirs = key.names
    for name in (*theirs, key.ours):
        if re.search(r"[{}]", name.replace("{}", "")):
            return f"{name!r} has a brace that is no {{}}, which stands for the number of a layer"
    if len({name.count("{}") for name in (*theirs, key.ours)}) > 1:
        return f"{', '.join(theirs)} and {key.ours} have other numbers of {{}}; each needs as many"
    if (key.transpose is not None and sorted(key.transpose) != list(range(len(key.transpose)))) or key.transpose == ():
        return f"transpose = {list(key.transpose or ())} of {key.ours} is no order of axes; write [1, 0], say"
    if len(key.scales) != len(theirs) or 0 in key.scales:
        return f"scale = {key.scale} of {key.ours} should be one number other than 0, or {len(theirs)} of them"
    if key.reshape is not None and (key.reshape.count(-1) > 1 or any(side < 1 and side != -1 for side in key.reshape)):
        return f"reshape = {list(key.reshape)} of {key.ours} should be whole numbers, one of which may be -1"
    if key.shape is not None and key.reshape is None:
        return f"shape = {list(key.shape)} of {key.ours} is theirs where reshape changes it; add reshape"
    return None


def _cut(weights: Weights, splits: tuple[Split, ...]) -> Weights:
    """Cut the tensors that are several."""
    cut: Weights = {}
    for name, tensor in weights.items():
        for split in splits:
            if found := _pattern(split.theirs).fullmatch(name):
                parts = tensor.chunk(len(split.into), dim=split.axis)
                cut |= {into.format(*found.groups()): part for into, part in zip(split.into, parts, strict=True)}
                break
        else:
            cut[name] = tensor
    return cut


class _SplittingMap(KeyMap):
    """A table that puts together again, when it writes, what was cut for reading."""

    def __init__(self, rules: list[Rule], splits: tuple[Split, ...]) -> None:
        super().__init__(rules)
        self.splits = splits

    def write(self, weights: Mapping[str, Tensor], config: ViTConfig) -> Weights:
        """Write, then join the parts of each split."""
        written = super().write(weights, config)
        for split in self.splits:
            for name in list(written):
                if found := _pattern(split.into[0]).fullmatch(name):
                    parts = [written.pop(into.format(*found.groups())) for into in split.into]
                    written[split.theirs.format(*found.groups())] = torch.cat(parts, dim=split.axis)
        return written


def _pattern(template: str) -> re.Pattern[str]:
    return re.compile(r"(\d+)".join(re.escape(part) for part in template.split("{}")))
