"""The model's forward pass for training on a GPU, in fewer passes over memory; to be wrapped by torch.compile.

    W·(γ·x̂ + β) + b  =  (W·γ)·x̂ + (W·β + b)

A norm's γ and β are multiplied into the matrix behind it, anew in each step. Their gradients then come from that of the
matrix, where a norm would have to sum over all tokens. Where the head reads one token only, the last block computes
keys and values of all tokens, but everything else of that token alone: the others' numbers would reach no loss. So
every gradient stays what it is, up to rounding. Patches are cut and projected by a product, which a GPU does several
times as fast as a convolution. In bf16 gradients of biases are summed while what they are the sum of is written. GELU
is there cuBLASLt's tanh form, and its slope on the way back a polynomial near that of the exact one, 9e-4 from the
tanh form's at most. The residual stream is float32, as under autocast: rounded to bf16 in every block it made
gradients up to twice as wrong (docs/lab/gpu.md).
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel
from torch.utils.checkpoint import checkpoint

from vitrail.acceleration.cuda.attention import for_training
from vitrail.acceleration.cuda.gelu_matmul import gelu_matmul
from vitrail.acceleration.cuda.gradients import gelu_gradient, joined_gradient
from vitrail.acceleration.cuda.short_attention import can_attend, is_short, short_attention, short_attention_gradient
from vitrail.acceleration.onednn import token_read
from vitrail.errors import ConfigError
from vitrail.models.attention import Attention
from vitrail.models.blocks import Block
from vitrail.models.checks import check_images
from vitrail.models.config import ViTConfig
from vitrail.models.patches import patchify
from vitrail.models.position import TokenPositions
from vitrail.models.vit import ViT


def can_hasten(config: ViTConfig) -> bool:
    """Say whether such a model can be computed so: pre-norm blocks, and no positions inside attention."""
    return config.norm_order == "pre" and config.position not in ("rope_2d", "relative")


def can_forget() -> bool:
    """Say whether gradient checkpointing saves memory once compiled: torch 2.11 keeps what our own gradients read."""
    return bool(torch.__version__ >= "2.12")


class TrainingPass(nn.Module):
    """A model, computed in fewer steps. It has no parameters but the model's own, and trains those.

    It is made for the device that the model is on by then.
    Stochastic depth draws what it draws in the model; dropout in the last block draws for one token instead of all.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        if not can_hasten(model.config):  # it would be computed all the same, and wrongly
            raise ConfigError(
                "this model's norms come after its branches, or its attention needs positions; train the model itself"
            )
        self.model = model
        self.can_attend = can_attend(next(model.parameters()).device)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, C, H, W) to logits (B, classes)."""
        model = self.model
        tokens, places = self._embed(x)
        if torch.is_autocast_enabled(x.device.type):
            tokens = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        *blocks, last = (cast("Block", block) for block in model.blocks)
        for block in blocks:
            tokens = self._run(_all_tokens, block, tokens, places)
        one = token_read(model.config) is not None and not model.config.patch_dropout
        return model._classify(self._run(_one_token if one else _all_tokens, last, tokens, places))

    def _embed(self, x: Tensor) -> tuple[Tensor, TokenPositions]:
        model, config = self.model, self.model.config
        if config.stem != "conv":
            return model.embed(x)
        check_images(x, config, next(model.parameters()))
        kernel = cast("nn.Conv2d", model.patch_embed.proj)
        return model.add_positions(F.linear(patchify(x, config.patch_size), kernel.weight.flatten(1), kernel.bias))

    def _run(
        self,
        function: Callable[[Block, Tensor, TokenPositions, bool], Tensor],
        block: Block,
        tokens: Tensor,
        places: TokenPositions,
    ) -> Tensor:
        """Run one block, forgetting its activations until the backward pass where the model is told to."""
        if self.model.gradient_checkpointing and self.model.training:
            return cast("Tensor", checkpoint(function, block, tokens, places, self.can_attend, use_reentrant=False))
        return function(block, tokens, places, self.can_attend)


# ── a block ──


def _all_tokens(block: Block, x: Tensor, places: TokenPositions, can_attend: bool) -> Tensor:
    """Map (B, T, D) to (B, T, D); attention among few tokens as `can_attend` says."""
    x = block.add_position(x, places)
    attention, normed, (weight, bias) = block.attn, _normed(x, block.norm1), _folded(block.norm1, block.attn.qkv)
    if normed.dtype != torch.bfloat16:
        query, key, value = F.linear(normed, weight, bias).chunk(3, dim=-1)
    elif can_attend and _is_plain(attention) and is_short(x.shape[1], attention.head_width):
        seen = _Seen.apply(normed, weight.to(normed.dtype), bias, attention.heads)  # type: ignore[no-untyped-call]
        return _added(block, x, attention.proj_drop(attention.proj(seen)))
    else:
        query, key, value = _Qkv.apply(normed, weight.to(normed.dtype), bias)  # type: ignore[no-untyped-call]
    return _added(block, x, _attended(block, query, key, value))


def _one_token(block: Block, x: Tensor, places: TokenPositions, _: bool) -> Tensor:
    """Map (B, T, D) to the token that is read, (B, 1, D)."""
    x = block.add_position(x, places)
    read = token_read(block.config) or 0  # asked for each time: a model can be resized
    here, inner = slice(read, read + 1), block.attn.heads * block.attn.head_width
    normed, (weight, bias) = _normed(x, block.norm1), _folded(block.norm1, block.attn.qkv)
    query = F.linear(normed[:, here], weight[:inner], bias[:inner])
    key, value = F.linear(normed, weight[inner:], bias[inner:]).chunk(2, dim=-1)
    return _added(block, x[:, here], _attended(block, query, key, value))


def _attended(block: Block, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Let tokens (B, t, inner) look at all of (B, T, inner); what `Attention` returns for them."""
    attention = block.attn
    shape = (attention.heads, attention.head_width)
    query, key, value = query.unflatten(-1, shape), key.unflatten(-1, shape), value.unflatten(-1, shape)
    query, key = attention.q_norm(query), attention.k_norm(key)
    # Chosen here, and not by the caller: what is compiled may come from a file, which knows nothing of the caller.
    with sdpa_kernel(for_training(query.shape[1], key.shape[1])):
        heads = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            dropout_p=attention.dropout if attention.training else 0.0,
        )
    return cast("Tensor", attention.proj_drop(attention.proj(heads.transpose(1, 2).flatten(2))))


def _is_plain(attention: Attention) -> bool:
    """Say whether nothing happens between queries, keys and values and their looking at each other."""
    return isinstance(attention.q_norm, nn.Identity) and not (attention.dropout and attention.training)


def _added(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """Add the attention's branch, then the MLP's."""
    mlp = block.mlp
    x = _sum(x, block.drop_path(block.ls1(attended)))
    normed, (weight, bias) = _normed(x, block.norm2), _folded(block.norm2, mlp.fc1)
    if normed.dtype == torch.bfloat16 and mlp.activation is F.gelu:
        hidden = _Hidden.apply(normed, weight.to(normed.dtype), bias)  # type: ignore[no-untyped-call]
    else:
        hidden = mlp.activated(F.linear(normed, weight, bias))
    return _sum(x, block.drop_path(block.ls2(mlp.drop2(mlp.fc2(mlp.drop1(hidden))))))


def _sum(x: Tensor, branch: Tensor) -> Tensor:
    """Add a branch to the stream."""
    if not _is_mixed(x):
        return x + branch
    return cast("Tensor", _MixedSum.apply(x, branch))  # type: ignore[no-untyped-call]


def _normed(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """Return what a product is to be made of: the stream as the norm leaves it, but for γ and β."""
    if not _is_mixed(x):
        return F.layer_norm(x, norm.normalized_shape, eps=norm.eps).to(_product_dtype(x))
    return cast("Tensor", _MixedNorm.apply(x, norm.eps))  # type: ignore[no-untyped-call]


def _is_mixed(x: Tensor) -> bool:
    """Say whether the stream is float32 and products are made in bf16."""
    return x.dtype == torch.float32 and _product_dtype(x) == torch.bfloat16


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _folded(norm: nn.LayerNorm, linear: nn.Linear) -> tuple[Tensor, Tensor]:
    """Return the matrix and the bias that make of normed tokens what the norm's γ and β and the layer make of them."""
    # As a sum of products, which autocast leaves in float32, and which is made while the matrix is read anyway.
    bias = (linear.weight * norm.bias).sum(dim=1)
    return linear.weight * norm.weight, bias if linear.bias is None else bias + linear.bias


# ── layers with a gradient of their own, in bf16 ──


class _MixedSum(torch.autograd.Function):
    """The stream, float32, and a branch, bf16 or float32.

    Its gradient is rounded to bf16, once for both, so that one buffer of two bytes a number serves the stream and the
    product of the branch. Since a branch in bf16 reads it, too, no compiler can take that cast out.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, branch: Tensor) -> Tensor:
        ctx.dtype = branch.dtype
        return x + branch

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        low = gradients[0].to(torch.bfloat16)
        return low.to(gradients[0].dtype), low.to(ctx.dtype)


class _MixedNorm(torch.autograd.Function):
    """The stream (B, T, D), float32, to what a norm without γ and β makes of it, bf16.

    Its gradient is made of that, which the product behind it keeps anyway, so that the stream itself is not kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> Tensor:
        wide, _, scale = torch.native_layer_norm(x, x.shape[-1:], None, None, eps)
        normed = wide.to(torch.bfloat16)
        ctx.save_for_backward(normed, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        normed, scale = ctx.saved_tensors
        normed, gradient = normed.float(), gradients[0].float()
        along = (gradient * normed).mean(dim=-1, keepdim=True)
        return scale * (gradient - gradient.mean(dim=-1, keepdim=True) - normed * along), None


class _Qkv(torch.autograd.Function):
    """Tokens (B, T, D) to queries, keys and values, each (B, T, inner). The bias is float32, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        made = torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight.t())
        return made.view(*x.shape[:2], weight.shape[0]).chunk(3, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        joined, summed = joined_gradient(*(gradient.flatten(0, 1) for gradient in gradients))
        return _before(joined, x, weight), joined.t() @ x.flatten(0, 1), summed


class _Seen(torch.autograd.Function):
    """Tokens (B, T, D) to what they see, (B, T, inner), where they are few. The bias is float32, as is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, heads: int) -> Tensor:
        made = torch.addmm(bias.to(x.dtype), x.flatten(0, 1), weight.t()).view(*x.shape[:2], weight.shape[0])
        seen, totals = short_attention(made, heads)
        ctx.save_for_backward(x, weight, made, seen, totals)
        ctx.heads = heads
        return cast("Tensor", seen)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, made, seen, totals = ctx.saved_tensors
        gradient, summed = short_attention_gradient(gradients[0], made, seen, totals, ctx.heads)
        gradient = gradient.flatten(0, 1)
        return _before(gradient, x, weight), gradient.t() @ x.flatten(0, 1), summed, None


class _Hidden(torch.autograd.Function):
    """Tokens (B, T, D) to the hidden layer behind GELU, (B, T, hidden). The bias is float32, and so is its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        hidden, made = gelu_matmul(x.flatten(0, 1), weight, bias.to(x.dtype))
        ctx.save_for_backward(x, weight, made)
        return cast("Tensor", hidden.view(*x.shape[:2], weight.shape[0]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight, made = ctx.saved_tensors
        gradient, summed = gelu_gradient(gradients[0].flatten(0, 1), made)
        return _before(gradient, x, weight), gradient.t() @ x.flatten(0, 1), summed


def _before(gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return the gradient of what a product was made of."""
    return (gradient @ weight).view_as(x)
