"""The passes of `passes.py` as Triton kernels, and a matrix product whose activation is part of it.

Triton comes with torch's CUDA builds and is absent elsewhere, so this file is imported only where a CUDA tensor is.
Statistics and activations are computed in float32 whatever the rows are stored in. Axes: M rows, D their width, N K the
outputs and inputs of a product.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.acceleration.cuda.elementwise import FP8, Form

_FORMS: dict[Form, int] = {"none": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4}
"""What the kernels call the activations."""


# ── what is done to numbers ──


@triton.jit
def _saturated(x):
    """Round to fp8; what is too large becomes the largest number there is, 448."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _gelu(x):
    """Compute the exact GELU, x·Φ(x), by a polynomial that is at most 1.5e-7 off (Abramowitz and Stegun, 7.1.26).

    The polynomial gives Φ(−|x|) itself, so that nothing cancels where GELU is small.
    """
    size = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * tl.exp(-size * size)
    return x * tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _gelu_for_fp8(x):
    """Compute GELU to within 5e-5, which fp8 does not see, by products alone, so that memory stays the bound.

    Φ(x) − ½ is x times a polynomial in x² (minimax up to 4.25, and nearly ½ there), which neither divides nor takes
    powers. Beyond ±30 the error grows with x, to 1.7e-6 of it.
    """
    near = tl.minimum(tl.maximum(x, -4.25), 4.25)
    square = near * near
    series = 4.55263813e-11
    series = -4.50997639e-09 + square * series
    series = 1.98103578e-07 + square * series
    series = -5.13214627e-06 + square * series
    series = 8.82625245e-05 + square * series
    series = -0.00107727828 + square * series
    series = 0.0097112013 + square * series
    series = -0.0661751628 + square * series
    series = 0.398808867 + square * series
    return x * (0.5 + near * series)


@triton.jit
def _active(x, FORM: tl.constexpr, LOW: tl.constexpr):
    """Apply an activation to float32 numbers, which will be rounded to fp8 if LOW."""
    if FORM == 1:
        x = _gelu_for_fp8(x) if LOW else _gelu(x)
    elif FORM == 2:
        # tanh(u) = 1 − 2 / (e^2u + 1), which needs no special function but exp; e^2u may become infinite.
        inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        x = x * (1.0 - 1.0 / (tl.exp(inner) + 1.0))
    elif FORM == 3:
        x = x / (1.0 + tl.exp(-1.702 * x))
    elif FORM == 4:
        x = tl.maximum(x, 0.0)
    return x


# ── rows ──


@triton.jit
def _norm_rows(
    x_at, shift_at, branch_at, out_at, M, D, eps, inverse_scale,
    HAS_SHIFT: tl.constexpr, HAS_BRANCH: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the branch to the stream and write it back; add the shift, normalise, and write to `out`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    inside = (rows[:, None] < M) & (columns[None, :] < D)
    places = rows[:, None].to(tl.int64) * D + columns[None, :]
    x = tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch_at + places, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(x_at.dtype.element_ty)
        tl.store(x_at + places, stored, mask=inside)
        # What is normalised is what the stream holds, so that no later block sees another number.
        x = stored.to(tl.float32)
    if HAS_SHIFT:
        x += tl.load(shift_at + columns, mask=columns < D, other=0.0)[None, :]
    mean = tl.sum(x, axis=1) / D
    off = tl.where(inside, x - mean[:, None], 0.0)
    variance = tl.sum(off * off, axis=1) / D
    normed = off * (1.0 / tl.sqrt(variance + eps))[:, None]
    if LOW:
        tl.store(out_at + places, _saturated(normed * inverse_scale), mask=inside)
    else:
        tl.store(out_at + places, normed.to(out_at.dtype.element_ty), mask=inside)


@triton.jit
def _activate_all(x_at, out_at, count, inverse_scale, FORM: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr):
    """Apply an activation to numbers that lie one behind the other."""
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x = _active(tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32), FORM, LOW)
    if LOW:
        tl.store(out_at + places, _saturated(x * inverse_scale), mask=inside)
    else:
        tl.store(out_at + places, x.to(out_at.dtype.element_ty), mask=inside)


def norm(
    x: Tensor, eps: float, *, shift: Tensor | None = None, branch: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Do what `passes.norm` says."""
    M, D = x.shape
    out = torch.empty_like(x, dtype=x.dtype if scale is None else FP8)
    wide = triton.next_power_of_2(D)
    rows = max(1, min(8, 4096 // wide))
    with torch.cuda.device_of(x):  # a kernel runs on the current device, wherever its tensors lie
        _norm_rows[(triton.cdiv(M, rows),)](
            x, x if shift is None else shift, x if branch is None else branch, out, M, D, eps, 1.0 / (scale or 1.0),
            HAS_SHIFT=shift is not None, HAS_BRANCH=branch is not None, LOW=scale is not None, ROWS=rows, WIDE=wide,
            num_warps=4 if rows * wide <= 2048 else 8,
        )  # fmt: skip
    return out


def activate(x: Tensor, form: Form, *, scale: float | None = None) -> Tensor:
    """Do what `passes.activate` says."""
    out = x if scale is None else torch.empty_like(x, dtype=FP8)
    block = 4096
    with torch.cuda.device_of(x):
        _activate_all[(triton.cdiv(x.numel(), block),)](
            x, out, x.numel(), 1.0 / (scale or 1.0), FORM=_FORMS[form], LOW=scale is not None, BLOCK=block, num_warps=8
        )
    return out


# ── images and tokens ──


@triton.jit
def _cut_rows(
    x_at, out_at, M, stride_b, stride_c, stride_h, stride_w,
    T: tl.constexpr, BEFORE: tl.constexpr, PATCHES: tl.constexpr, COLUMNS: tl.constexpr,
    C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write each patch as one row, channel by channel and line by line, and zeros in the rows of other tokens.

    What a thread writes lies side by side, and so does what it reads, within a line of a patch.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    numbers = tl.arange(0, WIDE)
    patch = rows % T - BEFORE
    is_patch = (rows < M) & (patch >= 0) & (patch < PATCHES)
    top, left = patch // COLUMNS * PH, patch % COLUMNS * PW
    channel, y, x = numbers // (PH * PW), numbers // PW % PH, numbers % PW
    first = (rows // T).to(tl.int64) * stride_b + top * stride_h + left * stride_w
    inside = channel * stride_c + y * stride_h + x * stride_w
    there = numbers[None, :] < C * PH * PW
    found = tl.load(x_at + first[:, None] + inside[None, :], mask=is_patch[:, None] & there, other=0.0)
    places = rows[:, None].to(tl.int64) * (C * PH * PW) + numbers[None, :]
    tl.store(out_at + places, found.to(tl.float32).to(out_at.dtype.element_ty), mask=(rows[:, None] < M) & there)


@triton.jit
def _add_table(x_at, table_at, count, BLOCK: tl.constexpr):
    """Add a table to each of several pieces of memory of its size."""
    places = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    x_at += tl.program_id(0).to(tl.int64) * count
    x = tl.load(x_at + places, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(table_at + places, mask=inside, other=0.0)
    tl.store(x_at + places, x.to(x_at.dtype.element_ty), mask=inside)


def cut_patches(
    images: Tensor, patch: tuple[int, int], dtype: torch.dtype, *, before: int = 0, after: int = 0
) -> Tensor:
    """Do what `passes.cut_patches` says."""
    (B, C, H, W), (h, w) = images.shape, patch
    columns = W // w
    patches, width = H // h * columns, C * h * w
    T = before + patches + after
    out = images.new_empty(B, T, width, dtype=dtype)
    wide = triton.next_power_of_2(width)
    rows = max(1, min(8, 4096 // wide))
    with torch.cuda.device_of(images):
        _cut_rows[(triton.cdiv(B * T, rows),)](
            images, out, B * T, *images.stride(),
            T=T, BEFORE=before, PATCHES=patches, COLUMNS=columns, C=C, PH=h, PW=w, ROWS=rows, WIDE=wide,
            num_warps=4 if rows * wide <= 2048 else 8,
        )  # fmt: skip
    return out


def add_table(tokens: Tensor, table: Tensor) -> Tensor:
    """Do what `passes.add_table` says."""
    block = 4096
    with torch.cuda.device_of(tokens):
        _add_table[(len(tokens), triton.cdiv(table.numel(), block))](
            tokens, table, table.numel(), BLOCK=block, num_warps=8
        )
    return tokens


# ── a product with its activation ──


def _shapes() -> list[Any]:
    """Return the tilings that are tried for a product."""
    return [
        triton.Config({"BM": rows, "BN": columns, "BK": depth, "GROUP": 8}, num_stages=stages, num_warps=warps)
        for rows, columns, depth, stages, warps in (
            (128, 256, 64, 3, 8), (128, 128, 64, 4, 8), (128, 128, 64, 4, 4), (128, 256, 128, 3, 8),
            (64, 256, 64, 4, 4),
        )
    ]  # fmt: skip


@triton.jit(do_not_specialize=["ABOUT"])
def _multiply(
    x_at, weight_at, bias_at, out_at, M, N, K, sum_scale, inverse_scale, PROGRAMS, ABOUT,  # noqa: ARG001
    FORM: tl.constexpr, LOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute active(x · weightᵀ · sum_scale + bias) · inverse_scale, tile after tile, each program some of them.

    ABOUT is the size of M to a power of two, and only there for tilings to be chosen by.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        # Neighbouring programs share rows of tiles, so that what they read is still in the cache.
        first = (tile // (GROUP * tiles_n)) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        tile_m, tile_n = first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height
        rows, columns, depth = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
        x_rows = x_at + (rows % M)[:, None].to(tl.int64) * K + depth[None, :]
        weight_rows = weight_at + (columns % N)[None, :].to(tl.int64) * K + depth[:, None]
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BK)):
            left = K - k * BK
            x = tl.load(x_rows + k * BK, mask=depth[None, :] < left, other=0.0)
            weight = tl.load(weight_rows + k * BK, mask=depth[:, None] < left, other=0.0)
            sums = tl.dot(x, weight, sums)
        bias = tl.load(bias_at + columns, mask=columns < N, other=0.0).to(tl.float32)
        result = _active(sums * sum_scale + bias[None, :], FORM, LOW)
        places = out_at + rows[:, None].to(tl.int64) * N + columns[None, :]
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        if LOW:
            tl.store(places, _saturated(result * inverse_scale), mask=inside)
        else:
            tl.store(places, result.to(out_at.dtype.element_ty), mask=inside)


_tuned: Any = None


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor, form: Form, *, sum_scale: float = 1.0, scale: float | None = None,
    tiling: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Return active(x · weightᵀ · sum_scale + bias): in the bias's dtype, or with `scale` in fp8.

    x (M, K) and weight (N, K) are both bf16 or both fp8. Without a `tiling`, some are timed at the first call, and
    again where M is of another size, by powers of two.
    """
    global _tuned
    (M, K), N = x.shape, weight.shape[0]
    out = x.new_empty(M, N, dtype=bias.dtype if scale is None else FP8)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    given = (x, weight, bias, out, M, N, K, sum_scale, 1.0 / (scale or 1.0), programs, M.bit_length())
    with torch.cuda.device_of(x):
        if tiling is not None:
            _multiply[(programs,)](*given, FORM=_FORMS[form], LOW=scale is not None, **tiling)
            return out
        if _tuned is None:  # made when first asked for: an import must not do anything
            _tuned = triton.autotune(_shapes(), key=["ABOUT", "N", "K", "FORM", "LOW"])(_multiply)
        _tuned[(programs,)](*given, FORM=_FORMS[form], LOW=scale is not None)
    return out
