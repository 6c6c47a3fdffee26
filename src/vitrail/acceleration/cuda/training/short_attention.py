"""Attention of our own for training on short sequences.

torch's kernels use tiles of 128 or more tokens, and a multi-kernel backward pass. With 64 tokens most of a tile is
empty, and with 197 two fifths. In ours, one Triton program handles one head of one image. It reads queries, keys and
values in the layout of their matmul's output; the backward pass writes their gradients in the layout of the next
matmul's input, and the bias gradients in the same kernel. For the backward pass it saves the log-sum-exp of each query.
Elsewhere plain torch does the same. Axes: B images, T tokens, H heads of width D.
"""

import math

import torch
from torch import Tensor


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def short_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, T, H·D) for concatenated queries, keys and values (B, T, 3·H·D), and the LSE.

    The LSE is the base-2 log-sum-exp of each query's scores: (B, H, T), float32.
    """
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.training.short_attention_kernels import short_attention as fused

        return fused(qkv, heads)
    query, key, value = _split(qkv, heads)
    scores = _scores(query, key)
    lse = scores.logsumexp(dim=-1) / math.log(2)
    return _concatenate(scores.softmax(dim=-1).to(qkv.dtype) @ value), lse


@short_attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(B, heads, T, dtype=torch.float32)


@torch.library.custom_op("vitrail::short_attention_gradient", mutates_args=())
def short_attention_gradient(
    gradient: Tensor, qkv: Tensor, output: Tensor, lse: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv` for the gradient of the output, and its sum over all tokens (3·H·D,), float32."""
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.training.short_attention_kernels import short_attention_gradient as fused

        return fused(gradient, qkv, output, lse, heads)
    dtype, (query, key, value) = qkv.dtype, _split(qkv, heads)
    gradient, output = (tensor.unflatten(-1, (heads, -1)).transpose(1, 2) for tensor in (gradient, output))
    weights = (_scores(query, key) - lse[..., None] * math.log(2)).exp()
    means = (gradient.float() * output.float()).sum(dim=-1, keepdim=True)
    grad_scores = (weights * ((gradient @ value.mT).float() - means)).to(dtype)
    scale = key.shape[-1] ** -0.5
    gradients = (grad_scores @ key * scale, grad_scores.mT @ query * scale, weights.to(dtype).mT @ gradient)
    qkv_gradient = torch.cat([_concatenate(part) for part in gradients], dim=-1)
    return qkv_gradient, qkv_gradient.float().sum(dim=(0, 1))


@short_attention_gradient.register_fake
def _(gradient: Tensor, qkv: Tensor, output: Tensor, lse: Tensor, heads: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - as the operator itself
    qkv_gradient = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return qkv_gradient, qkv.new_empty(qkv.shape[2], dtype=torch.float32)


def _split(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (B, H, T, D)."""
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return query, key, value


def _scores(query: Tensor, key: Tensor) -> Tensor:
    """Return the scaled attention scores, (B, H, T, T), in float32."""
    scores: Tensor = (query @ key.mT).float() * key.shape[-1] ** -0.5
    return scores


def _concatenate(heads: Tensor) -> Tensor:
    """Concatenate heads (B, H, T, D) to (B, T, H·D)."""
    return heads.transpose(1, 2).flatten(2)
