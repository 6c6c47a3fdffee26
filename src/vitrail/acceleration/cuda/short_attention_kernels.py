"""Attention among few tokens as Triton kernels: one program for one head of one image (`short_attention.py`).

Triton comes with torch's CUDA builds and is absent elsewhere, so this file is imported only where a CUDA tensor is.
Axes: T tokens, D numbers of a head. T is known when a kernel is compiled, so that a block without a gap is read without
asking. Loops have `disable_licm`: addresses would be computed before them, and fill the registers that sums need.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.acceleration.cuda.short_attention import MOST

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = tl.constexpr(64)
"""How many queries are in hand at once: the least that Hopper's tensor cores take."""


# ── rows of a head ──


@triton.jit
def _rows(at, first, T: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Read rows, one for each token; 0 for tokens that are not there."""
    rows = first + tl.arange(0, SIZE)
    return tl.load(at + rows[:, None] * STEP + tl.arange(0, D)[None, :], mask=(rows < T)[:, None], other=0.0)


@triton.jit
def _write_rows(at, made, first, T: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Write rows of the tokens that are there."""
    rows = first + tl.arange(0, SIZE)
    tl.store(at + rows[:, None] * STEP + tl.arange(0, D)[None, :], made, mask=(rows < T)[:, None])


@triton.jit
def _numbers(at, first: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr):
    """Read one number for each token; 0 for tokens that are not there."""
    rows = first + tl.arange(0, SIZE)
    if first + SIZE <= T:
        return tl.load(at + rows)
    else:
        return tl.load(at + rows, mask=rows < T, other=0.0)


# ── forwards ──


@triton.jit
def _likeness(query, key, first, scale, T: tl.constexpr, SIZE: tl.constexpr):
    """Compute how like queries are to `SIZE` keys, as powers of two; to keys that are not there not at all."""
    likeness = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
    if first + SIZE > T:
        likeness = tl.where((first + tl.arange(0, SIZE) < T)[None, :], likeness, float("-inf"))
    return likeness


@triton.jit
def _attend(
    qkv_at, seen_at, totals_at, scale,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Let the tokens of an image look at each other, for one head, and keep what looks were divided by.

    Keys and values are read once, in up to three parts, powers of two, since the one that holds all may be much larger.
    """
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    query_at = qkv_at + image * T * (3 * HEADS * D) + head * D
    key_at, value_at = query_at + HEADS * D, query_at + 2 * HEADS * D
    seen_at += image * T * (HEADS * D) + head * D
    totals_at += tl.program_id(0).to(tl.int64) * T
    key, value = _rows(key_at, 0, T, 3 * HEADS * D, D, KEYS), _rows(value_at, 0, T, 3 * HEADS * D, D, KEYS)
    if MORE > 0:
        more_keys = _rows(key_at, KEYS, T, 3 * HEADS * D, D, MORE)
        more_values = _rows(value_at, KEYS, T, 3 * HEADS * D, D, MORE)
    if REST > 0:
        last_keys = _rows(key_at, KEYS + MORE, T, 3 * HEADS * D, D, REST)
        last_values = _rows(value_at, KEYS + MORE, T, 3 * HEADS * D, D, REST)
    for first in tl.range(0, T, BLOCK, disable_licm=True):
        query = _rows(query_at, first, T, 3 * HEADS * D, D, BLOCK)
        likeness = _likeness(query, key, 0, scale, T, KEYS)
        largest = tl.max(likeness, axis=1)
        if MORE > 0:
            more = _likeness(query, more_keys, KEYS, scale, T, MORE)
            largest = tl.maximum(largest, tl.max(more, axis=1))
        if REST > 0:
            rest = _likeness(query, last_keys, KEYS + MORE, scale, T, REST)
            largest = tl.maximum(largest, tl.max(rest, axis=1))
        looks = tl.exp2(likeness - largest[:, None])
        total = tl.sum(looks, axis=1)
        seen = tl.dot(looks.to(value.dtype), value)
        if MORE > 0:
            more = tl.exp2(more - largest[:, None])
            total += tl.sum(more, axis=1)
            seen = tl.dot(more.to(value.dtype), more_values, seen)
        if REST > 0:
            rest = tl.exp2(rest - largest[:, None])
            total += tl.sum(rest, axis=1)
            seen = tl.dot(rest.to(value.dtype), last_values, seen)
        seen = (seen / total[:, None]).to(seen_at.dtype.element_ty)
        _write_rows(seen_at, seen, first, T, HEADS * D, D, BLOCK)
        rows = first + tl.arange(0, BLOCK)
        tl.store(totals_at + rows, largest + tl.log2(total), mask=rows < T)


# ── backwards ──


@triton.jit
def _taken(
    query_at, gradient_at, seen_at, means_at, first: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Read a block of queries, and the gradient of what they see; write the mean of the gradients of their looks.

    A query's looks sum to one, so that the mean, weighted by looks, is the product of what it sees and of its gradient.
    """
    query = _rows(query_at, first, T, 3 * HEADS * D, D, SIZE)
    gradient = _rows(gradient_at, first, T, HEADS * D, D, SIZE)
    seen = _rows(seen_at, first, T, HEADS * D, D, SIZE)
    rows = first + tl.arange(0, SIZE)
    tl.store(means_at + rows, tl.sum(gradient.to(tl.float32) * seen.to(tl.float32), axis=1), mask=rows < T)
    return query, gradient, tl.zeros([D, SIZE], dtype=tl.float32)


@triton.jit
def _tile(
    query, gradient, of_query, key, value, of_key, of_value, there, totals_at, means_at, scale,
    first: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Add what a block of queries and a block of keys give to each other's gradients, but for the scale.

    Everything lies with keys as its rows, and `of_query` (D, queries) on its side: looks then go from one product into
    the next without leaving their registers, and only queries may be fewer than the 64 rows of a tensor core.
    """
    looks = tl.exp2(tl.dot(key, tl.trans(query)) * (scale * LOG2_E) - _numbers(totals_at, first, T, SIZE)[None, :])
    looks = tl.where(there[:, None], looks, 0.0)
    of_value = tl.dot(looks.to(gradient.dtype), gradient, of_value)
    of_looks = tl.dot(value, tl.trans(gradient))
    of_likeness = (looks * (of_looks - _numbers(means_at, first, T, SIZE)[None, :])).to(key.dtype)
    of_key = tl.dot(of_likeness, query, of_key)
    of_query = tl.dot(tl.trans(key), of_likeness, of_query)
    return of_query, of_key, of_value


@triton.jit
def _given(
    out_at, sums_at, of_query, scale, first: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Write the gradient of a block of queries, and its sum."""
    made = tl.trans((of_query * scale).to(out_at.dtype.element_ty))
    _write_rows(out_at, made, first, T, 3 * HEADS * D, D, SIZE)
    tl.store(sums_at + first // BLOCK * (3 * HEADS * D) + tl.arange(0, D), tl.sum(made.to(tl.float32), axis=0))


@triton.jit
def _attend_gradient(
    gradient_at, qkv_at, seen_at, totals_at, means_at, out_at, sums_at, scale,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Go back through `_attend`, a block of `KEYS` keys after the other; queries that are not there add nothing.

    The gradient of keys and values is done when all queries have been at a block. That of all queries is in registers
    until the end, so nothing is computed twice. Queries come in `FULL` blocks of 64, and a `TAIL` of 16, 32 or 64 for
    those left; each has a name, since a loop in Triton carries no lists.
    """
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    qkv_at += image * T * (3 * HEADS * D) + head * D
    out_at += image * T * (3 * HEADS * D) + head * D
    gradient_at += image * T * (HEADS * D) + head * D
    seen_at += image * T * (HEADS * D) + head * D
    totals_at += tl.program_id(0).to(tl.int64) * T
    means_at += tl.program_id(0).to(tl.int64) * T
    # Sums of 64 tokens, which are a thirtieth of what is written; another kernel adds those up.
    sums_at += image * ((T + BLOCK - 1) // BLOCK) * (3 * HEADS * D) + head * D
    if FULL > 0:
        q0, g0, of_q0 = _taken(qkv_at, gradient_at, seen_at, means_at, 0, T, HEADS, D, BLOCK)
    if FULL > 1:
        q1, g1, of_q1 = _taken(qkv_at, gradient_at, seen_at, means_at, BLOCK, T, HEADS, D, BLOCK)
    if FULL > 2:
        q2, g2, of_q2 = _taken(qkv_at, gradient_at, seen_at, means_at, 2 * BLOCK, T, HEADS, D, BLOCK)
    if FULL > 3:
        q3, g3, of_q3 = _taken(qkv_at, gradient_at, seen_at, means_at, 3 * BLOCK, T, HEADS, D, BLOCK)
    if TAIL > 0:
        q4, g4, of_q4 = _taken(qkv_at, gradient_at, seen_at, means_at, FULL * BLOCK, T, HEADS, D, TAIL)
    tl.debug_barrier()  # the means are read by other threads than those that wrote them
    for first in tl.range(0, T, KEYS, disable_licm=True):
        key = _rows(qkv_at + HEADS * D, first, T, 3 * HEADS * D, D, KEYS)
        value = _rows(qkv_at + 2 * HEADS * D, first, T, 3 * HEADS * D, D, KEYS)
        there = first + tl.arange(0, KEYS) < T
        of_k, of_v = tl.zeros([KEYS, D], dtype=tl.float32), tl.zeros([KEYS, D], dtype=tl.float32)
        if FULL > 0:
            of_q0, of_k, of_v = _tile(
                q0, g0, of_q0, key, value, of_k, of_v, there, totals_at, means_at, scale, 0, T, BLOCK
            )
        if FULL > 1:
            of_q1, of_k, of_v = _tile(
                q1, g1, of_q1, key, value, of_k, of_v, there, totals_at, means_at, scale, BLOCK, T, BLOCK
            )
        if FULL > 2:
            of_q2, of_k, of_v = _tile(
                q2, g2, of_q2, key, value, of_k, of_v, there, totals_at, means_at, scale, 2 * BLOCK, T, BLOCK
            )
        if FULL > 3:
            of_q3, of_k, of_v = _tile(
                q3, g3, of_q3, key, value, of_k, of_v, there, totals_at, means_at, scale, 3 * BLOCK, T, BLOCK
            )
        if TAIL > 0:
            of_q4, of_k, of_v = _tile(
                q4, g4, of_q4, key, value, of_k, of_v, there, totals_at, means_at, scale, FULL * BLOCK, T, TAIL
            )
        of_key, of_value = (of_k * scale).to(out_at.dtype.element_ty), of_v.to(out_at.dtype.element_ty)
        _write_rows(out_at + HEADS * D, of_key, first, T, 3 * HEADS * D, D, KEYS)
        _write_rows(out_at + 2 * HEADS * D, of_value, first, T, 3 * HEADS * D, D, KEYS)
        sum_at = sums_at + first // BLOCK * (3 * HEADS * D) + tl.arange(0, D)
        tl.store(sum_at + HEADS * D, tl.sum(of_key.to(tl.float32), axis=0))
        tl.store(sum_at + 2 * HEADS * D, tl.sum(of_value.to(tl.float32), axis=0))
        if KEYS > BLOCK:  # the sum is that of two times 64 tokens
            second = tl.full([D], first + BLOCK, dtype=tl.int32) < T
            tl.store(sum_at + 4 * HEADS * D, tl.zeros([D], dtype=tl.float32), mask=second)
            tl.store(sum_at + 5 * HEADS * D, tl.zeros([D], dtype=tl.float32), mask=second)
    if FULL > 0:
        _given(out_at, sums_at, of_q0, scale, 0, T, HEADS, D, BLOCK)
    if FULL > 1:
        _given(out_at, sums_at, of_q1, scale, BLOCK, T, HEADS, D, BLOCK)
    if FULL > 2:
        _given(out_at, sums_at, of_q2, scale, 2 * BLOCK, T, HEADS, D, BLOCK)
    if FULL > 3:
        _given(out_at, sums_at, of_q3, scale, 3 * BLOCK, T, HEADS, D, BLOCK)
    if TAIL > 0:
        _given(out_at, sums_at, of_q4, scale, FULL * BLOCK, T, HEADS, D, TAIL)


# ── what is called ──


def short_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Do what `short_attention.short_attention` says."""
    B, T, qkv, width = *qkv.shape[:2], qkv.contiguous(), qkv.shape[2] // 3 // heads
    _check(T, width)
    seen, totals = qkv.new_empty(B, T, heads * width), qkv.new_empty(B, heads, T, dtype=torch.float32)
    keys, more, rest = _in_parts(T)
    with torch.cuda.device_of(qkv):
        kernel = _attend[(B * heads,)](
            qkv, seen, totals, width**-0.5, T=T, HEADS=heads, D=width, KEYS=keys, MORE=more, REST=rest, num_warps=4,
            num_stages=1,
        )  # fmt: skip
    _check_compiled(kernel)
    return seen, totals


def short_attention_gradient(
    gradient: Tensor, qkv: Tensor, seen: Tensor, totals: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Do what `short_attention.short_attention_gradient` says."""
    B, T, qkv, width = *qkv.shape[:2], qkv.contiguous(), qkv.shape[2] // 3 // heads
    _check(T, width)
    full, left = divmod(T, 64)
    # Two programs of four warps share a processor, and one reads while the other computes. Where their registers are
    # too few for the gradients of all queries, one of eight warps has it to itself. Nothing may spill (`is_short`), and
    # fewer than 64 queries at once come out wrong with four warps, most likely by the assembler (benchmarks/lab-gpu.md, 30).
    few = (128 if width <= 64 else 64) >= T
    keys, warps, tail = (64, 4, 64) if few else (128, 8, _filled(left))
    sums, out = qkv.new_empty(B, -(-T // 64), qkv.shape[2], dtype=torch.float32), torch.empty_like(qkv)
    with torch.cuda.device_of(qkv):
        kernel = _attend_gradient[(B * heads,)](
            gradient.contiguous(), qkv, seen.contiguous(), totals.contiguous(), torch.empty_like(totals), out, sums,
            width**-0.5, T=T, HEADS=heads, D=width, FULL=full, TAIL=tail if left else 0, KEYS=keys,
            num_warps=warps, num_stages=2 if width <= 64 else 1,
        )  # fmt: skip
    _check_compiled(kernel)
    return out, sums.sum(dim=(0, 1))


def _check(tokens: int, width: int) -> None:
    if tokens > MOST.get(width, 0):
        raise ValueError(f"{tokens} tokens and heads of {width} numbers are more than these kernels can do")


def _check_compiled(kernel: Any) -> None:
    """Refuse what a kernel made that spills registers (`is_short`); an interpreted one is not compiled."""
    if getattr(kernel, "n_spills", 0):
        raise RuntimeError("this version of Triton lets the attention kernels spill, so that gradients may be wrong")


def _in_parts(tokens: int) -> tuple[int, int, int]:
    """Return how many keys are read in each of three parts: the fewest that hold so many tokens."""
    for parts in ((128, 0, 16), (128, 64, 0), (128, 64, 16)):
        if 128 < tokens <= sum(parts):
            return parts
    return min(256, _filled(tokens)), 0, 16 if tokens > 256 else 0


def _filled(tokens: int) -> int:
    """Return the power of two that tensor cores compute so many tokens with."""
    return max(16, 1 << (tokens - 1).bit_length())
