"""Short attention as Triton kernels: one program per head and image (`short_attention.py`).

Triton comes only with torch's CUDA builds, so this file is imported only for CUDA tensors. Axes: T tokens, D head
width. T is a compile-time constant, so that full blocks are read without a mask. Loops have `disable_licm`: hoisted
addresses would take the registers that the accumulators need.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.acceleration.planner import SHORT_BY_HEAD_WIDTH

LOG2_E = tl.constexpr(1.4426950408889634)
BLOCK = tl.constexpr(64)
"""Queries per block: the minimum of Hopper's tensor cores."""


# ── rows of a head ──


@triton.jit
def _rows(ptr, first, T: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Load one row per token; 0 beyond the last token."""
    rows = first + tl.arange(0, SIZE)
    return tl.load(ptr + rows[:, None] * STEP + tl.arange(0, D)[None, :], mask=(rows < T)[:, None], other=0.0)


@triton.jit
def _write_rows(ptr, values, first, T: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr):
    """Store the rows of existing tokens."""
    rows = first + tl.arange(0, SIZE)
    tl.store(ptr + rows[:, None] * STEP + tl.arange(0, D)[None, :], values, mask=(rows < T)[:, None])


@triton.jit
def _values(ptr, first: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr):
    """Load one value per token; 0 beyond the last token."""
    rows = first + tl.arange(0, SIZE)
    if first + SIZE <= T:
        return tl.load(ptr + rows)
    else:
        return tl.load(ptr + rows, mask=rows < T, other=0.0)


# ── forward ──


@triton.jit
def _scores(query, key, first, scale, T: tl.constexpr, SIZE: tl.constexpr):
    """Compute the base-2 scores of queries and `SIZE` keys; -inf beyond the last key."""
    scores = tl.dot(query, tl.trans(key)) * (scale * LOG2_E)
    if first + SIZE > T:
        scores = tl.where((first + tl.arange(0, SIZE) < T)[None, :], scores, float("-inf"))
    return scores


@triton.jit
def _attend(
    qkv_ptr, output_ptr, lse_ptr, scale,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    KEYS: tl.constexpr, MORE: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Compute attention for one head of an image, and save the log-sum-exp.

    Keys and values are loaded once, in up to three power-of-two parts, since a single one could be much larger.
    """
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    query_ptr = qkv_ptr + image * T * (3 * HEADS * D) + head * D
    key_ptr, value_ptr = query_ptr + HEADS * D, query_ptr + 2 * HEADS * D
    output_ptr += image * T * (HEADS * D) + head * D
    lse_ptr += tl.program_id(0).to(tl.int64) * T
    key, value = _rows(key_ptr, 0, T, 3 * HEADS * D, D, KEYS), _rows(value_ptr, 0, T, 3 * HEADS * D, D, KEYS)
    if MORE > 0:
        more_keys = _rows(key_ptr, KEYS, T, 3 * HEADS * D, D, MORE)
        more_values = _rows(value_ptr, KEYS, T, 3 * HEADS * D, D, MORE)
    if REST > 0:
        last_keys = _rows(key_ptr, KEYS + MORE, T, 3 * HEADS * D, D, REST)
        last_values = _rows(value_ptr, KEYS + MORE, T, 3 * HEADS * D, D, REST)
    for first in tl.range(0, T, BLOCK, disable_licm=True):
        query = _rows(query_ptr, first, T, 3 * HEADS * D, D, BLOCK)
        scores = _scores(query, key, 0, scale, T, KEYS)
        largest = tl.max(scores, axis=1)
        if MORE > 0:
            more = _scores(query, more_keys, KEYS, scale, T, MORE)
            largest = tl.maximum(largest, tl.max(more, axis=1))
        if REST > 0:
            rest = _scores(query, last_keys, KEYS + MORE, scale, T, REST)
            largest = tl.maximum(largest, tl.max(rest, axis=1))
        weights = tl.exp2(scores - largest[:, None])
        total = tl.sum(weights, axis=1)
        output = tl.dot(weights.to(value.dtype), value)
        if MORE > 0:
            more = tl.exp2(more - largest[:, None])
            total += tl.sum(more, axis=1)
            output = tl.dot(more.to(value.dtype), more_values, output)
        if REST > 0:
            rest = tl.exp2(rest - largest[:, None])
            total += tl.sum(rest, axis=1)
            output = tl.dot(rest.to(value.dtype), last_values, output)
        output = (output / total[:, None]).to(output_ptr.dtype.element_ty)
        _write_rows(output_ptr, output, first, T, HEADS * D, D, BLOCK)
        rows = first + tl.arange(0, BLOCK)
        tl.store(lse_ptr + rows, largest + tl.log2(total), mask=rows < T)


# ── backward ──


@triton.jit
def _load_queries(
    query_ptr, gradient_ptr, output_ptr, means_ptr, first: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Load a block of queries and their output gradient; store the weighted mean of the attention weights' gradient.

    A query's weights sum to one, so this mean is the dot product of the output and its gradient.
    """
    query = _rows(query_ptr, first, T, 3 * HEADS * D, D, SIZE)
    gradient = _rows(gradient_ptr, first, T, HEADS * D, D, SIZE)
    output = _rows(output_ptr, first, T, HEADS * D, D, SIZE)
    rows = first + tl.arange(0, SIZE)
    tl.store(means_ptr + rows, tl.sum(gradient.to(tl.float32) * output.to(tl.float32), axis=1), mask=rows < T)
    return query, gradient, tl.zeros([D, SIZE], dtype=tl.float32)


@triton.jit
def _tile(
    query, gradient, grad_query, key, value, grad_key, grad_value, valid, lse_ptr, means_ptr, scale,
    first: tl.constexpr, T: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Accumulate the gradients of a block of queries and a block of keys, without the scale.

    Keys are the rows throughout, and `grad_query` (D, queries) is transposed: weights then pass from one matmul to the
    next in registers, and only queries may be fewer than the 64 rows of a tensor core.
    """
    weights = tl.exp2(tl.dot(key, tl.trans(query)) * (scale * LOG2_E) - _values(lse_ptr, first, T, SIZE)[None, :])
    weights = tl.where(valid[:, None], weights, 0.0)
    grad_value = tl.dot(weights.to(gradient.dtype), gradient, grad_value)
    grad_weights = tl.dot(value, tl.trans(gradient))
    grad_scores = (weights * (grad_weights - _values(means_ptr, first, T, SIZE)[None, :])).to(key.dtype)
    grad_key = tl.dot(grad_scores, query, grad_key)
    grad_query = tl.dot(tl.trans(key), grad_scores, grad_query)
    return grad_query, grad_key, grad_value


@triton.jit
def _store_query_gradient(
    out_ptr, sums_ptr, grad_query, scale, first: tl.constexpr,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Store the gradient of a block of queries, and its sum."""
    rows_gradient = tl.trans((grad_query * scale).to(out_ptr.dtype.element_ty))
    _write_rows(out_ptr, rows_gradient, first, T, 3 * HEADS * D, D, SIZE)
    tl.store(
        sums_ptr + first // BLOCK * (3 * HEADS * D) + tl.arange(0, D), tl.sum(rows_gradient.to(tl.float32), axis=0)
    )


@triton.jit
def _attend_gradient(
    gradient_ptr, qkv_ptr, output_ptr, lse_ptr, means_ptr, out_ptr, sums_ptr, scale,
    T: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, FULL: tl.constexpr, TAIL: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Backward pass of `_attend`, in blocks of `KEYS` keys; missing queries contribute nothing.

    The gradients of a block of keys and values are complete after all queries. The gradients of all queries stay in
    registers until the end, so nothing is computed twice. Queries come in `FULL` blocks of 64 and a `TAIL` of 16, 32 or
    64; each has its own variable, since a Triton loop cannot carry lists.
    """
    image, head = (tl.program_id(0) // HEADS).to(tl.int64), tl.program_id(0) % HEADS
    qkv_ptr += image * T * (3 * HEADS * D) + head * D
    out_ptr += image * T * (3 * HEADS * D) + head * D
    gradient_ptr += image * T * (HEADS * D) + head * D
    output_ptr += image * T * (HEADS * D) + head * D
    lse_ptr += tl.program_id(0).to(tl.int64) * T
    means_ptr += tl.program_id(0).to(tl.int64) * T
    # Partial sums of 64 tokens, a thirtieth of the output; another kernel adds them up.
    sums_ptr += image * ((T + BLOCK - 1) // BLOCK) * (3 * HEADS * D) + head * D
    if FULL > 0:
        q0, g0, grad_q0 = _load_queries(qkv_ptr, gradient_ptr, output_ptr, means_ptr, 0, T, HEADS, D, BLOCK)
    if FULL > 1:
        q1, g1, grad_q1 = _load_queries(qkv_ptr, gradient_ptr, output_ptr, means_ptr, BLOCK, T, HEADS, D, BLOCK)
    if FULL > 2:
        q2, g2, grad_q2 = _load_queries(qkv_ptr, gradient_ptr, output_ptr, means_ptr, 2 * BLOCK, T, HEADS, D, BLOCK)
    if FULL > 3:
        q3, g3, grad_q3 = _load_queries(qkv_ptr, gradient_ptr, output_ptr, means_ptr, 3 * BLOCK, T, HEADS, D, BLOCK)
    if TAIL > 0:
        q4, g4, grad_q4 = _load_queries(qkv_ptr, gradient_ptr, output_ptr, means_ptr, FULL * BLOCK, T, HEADS, D, TAIL)
    tl.debug_barrier()  # the means are read by other threads
    for first in tl.range(0, T, KEYS, disable_licm=True):
        key = _rows(qkv_ptr + HEADS * D, first, T, 3 * HEADS * D, D, KEYS)
        value = _rows(qkv_ptr + 2 * HEADS * D, first, T, 3 * HEADS * D, D, KEYS)
        valid = first + tl.arange(0, KEYS) < T
        grad_k, grad_v = tl.zeros([KEYS, D], dtype=tl.float32), tl.zeros([KEYS, D], dtype=tl.float32)
        if FULL > 0:
            grad_q0, grad_k, grad_v = _tile(
                q0, g0, grad_q0, key, value, grad_k, grad_v, valid, lse_ptr, means_ptr, scale, 0, T, BLOCK
            )
        if FULL > 1:
            grad_q1, grad_k, grad_v = _tile(
                q1, g1, grad_q1, key, value, grad_k, grad_v, valid, lse_ptr, means_ptr, scale, BLOCK, T, BLOCK
            )
        if FULL > 2:
            grad_q2, grad_k, grad_v = _tile(
                q2, g2, grad_q2, key, value, grad_k, grad_v, valid, lse_ptr, means_ptr, scale, 2 * BLOCK, T, BLOCK
            )
        if FULL > 3:
            grad_q3, grad_k, grad_v = _tile(
                q3, g3, grad_q3, key, value, grad_k, grad_v, valid, lse_ptr, means_ptr, scale, 3 * BLOCK, T, BLOCK
            )
        if TAIL > 0:
            grad_q4, grad_k, grad_v = _tile(
                q4, g4, grad_q4, key, value, grad_k, grad_v, valid, lse_ptr, means_ptr, scale, FULL * BLOCK, T, TAIL
            )
        grad_key, grad_value = (grad_k * scale).to(out_ptr.dtype.element_ty), grad_v.to(out_ptr.dtype.element_ty)
        _write_rows(out_ptr + HEADS * D, grad_key, first, T, 3 * HEADS * D, D, KEYS)
        _write_rows(out_ptr + 2 * HEADS * D, grad_value, first, T, 3 * HEADS * D, D, KEYS)
        sum_ptr = sums_ptr + first // BLOCK * (3 * HEADS * D) + tl.arange(0, D)
        tl.store(sum_ptr + HEADS * D, tl.sum(grad_key.to(tl.float32), axis=0))
        tl.store(sum_ptr + 2 * HEADS * D, tl.sum(grad_value.to(tl.float32), axis=0))
        if KEYS > BLOCK:  # the sum covers two blocks of 64 tokens
            second = tl.full([D], first + BLOCK, dtype=tl.int32) < T
            tl.store(sum_ptr + 4 * HEADS * D, tl.zeros([D], dtype=tl.float32), mask=second)
            tl.store(sum_ptr + 5 * HEADS * D, tl.zeros([D], dtype=tl.float32), mask=second)
    if FULL > 0:
        _store_query_gradient(out_ptr, sums_ptr, grad_q0, scale, 0, T, HEADS, D, BLOCK)
    if FULL > 1:
        _store_query_gradient(out_ptr, sums_ptr, grad_q1, scale, BLOCK, T, HEADS, D, BLOCK)
    if FULL > 2:
        _store_query_gradient(out_ptr, sums_ptr, grad_q2, scale, 2 * BLOCK, T, HEADS, D, BLOCK)
    if FULL > 3:
        _store_query_gradient(out_ptr, sums_ptr, grad_q3, scale, 3 * BLOCK, T, HEADS, D, BLOCK)
    if TAIL > 0:
        _store_query_gradient(out_ptr, sums_ptr, grad_q4, scale, FULL * BLOCK, T, HEADS, D, TAIL)


# ── launchers ──


def short_attention(qkv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Implement `short_attention.short_attention`."""
    B, T, qkv, width = *qkv.shape[:2], qkv.contiguous(), qkv.shape[2] // 3 // heads
    _check(T, width)
    output, lse = qkv.new_empty(B, T, heads * width), qkv.new_empty(B, heads, T, dtype=torch.float32)
    keys, more, rest = _key_parts(T)
    with torch.cuda.device_of(qkv):
        kernel = _attend[(B * heads,)](
            qkv, output, lse, width**-0.5, T=T, HEADS=heads, D=width, KEYS=keys, MORE=more, REST=rest, num_warps=4,
            num_stages=1,
        )  # fmt: skip
    _check_compiled(kernel)
    return output, lse


def short_attention_gradient(
    gradient: Tensor, qkv: Tensor, output: Tensor, lse: Tensor, heads: int
) -> tuple[Tensor, Tensor]:
    """Implement `short_attention.short_attention_gradient`."""
    B, T, qkv, width = *qkv.shape[:2], qkv.contiguous(), qkv.shape[2] // 3 // heads
    _check(T, width)
    full, left = divmod(T, 64)
    # Two programs of four warps share an SM, so one loads while the other computes. If their registers cannot hold the
    # gradients of all queries, one program of eight warps uses the SM alone. Nothing may spill (`is_short`), and blocks
    # of fewer than 64 queries are wrong with four warps, most likely an assembler bug (benchmarks/lab-gpu.md, 30).
    few = (128 if width <= 64 else 64) >= T
    keys, warps, tail = (64, 4, 64) if few else (128, 8, _padded(left))
    sums, out = qkv.new_empty(B, -(-T // 64), qkv.shape[2], dtype=torch.float32), torch.empty_like(qkv)
    with torch.cuda.device_of(qkv):
        kernel = _attend_gradient[(B * heads,)](
            gradient.contiguous(), qkv, output.contiguous(), lse.contiguous(), torch.empty_like(lse), out, sums,
            width**-0.5, T=T, HEADS=heads, D=width, FULL=full, TAIL=tail if left else 0, KEYS=keys,
            num_warps=warps, num_stages=2 if width <= 64 else 1,
        )  # fmt: skip
    _check_compiled(kernel)
    return out, sums.sum(dim=(0, 1))


def _check(tokens: int, width: int) -> None:
    if tokens > SHORT_BY_HEAD_WIDTH.get(width, 0):
        raise ValueError(f"these kernels do not support {tokens} tokens with heads of width {width}")


def _check_compiled(kernel: Any) -> None:
    """Raise if a kernel spills registers (`planner.is_short`); an interpreted one is not compiled."""
    if getattr(kernel, "n_spills", 0):
        raise RuntimeError(
            "the attention kernels spill registers with this version of Triton, so gradients may be wrong"
        )


def _key_parts(tokens: int) -> tuple[int, int, int]:
    """Return the sizes of the three parts in which keys are loaded: the smallest that hold all tokens."""
    for parts in ((128, 0, 16), (128, 64, 0), (128, 64, 16)):
        if 128 < tokens <= sum(parts):
            return parts
    return min(256, _padded(tokens)), 0, 16 if tokens > 256 else 0


def _padded(tokens: int) -> int:
    """Return the power of two, at least 16, that holds this many tokens."""
    return max(16, 1 << (tokens - 1).bit_length())
