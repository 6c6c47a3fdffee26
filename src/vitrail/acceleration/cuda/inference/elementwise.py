"""Elementwise and normalisation kernels between matmuls.

On a CUDA device these are Triton kernels (`kernels.py`); elsewhere the plain torch below, which is also the reference
for the kernels. Rows are (M, D), in the stream's dtype or, with a scale, in fp8.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.acceleration.cuda.fp8.quantisation import to_fp8
from vitrail.models.stems import patchify

Form = Literal["none", "gelu", "gelu_tanh", "quick_gelu", "relu"]
"""The supported activations."""


def norm(
    x: Tensor, eps: float, *, shift: Tensor | None = None, branch: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Normalise rows to mean 0 and variance 1; `branch` is first added to x in place.

    `shift` (D,) is added before normalising, but not to x. With `scale`, the result is fp8, quantised with that scale.
    """
    if x.is_cuda:
        from vitrail.acceleration.cuda.inference.kernels import norm as fused

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
        from vitrail.acceleration.cuda.inference.kernels import activate as fused

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
        from vitrail.acceleration.cuda.inference.kernels import cut_patches as fused

        return fused(images, patch, dtype, before=before, after=after)
    return F.pad(patchify(images, patch).to(dtype), (0, 0, before, after))


def add_table(tokens: Tensor, table: Tensor) -> Tensor:
    """Add a table (T, D) to every image's tokens (B, T, D), in place."""
    if tokens.is_cuda:
        from vitrail.acceleration.cuda.inference.kernels import add_table as fused

        return fused(tokens, table)
    return tokens.add_(table)


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
