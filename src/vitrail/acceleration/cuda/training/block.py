"""A block of the fused training path: two residual branches with hand-written gradients in bf16.

A norm's γ and β are folded into the following matrix in each step (`folding.py`). In bf16, bias gradients are summed in
the kernel that writes the gradient, and GELU's derivative is a polynomial, within 2e-4 of the exact one. The residual
stream is float32, as under autocast: rounding it to bf16 in every block doubled the gradient error
(benchmarks/lab-gpu.md).
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from vitrail.acceleration.cuda.attention import for_training
from vitrail.acceleration.cuda.training.gradients import gelu_gradient, joined_gradient
from vitrail.acceleration.cuda.training.short_attention import short_attention, short_attention_gradient
from vitrail.acceleration.folding import fold_trained_norm
from vitrail.acceleration.planner import is_short
from vitrail.models.blocks import Attention, Block, pooled_token
from vitrail.models.position import TokenPositions


def all_tokens(block: Block, x: Tensor, places: TokenPositions, can_be_short: bool) -> Tensor:
    """Map (B, T, D) to (B, T, D); `can_be_short` enables the short-attention kernels."""
    x = block.add_position(x, places)
    attention, normed, (weight, bias) = (
        block.attn,
        _normed(x, block.norm1),
        fold_trained_norm(block.norm1, block.attn.qkv),
    )
    if normed.dtype != torch.bfloat16:
        query, key, value = F.linear(normed, weight, bias).chunk(3, dim=-1)
    elif can_be_short and _is_plain(attention) and is_short(x.shape[1], attention.head_width):
        attended = _ShortAttention.apply(normed, weight.to(normed.dtype), bias, attention.heads)  # type: ignore[no-untyped-call]
        return _add_branches(block, x, attention.proj_drop(attention.proj(attended)))
    else:
        query, key, value = _Qkv.apply(normed, weight.to(normed.dtype), bias)  # type: ignore[no-untyped-call]
    return _add_branches(block, x, _attend(block, query, key, value))


def one_token(block: Block, x: Tensor, places: TokenPositions, _: bool) -> Tensor:
    """Map (B, T, D) to the token the head reads, (B, 1, D)."""
    x = block.add_position(x, places)
    read = pooled_token(block.config) or 0  # looked up each time: a model can be resized
    here, inner = slice(read, read + 1), block.attn.heads * block.attn.head_width
    normed, (weight, bias) = _normed(x, block.norm1), fold_trained_norm(block.norm1, block.attn.qkv)
    query = F.linear(normed[:, here], weight[:inner], bias[:inner])
    key, value = F.linear(normed, weight[inner:], bias[inner:]).chunk(2, dim=-1)
    return _add_branches(block, x[:, here], _attend(block, query, key, value))


def _attend(block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend from queries (B, t, inner) to keys and values (B, T, inner), as `Attention` does."""
    attention = block.attn
    shape = (attention.heads, attention.head_width)
    query, key, value = query.unflatten(-1, shape), key.unflatten(-1, shape), value.unflatten(-1, shape)
    query, key = attention.q_norm(query), attention.k_norm(key)
    # Chosen here rather than by the caller: a compiled graph may come from the cache, which ignores the context.
    with sdpa_kernel(for_training(query.shape[1], key.shape[1])):
        heads = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=attention.dropout if attention.training else 0.0,
        )
    return cast("Tensor", attention.proj_drop(attention.proj(heads.transpose(1, 2).flatten(2))))


def _is_plain(attention: Attention) -> bool:
    """Return whether attention has neither QK norm nor dropout."""
    return isinstance(attention.q_norm, nn.Identity) and not (attention.dropout and attention.training)


def _add_branches(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """Add the attention branch, then the MLP branch."""
    mlp = block.mlp
    x = _sum(x, block.drop_path(block.ls1(attended)))
    normed, (weight, bias) = _normed(x, block.norm2), fold_trained_norm(block.norm2, mlp.fc1)
    if normed.dtype == torch.bfloat16 and mlp.activation is F.gelu:
        hidden = _Hidden.apply(normed, weight.to(normed.dtype), bias)  # type: ignore[no-untyped-call]
    else:
        hidden = mlp.activated(F.linear(normed, weight, bias))
    return _sum(x, block.drop_path(block.ls2(mlp.drop2(mlp.fc2(mlp.drop1(hidden))))))


def as_stream(tokens: Tensor) -> Tensor:
    """Return tokens in the precision of the residual stream: float32 under autocast."""
    if torch.is_autocast_enabled(tokens.device.type):
        return tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    return tokens


def _sum(x: Tensor, branch: Tensor) -> Tensor:
    """Add a branch to the residual stream."""
    if not _is_mixed(x):
        return x + branch
    return cast("Tensor", _MixedSum.apply(x, branch))  # type: ignore[no-untyped-call]


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Normalise the residual stream without γ and β, in the dtype of the following matmul."""
    if not _is_mixed(x):
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps).to(_matmul_dtype(x))
    return cast("Tensor", _MixedNorm.apply(x, norm.eps))  # type: ignore[no-untyped-call]


def _is_mixed(x: Tensor) -> bool:
    """Return whether the stream is float32 and matmuls are in bf16."""
    return x.dtype == torch.float32 and _matmul_dtype(x) == torch.bfloat16


def _matmul_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


# ── autograd functions for bf16 ──


class _MixedSum(torch.autograd.Function):
    """Add a branch (bf16 or float32) to the float32 residual stream.

    The gradient is rounded to bf16 once for both, so that the stream and the branch's matmul share one bf16 buffer.
    Since a bf16 branch reads it too, the compiler cannot remove the cast.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor) -> Tensor:
        ctx.dtype = branch.dtype
        return x + branch

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        low = gradients[0].to(torch.bfloat16)
        return low.to(gradients[0].dtype), low.to(ctx.dtype)


class _MixedNorm(torch.autograd.Function):
    """Normalise the float32 stream (B, T, D) without γ and β, to bf16.

    The gradient is computed from the output, which the following matmul saves anyway, so the stream is not saved.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide, _, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        normed = wide.to(torch.bfloat16)
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        normed, scale = ctx.saved_tensors
        normed, gradient = normed.float(), gradients[0].float()
        along = (gradient * normed).mean(dim=-1, keepdim=True)
        return scale * (gradient - gradient.mean(dim=-1, keepdim=True) - normed * along), None


class _Qkv(torch.autograd.Function):
    """Map tokens (B, T, D) to queries, keys and values, each (B, T, inner). The bias and its gradient are float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        qkv = torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight.t())
        return qkv.view(*x.shape[:2], weight.shape[0]).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        joined, summed = joined_gradient(*(gradient.flatten(0, 1) for gradient in gradients))
        return _input_gradient(joined, x, weight), joined.t() @ x.flatten(0, 1), summed


class _ShortAttention(torch.autograd.Function):
    """Attention of a few tokens (B, T, D), giving (B, T, inner). The bias and its gradient are float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
        qkv = torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight.t()).view(*x.shape[:2], weight.shape[0])
        attended, lse = short_attention(qkv, heads)
        ctx.save_for_backward(x, weight, qkv, attended, lse)
        ctx.heads = heads
        return cast("Tensor", attended)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, qkv, attended, lse = ctx.saved_tensors
        gradient, summed = short_attention_gradient(gradients[0], qkv, attended, lse, ctx.heads)
        gradient = gradient.flatten(0, 1)
        return _input_gradient(gradient, x, weight), gradient.t() @ x.flatten(0, 1), summed, None


class _Hidden(torch.autograd.Function):
    """Map tokens (B, T, D) to GELU of the hidden layer, (B, T, hidden). The bias and its gradient are float32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        pre_activation = torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight.t())
        ctx.save_for_backward(x, weight, pre_activation)
        return F.gelu(pre_activation).view(*x.shape[:2], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, pre_activation = ctx.saved_tensors
        gradient, summed = gelu_gradient(gradients[0].flatten(0, 1), pre_activation)
        return _input_gradient(gradient, x, weight), gradient.t() @ x.flatten(0, 1), summed


def _input_gradient(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of a matmul's input."""
    return (gradient @ weight).view_as(x)
