"""A matmul of the encoder in fp8.

On a CPU plain torch does the same arithmetic, so that it can be checked without a GPU.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from vitrail.acceleration.cuda.fp8.quantisation import FP8_MAX, InputCalibration, round_correlated, to_fp8
from vitrail.acceleration.cuda.inference.elementwise import Form, activate
from vitrail.acceleration.folding import Affine

WeightScales = Literal["tensor", "row"]
"""Whether an fp8 matrix has one scale, or one per output."""


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
            from vitrail.acceleration.cuda.inference.kernels import multiply

            return multiply(x, self.weight, self.bias, form, sum_scale=self.sum_scale, scale=scale)
        return activate(self(x), form, scale=scale)
