"""Attention on a CUDA device: the choice of torch's kernel, and a kernel of our own for training on short sequences.

torch's kernels use tiles of 128 or more tokens, and a multi-kernel backward pass. With 64 tokens most of a tile is
empty, and with 197 two fifths. In ours, one Triton program handles one head of one image. It reads queries, keys and
values in the layout of their matmul's output; the backward pass writes their gradients in the layout of the next
matmul's input, and the bias gradients in the same kernel. For the backward pass it saves the log-sum-exp of each query.
Elsewhere plain torch does the same. Axes: B images, T tokens, H heads of width D.
"""

import contextlib
import math
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

PREFERRED = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
"""The fastest first, for a few hundred tokens on Hopper GPUs."""
TRUSTED = PREFERRED[1:]
"""All of torch's kernels except cuDNN's."""
MAX_TOKENS = 272
"""Sequence length up to which the kernel is used (benchmarks/lab-gpu.md, attempts 29 and 30)."""
SUPPORTED_TOKENS = {16: 128, 32: 128, 64: 272, 128: 128}
"""Maximum number of tokens for each supported head width."""
VERIFIED_TRITON = ("3.6.",)
"""Triton versions whose kernels were verified against torch on a GPU; verify before adding one."""


# ── torch's kernels ──


def preferred_attention(device_type: str) -> AbstractContextManager[None]:
    """Return a context in which attention uses the fastest available kernel; on a CPU it does nothing."""
    return sdpa_kernel(PREFERRED, set_priority=True) if device_type == "cuda" else contextlib.nullcontext()


def for_training(queries: int, keys: int) -> list[SDPBackend]:
    """Return the kernels allowed for attention with gradients.

    cuDNN's is the fastest, but its gradient is reported to be NaN on Hopper GPUs for some lengths: 64, 192, 320, … keys
    with a mask (pytorch issue 196678; our runs with 64 keys and no mask failed too), and one query (cudnn-frontend
    issue 1072). So it is excluded for every multiple of 64, which costs a model with 64 tokens 10% of the step time,
    and for one query. Another report (kyutai-labs/pocket-tts 264) names no length; a run detects NaN and stops.
    """
    return TRUSTED if queries == 1 or keys % 64 == 0 else PREFERRED


# ── short sequences ──


def can_attend(device: torch.device) -> bool:
    """Return whether the kernels are verified on a device, or plain torch is used there.

    They are verified on Hopper GPUs. On others shared memory is too small, or registers spill.
    """
    if device.type != "cuda":
        return True
    if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from triton import __version__

    return str(__version__).startswith(VERIFIED_TRITON)


def is_short(tokens: int, head_width: int) -> bool:
    """Return whether the kernel supports this number of tokens.

    A program holds the gradients of all queries of a head in registers, and must not spill: NVIDIA's assembler
    miscompiled a spilling kernel (benchmarks/lab-gpu.md, attempt 30).
    """
    return tokens <= min(MAX_TOKENS, SUPPORTED_TOKENS.get(head_width, 0))


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def short_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, T, H·D) for concatenated queries, keys and values (B, T, 3·H·D), and the LSE.

    The LSE is the base-2 log-sum-exp of each query's scores: (B, H, T), float32.
    """
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.short_attention_kernels import short_attention as fused

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
        from vitrail.acceleration.cuda.short_attention_kernels import short_attention_gradient as fused

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
