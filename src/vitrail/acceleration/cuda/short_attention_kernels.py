"""Attention among few tokens as Triton kernels: one program for one head of one picture (`short_attention.py`).

Triton comes with torch's CUDA builds and is absent elsewhere, so this file is imported only where a CUDA tensor is.
Axes: T tokens, D numbers of a head; TOKENS is T, filled up to a power of two.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _looks(query, key, there, scale):
    """Compute how much each token looks at each, in float32; at none that is not there."""
    likeness = tl.dot(query, tl.trans(key)) * scale
    likeness = tl.where(there[None, :], likeness, float("-inf"))
    looks = tl.exp(likeness - tl.max(likeness, axis=1)[:, None])
    return looks / tl.sum(looks, axis=1)[:, None]


@triton.jit
def _attend(qkv_at, out_at, T, scale, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr):
    """Let the tokens of a picture look at each other, for one head."""
    picture, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, D)
    there = rows < T
    from_at = qkv_at + picture.to(tl.int64) * T * (3 * HEADS * D) + head * D
    places = rows[:, None] * (3 * HEADS * D) + columns[None, :]
    query = tl.load(from_at + places, mask=there[:, None], other=0.0)
    key = tl.load(from_at + HEADS * D + places, mask=there[:, None], other=0.0)
    value = tl.load(from_at + 2 * HEADS * D + places, mask=there[:, None], other=0.0)
    seen = tl.dot(_looks(query, key, there, scale).to(value.dtype), value)
    to_at = out_at + picture.to(tl.int64) * T * (HEADS * D) + head * D
    tl.store(
        to_at + rows[:, None] * (HEADS * D) + columns[None, :], seen.to(out_at.dtype.element_ty), mask=there[:, None]
    )


@triton.jit
def _attend_gradient(
    gradient_at, qkv_at, out_at, sums_at, T, scale, HEADS: tl.constexpr, D: tl.constexpr, TOKENS: tl.constexpr
):
    """Compute `_attend` again, and go back through it; tokens that are not there have gradient 0, and add nothing."""
    picture, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
    rows, columns = tl.arange(0, TOKENS), tl.arange(0, D)
    there = rows < T
    start = picture.to(tl.int64) * T * (3 * HEADS * D) + head * D
    places = start + rows[:, None] * (3 * HEADS * D) + columns[None, :]
    query = tl.load(qkv_at + places, mask=there[:, None], other=0.0)
    key = tl.load(qkv_at + HEADS * D + places, mask=there[:, None], other=0.0)
    value = tl.load(qkv_at + 2 * HEADS * D + places, mask=there[:, None], other=0.0)
    seen_at = gradient_at + picture.to(tl.int64) * T * (HEADS * D) + head * D
    seen = tl.load(seen_at + rows[:, None] * (HEADS * D) + columns[None, :], mask=there[:, None], other=0.0)
    looks = _looks(query, key, there, scale)
    of_value = tl.dot(tl.trans(looks.to(seen.dtype)), seen).to(out_at.dtype.element_ty)
    of_looks = tl.dot(seen, tl.trans(value))
    of_likeness = (looks * (of_looks - tl.sum(looks * of_looks, axis=1)[:, None]) * scale).to(key.dtype)
    of_query = tl.dot(of_likeness, key).to(out_at.dtype.element_ty)
    of_key = tl.dot(tl.trans(of_likeness), query).to(out_at.dtype.element_ty)
    tl.store(out_at + places, of_query, mask=there[:, None])
    tl.store(out_at + HEADS * D + places, of_key, mask=there[:, None])
    tl.store(out_at + 2 * HEADS * D + places, of_value, mask=there[:, None])
    # A sum for each picture, which is a hundredth of what was written; another kernel adds those up.
    sum_at = sums_at + picture.to(tl.int64) * (3 * HEADS * D) + head * D + columns
    tl.store(sum_at, tl.sum(of_query.to(tl.float32), axis=0))
    tl.store(sum_at + HEADS * D, tl.sum(of_key.to(tl.float32), axis=0))
    tl.store(sum_at + 2 * HEADS * D, tl.sum(of_value.to(tl.float32), axis=0))


def short_attention(qkv: Tensor, heads: int) -> Tensor:
    """Do what `short_attention.short_attention` says."""
    B, T, qkv, width = *qkv.shape[:2], qkv.contiguous(), qkv.shape[2] // 3 // heads
    out = qkv.new_empty(B, T, heads * width)
    with torch.cuda.device_of(qkv):
        _attend[(B * heads,)](
            qkv, out, T, width**-0.5, HEADS=heads, D=width, TOKENS=_filled(T), num_warps=_warps(T)
        )  # fmt: skip
    return out


def short_attention_gradient(gradient: Tensor, qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Do what `short_attention.short_attention_gradient` says."""
    B, T, qkv, width = *qkv.shape[:2], qkv.contiguous(), qkv.shape[2] // 3 // heads
    out, sums = torch.empty_like(qkv), qkv.new_empty(B, qkv.shape[2], dtype=torch.float32)
    with torch.cuda.device_of(qkv):
        _attend_gradient[(B * heads,)](
            gradient.contiguous(), qkv, out, sums, T, width**-0.5, HEADS=heads, D=width, TOKENS=_filled(T),
            num_warps=_warps(T),
        )  # fmt: skip
    return out, sums.sum(dim=0)


def _filled(tokens: int) -> int:
    """Return the power of two that tensor cores compute so many tokens with."""
    return max(16, 1 << (tokens - 1).bit_length())


def _warps(tokens: int) -> int:
    return 8 if tokens > 64 else 4
