"""Strict loading: missing, unexpected and misshapen weights are errors."""

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

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
