"""The whole encoder for answering on a CUDA device: what `models/` computes, in the fewest passes over memory.

    tokens (B, T, D)  ->  rows (B·T, D) of the residual stream, in place from block to block  ->  tokens

Per block four products and four passes. In bf16 the residual is added by the product that makes the branch, which then
cannot add its bias as well: these biases are summed up over the blocks, known before the first image, and added
where a norm reads the stream. In fp8 the product makes the branch, and the norm that follows adds it to the stream.
Where one token only is read behind it, the last block computes that token only.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.acceleration.cuda.elementwise import FP8, Form, activate, norm, quantise
from vitrail.acceleration.cuda.folding import Affine, fold
from vitrail.acceleration.cuda.matmul import Fp8Matmul, Known, Matmul, WeightScales, can_take_fp8
from vitrail.acceleration.cuda.merging import Merging, log_sizes, merge, read_merging
from vitrail.acceleration.cuda.rounding import Seen, see
from vitrail.acceleration.onednn import token_read
from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

PRODUCTS = ("qkv", "proj", "fc1", "fc2")
LOW = frozenset({"qkv", "fc1", "fc2"})
"""The products that fp8 is worth it for by default: their inputs are made in fp8 by the pass before, for nothing."""
SPARED = 1
"""Of the squares of fp8's error, the first block of a trained B/16 makes a third, any other a ninth or less; that of
smaller models makes half or more (benchmarks/lab-gpu.md): most likely because what it gets wrong goes through all others,
while there is little in the stream to outweigh it."""


@dataclass(frozen=True)
class Numbers:
    """In which numbers the encoder computes."""

    dtype: torch.dtype = torch.bfloat16
    """Of the residual stream, and of every product that is not in fp8."""
    exact: bool = False
    """Compute GELU in its exact form, where cuBLASLt has the tanh form only."""
    inputs: Mapping[str, Known] | None = field(default=None, repr=False, compare=False)
    """What is known of each product's inputs: `{"0.qkv": …}` (`calibrate`). None: nothing is in fp8."""
    low: frozenset[str] = LOW
    """Which of a block's products are in fp8."""
    spared: int = SPARED
    """How many of the first blocks are not."""
    weight_scales: WeightScales = "tensor"
    fused: bool | None = None
    """Let Triton multiply where an activation could not be part of the product otherwise, on a CUDA device. None: where
    that was found to be faster, which is in fp8 and not in bf16."""


def can_fold(config: ViTConfig) -> bool:
    """Say whether the encoder of such a model can be computed so: the paper's blocks, positions added at the stem."""
    plain = config.norm_order == "pre" and config.out_proj and not config.qk_norm and config.activation != "swiglu"
    return plain and config.position not in ("rope_2d", "relative") and config.position_at == "stem"


def can_quantise(config: ViTConfig) -> bool:
    """Say whether such a model can also be computed in fp8."""
    return can_fold(config) and can_take_fp8(config.width, config.heads * config.head_width, config.mlp_hidden)


class FastEncoder(nn.Module):
    """The blocks of a model: all, or the first `layers`.

    With `whole` every token leaves the last one, also where the model's head reads one only. With `merge` each block
    but one behind which a single token is read has so many tokens fewer behind it (`merging.py`).
    """

    shift: Tensor

    def __init__(
        self, model: ViT, numbers: Numbers, *, layers: int | None = None, whole: bool = False, merge: int | Merging = 0
    ) -> None:
        super().__init__()
        if not can_fold(model.config):  # it would be computed all the same, and wrongly
            raise ConfigError(
                "the fast encoder takes plain pre-norm blocks and positions added at the stem, which this model does "
                "not have; vitrail.accelerate computes it another way"
            )
        self.dtype, self.read = numbers.dtype, None if whole else token_read(model.config)
        if self.read is not None and model.config.class_token == "last":
            self.read = -1  # wherever that is by then
        shift = next(model.parameters()).new_zeros(model.config.width, dtype=torch.float64)
        self.blocks = nn.ModuleList()
        blocks = list(model.blocks)[:layers]
        merging = self._read_merging(merge, model.config, len(blocks))
        for index, block in enumerate(blocks):
            read = self.read if index == len(blocks) - 1 else None
            made = FastBlock(cast("Block", block), numbers, index, shift, read, merging)
            self.blocks.append(made)
            shift = made.shift_behind
        self.register_buffer("shift", shift.to(_wide(self.dtype)), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D), or to (B, 1, D) where one token is read. The tokens' memory is written to."""
        return self.merged(tokens)[0]

    def merged(self, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Do so, and say how many patches each token stands for; None where they are as many as before."""
        B, T, D = tokens.shape
        if not B:  # for which not every kernel of attention has an answer
            left = T - sum(cast("FastBlock", block).merges for block in self.blocks)
            return tokens.new_zeros(0, left if self.read is None else 1, D, dtype=_wide(self.dtype)), None
        # The kernels take rows that lie one behind the other, which a convolution's, of one image, do not.
        x, branch, sizes = tokens.to(self.dtype).reshape(-1, D).contiguous(), None, None
        for block in self.blocks:
            x, branch, sizes = block(x, branch, B, T, sizes)
            T -= cast("FastBlock", block).merges
        wide = x.to(_wide(self.dtype)) + self.shift
        return (wide if branch is None else wide + branch).view(B, T if self.read is None else 1, D), sizes

    def _read_merging(self, merge: int | Merging, config: ViTConfig, blocks: int) -> Merging | None:
        asked = merge.tokens if isinstance(merge, Merging) else merge
        found = read_merging(asked, config, blocks if self.read is None else blocks - 1)
        return merge if found is not None and isinstance(merge, Merging) else found

    def watch(self, record: dict[str, Seen], low: frozenset[str], spared: int) -> None:
        """Keep in `record` what is seen of the numbers that go into each product, all of it for those to be in fp8."""
        for block in self.blocks:
            cast("FastBlock", block).watch(record, low, spared)


class FastBlock(nn.Module):
    """One block: x + proj(attention(qkv(norm(x)))), then x + fc2(gelu(fc1(norm(x))))."""

    shift1: Tensor
    shift2: Tensor

    def __init__(
        self, block: Block, numbers: Numbers, index: int, shift: Tensor, read: int | None, merging: Merging | None
    ) -> None:
        super().__init__()
        config, folded = block.config, fold(block)
        self.index, self.eps, self.exact, self.fused = index, config.norm_eps, numbers.exact, numbers.fused
        self.heads, self.head_width = config.heads, config.head_width
        self.read = read
        self.merges = 0 if merging is None or read is not None else merging.tokens
        self.proportional = merging is not None and merging.proportional
        patches = config.layout.patches
        self.before, self.after = patches.start, config.tokens - patches.stop
        self.form = cast("Form", config.activation)
        self.record: dict[str, Seen] | None = None
        self.summed = set[str]()

        inner = self.heads * self.head_width
        if self.read is None:
            self.qkv = self._product("qkv", folded.qkv, numbers)
        else:  # one query an image, keys and values of all tokens
            self.q = self._product("qkv", folded.qkv.rows(0, inner), numbers)
            self.kv = self._product("qkv", folded.qkv.rows(inner, 3 * inner), numbers)
        self.proj = self._product("proj", folded.proj, numbers)
        self.fc1 = self._product("fc1", folded.fc1, numbers)
        self.fc2 = self._product("fc2", folded.fc2, numbers)

        wide = _wide(numbers.dtype)
        self.register_buffer("shift1", shift.to(wide), persistent=False)
        shift = shift + folded.proj.bias if isinstance(self.proj, Matmul) else shift
        self.register_buffer("shift2", shift.to(wide), persistent=False)
        self.shift_behind = shift + folded.fc2.bias if isinstance(self.fc2, Matmul) else shift
        """What is still to be added to the stream behind this block."""

    def forward(
        self, x: Tensor, branch: Tensor | None, batch: int, tokens: int, sizes: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Map rows (batch·tokens, D), and a branch still to be added to them, to the same behind this block.

        `sizes` (batch, tokens) says how many patches each token stands for, where tokens are merged.
        """
        first = self.qkv if self.read is None else self.kv
        h = norm(x, self.eps, shift=self.shift1, branch=branch, scale=_scale(first))
        self._note("qkv", h)
        heads, keys = self._attended(h, batch, tokens, sizes)
        self._note("proj", heads)
        if self.read is not None:
            x = x.unflatten(0, (batch, tokens))[:, self.read].contiguous()
        branch = _joined(x, self.proj, heads)
        if self.merges:
            # What is kept back is the same for all tokens, so that it is in their mean, too.
            x = (x if branch is None else x.add_(branch)).unflatten(0, (batch, tokens))
            x, sizes = merge(x, sizes, keys, self.merges, before=self.before, after=self.after)
            x, branch = x.flatten(0, 1).contiguous(), None
        h = norm(x, self.eps, shift=self.shift2, branch=branch, scale=_scale(self.fc1))
        self._note("fc1", h)
        hidden = self._activated(h)
        self._note("fc2", hidden)
        return x, _joined(x, self.fc2, hidden), sizes

    def _attended(self, h: Tensor, batch: int, tokens: int, sizes: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the heads side by side, (M, inner), of all tokens or of the one that is read; and the keys of all."""
        if self.read is None:
            # Views: no kernel of attention needs the three apart in memory.
            query, key, value = self.qkv(h).view(batch, tokens, 3, self.heads, self.head_width).unbind(2)
        else:
            asked = h.unflatten(0, (batch, tokens))[:, self.read].contiguous()
            query = self.q(asked).view(batch, 1, self.heads, self.head_width)
            key, value = self.kv(h).view(batch, tokens, 2, self.heads, self.head_width).unbind(2)
        bias = log_sizes(sizes, query.dtype) if self.proportional else None
        query, keys, value = (part.transpose(1, 2) for part in (query, key, value))
        heads = F.scaled_dot_product_attention(query, keys, value, attn_mask=bias)
        return heads.transpose(1, 2).reshape(-1, self.heads * self.head_width), key

    def _activated(self, h: Tensor) -> Tensor:
        scale = _scale(self.fc2)
        if isinstance(self.fc1, Fp8Matmul):
            return self.fc1.activated(h, self.form, scale, fused=self.fused is not False)
        if scale is not None:
            return activate(self.fc1(h), self.form, scale=scale)
        tanh = self.form == "gelu" and not self.exact
        return self.fc1.activated(h, "gelu_tanh" if tanh else self.form, fused=self.fused is True and self.exact)

    def _product(self, name: str, folded: Affine, numbers: Numbers) -> Matmul | Fp8Matmul:
        """Make a product. Behind the one token that is read there are too few rows for fp8 to pay.

        That token's query is rounded by what was seen of all tokens, as keys and values are: by its own rows alone the
        answers hardly change.
        """
        if numbers.inputs is None or not self._takes_fp8(name, numbers.low, numbers.spared):
            return Matmul(folded, numbers.dtype)
        return Fp8Matmul(folded, numbers.dtype, numbers.inputs[f"{self.index}.{name}"], numbers.weight_scales)

    def _takes_fp8(self, name: str, low: frozenset[str], spared: int) -> bool:
        return name in low and self.index >= spared and (self.read is None or name == "qkv")

    def watch(self, record: dict[str, Seen], low: frozenset[str], spared: int) -> None:
        """Keep in `record` what is seen of the numbers that go into each product."""
        self.record = record
        self.summed = {name for name in PRODUCTS if self._takes_fp8(name, low, spared)}

    def _note(self, name: str, x: Tensor) -> None:
        if self.record is not None:
            key = f"{self.index}.{name}"
            self.record[key] = see(x, self.record.get(key), together=name in self.summed)


def _joined(x: Tensor, product: Matmul | Fp8Matmul, h: Tensor) -> Tensor | None:
    """Add a product to the stream, or return it as a branch for the next norm to add."""
    if isinstance(product, Matmul):
        product.add_to(x, h)
        return None
    return cast("Tensor", product(h if h.dtype == FP8 else quantise(h, product.scale)))


def _scale(product: nn.Module) -> float | None:
    """Return the scale in which a product takes its input; None where that is not fp8."""
    return product.scale if isinstance(product, Fp8Matmul) else None


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32
