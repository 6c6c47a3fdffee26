"""Gradients fused with their sum over tokens.

torch.compile writes a gradient in one kernel and reads it in another to sum it. Here one Triton kernel, registered as a
custom operator, does both (`gradient_kernels.py`); elsewhere plain torch. Axes: M tokens of all images, N outputs.
"""

import torch
from torch import Tensor

NEAR = 4.25
"""Beyond this the derivative is 0 or 1 to within 2e-4."""
SLOPE = (
    0.797756437, -0.265392615, 0.0590925549, -0.0090404636, 0.000996549479, -7.93630248e-05, 4.43268768e-06,
    -1.63492356e-07, 3.55249778e-09, -3.42681235e-11,
)  # fmt: skip
"""Coefficients of a polynomial p with GELU'(x) ≈ ½ + x·p(x²), lowest order first."""


@torch.library.custom_op("vitrail::gelu_gradient", mutates_args=())
def gelu_gradient(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of GELU's input (M, N), and its sum over the rows (N,) in float32.

    The derivative is within 2e-4 of the exact GELU's, and within 1e-3 of the tanh approximation's.
    """
    if x.is_cuda:
        from vitrail.acceleration.cuda.training.gradient_kernels import gelu_gradient as fused

        return fused(gradient, x)
    result = (gradient.float() * _half_and(x.float(), SLOPE)).to(x.dtype).contiguous()
    return result, result.float().sum(dim=0)


@gelu_gradient.register_fake
def _(gradient: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    # Contiguous, as the kernel writes it, whatever the strides of the gradient: compiled code relies on it.
    rows = torch.empty_like(gradient, memory_format=torch.contiguous_format)
    return rows, x.new_empty(x.shape[1], dtype=torch.float32)


@torch.library.custom_op("vitrail::joined_gradient", mutates_args=())
def joined_gradient(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Concatenate the gradients of queries, keys and values (M, N) to (M, 3N), and return their sum over the rows."""
    if query.is_cuda:
        from vitrail.acceleration.cuda.training.gradient_kernels import joined_gradient as fused

        return fused(query, key, value)
    joined = torch.cat([query, key, value], dim=1)
    return joined, joined.float().sum(dim=0)


@joined_gradient.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows, columns = query.shape[0], query.shape[1] + key.shape[1] + value.shape[1]
    return query.new_empty(rows, columns), query.new_empty(columns, dtype=torch.float32)


def _half_and(x: Tensor, coefficients: tuple[float, ...]) -> Tensor:
    """Return ½ + x·p(x²), with x clamped to ±NEAR."""
    near = x.clamp(-NEAR, NEAR)
    square, series = near * near, torch.full_like(near, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        series = series * square + coefficient
    return 0.5 + near * series
