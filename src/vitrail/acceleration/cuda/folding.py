"""Constant folding: a block's norms and LayerScale become part of its matrices.

    norm(x) = γ·x̂ + β, so  W·norm(x) + b  =  (W·γ)·x̂ + (b + W·β)        after a LayerNorm
    s·(W·x + b)  =  (s·W)·x + (s·b)                                       before a LayerScale

Folding is in float64, so that a folded model rounds only once, when its matrices are cast.
"""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from vitrail.models.blocks import Block, LayerScale


class Affine(NamedTuple):
    """A weight (outputs, inputs) and a bias, both float64."""

    weight: Tensor
    bias: Tensor

    def rows(self, start: int, stop: int) -> "Affine":
        """Return a slice of the outputs."""
        return Affine(self.weight[start:stop], self.bias[start:stop])


class Folded(NamedTuple):
    """A block as four matmuls, with only normalisation, attention and the activation in between."""

    qkv: Affine
    proj: Affine
    fc1: Affine
    fc2: Affine


@torch.no_grad()
def fold(block: Block) -> Folded:
    """Fold the norms and LayerScale of a pre-norm block into its matrices."""
    return Folded(
        qkv=_after_norm(block.attn.qkv, block.norm1),
        proj=_scaled(cast("nn.Linear", block.attn.proj), block.ls1),
        fc1=_after_norm(block.mlp.fc1, block.norm2),
        fc2=_scaled(block.mlp.fc2, block.ls2),
    )


def affine(linear: nn.Linear | nn.Conv2d) -> Affine:
    """Return a layer's matrix, and its bias or zeros."""
    weight = linear.weight.detach().double().flatten(1)
    bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach().double()
    return Affine(weight, bias)


def _after_norm(linear: nn.Linear, norm: nn.LayerNorm) -> Affine:
    weight, bias = affine(linear)
    return Affine(weight * norm.weight.detach().double(), bias + weight @ norm.bias.detach().double())


def _scaled(linear: nn.Linear, scale: nn.Module) -> Affine:
    weight, bias = affine(linear)
    if not isinstance(scale, LayerScale):
        return Affine(weight, bias)
    gamma = scale.gamma.detach().double()
    return Affine(weight * gamma[:, None], bias * gamma)
