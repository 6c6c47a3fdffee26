"""Attention among few tokens, for training: all of a head is in hand at once, so that nothing is kept for later.

Kernels for long sequences work in tiles of 128 tokens and more, and keep sums for the way back. Among 64 tokens most of
a tile is empty; one head of one picture is then a small Triton program that reads queries, keys and values where their
product wrote them, and on the way back writes their gradients where the next product reads them, and the gradient of
their biases in the same pass. Elsewhere plain torch does the same. Axes: B pictures, T tokens, H heads of D numbers.
"""

import torch
from torch import Tensor

LONGEST = 64
"""Up to how many tokens it is taken. It can do 128; between the two it has not been timed (docs/lab/gpu.md, 29)."""
HEADS = (16, 32, 64, 128)
"""The widths of a head it can do."""


def is_short(tokens: int, head_width: int) -> bool:
    """Say whether so many tokens are few enough."""
    return tokens <= LONGEST and head_width in HEADS


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """Return what tokens see, (B, T, H·D), from queries, keys and values side by side, (B, T, 3·H·D)."""
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.short_attention_kernels import short_attention as fused

        return fused(qkv, heads)
    _, _, value, looks = _looks(qkv, heads)
    return _joined(looks.to(qkv.dtype) @ value)


@short_attention.register_fake
def _(qkv: Tensor, heads: int) -> Tensor:  # noqa: ARG001 - as the operator itself
    return qkv.new_empty(*qkv.shape[:2], qkv.shape[2] // 3)


@torch.library.custom_op("vitrail::short_attention_gradient", mutates_args=())
def short_attention_gradient(gradient: Tensor, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv`, from the one of what tokens see, and its sum over all tokens (3·H·D,), float32."""
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.short_attention_kernels import short_attention_gradient as fused

        return fused(gradient, qkv, heads)
    query, key, value, looks = _looks(qkv, heads)
    dtype, seen = qkv.dtype, gradient.unflatten(-1, (heads, -1)).transpose(1, 2)
    of_looks = (seen @ value.mT).float()
    of_likeness = looks * (of_looks - (looks * of_looks).sum(dim=-1, keepdim=True)) * key.shape[-1] ** -0.5
    of_likeness, looks = of_likeness.to(dtype), looks.to(dtype)
    parts = (of_likeness @ key, of_likeness.mT @ query, looks.mT @ seen)
    made = torch.cat([_joined(part) for part in parts], dim=-1)
    return made, made.float().sum(dim=(0, 1))


@short_attention_gradient.register_fake
def _(gradient: Tensor, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - as the operator itself
    made = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return made, qkv.new_empty(qkv.shape[2], dtype=torch.float32)


def _looks(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return queries, keys and values (B, H, T, D), and how much each token looks at each, in float32."""
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    likeness = (query @ key.mT).float() * key.shape[-1] ** -0.5
    return query, key, value, likeness.softmax(dim=-1)


def _joined(parts: Tensor) -> Tensor:
    """Put heads (B, H, T, D) side by side, (B, T, H·D)."""
    return parts.transpose(1, 2).flatten(2)
