"""The gradients of `gradients.py` as Triton kernels: written, and summed over all rows, in one pass over memory.

Triton comes with torch's CUDA builds and is absent elsewhere, so this file is imported only where a CUDA tensor is.
Axes: M rows, N columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _slope(x):
    """Compute the slope of GELU to within 2e-4, as `gradients.SLOPE` says."""
    near = tl.minimum(tl.maximum(x, -4.25), 4.25)
    square = near * near
    series = -3.42681235e-11
    series = 3.55249778e-09 + square * series
    series = -1.63492356e-07 + square * series
    series = 4.43268768e-06 + square * series
    series = -7.93630248e-05 + square * series
    series = 0.000996549479 + square * series
    series = -0.0090404636 + square * series
    series = 0.0590925549 + square * series
    series = -0.265392615 + square * series
    series = 0.797756437 + square * series
    return 0.5 + near * series


@triton.jit
def _gelu_gradient(
    gradient_at, x_at, out_at, sums_at, M, N, ROUNDS, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Go down a stripe of rows: multiply the gradient by GELU's slope, write it, and sum it up."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROUNDS * ROWS
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for turn in range(ROUNDS):
        rows = first + turn * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        places = rows[:, None].to(tl.int64) * N + columns[None, :]
        x = tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32)
        made = (tl.load(gradient_at + places, mask=inside, other=0.0).to(tl.float32) * _slope(x)).to(
            out_at.dtype.element_ty
        )
        tl.store(out_at + places, made, mask=inside)
        total += made.to(tl.float32)
    tl.store(sums_at + tl.program_id(1) * N + columns, tl.sum(total, axis=0), mask=columns < N)


@triton.jit
def _joined_gradient(
    query_at, key_at, value_at, out_at, sums_at, M, N, ROUNDS, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Go down a stripe of rows of one of three gradients: write it beside the others, and sum it up."""
    which = tl.program_id(2)
    from_at = query_at
    if which == 1:
        from_at = key_at
    if which == 2:
        from_at = value_at
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * ROUNDS * ROWS
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for turn in range(ROUNDS):
        rows = first + turn * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        x = tl.load(from_at + rows[:, None].to(tl.int64) * N + columns[None, :], mask=inside, other=0.0)
        tl.store(out_at + rows[:, None].to(tl.int64) * (3 * N) + which * N + columns[None, :], x, mask=inside)
        total += x.to(tl.float32)
    tl.store(sums_at + tl.program_id(1) * (3 * N) + which * N + columns, tl.sum(total, axis=0), mask=columns < N)


_STRIPE_ROWS, _STRIPES = 16, 96
"""Rows that a program has in hand at once, and into how many stripes all rows are cut: each makes a sum."""
_SLOPE_COLUMNS, _JOINED_COLUMNS = 128, 256
"""Columns that a program has in hand at once; for the slope the fastest of what was tried on an H200."""


def gelu_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `gradients.gelu_gradient` says."""
    M, N = x.shape
    gradient, x = gradient.contiguous(), x.contiguous()
    out, (stripes, rounds) = torch.empty_like(x), _stripes(M)
    sums = x.new_empty(stripes, N, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _gelu_gradient[(triton.cdiv(N, _SLOPE_COLUMNS), stripes)](
            gradient, x, out, sums, M, N, rounds, ROWS=_STRIPE_ROWS, COLUMNS=_SLOPE_COLUMNS, num_warps=4
        )
    return out, sums.sum(dim=0)


def joined_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `gradients.joined_gradient` says."""
    M, N = query.shape
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, (stripes, rounds) = query.new_empty(M, 3 * N), _stripes(M)
    sums = query.new_empty(stripes, 3 * N, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _joined_gradient[(triton.cdiv(N, _JOINED_COLUMNS), stripes, 3)](
            query, key, value, out, sums, M, N, rounds, ROWS=_STRIPE_ROWS, COLUMNS=_JOINED_COLUMNS, num_warps=4
        )
    return out, sums.sum(dim=0)


def _stripes(rows: int) -> tuple[int, int]:
    """Return into how many stripes so many rows are cut, and how often a program turns to reach the end of one."""
    rounds = max(1, triton.cdiv(rows, _STRIPES * _STRIPE_ROWS))
    return triton.cdiv(rows, rounds * _STRIPE_ROWS), rounds
