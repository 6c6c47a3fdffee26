"""The kernels of `elementwise.py` in Triton, and a matmul with a fused activation.

Triton comes only with torch's CUDA builds, so this file is imported only for CUDA tensors. Statistics and activations
are computed in float32, whatever the dtype of the rows. Axes: M rows, D width, N outputs and K inputs of a matmul.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrail.acceleration.cuda.fp8.quantisation import FP8

_FORMS: dict[str, int] = {"none": 0, "gelu": 1, "gelu_tanh": 2, "quick_gelu": 3, "relu": 4}
"""Codes of the activations (`elementwise.Form`)."""


# ── elementwise functions ──


@triton.jit
def _saturated(x):
    """Round to fp8, saturating at ±448."""
    return tl.minimum(tl.maximum(x, -448.0), 448.0).to(tl.float8e4nv)


@triton.jit
def _gelu(x):
    """Compute the exact GELU, x·Φ(x), by a polynomial with an error of at most 1.5e-7 (Abramowitz and Stegun, 7.1.26).

    The polynomial gives Φ(−|x|) directly, which avoids cancellation where GELU is small.
    """
    size = tl.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    tail = 0.5 * series * tl.exp(-size * size)
    return x * tl.where(x > 0, 1.0 - tail, tail)


@triton.jit
def _gelu_for_fp8(x):
    """Compute GELU to within 5e-5, below fp8's resolution, with multiplications only, so that it stays memory-bound.

    Φ(x) − ½ is x times a polynomial in x² (minimax up to 4.25, and nearly ½ there), which needs neither division nor
    exp. Beyond ±30 the error grows with x, to 1.7e-6 of it.
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
    """Apply an activation to float32 values, which will be rounded to fp8 if LOW."""
    if FORM == 1:
        x = _gelu_for_fp8(x) if LOW else _gelu(x)
    elif FORM == 2:
        # tanh(u) = 1 − 2 / (e^2u + 1), which only needs exp; e^2u may overflow to infinity.
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
    x_ptr, shift_ptr, branch_ptr, out_ptr, M, D, eps, inverse_scale,
    HAS_SHIFT: tl.constexpr, HAS_BRANCH: tl.constexpr, LOW: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add the branch to the stream and write it back; add the shift, normalise, and write to `out`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, WIDE)
    inside = (rows[:, None] < M) & (columns[None, :] < D)
    offsets = rows[:, None].to(tl.int64) * D + columns[None, :]
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_BRANCH:
        x += tl.load(branch_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
        stored = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + offsets, stored, mask=inside)
        # Normalise the rounded stream, which is what later blocks read.
        x = stored.to(tl.float32)
    if HAS_SHIFT:
        x += tl.load(shift_ptr + columns, mask=columns < D, other=0.0)[None, :]
    mean = tl.sum(x, axis=1) / D
    off = tl.where(inside, x - mean[:, None], 0.0)
    variance = tl.sum(off * off, axis=1) / D
    normed = off * (1.0 / tl.sqrt(variance + eps))[:, None]
    if LOW:
        tl.store(out_ptr + offsets, _saturated(normed * inverse_scale), mask=inside)
    else:
        tl.store(out_ptr + offsets, normed.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _activate_all(x_ptr, out_ptr, count, inverse_scale, FORM: tl.constexpr, LOW: tl.constexpr, BLOCK: tl.constexpr):
    """Apply an activation to contiguous values."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x = _active(tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32), FORM, LOW)
    if LOW:
        tl.store(out_ptr + offsets, _saturated(x * inverse_scale), mask=inside)
    else:
        tl.store(out_ptr + offsets, x.to(out_ptr.dtype.element_ty), mask=inside)


def norm(
    x: Tensor, eps: float, *, shift: Tensor | None = None, branch: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """Implement `elementwise.norm`."""
    M, D = x.shape
    out = torch.empty_like(x, dtype=x.dtype if scale is None else FP8)
    wide = triton.next_power_of_2(D)
    rows = max(1, min(8, 4096 // wide))
    with torch.cuda.device_of(x):  # Triton launches on the current device, not on the tensors' device
        _norm_rows[(triton.cdiv(M, rows),)](
            x, x if shift is None else shift, x if branch is None else branch, out, M, D, eps, 1.0 / (scale or 1.0),
            HAS_SHIFT=shift is not None, HAS_BRANCH=branch is not None, LOW=scale is not None, ROWS=rows, WIDE=wide,
            num_warps=4 if rows * wide <= 2048 else 8,
        )  # fmt: skip
    return out


def activate(x: Tensor, form: str, *, scale: float | None = None) -> Tensor:
    """Implement `elementwise.activate`."""
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
    x_ptr, out_ptr, M, stride_b, stride_c, stride_h, stride_w,
    T: tl.constexpr, BEFORE: tl.constexpr, PATCHES: tl.constexpr, COLUMNS: tl.constexpr,
    C: tl.constexpr, PH: tl.constexpr, PW: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write each patch as one row, channel by channel and line by line, and zeros in the rows of other tokens.

    Writes are contiguous per thread, and reads are contiguous within a line of a patch.
    """
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    elements = tl.arange(0, WIDE)
    patch = rows % T - BEFORE
    is_patch = (rows < M) & (patch >= 0) & (patch < PATCHES)
    top, left = patch // COLUMNS * PH, patch % COLUMNS * PW
    channel, y, x = elements // (PH * PW), elements // PW % PH, elements % PW
    first = (rows // T).to(tl.int64) * stride_b + top * stride_h + left * stride_w
    inside = channel * stride_c + y * stride_h + x * stride_w
    valid = elements[None, :] < C * PH * PW
    values = tl.load(x_ptr + first[:, None] + inside[None, :], mask=is_patch[:, None] & valid, other=0.0)
    offsets = rows[:, None].to(tl.int64) * (C * PH * PW) + elements[None, :]
    tl.store(out_ptr + offsets, values.to(tl.float32).to(out_ptr.dtype.element_ty), mask=(rows[:, None] < M) & valid)


@triton.jit
def _add_table(x_ptr, table_ptr, count, BLOCK: tl.constexpr):
    """Add a table to each of several blocks of its size."""
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < count
    x_ptr += tl.program_id(0).to(tl.int64) * count
    x = tl.load(x_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(table_ptr + offsets, mask=inside, other=0.0)
    tl.store(x_ptr + offsets, x.to(x_ptr.dtype.element_ty), mask=inside)


def cut_patches(
    images: Tensor, patch: tuple[int, int], dtype: torch.dtype, *, before: int = 0, after: int = 0
) -> Tensor:
    """Implement `elementwise.cut_patches`."""
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
    """Implement `elementwise.add_table`."""
    block = 4096
    with torch.cuda.device_of(tokens):
        _add_table[(len(tokens), triton.cdiv(table.numel(), block))](
            tokens, table, table.numel(), BLOCK=block, num_warps=8
        )
    return tokens


# ── matmul with a fused activation ──


def _tilings() -> list[Any]:
    """Return the tilings to autotune."""
    return [
        triton.Config({"BM": rows, "BN": columns, "BK": depth, "GROUP": 8}, num_stages=stages, num_warps=warps)
        for rows, columns, depth, stages, warps in (
            (128, 256, 64, 3, 8), (128, 128, 64, 4, 8), (128, 128, 64, 4, 4), (128, 256, 128, 3, 8),
            (64, 256, 64, 4, 4),
        )
    ]  # fmt: skip


@triton.jit(do_not_specialize=["ABOUT"])
def _multiply(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, sum_scale, inverse_scale, PROGRAMS, ABOUT,  # noqa: ARG001
    FORM: tl.constexpr, LOW: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute active(x · weightᵀ · sum_scale + bias) · inverse_scale with a persistent grid.

    ABOUT is the bit length of M, used only as an autotuning key.
    """
    tiles_m, tiles_n = tl.cdiv(M, BM), tl.cdiv(N, BN)
    for tile in range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS):
        # Neighbouring programs share rows of tiles, which improves L2 cache hits.
        first = (tile // (GROUP * tiles_n)) * GROUP
        height = tl.minimum(tiles_m - first, GROUP)
        tile_m, tile_n = first + (tile % (GROUP * tiles_n)) % height, (tile % (GROUP * tiles_n)) // height
        rows, columns, depth = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN), tl.arange(0, BK)
        x_rows = x_ptr + (rows % M)[:, None].to(tl.int64) * K + depth[None, :]
        weight_rows = weight_ptr + (columns % N)[None, :].to(tl.int64) * K + depth[:, None]
        sums = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(tl.cdiv(K, BK)):
            left = K - k * BK
            x = tl.load(x_rows + k * BK, mask=depth[None, :] < left, other=0.0)
            weight = tl.load(weight_rows + k * BK, mask=depth[:, None] < left, other=0.0)
            sums = tl.dot(x, weight, sums)
        bias = tl.load(bias_ptr + columns, mask=columns < N, other=0.0).to(tl.float32)
        result = _active(sums * sum_scale + bias[None, :], FORM, LOW)
        offsets = out_ptr + rows[:, None].to(tl.int64) * N + columns[None, :]
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        if LOW:
            tl.store(offsets, _saturated(result * inverse_scale), mask=inside)
        else:
            tl.store(offsets, result.to(out_ptr.dtype.element_ty), mask=inside)


_tuned: Any = None


def multiply(
    x: Tensor, weight: Tensor, bias: Tensor, form: str, *, sum_scale: float = 1.0, scale: float | None = None,
    tiling: dict[str, int] | None = None,
) -> Tensor:  # fmt: skip
    """Return active(x · weightᵀ · sum_scale + bias): in the bias's dtype, or with `scale` in fp8.

    x (M, K) and weight (N, K) are both bf16 or both fp8. Without a `tiling`, several are timed at the first
    call, and again when the bit length of M changes.
    """
    global _tuned
    (M, K), N = x.shape, weight.shape[0]
    out = x.new_empty(M, N, dtype=bias.dtype if scale is None else FP8)
    programs = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    arguments = (x, weight, bias, out, M, N, K, sum_scale, 1.0 / (scale or 1.0), programs, M.bit_length())
    with torch.cuda.device_of(x):
        if tiling is not None:
            _multiply[(programs,)](*arguments, FORM=_FORMS[form], LOW=scale is not None, **tiling)
            return out
        if _tuned is None:  # created on first use: importing must have no side effects
            _tuned = triton.autotune(_tilings(), key=["ABOUT", "N", "K", "FORM", "LOW"])(_multiply)
        _tuned[(programs,)](*arguments, FORM=_FORMS[form], LOW=scale is not None)
    return out
