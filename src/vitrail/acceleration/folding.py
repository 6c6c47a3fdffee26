"""Folding: norms and LayerScale become part of the linear layers next to them.

    W·(γ·x̂ + β) + b  =  (W·γ)·x̂ + (W·β + b)        a layer after a LayerNorm
    s·(W·x + b)  =  (s·W)·x + (s·b)                 a layer before a LayerScale

Every path folds here. Inference on a GPU folds once, in float64, so that a folded model rounds only when its matrices
are cast (`fold_block`). Training folds in every step, with gradients: those of γ and β then come from the matrix's
gradient, instead of a sum over all tokens (`fold_trained_norm`). oneDNN folds only LayerScale (`fold_scale`).
"""

from typing import NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from vitrail.models.blocks import Block, LayerScale

Bias = TypeVar("Bias", Tensor, Tensor | None)


class Affine(NamedTuple):
    """A weight (outputs, inputs) and a bias."""

    weight: Tensor
    bias: Tensor

    def rows(self, start: int, stop: int) -> "Affine":
        """Return a slice of the outputs."""
        return Affine(self.weight[start:stop], self.bias[start:stop])


class FoldedBlock(NamedTuple):
    """A block as four matmuls, with only normalisation, attention and the activation in between; in float64."""

    qkv: Affine
    proj: Affine
    fc1: Affine
    fc2: Affine


@torch.no_grad()
def fold_block(block: Block) -> FoldedBlock:
    """Fold the norms and LayerScale of a pre-norm block."""
    return FoldedBlock(
        qkv=_fold_norm(affine(block.attn.qkv), block.norm1),
        proj=Affine(*fold_scale(*affine(cast("nn.Linear", block.attn.proj)), block.ls1)),
        fc1=_fold_norm(affine(block.mlp.fc1), block.norm2),
        fc2=Affine(*fold_scale(*affine(block.mlp.fc2), block.ls2)),
    )


def affine(layer: nn.Linear | nn.Conv2d) -> Affine:
    """Return a layer's matrix, and its bias or zeros, in float64."""
    weight = layer.weight.detach().double().flatten(1)
    bias = weight.new_zeros(weight.shape[0]) if layer.bias is None else layer.bias.detach().double()
    return Affine(weight, bias)


def fold_trained_norm(norm: nn.LayerNorm, layer: nn.Linear) -> Affine:
    """Fold a norm into the layer after it, with gradients."""
    # Multiply and sum, which autocast leaves in float32, and which fuses with reading the matrix.
    return _after_norm(layer.weight, layer.bias, norm.weight, (layer.weight * norm.bias).sum(dim=1))


def fold_scale(weight: Tensor, bias: Bias, scale: nn.Module) -> tuple[Tensor, Bias]:
    """Fold a LayerScale, if `scale` is one, into the layer before it."""
    if not isinstance(scale, LayerScale):
        return weight, bias
    gamma = scale.gamma.to(weight.dtype)
    return weight * gamma[:, None], None if bias is None else bias * gamma


def _fold_norm(layer: Affine, norm: nn.LayerNorm) -> Affine:
    shift = layer.weight @ norm.bias.to(layer.weight.dtype)
    return _after_norm(layer.weight, layer.bias, norm.weight.to(layer.weight.dtype), shift)


def _after_norm(weight: Tensor, bias: Tensor | None, gamma: Tensor, shift: Tensor) -> Affine:
    """Return the layer for x̂, given W·β as `shift`."""
    return Affine(weight * gamma, shift if bias is None else shift + bias)
