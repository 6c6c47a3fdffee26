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
    transpose: Annotated[tuple[int, ...], Sequence] | None = None


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
        ViTConfig.model_validate({**ViTConfig().model_dump(), **table.config})
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    for key in table.keys:
        if fault := _fault(key):
            raise CheckpointError(f"{path}: {fault}")
    rules = [
        Rule((key.theirs,) if isinstance(key.theirs, str) else key.theirs, key.ours, permute=key.transpose)
        for key in table.keys
    ]
    keys = _SplittingMap(rules, table.splits)
    return Family(
        name=f"the key table {file.name}",
        recognise=lambda _: True,
        table=lambda _: keys,
        tidy=lambda weights, _: _cut(weights, table.splits),
        hints=lambda _: _as_config(table.config),
        preprocess=Preprocess(),
    )


def _fault(key: Key) -> str | None:
    """Say what is wrong with a rule, if anything is."""
    theirs = (key.theirs,) if isinstance(key.theirs, str) else key.theirs
    for name in (*theirs, key.ours):
        if re.search(r"[{}]", name.replace("{}", "")):
            return f"{name!r} has a brace that is no {{}}, which stands for the number of a layer"
    if len({name.count("{}") for name in (*theirs, key.ours)}) > 1:
        return f"{', '.join(theirs)} and {key.ours} have other numbers of {{}}; each needs as many"
    if (key.transpose is not None and sorted(key.transpose) != list(range(len(key.transpose)))) or key.transpose == ():
        return f"transpose = {list(key.transpose or ())} of {key.ours} is no order of axes; write [1, 0], say"
    return None


def _as_config(fields: Mapping[str, Any]) -> Hints:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


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
