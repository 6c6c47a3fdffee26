"""The encoder with oneDNN's prepacked weights and fused matmuls.

torch passes oneDNN a plain matrix, which each matmul first reorders into blocks; here that is done once. The activation
and the residual addition are fused into the matmul, and the residual stream stays in the low precision. If the head
reads a single token, the last block computes only that token. The model itself is not modified: the blocks of a copy
are replaced.

The operators are those that torch.compile uses, so they exist wherever torch is built with oneDNN.
"""

import copy
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.acceleration.folding import fold_scale
from vitrail.models.blocks import Block, Mlp, gelu_tanh, pooled_token
from vitrail.models.position import TokenPositions
from vitrail.models.stems import ConvProjection, LinearProjection, patchify
from vitrail.models.vit import ViT

_FUSED = {F.gelu: ("gelu", "none"), gelu_tanh: ("gelu", "tanh"), F.relu: ("relu", "")}
"""The activations that oneDNN can fuse into a matmul, by oneDNN's names."""


class PackedLinear(nn.Module):
    """A linear layer with a prepacked matrix and a fused activation or residual addition."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        # Not persistent: only oneDNN understands the layout.
        blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().to(dtype).contiguous(), None)
        self.register_buffer("weight", blocks, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().to(dtype), persistent=False)

    def forward(self, x: Tensor, activation: str = "none", algorithm: str = "") -> Tensor:
        """Return the activated output."""
        op = torch.ops.mkldnn._linear_pointwise.default
        return cast("Tensor", op(x, self.weight, self.bias, activation, [], algorithm))

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return the output plus the residual."""
        op = torch.ops.mkldnn._linear_pointwise.binary
        return cast("Tensor", op(x, residual, self.weight, self.bias, "add"))


class PackedStem(nn.Module):
    """The patch projection as one matmul, which has less overhead than a convolution."""

    def __init__(self, stem: ConvProjection | LinearProjection, dtype: torch.dtype) -> None:
        super().__init__()
        kernel = stem.proj
        self.patch, self.dtype = (kernel.weight.shape[2], kernel.weight.shape[3]), dtype
        self.proj = PackedLinear(kernel.weight.flatten(1), kernel.bias, dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, C, H, W) to (B, N, D)."""
        return cast("Tensor", self.proj(patchify(x.to(self.dtype), self.patch)))


class PackedBlock(nn.Module):
    """An encoder block for inference only: the same computation with less memory traffic."""

    def __init__(self, block: Block, dtype: torch.dtype, *, last: bool) -> None:
        super().__init__()
        self.block, self.dtype, self.last = block, dtype, last
        self.read = pooled_token(block.config) if last else None
        attention, mlp = block.attn, block.mlp
        proj = cast("nn.Linear", attention.proj)
        self.proj = PackedLinear(*fold_scale(proj.weight, proj.bias, block.ls1), dtype)
        self.fc2 = PackedLinear(*fold_scale(mlp.fc2.weight, mlp.fc2.bias, block.ls2), dtype)
        self.fc1 = PackedLinear(mlp.fc1.weight, mlp.fc1.bias, dtype)
        attention.qkv = PackedLinear(attention.qkv.weight, attention.qkv.bias, dtype)  # type: ignore[assignment]
        block.to(dtype)
        del attention.proj, mlp.fc1, mlp.fc2

    def forward(self, x: Tensor, places: TokenPositions) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        block = self.block
        x = block.add_position(x, places).to(self.dtype)
        if block.config.norm_order == "pre":
            x = self._attend(x, block.norm1(x), places)
            x = self._mlp(x, block.norm2(x))
        else:
            x = block.norm1(self._attend(x, x, places))
            x = block.norm2(self._mlp(x, x))
        return x.float() if self.last else x

    def _attend(self, residual: Tensor, x: Tensor, places: TokenPositions) -> Tensor:
        query, key, value, _ = self.block.attn.project(x, places)
        if self.read is not None:
            here = slice(self.read, self.read + 1)
            residual, query = residual[:, here].contiguous(), query[:, :, here]
        heads = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return self.proj.added_to(residual, heads)

    def _mlp(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.fc2.added_to(residual, _activate(self.fc1, self.block.mlp, x))


def pack(model: ViT, dtype: torch.dtype) -> ViT:
    """Return a CPU copy of a model whose blocks compute in `dtype`, for inference only."""
    packed = copy.deepcopy(model).eval().requires_grad_(False)
    if isinstance(packed.patch_embed, ConvProjection | LinearProjection):
        packed.patch_embed = PackedStem(packed.patch_embed, dtype)
    blocks = [cast("Block", block) for block in packed.blocks]
    packed.blocks = nn.ModuleList(
        PackedBlock(block, dtype, last=number == len(blocks) - 1) for number, block in enumerate(blocks)
    )
    return packed


def _activate(fc1: PackedLinear, mlp: Mlp, x: Tensor) -> Tensor:
    if mlp.activation is None:
        gate, x = fc1(x).chunk(2, dim=-1)
        return F.silu(gate) * x
    fused = _FUSED.get(mlp.activation)
    return fc1(x, *fused) if fused else mlp.activation(fc1(x))
