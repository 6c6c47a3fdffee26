"""Inspect a checkpoint: its architecture, its tensors, and anything unusual."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.checkpoints.load import load
from vitrail.models.variants import variant_name


class TensorRow(NamedTuple):
    """One tensor of a checkpoint, under our name."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float | None
    std: float | None


class Inspection(NamedTuple):
    """The description of a checkpoint."""

    bundle: Bundle
    variant: str | None
    """The paper's name for a model of this size, such as "B/16"."""
    tensors: list[TensorRow]
    oddities: list[str]
    """Anything unusual, one sentence each."""


def inspect(
    source: str | Path,
    *,
    heads: int | None = None,
    overrides: Mapping[str, Any] | None = None,
    keys: str | Path | None = None,
) -> Inspection:
    """Open a checkpoint and describe it, tensor by tensor."""
    bundle = load(source, heads=heads, overrides=overrides, keys=keys, dtype="keep")
    state = bundle.model.state_dict()
    rows = [_row(name, tensor) for name, tensor in state.items()]
    return Inspection(bundle, variant_name(bundle.model.config), rows, _oddities(bundle, state))


def _row(name: str, tensor: Tensor) -> TensorRow:
    numbers = tensor.float()
    std = float(numbers.std(correction=0)) if numbers.numel() > 1 else 0.0
    return TensorRow(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), float(numbers.mean()), std)


def _oddities(bundle: Bundle, state: dict[str, Tensor]) -> list[str]:
    oddities = []
    for name, tensor in state.items():
        if not tensor.is_floating_point():
            continue
        broken = int((~tensor.isfinite()).sum())
        if broken:
            oddities.append(f"{name} has {broken} values that are not finite")
        elif name.endswith("weight") and tensor.ndim > 1 and not tensor.any():
            oddities.append(f"{name} is all zero")
    dtypes = {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}
    if dtypes != {torch.float32}:
        oddities.append(f"the weights are stored as {', '.join(sorted(str(d).removeprefix('torch.') for d in dtypes))}")
    if bundle.classes is None and bundle.model.config.classes:
        oddities.append("the class names are unknown")
    return [*map(str, bundle.provenance.get("notes") or []), *oddities]
