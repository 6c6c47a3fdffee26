"""Cast weight matrices once, instead of letting autocast cast them for every batch."""

import copy

import torch
from torch import nn

from vitrail.models.vit import ViT
from vitrail.runtime import Precision


def cast_once(model: ViT, precision: Precision) -> ViT:
    """Return a copy whose matrices are already in `precision`; autocast would cast them for every batch.

    Outputs are bit-identical: what autocast leaves in float32 (norms, positions, the hybrids' standardised kernels)
    stays in float32.
    """
    if precision == "float32":
        return model
    return cast_matrices(copy.deepcopy(model), torch.bfloat16 if precision == "bf16" else torch.float16)


def cast_matrices(model: ViT, dtype: torch.dtype) -> ViT:
    """Cast in place the matrices that autocast would cast, and return the model."""
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            module.to(dtype)
    return model
