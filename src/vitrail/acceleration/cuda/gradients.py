"""Gradients whose sum over all tokens, which is that of a bias, is made while they are written.

torch's compiler writes such a gradient in one kernel and reads it again in another to sum it up. Here both are one
Triton kernel, which the compiler is told of as an operator; elsewhere plain torch does the same. Axes: M tokens of all
images, N outputs of a layer.
"""

import torch
from torch import Tensor

NEAR = 4.25
"""Beyond this the slope is 0 or 1, but for 2e-4."""
SLOPE = (
    0.797756437, -0.265392615, 0.0590925549, -0.0090404636, 0.000996549479, -7.93630248e-05, 4.43268768e-06,
    -1.63492356e-07, 3.55249778e-09, -3.42681235e-11,
)  # fmt: skip
"""Coefficients of a polynomial p for which GELU'(x) is nearly ½ + x·p(x²); lowest first."""


@torch.library.custom_op("vitrail::gelu_gradient", mutates_args=())
def gelu_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient before GELU, from the one behind it, and its sum over the rows (N,), in float32.

    Both are (M, N). The slope is within 2e-4 of exact GELU's, and within 1e-3 of its tanh form's.
    """
    if x.is_cuda:
        from vitrail.acceleration.cuda.gradient_kernels import gelu_gradient as fused

        return fused(gradient, x)
    before = (gradient.float() * _half_and(x.float(), SLOPE)).to(x.dtype).contiguous()
    return before, before.float().sum(dim=0)


@gelu_gradient.register_fake
def _(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    # Rows one behind the other, as the kernel writes them, however the gradient lies: compiled code relies on it.
    rows = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    return rows, x.new_empty(x.shape[1], dtype=torch.float32)


@torch.library.custom_op("vitrail::joined_gradient", mutates_args=())
def joined_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of queries, keys and values (M, N) side by side, (M, 3N), and their sum over the rows."""
    if query.is_cuda:
        from vitrail.acceleration.cuda.gradient_kernels import joined_gradient as fused

        return fused(query, key, value)
    joined = torch.cat([query, key, value], dim=1)
    return joined, joined.float().sum(dim=0)


@joined_gradient.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = query.shape[0], query.shape[1] + key.shape[1] + value.shape[1]
    return query.new_empty(rows, columns), query.new_empty(columns, dtype=torch.float32)


def _half_and(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Return ½ + x·p(x²), and its value at the border where x lies beyond."""
    near = x.clamp(-NEAR, NEAR)
    square, series = near * near, torch.full_like(near, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        series = series * square + coefficient
    return 0.5 + near * series
