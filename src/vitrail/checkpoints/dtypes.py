"""The dtypes of weights: which ones can be opened, and conversion between them."""

from pathlib import Path
from typing import Literal, get_args

import torch

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError, ConfigError, suggest

Dtype = Literal["float32", "bf16", "fp16", "float64", "keep"]
"""The dtype to open a model in; `keep` keeps that of the file."""
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


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
