"""Elementwise and normalisation kernels between matmuls, and gradients fused with their sum over tokens.

On a CUDA device these are Triton kernels (`kernels.py`); elsewhere the plain torch below, which is also the reference
for the kernels. Rows are (M, D), in the stream's dtype or, with a scale, in fp8.

torch.compile writes a gradient in one kernel and reads it in another to sum it. Here one Triton kernel, registered as a
custom operator, does both; elsewhere plain torch. Axes: M tokens of all images, N outputs.
"""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.stems import patchify

Form = Literal["none", "gelu", "gelu_tanh", "quick_gelu", "relu"]
"""The supported activations."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest finite value of this fp8 format."""


# ── inference ──


@functools.cache
def kernels_run(device: torch.device) -> bool:
    """Return whether the kernels run on a CUDA device: Triton, or the C compiler it needs, may be missing."""
    try:
        from vitrail.acceleration.cuda.kernels import norm as fused

        fused(torch.zeros(1, 16, device=device, dtype=torch.bfloat16), 1e-6)
    except Exception:  # whatever fails in Triton, the model can run without it
        return False
    return True


def norm(
    x: Tensor, eps: float, *, shift: Tensor | None = None, branch: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Normalise rows to mean 0 and variance 1; `branch` is first added to x in place.

    `shift` (D,) is added before normalising, but not to x. With `scale`, the result is fp8, quantised with that scale.
    """
    if x.is_cuda:
        from vitrail.acceleration.cuda.kernels import norm as fused

        return fused(x, eps, shift=shift, branch=branch, scale=scale)
    if branch is not None:
        x.add_(branch)
    wide = x if x.dtype == torch.float64 else x.float()
    shifted = wide if shift is None else wide + shift.to(wide.dtype)
    normed = F.layer_norm(shifted, x.shape[-1:], eps=eps)
    return normed.to(x.dtype) if scale is None else to_fp8(normed, scale)


def activate(x: Tensor, form: Form, *, scale: float | None = None) -> Tensor:
    """Apply an activation: in place, or with `scale` to a new fp8 tensor quantised with that scale."""
    if x.is_cuda:
        from vitrail.acceleration.cuda.kernels import activate as fused

        return fused(x, form, scale=scale)
    wide = x if x.dtype == torch.float64 else x.float()
    active = _plain(wide, form)
    return x.copy_(active) if scale is None else to_fp8(active, scale)


def quantise(x: Tensor, scale: float) -> Tensor:
    """Quantise x to fp8 with a scale."""
    return activate(x, "none", scale=scale)


def cut_patches(
    images: Tensor, patch: tuple[int, int], dtype: torch.dtype, *, before: int = 0, after: int = 0
) -> Tensor:
    """Cut images (B, C, H, W) into rows (B, T, C·h·w) of a dtype: patches, with zero rows `before` and `after`."""
    if images.is_cuda:
        from vitrail.acceleration.cuda.kernels import cut_patches as fused

        return fused(images, patch, dtype, before=before, after=after)
    return F.pad(patchify(images, patch).to(dtype), (0, 0, before, after))


def add_table(tokens: Tensor, table: Tensor) -> Tensor:
    """Add a table (T, D) to every image's tokens (B, T, D), in place."""
    if tokens.is_cuda:
        from vitrail.acceleration.cuda.kernels import add_table as fused

        return fused(tokens, table)
    return tokens.add_(table)


def to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """Round x / scale to fp8, saturating."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def _plain(x: Tensor, form: Form) -> Tensor:
    match form:
        case "none":
            return x
        case "gelu":
            return F.gelu(x)
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "quick_gelu":
            return x * torch.sigmoid(1.702 * x)
        case "relu":
            return F.relu(x)


# ── gradients ──

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
        from vitrail.acceleration.cuda.gradient_kernels import gelu_gradient as fused

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
        from vitrail.acceleration.cuda.gradient_kernels import joined_gradient as fused

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
