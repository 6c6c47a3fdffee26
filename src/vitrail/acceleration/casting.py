"""Matrices in low precision from the start, where autocast would cast them anew for every batch."""

import copy

import torch
from torch import nn

from vitrail.models.vit import ViT
from vitrail.runtime import Precision


def cast_once(model: ViT, precision: Precision) -> ViT:
    """Return a copy whose matrices are in `precision` already; autocast would cast them anew for every batch.

    The numbers are the same, bit for bit: what autocast leaves in float32 (norms, positions, the hybrids' standardised
    kernels) stays so.
    """
    if precision == "float32":
        return model
    return cast_matrices(copy.deepcopy(model), torch.bfloat16 if precision == "bf16" else torch.float16)


def cast_matrices(model: ViT, dtype: torch.dtype) -> ViT:
    """Cast the matrices of a model that autocast would cast, and return it."""
    for module in model.modules():
        if type(module) in (nn.Linear, nn.Conv2d):
            module.to(dtype)
    return model
