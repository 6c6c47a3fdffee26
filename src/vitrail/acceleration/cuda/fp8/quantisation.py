"""fp8: its format, statistics of a matmul's inputs, and the rounding of weights by them.

The inputs of a matmul are observed on sample images (`InputStatistics`). Correlated inputs can compensate each other:
after the weights of one input are rounded, those of the remaining inputs are adjusted to minimise the output error
(GPTQ, arXiv 2210.17323). It costs nothing at inference.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite value of this fp8 format."""
ROW_CHUNK = 65_536
"""Rows converted to float32 at a time."""
INPUT_BLOCK = 128
"""Inputs per block; the error of a block is propagated to all later inputs by one matmul."""
MIN_DAMPING = 0.01
"""Added to the mean square of every input, relative to the mean over all; GPTQ uses 0.01 to make the matrix safe to
invert."""
DAMPING = 0.5
"""Additional damping for few rows, times inputs / rows: enough that even two rows do little harm."""


class InputStatistics(NamedTuple):
    """Statistics of a matmul's input."""

    largest: Tensor
    """The largest absolute value."""
    products: Tensor | None
    """Sum over rows of the outer product of the inputs, (inputs, inputs), float32; None: not collected."""
    rows: int

    def damped(self) -> Tensor | None:
        """Return the damped mean of the outer products, an estimate for all rows.

        The fewer rows there are compared with inputs, the stronger the damping, which treats inputs as independent.
        None if nothing was collected, or the squares overflow or underflow in float32.
        """
        if self.products is None:
            return None
        mean = self.products / self.rows
        square = float(mean.diagonal().mean())
        if not torch.finfo(torch.float32).tiny / MIN_DAMPING < square < math.inf:
            return None
        mean.diagonal().add_((MIN_DAMPING + DAMPING * mean.shape[0] / self.rows) * square)
        return mean


class InputCalibration(NamedTuple):
    """The calibration of a matmul's input (`calibrate`)."""

    scale: float
    """The quantisation scale of the input."""
    correlation: Tensor | None = None
    """The damped correlation of the inputs, to round the weights with (`round_correlated`); None: round to nearest."""


def to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """Round x / scale to fp8, saturating."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def observe(x: Tensor, before: InputStatistics | None, *, correlate: bool = True) -> InputStatistics:
    """Add rows (M, inputs) to the statistics `before`, whose memory is reused."""
    if before is None:
        sums = x.new_zeros(x.shape[1], x.shape[1], dtype=torch.float32) if correlate else None
        before = InputStatistics(x.new_zeros(()), sums, 0)
    largest = before.largest
    for rows in x.split(ROW_CHUNK):
        low, high = rows.aminmax()
        largest = torch.maximum(largest, torch.maximum(-low, high))
        if before.products is not None:
            wide = rows.float()
            before.products.addmm_(wide.t(), wide)
    return InputStatistics(largest, before.products, before.rows + len(x))


def round_correlated(weight: Tensor, correlation: Tensor) -> Tensor:
    """Round a matrix (outputs, inputs) to fp8, given the correlation of its inputs (`InputStatistics.damped`)."""
    # The largest inputs come first, while many remain to compensate.
    order = correlation.diagonal().argsort(descending=True)
    factor = torch.linalg.cholesky(correlation[order][:, order].double())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(factor), upper=True).float()
    remaining = weight.t()[order].float()  # one contiguous row per input
    for start in range(0, len(remaining), INPUT_BLOCK):
        stop = start + INPUT_BLOCK
        block, block_inverse = remaining[start:stop], inverse[start:stop, start:stop]
        errors = torch.empty_like(block)
        for number, row in enumerate(block):
            rounded = to_fp8(row, 1.0).float()
            errors[number] = (row - rounded) / block_inverse[number, number]
            row.copy_(rounded)
            block[number + 1 :].addr_(block_inverse[number, number + 1 :], errors[number], alpha=-1)
        remaining[stop:].addmm_(inverse[start:stop, stop:].t(), errors, alpha=-1)
    return torch.empty_like(remaining).index_copy_(0, order, remaining).t().contiguous().to(FP8)
