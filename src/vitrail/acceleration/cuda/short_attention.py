"""Attention among few tokens, for training: all keys of a head are in hand at once, and gradients in one pass.

Kernels for long sequences work in tiles of 128 tokens and more, and go back in several passes. Among 64 tokens most of
a tile is empty, and among 197 two fifths. One head of one image is here a Triton program that reads queries, keys and
values where their product wrote them, and on the way back writes their gradients where the next product reads them, and
the gradient of their biases in the same pass. For the way back it keeps what looks were divided by, a number for each
query. Elsewhere plain torch does the same. Axes: B images, T tokens, H heads of D numbers.
"""

import math

import torch
from torch import Tensor

LONGEST = 272
"""Up to how many tokens it is taken, where it can (benchmarks/lab-gpu.md, attempts 29 and 30)."""
MOST = {16: 128, 32: 128, 64: 272, 128: 128}
"""How many tokens it can do at all, for each width of a head it can do."""
COMPARED = ("3.6.",)
"""Versions of Triton whose kernels were compared with torch on a GPU; a newer one is to be let in when they are."""


def can_attend(device: torch.device) -> bool:
    """Say whether the kernels are known to be right on a device: where they ran and were compared, or torch computes.

    They did on Hopper GPUs. On some others shared memory is too small, and on others they spill.
    """
    if device.type != "cuda":
        return True
    if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    from triton import __version__

    return str(__version__).startswith(COMPARED)


def is_short(tokens: int, head_width: int) -> bool:
    """Say whether so many tokens are few enough.

    The gradients of all queries of a head are in a program's registers at once, and nothing may spill from there: what
    NVIDIA's assembler made of a kernel that spills reached for wrong places (benchmarks/lab-gpu.md, attempt 30).
    """
    return tokens <= min(LONGEST, MOST.get(head_width, 0))


@torch.library.custom_op("vitrail::short_attention", mutates_args=())
def short_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return what tokens see, (B, T, H·D), from queries, keys and values side by side, (B, T, 3·H·D); and the totals.

    Those are the logarithms, to base 2, of what each query's looks were divided by: (B, H, T), float32.
    """
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.short_attention_kernels import short_attention as fused

        return fused(qkv, heads)
    query, key, value = _parts(qkv, heads)
    likeness = _likeness(query, key)
    totals = likeness.logsumexp(dim=-1) / math.log(2)
    return _joined(likeness.softmax(dim=-1).to(qkv.dtype) @ value), totals


@short_attention.register_fake
def _(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    B, T, width = qkv.shape
    return qkv.new_empty(B, T, width // 3), qkv.new_empty(B, heads, T, dtype=torch.float32)


@torch.library.custom_op("vitrail::short_attention_gradient", mutates_args=())
def short_attention_gradient(
    gradient: Tensor, qkv: Tensor, seen: Tensor, totals: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Return the gradient of `qkv`, from the one of what tokens see, and its sum over all tokens (3·H·D,), float32."""
    if qkv.is_cuda:
        from vitrail.acceleration.cuda.short_attention_kernels import short_attention_gradient as fused

        return fused(gradient, qkv, seen, totals, heads)
    dtype, (query, key, value) = qkv.dtype, _parts(qkv, heads)
    gradient, seen = (given.unflatten(-1, (heads, -1)).transpose(1, 2) for given in (gradient, seen))
    looks = (_likeness(query, key) - totals[..., None] * math.log(2)).exp()
    means = (gradient.float() * seen.float()).sum(dim=-1, keepdim=True)
    of_likeness = (looks * ((gradient @ value.mT).float() - means)).to(dtype)
    scale = key.shape[-1] ** -0.5
    parts = (of_likeness @ key * scale, of_likeness.mT @ query * scale, looks.to(dtype).mT @ gradient)
    made = torch.cat([_joined(part) for part in parts], dim=-1)
    return made, made.float().sum(dim=(0, 1))


@short_attention_gradient.register_fake
def _(gradient: Tensor, qkv: Tensor, seen: Tensor, totals: Tensor, heads: int) -> tuple[Tensor, Tensor]:  # noqa: ARG001 - as the operator itself
    made = torch.empty_like(qkv, memory_format=torch.contiguous_format)
    return made, qkv.new_empty(qkv.shape[2], dtype=torch.float32)


def _parts(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each (B, H, T, D)."""
    query, key, value = qkv.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    return query, key, value


def _likeness(query: Tensor, key: Tensor) -> Tensor:
    """Return how like each query is to each key, (B, H, T, T), in float32."""
    likeness: Tensor = (query @ key.mT).float() * key.shape[-1] ** -0.5
    return likeness


def _joined(parts: Tensor) -> Tensor:
    """Put heads (B, H, T, D) side by side, (B, T, H·D)."""
    return parts.transpose(1, 2).flatten(2)
