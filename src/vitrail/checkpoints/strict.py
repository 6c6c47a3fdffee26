"""Loading weights so that nothing is left out unseen."""

import fnmatch
from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

SHOWN = 8
"""How many names of each kind an error lists before it counts the rest."""


def loaded_model(config: ViTConfig, weights: Weights, *, fresh: Sequence[str] = ()) -> tuple[ViT, list[str]]:
    """Build a model with these weights; return it, and the names that were allowed to be missing and start fresh.

    Nothing is drawn and nothing allocated for a model whose weights are all there.
    """
    with torch.device("cpu" if fresh else "meta"):
        model = ViT(config)
    kinds = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
    started_fresh = load_weights(model, weights, fresh=fresh)
    if len(kinds) == 1:
        model = model.to(next(iter(kinds)))  # what is computed or fresh, too
    return model.eval(), started_fresh


def load_weights(model: ViT, weights: Weights, *, fresh: Sequence[str] = ()) -> list[str]:
    """Put weights into a model, by assignment: no second copy is made. Return the names that stayed as they were.

    Whatever is missing, unexpected or of another shape is listed in one error. Names that match a pattern of `fresh`,
    such as "head.*", may be missing, and keep what the model has.
    """
    wanted = model.state_dict()
    may_miss = {name for name in wanted if any(fnmatch.fnmatchcase(name, pattern) for pattern in fresh)}
    for name in wanted:
        if name.endswith("num_batches_tracked"):  # BatchNorm's counter of batches is no weight, and older files lack it
            weights.setdefault(name, torch.tensor(0))
    missing = [name for name in wanted if name not in weights and name not in may_miss]
    unexpected = [name for name in weights if name not in wanted]
    misshapen = [
        f"{name}: file {_by(weights[name])}, model {_by(tensor)}"
        for name, tensor in wanted.items()
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
    return [name for name in wanted if name not in weights]


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _by(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
