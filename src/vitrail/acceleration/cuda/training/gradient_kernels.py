"""The gradients of `gradients.py` as Triton kernels that write and sum over rows in one pass.

Triton comes only with torch's CUDA builds, so this file is imported only for CUDA tensors.
Axes: M rows, N columns.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _slope(x):
    """Compute the derivative of GELU to within 2e-4 (see `gradients.SLOPE`)."""
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
    gradient_ptr, x_ptr, out_ptr, sums_ptr, M, N, STEPS, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Process a stripe of rows: multiply the gradient by GELU's derivative, write it and accumulate the sum."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * STEPS * ROWS
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(STEPS):
        rows = first + step * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        offsets = rows[:, None].to(tl.int64) * N + columns[None, :]
        x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        result = (tl.load(gradient_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * _slope(x)).to(
            out_ptr.dtype.element_ty
        )
        tl.store(out_ptr + offsets, result, mask=inside)
        total += result.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(1) * N + columns, tl.sum(total, axis=0), mask=columns < N)


@triton.jit
def _joined_gradient(
    query_ptr, key_ptr, value_ptr, out_ptr, sums_ptr, M, N, STEPS, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Process a stripe of rows of one of three gradients: write it concatenated and accumulate the sum."""
    which = tl.program_id(2)
    source_ptr = query_ptr
    if which == 1:
        source_ptr = key_ptr
    if which == 2:
        source_ptr = value_ptr
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * STEPS * ROWS
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(STEPS):
        rows = first + step * ROWS + tl.arange(0, ROWS)
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        x = tl.load(source_ptr + rows[:, None].to(tl.int64) * N + columns[None, :], mask=inside, other=0.0)
        tl.store(out_ptr + rows[:, None].to(tl.int64) * (3 * N) + which * N + columns[None, :], x, mask=inside)
        total += x.to(tl.float32)
    tl.store(sums_ptr + tl.program_id(1) * (3 * N) + which * N + columns, tl.sum(total, axis=0), mask=columns < N)


_STRIPE_ROWS, _STRIPES = 16, 96
"""Rows per step of a program, and the number of stripes; each stripe gives a partial sum."""
_SLOPE_COLUMNS, _JOINED_COLUMNS = 128, 256
"""Columns per program; for the derivative, the fastest of those tried on an H200."""


def gelu_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `elementwise.gelu_gradient`."""
    M, N = x.shape
    gradient, x = gradient.contiguous(), x.contiguous()
    out, (stripes, steps) = torch.empty_like(x), _stripes(M)
    sums = x.new_empty(stripes, N, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _gelu_gradient[(triton.cdiv(N, _SLOPE_COLUMNS), stripes)](
            gradient, x, out, sums, M, N, steps, ROWS=_STRIPE_ROWS, COLUMNS=_SLOPE_COLUMNS, num_warps=4
        )
    return out, sums.sum(dim=0)


def joined_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `elementwise.joined_gradient`."""
    M, N = query.shape
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out, (stripes, steps) = query.new_empty(M, 3 * N), _stripes(M)
    sums = query.new_empty(stripes, 3 * N, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _joined_gradient[(triton.cdiv(N, _JOINED_COLUMNS), stripes, 3)](
            query, key, value, out, sums, M, N, steps, ROWS=_STRIPE_ROWS, COLUMNS=_JOINED_COLUMNS, num_warps=4
        )
    return out, sums.sum(dim=0)


def _stripes(rows: int) -> tuple[int, int]:
    """Return the number of stripes for this many rows, and the steps per stripe."""
    steps = max(1, triton.cdiv(rows, _STRIPES * _STRIPE_ROWS))
    return triton.cdiv(rows, steps * _STRIPE_ROWS), steps
