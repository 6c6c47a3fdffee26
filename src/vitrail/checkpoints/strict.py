"""Loading weights so that nothing is left out unseen."""

import fnmatch
from collections.abc import Sequence

from torch import Tensor

from vitrail.checkpoints.keys import Weights
from vitrail.errors import CheckpointError
from vitrail.models.vit import ViT

SHOWN = 8
"""How many names of each kind an error lists before it counts the rest."""


def load_weights(model: ViT, weights: Weights, *, fresh: Sequence[str] = ()) -> None:
    """Put weights into a model, by assignment: no second copy is made.

    Whatever is missing, unexpected or of another shape is listed in one error. Names that match a pattern of `fresh`,
    such as "head.*", may be missing, and keep what the model has.
    """
    wanted = model.state_dict()
    may_miss = {name for name in wanted if any(fnmatch.fnmatchcase(name, pattern) for pattern in fresh)}
    # BatchNorm's counter of batches is no weight, and older files lack it.
    may_miss |= {name for name in wanted if name.endswith("num_batches_tracked")}
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


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _by(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "a number"
