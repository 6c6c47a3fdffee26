"""A matmul of the encoder in the dtype of the residual stream, with fused epilogues.

On a CPU plain torch does the same arithmetic, in any dtype, so that it can be checked without a GPU.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.acceleration.cuda.inference.elementwise import Form, activate
from vitrail.acceleration.folding import Affine


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
            from vitrail.acceleration.cuda.inference.kernels import multiply

            return multiply(x, self.weight, self.bias, form)
        if x.is_cuda and form in ("gelu_tanh", "relu"):
            # A private function, but the only access to this epilogue in torch.
            return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=form == "gelu_tanh")
        return activate(self(x), form)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the output to the residual in place, without the bias: a GEMM adds only one matrix."""
        residual.addmm_(x, self.weight.t())
