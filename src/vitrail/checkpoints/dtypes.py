"""The kinds of numbers that weights are kept in: which can be opened, and in which a model is wanted."""

from pathlib import Path
from typing import Literal, get_args

import torch

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError, ConfigError, suggest

Dtype = Literal["float32", "bf16", "fp16", "float64", "keep"]
"""In which numbers a model is opened; `keep` is what its file has."""
_DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "float64": torch.float64}


def check_dtype(name: str) -> None:
    """Refuse a kind of numbers that there is not."""
    if name not in get_args(Dtype):
        raise ConfigError(
            f"no dtype is called {name!r}; choose {', '.join(get_args(Dtype))}{suggest(name, get_args(Dtype))}"
        )


def check_numbers(weights: Weights, file: Path) -> None:
    """See to it that all are numbers a model can be made of."""
    for name, tensor in weights.items():
        counter = name.endswith("num_batches_tracked")
        if tensor.layout != torch.strided or tensor.is_meta or not (tensor.dtype in _DTYPES.values() or counter):
            kind = "no" if tensor.is_meta else "sparse" if tensor.layout != torch.strided else f"{tensor.dtype}"
            raise CheckpointError(
                f"{file} holds {kind.removeprefix('torch.')} numbers in {name}; save the model in float32 with the "
                f"library that made it, and open that"
            )


def in_dtype(weights: Weights, dtype: Dtype) -> Weights:
    """Return the weights in the wanted numbers; `weights` is emptied on the way, so that each is held once."""
    if dtype == "keep":
        return weights
    wanted = _DTYPES[dtype]
    return {
        name: tensor.to(wanted) if tensor.is_floating_point() else tensor
        for name, tensor in ((name, weights.pop(name)) for name in list(weights))
    }


def named(weights: Weights) -> str:
    """Say which kinds of numbers there are."""
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    return " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
