"""The matmuls of the encoder, in bf16 with fused epilogues or in fp8; constant folding, and the rounding of weights.

Norms and LayerScale are folded into the matrices next to them:

    norm(x) = γ·x̂ + β, so  W·norm(x) + b  =  (W·γ)·x̂ + (b + W·β)        after a LayerNorm
    s·(W·x + b)  =  (s·W)·x + (s·b)                                       before a LayerScale

Folding is in float64, so that a folded model rounds only once, when its matrices are cast.

The inputs of a matmul are observed on sample images (`InputStatistics`). Correlated inputs can compensate each other:
after the weights of one input are rounded, those of the remaining inputs are adjusted to minimise the output error
(GPTQ, arXiv 2210.17323). It costs nothing at inference.

On a CPU plain torch does the same arithmetic, in any dtype, so that it can be checked without a GPU.
"""

import math
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.acceleration.cuda.elementwise import FP8, FP8_MAX, Form, activate, to_fp8
from vitrail.models.blocks import Block, LayerScale

# ── folding ──


class Affine(NamedTuple):
    """A weight (outputs, inputs) and a bias, both float64."""

    weight: Tensor
    bias: Tensor

    def rows(self, start: int, stop: int) -> "Affine":
        """Return a slice of the outputs."""
        return Affine(self.weight[start:stop], self.bias[start:stop])


class Folded(NamedTuple):
    """A block as four matmuls, with only normalisation, attention and the activation in between."""

    qkv: Affine
    proj: Affine
    fc1: Affine
    fc2: Affine


@torch.no_grad()
def fold(block: Block) -> Folded:
    """Fold the norms and LayerScale of a pre-norm block into its matrices."""
    return Folded(
        qkv=_after_norm(block.attn.qkv, block.norm1),
        proj=_scaled(cast("nn.Linear", block.attn.proj), block.ls1),
        fc1=_after_norm(block.mlp.fc1, block.norm2),
        fc2=_scaled(block.mlp.fc2, block.ls2),
    )


def affine(linear: nn.Linear | nn.Conv2d) -> Affine:
    """Return a layer's matrix, and its bias or zeros."""
    weight = linear.weight.detach().double().flatten(1)
    bias = weight.new_zeros(weight.shape[0]) if linear.bias is None else linear.bias.detach().double()
    return Affine(weight, bias)


def _after_norm(linear: nn.Linear, norm: nn.LayerNorm) -> Affine:
    weight, bias = affine(linear)
    return Affine(weight * norm.weight.detach().double(), bias + weight @ norm.bias.detach().double())


def _scaled(linear: nn.Linear, scale: nn.Module) -> Affine:
    weight, bias = affine(linear)
    if not isinstance(scale, LayerScale):
        return Affine(weight, bias)
    gamma = scale.gamma.detach().double()
    return Affine(weight * gamma[:, None], bias * gamma)


# ── rounding to fp8 ──

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


# ── matmuls ──

WeightScales = Literal["tensor", "row"]
"""Whether an fp8 matrix has one scale, or one per output."""


class InputCalibration(NamedTuple):
    """The calibration of a matmul's input (`calibrate`)."""

    scale: float
    """The quantisation scale of the input."""
    correlation: Tensor | None = None
    """The damped correlation of the inputs, to round the weights with (`round_correlated`); None: round to nearest."""


class Matmul(nn.Module):
    """A matmul in the dtype of the residual stream."""

    weight: Tensor
    bias: Tensor

    def __init__(self, folded: Affine, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("weight", folded.weight.to(dtype).contiguous(), persistent=False)
        self.register_buffer("bias", folded.bias.to(dtype).contiguous(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (M, inputs) to (M, outputs)."""
        return F.linear(x, self.weight, self.bias)

    def activated(self, x: Tensor, form: Form, *, fused: bool = False) -> Tensor:
        """Return the activated output, with the activation fused by cuBLASLt where it can.

        cuBLASLt's GELU is the tanh approximation; the exact `gelu` takes a separate kernel, or with `fused` a Triton
        matmul.
        """
        if x.is_cuda and fused:
            from vitrail.acceleration.cuda.kernels import multiply

            return multiply(x, self.weight, self.bias, form)
        if x.is_cuda and form in ("gelu_tanh", "relu"):
            # A private function, but the only access to this epilogue in torch.
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=form == "gelu_tanh")
        return activate(self(x), form)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the output to the residual in place, without the bias: a GEMM adds only one matrix."""
        residual.addmm_(x, self.weight.t())


class Fp8Matmul(nn.Module):
    """An fp8 matmul, accumulated in float32 and written in the stream's dtype."""

    weight: Tensor
    bias: Tensor
    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self, folded: Affine, dtype: torch.dtype, calibration: InputCalibration, weight_scales: WeightScales = "tensor"
    ) -> None:
        super().__init__()
        self.dtype, self.scale, self.by_row = dtype, calibration.scale, weight_scales == "row"
        largest = folded.weight.abs().amax(dim=1, keepdim=True) if self.by_row else folded.weight.abs().max()
        scale = (largest / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny).float()
        if calibration.correlation is None:
            weight = to_fp8(folded.weight.float(), scale).contiguous()
        else:
            weight = round_correlated(folded.weight.float() / scale, calibration.correlation.to(scale.device))
        self.register_buffer("weight", weight, persistent=False)
        self.sum_scale = 0.0 if self.by_row else float(scale) * calibration.scale
        self.register_buffer("weight_scale", scale.t().contiguous() if self.by_row else scale, persistent=False)
        self.register_buffer("bias", folded.bias.to(dtype).contiguous(), persistent=False)
        self.register_buffer("input_scale", scale.new_tensor(calibration.scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map fp8 rows (M, inputs) to (M, outputs)."""
        if x.is_cuda:
            # With a scale per output, torch also requires one per input row.
            input_scale = self.input_scale.expand(x.shape[0], 1).contiguous() if self.by_row else self.input_scale
            return torch._scaled_mm(
                x, self.weight.t(), input_scale, self.weight_scale, self.bias, out_dtype=self.dtype, use_fast_accum=True
            )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sums = x.to(wide) @ self.weight.to(wide).t()
        return (sums * (self.input_scale * self.weight_scale) + self.bias.to(wide)).to(self.dtype)

    def activated(self, x: Tensor, form: Form, scale: float | None, *, fused: bool = False) -> Tensor:
        """Return the activated output, in fp8 if there is a scale; with `fused`, by a single Triton matmul."""
        if x.is_cuda and fused and not self.by_row:
            from vitrail.acceleration.cuda.kernels import multiply

            return multiply(x, self.weight, self.bias, form, sum_scale=self.sum_scale, scale=scale)
        return activate(self(x), form, scale=scale)
