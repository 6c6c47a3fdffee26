"""The tensors of a checkpoint: their dtypes, and strict loading into a model."""

import fnmatch
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError, ConfigError, suggest
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

Dtype = Literal["float32", "bf16", "fp16", "float64", "keep"]
"""The dtype to open a model in; `keep` keeps that of the file."""
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


# ── dtypes ──


def check_dtype(name: str) -> None:
    """Raise on an unknown dtype."""
    if name not in get_args(Dtype):
        raise ConfigError(
            f"no dtype is called {name!r}; choose {', '.join(get_args(Dtype))}{suggest(name, get_args(Dtype))}"
        )


def check_dtypes(weights: Weights, file: Path) -> None:
    """Raise if a tensor has an unsupported dtype or layout."""
    for name, tensor in weights.items():
        counter = name.endswith("num_batches_tracked")
        if tensor.layout != torch.strided or tensor.is_meta or not (tensor.dtype in _DTYPES.values() or counter):
            kind = "no" if tensor.is_meta else "sparse" if tensor.layout != torch.strided else f"{tensor.dtype}"
            raise CheckpointError(
                f"{file} has {kind.removeprefix('torch.')} values in {name}; save the model in float32 with the "
                f"library that made it, and open that"
            )


def in_dtype(weights: Weights, dtype: Dtype) -> Weights:
    """Convert the weights to a dtype; `weights` is emptied, so that each tensor is held only once."""
    if dtype == "keep":
        return weights
    target = _DTYPES[dtype]
    return {
        name: tensor.to(target) if tensor.is_floating_point() else tensor
        for name, tensor in ((name, weights.pop(name)) for name in list(weights))
    }


def dtype_names(weights: Weights) -> str:
    """Return the names of all floating-point dtypes in the weights."""
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))


# ── strict loading ──

SHOWN = 8
"""How many names of each kind an error lists."""


def loaded_model(config: ViTConfig, weights: Weights, *, fresh: Sequence[str] = ()) -> tuple[ViT, list[str]]:
    """Build a model with these weights; return it, and the names of the tensors that were missing and initialised.

    If all weights are present, nothing is initialised or allocated.
    """
    with torch.device("cpu" if fresh else "meta"):
        model = ViT(config)
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    initialised = load_weights(model, weights, fresh=fresh)
    if len(kinds) == 1:
        model = model.to(next(iter(kinds)))  # also computed buffers and initialised weights
    return model.eval(), initialised


def load_weights(model: ViT, weights: Weights, *, fresh: Sequence[str] = ()) -> list[str]:
    """Assign weights to a model, without a copy. Return the names that were not in the weights.

    One error lists everything that is missing, unexpected or of another shape. Names that match a pattern in `fresh`,
    such as "head.*", may be missing and keep the model's values.
    """
    expected = model.state_dict()
    optional = {name for name in expected if any(fnmatch.fnmatchcase(name, pattern) for pattern in fresh)}
    for name in expected:
        if name.endswith(
            "num_batches_tracked"
        ):  # BatchNorm's batch counter is not a weight, and missing in older files
            weights.setdefault(name, torch.tensor(0))
    missing = [name for name in expected if name not in weights and name not in optional]
    unexpected = [name for name in weights if name not in expected]
    misshapen = [
        f"{name}: file {_by(weights[name])}, model {_by(tensor)}"
        for name, tensor in expected.items()
        if name in weights and weights[name].shape != tensor.shape
    ]
    problems = [
        f"{len(names)} {kind} ({_listed(names)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", misshapen))
        if names
    ]
    if problems:
        raise CheckpointError(f"the weights do not fit the model: {'; '.join(problems)}")
    model.load_state_dict(weights, strict=False, assign=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    return [name for name in expected if name not in weights]


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _by(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a scalar"
