"""The matrix products of the encoder: in bf16 by cuBLASLt with what follows them in the same kernel, or in fp8.

On a CPU the same arithmetic is done by plain torch, in any dtype, so that it can be checked without a GPU.
"""

from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.acceleration.cuda.elementwise import FP8_MAX, Form, activate, to_fp8
from vitrail.acceleration.cuda.folding import Affine
from vitrail.acceleration.cuda.rounding import round_together

WeightScales = Literal["tensor", "row"]
"""Whether an fp8 matrix has one scale, or one for each of its outputs."""


class Known(NamedTuple):
    """What is known of a product's inputs before there are any (`calibrate`)."""

    scale: float
    """What 1 in fp8 stands for."""
    together: Tensor | None = None
    """How they go up and down together, by which weights are rounded (`rounding.py`); None: each to the nearest."""


class Matmul(nn.Module):
    """A product in the stream's own dtype."""

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
        """Return the product, activated: by cuBLASLt while it makes it, where it can.

        Its GELU is the tanh form; `gelu` itself takes a pass of its own, or with `fused` a product by Triton.
        """
        if x.is_cuda and fused:
            from vitrail.acceleration.cuda.kernels import multiply

            return multiply(x, self.weight, self.bias, form)
        if x.is_cuda and form in ("gelu_tanh", "relu"):
            # A private name, but the only way torch offers to this epilogue.
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=form == "gelu_tanh")
        return activate(self(x), form)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product to the residual, in its memory, and leave the bias out: a GEMM adds one thing only."""
        residual.addmm_(x, self.weight.t())


class Fp8Matmul(nn.Module):
    """A product of fp8 numbers, summed in float32 and written in the stream's dtype."""

    weight: Tensor
    bias: Tensor
    weight_scale: Tensor
    input_scale: Tensor

    def __init__(
        self, folded: Affine, dtype: torch.dtype, known: Known, weight_scales: WeightScales = "tensor"
    ) -> None:
        super().__init__()
        self.dtype, self.scale, self.by_row = dtype, known.scale, weight_scales == "row"
        largest = folded.weight.abs().amax(dim=1, keepdim=True) if self.by_row else folded.weight.abs().max()
        scale = (largest / FP8_MAX).clamp(min=torch.finfo(torch.float32).tiny).float()
        if known.together is None:
            weight = to_fp8(folded.weight.float(), scale).contiguous()
        else:
            weight = round_together(folded.weight.float() / scale, known.together.to(scale.device))
        self.register_buffer("weight", weight, persistent=False)
        self.sum_scale = 0.0 if self.by_row else float(scale) * known.scale
        self.register_buffer("weight_scale", scale.t().contiguous() if self.by_row else scale, persistent=False)
        self.register_buffer("bias", folded.bias.to(dtype).contiguous(), persistent=False)
        self.register_buffer("input_scale", scale.new_tensor(known.scale), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map fp8 rows (M, inputs) to (M, outputs)."""
        if x.is_cuda:
            # By rows, torch wants a scale for each row of the input, too.
            given = self.input_scale.expand(x.shape[0], 1).contiguous() if self.by_row else self.input_scale
            return torch._scaled_mm(
                x, self.weight.t(), given, self.weight_scale, self.bias, out_dtype=self.dtype, use_fast_accum=True
            )
        wide = torch.float64 if self.dtype == torch.float64 else torch.float32
        sums = x.to(wide) @ self.weight.to(wide).t()
        return (sums * (self.input_scale * self.weight_scale) + self.bias.to(wide)).to(self.dtype)

    def activated(self, x: Tensor, form: Form, scale: float | None, *, fused: bool = False) -> Tensor:
        """Return the product, activated and, with a scale, in fp8: in a pass behind it, or with `fused` by Triton."""
        if x.is_cuda and fused and not self.by_row:
            from vitrail.acceleration.cuda.kernels import multiply

            return multiply(x, self.weight, self.bias, form, sum_scale=self.sum_scale, scale=scale)
        return activate(self(x), form, scale=scale)


def can_take_fp8(*sizes: int) -> bool:
    """Say whether matrices of these sizes fit the tensor cores' fp8, which come in sixteens."""
    return all(size % 16 == 0 for size in sizes)
