"""What happens to rows of numbers before and between matrix products, each in one pass over memory.

On a CUDA device these are Triton kernels (`kernels.py`); elsewhere the plain torch below, which is also what the
kernels are checked against. Rows are (M, D), in the stream's dtype or, where a scale is given, in fp8.
"""

import functools
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.models.patches import patchify

Form = Literal["none", "gelu", "gelu_tanh", "quick_gelu", "relu"]
"""The activations that one pass can apply."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0
"""The largest number of that kind of fp8."""


@functools.cache
def kernels_run(device: torch.device) -> bool:
    """Say whether the kernels run on a CUDA device: Triton may be missing, or the C compiler that it needs."""
    try:
        from vitrail.acceleration.cuda.kernels import norm as fused

        fused(torch.zeros(1, 16, device=device, dtype=torch.bfloat16), 1e-6)
    except Exception:  # whatever Triton stumbles over, the model can be computed without it
        return False
    return True


def norm(
    x: Tensor, eps: float, *, shift: Tensor | None = None, branch: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Return rows with mean 0 and variance 1: of x, of x + shift, and of x + branch, which x becomes.

    `shift` (D,) is added to what is normalised but not to x. With `scale`, the result is fp8 and stands for `scale`
    times itself.
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
    """Apply an activation: in place, or with `scale` to a new tensor in fp8 that stands for `scale` times itself."""
    if x.is_cuda:
        from vitrail.acceleration.cuda.kernels import activate as fused

        return fused(x, form, scale=scale)
    wide = x if x.dtype == torch.float64 else x.float()
    active = _plain(wide, form)
    return x.copy_(active) if scale is None else to_fp8(active, scale)


def quantise(x: Tensor, scale: float) -> Tensor:
    """Return x in fp8, standing for `scale` times itself."""
    return activate(x, "none", scale=scale)


def cut_patches(
    images: Tensor, patch: tuple[int, int], dtype: torch.dtype, *, before: int = 0, after: int = 0
) -> Tensor:
    """Cut images (B, C, H, W) into rows (B, T, C·h·w) of a dtype: patches, zeros `before` and `after` them."""
    if images.is_cuda:
        from vitrail.acceleration.cuda.kernels import cut_patches as fused

        return fused(images, patch, dtype, before=before, after=after)
    return F.pad(patchify(images, patch).to(dtype), (0, 0, before, after))


def add_table(tokens: Tensor, table: Tensor) -> Tensor:
    """Add the same table (T, D) to every image's tokens (B, T, D), in their memory."""
    if tokens.is_cuda:
        from vitrail.acceleration.cuda.kernels import add_table as fused

        return fused(tokens, table)
    return tokens.add_(table)


def to_fp8(x: Tensor, scale: Tensor | float) -> Tensor:
    """Round x / scale to fp8; what is too large becomes the largest number there is."""
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
