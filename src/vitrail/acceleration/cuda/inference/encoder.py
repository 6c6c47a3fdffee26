"""The encoder for inference on a CUDA device: the computation of `models/` with as few kernels as possible.

    tokens (B, T, D)  ->  rows (B·T, D) of the residual stream, in place from block to block  ->  tokens

Each block has four matmuls and four elementwise kernels. In bf16 the matmul of a branch also adds the residual, so it
cannot add its bias: these biases are accumulated over the blocks in advance and added where a norm reads the stream. In
fp8 the matmul computes the branch, and the following norm adds it to the stream. If the head reads a single token, the
last block computes only that token.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.acceleration.cuda.fp8.matmul import Fp8Matmul, WeightScales
from vitrail.acceleration.cuda.fp8.quantisation import FP8, InputCalibration, InputStatistics, observe
from vitrail.acceleration.cuda.inference.elementwise import Form, activate, norm, quantise
from vitrail.acceleration.cuda.inference.matmul import Matmul
from vitrail.acceleration.folding import Affine, fold_block
from vitrail.acceleration.planner import unsupported_by_fused_encoder
from vitrail.errors import ConfigError
from vitrail.models.blocks import Block, pooled_token
from vitrail.models.vit import ViT

MATMULS = ("qkv", "proj", "fc1", "fc2")
LOW = frozenset({"qkv", "fc1", "fc2"})
"""The matmuls in fp8 by default: the preceding kernel writes their inputs in fp8 at no cost."""
SPARED = 1
"""First blocks that stay in bf16. The first block of a trained B/16 causes a third of fp8's squared error, any other a
ninth or less; in smaller models it causes half or more (benchmarks/lab-gpu.md), most likely because its error passes
through all other blocks while the stream is still small."""


@dataclass(frozen=True)
class EncoderPrecision:
    """The numerical formats of the encoder."""

    dtype: torch.dtype = torch.bfloat16
    """The dtype of the residual stream, and of every matmul that is not in fp8."""
    exact: bool = False
    """Compute the exact GELU; cuBLASLt has only the tanh approximation."""
    inputs: Mapping[str, InputCalibration] | None = field(default=None, repr=False, compare=False)
    """The calibration of each matmul's input: `{"0.qkv": …}` (`calibrate`). None: no fp8."""
    low: frozenset[str] = LOW
    """The matmuls of a block that are in fp8."""
    spared: int = SPARED
    """How many of the first blocks stay out of fp8."""
    weight_scales: WeightScales = "tensor"
    fused: bool | None = None
    """On a CUDA device, use a Triton matmul if cuBLASLt cannot fuse the activation. None: only in fp8, where that is
    faster."""


class FastEncoder(nn.Module):
    """The blocks of a model: all, or the first `layers`.

    With `all_tokens`, the last block returns every token, even if the head reads only one.
    """

    shift: Tensor

    def __init__(
        self, model: ViT, precision: EncoderPrecision, *, layers: int | None = None, all_tokens: bool = False
    ) -> None:
        super().__init__()
        if lacks := unsupported_by_fused_encoder(model.config):  # the result would be wrong
            raise ConfigError(f"the fast encoder does not support {lacks}; use vitrail.accelerate")
        self.dtype, self.read = precision.dtype, None if all_tokens else pooled_token(model.config)
        shift = next(model.parameters()).new_zeros(model.config.width, dtype=torch.float64)
        self.blocks = nn.ModuleList()
        blocks = list(model.blocks)[:layers]
        for index, block in enumerate(blocks):
            read = self.read if index == len(blocks) - 1 else None
            fast = FastBlock(cast("Block", block), precision, index, shift, read)
            self.blocks.append(fast)
            shift = fast.shift_after
        self.register_buffer("shift", shift.to(_wide(self.dtype)), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D), or to (B, 1, D) if the head reads one token. May overwrite `tokens`."""
        B, T, D = tokens.shape
        left = T if self.read is None else 1
        if not B:  # not every attention kernel supports an empty batch
            return tokens.new_zeros(0, left, D, dtype=_wide(self.dtype))
        # The kernels need contiguous rows, which the output of a convolution is not for one image.
        x, branch = tokens.to(self.dtype).reshape(-1, D).contiguous(), None
        for block in self.blocks:
            x, branch = block(x, branch, B, T)
        wide = x.to(_wide(self.dtype)) + self.shift
        return (wide if branch is None else wide + branch).view(B, left, D)

    def observe(self, statistics: dict[str, InputStatistics], low: frozenset[str], spared: int) -> None:
        """Collect statistics of each matmul's input; correlations only for those that will be in fp8."""
        for block in self.blocks:
            cast("FastBlock", block).observe(statistics, low, spared)


class FastBlock(nn.Module):
    """One block: x + proj(attention(qkv(norm(x)))), then x + fc2(gelu(fc1(norm(x))))."""

    shift1: Tensor
    shift2: Tensor

    def __init__(self, block: Block, precision: EncoderPrecision, index: int, shift: Tensor, read: int | None) -> None:
        super().__init__()
        config, folded = block.config, fold_block(block)
        self.index, self.eps, self.exact, self.fused = index, config.norm_eps, precision.exact, precision.fused
        self.heads, self.head_width = config.heads, config.head_width
        self.read = read
        self.form = cast("Form", config.activation)
        self.statistics: dict[str, InputStatistics] | None = None
        self.correlated = set[str]()

        inner = self.heads * self.head_width
        if self.read is None:
            self.qkv = self._matmul("qkv", folded.qkv, precision)
        else:  # one query per image, keys and values of all tokens
            self.q = self._matmul("qkv", folded.qkv.rows(0, inner), precision)
            self.kv = self._matmul("qkv", folded.qkv.rows(inner, 3 * inner), precision)
        self.proj = self._matmul("proj", folded.proj, precision)
        self.fc1 = self._matmul("fc1", folded.fc1, precision)
        self.fc2 = self._matmul("fc2", folded.fc2, precision)

        wide = _wide(precision.dtype)
        self.register_buffer("shift1", shift.to(wide), persistent=False)
        shift = shift + folded.proj.bias if isinstance(self.proj, Matmul) else shift
        self.register_buffer("shift2", shift.to(wide), persistent=False)
        self.shift_after = shift + folded.fc2.bias if isinstance(self.fc2, Matmul) else shift
        """What remains to be added to the stream after this block."""

    def forward(self, x: Tensor, branch: Tensor | None, batch: int, tokens: int) -> tuple[Tensor, Tensor | None]:
        """Map rows (batch·tokens, D) and a branch still to be added to the same after this block."""
        first = self.qkv if self.read is None else self.kv
        h = norm(x, self.eps, shift=self.shift1, branch=branch, scale=_scale(first))
        self._observe("qkv", h)
        heads = self._attend(h, batch, tokens)
        self._observe("proj", heads)
        if self.read is not None:
            x = x.unflatten(0, (batch, tokens))[:, self.read].contiguous()
        branch = _add_branch(x, self.proj, heads)
        h = norm(x, self.eps, shift=self.shift2, branch=branch, scale=_scale(self.fc1))
        self._observe("fc1", h)
        hidden = self._activated(h)
        self._observe("fc2", hidden)
        return x, _add_branch(x, self.fc2, hidden)

    def _attend(self, h: Tensor, batch: int, tokens: int) -> Tensor:
        """Return the concatenated heads, (M, inner), of all tokens or of the one that is read."""
        if self.read is None:
            # Views: the attention kernels do not need separate tensors.
            query, key, value = self.qkv(h).view(batch, tokens, 3, self.heads, self.head_width).unbind(2)
        else:
            row = h.unflatten(0, (batch, tokens))[:, self.read].contiguous()
            query = self.q(row).view(batch, 1, self.heads, self.head_width)
            key, value = self.kv(h).view(batch, tokens, 2, self.heads, self.head_width).unbind(2)
        heads = F.scaled_dot_product_attention(*(tensor.transpose(1, 2) for tensor in (query, key, value)))
        return heads.transpose(1, 2).reshape(-1, self.heads * self.head_width)

    def _activated(self, h: Tensor) -> Tensor:
        scale = _scale(self.fc2)
        if isinstance(self.fc1, Fp8Matmul):
            return self.fc1.activated(h, self.form, scale, fused=self.fused is not False)
        if scale is not None:
            return activate(self.fc1(h), self.form, scale=scale)
        tanh = self.form == "gelu" and not self.exact
        return self.fc1.activated(h, "gelu_tanh" if tanh else self.form, fused=self.fused is True and self.exact)

    def _matmul(self, name: str, folded: Affine, precision: EncoderPrecision) -> Matmul | Fp8Matmul:
        """Create a matmul. After selecting a single token there are too few rows for fp8 to pay off.

        That token's query uses the calibration of all tokens, as keys and values do; calibrating on its own rows
        hardly changes the outputs.
        """
        if precision.inputs is None or not self._takes_fp8(name, precision.low, precision.spared):
            return Matmul(folded, precision.dtype)
        return Fp8Matmul(folded, precision.dtype, precision.inputs[f"{self.index}.{name}"], precision.weight_scales)

    def _takes_fp8(self, name: str, low: frozenset[str], spared: int) -> bool:
        return name in low and self.index >= spared and (self.read is None or name == "qkv")

    def observe(self, statistics: dict[str, InputStatistics], low: frozenset[str], spared: int) -> None:
        """Collect statistics of each matmul's input."""
        self.statistics = statistics
        self.correlated = {name for name in MATMULS if self._takes_fp8(name, low, spared)}

    def _observe(self, name: str, x: Tensor) -> None:
        if self.statistics is not None:
            key = f"{self.index}.{name}"
            self.statistics[key] = observe(x, self.statistics.get(key), correlate=name in self.correlated)


def _add_branch(x: Tensor, matmul: Matmul | Fp8Matmul, h: Tensor) -> Tensor | None:
    """Add a matmul to the stream, or return its output as a branch for the next norm to add."""
    if isinstance(matmul, Matmul):
        matmul.add_to(x, h)
        return None
    return cast("Tensor", matmul(h if h.dtype == FP8 else quantise(h, matmul.scale)))


def _scale(matmul: nn.Module) -> float | None:
    """Return the scale of a matmul's fp8 input; None if it is not in fp8."""
    return matmul.scale if isinstance(matmul, Fp8Matmul) else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the accumulation dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32
