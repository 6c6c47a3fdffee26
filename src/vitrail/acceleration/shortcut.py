"""The model's forward pass for training, with what nobody sees left out; to be wrapped by torch.compile.

Where the head reads one token only, the last block computes keys and values of all tokens, but everything else of that
token alone. The other tokens' numbers would reach no loss, so every gradient stays what it is. Under autocast the
residual stream is kept in the low precision, which halves what norms and additions move.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vitrail.acceleration.packed import token_read
from vitrail.errors import ConfigError
from vitrail.models.blocks import Block
from vitrail.models.config import ViTConfig
from vitrail.models.position import Places
from vitrail.models.vit import ViT


def can_shorten(config: ViTConfig) -> bool:
    """Say whether such a model has something to leave out, and nothing that needs all tokens to place a query."""
    return (
        token_read(config) is not None
        and config.norm_order == "pre"
        and config.position not in ("rope_2d", "relative")
        and not config.patch_dropout
    )


class Shortcut(nn.Module):
    """A model, computed in fewer steps. It has no parameters but the model's own, and trains those.

    Stochastic depth draws what it draws in the model; dropout in the last block draws for one token instead of all.
    """

    def __init__(self, model: ViT) -> None:
        super().__init__()
        if not can_shorten(model.config):  # it would be computed all the same, and wrongly
            raise ConfigError(
                "this model's head reads more than one token, or its blocks need all of them; train the model itself"
            )
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures (B, C, H, W) to logits (B, classes)."""
        model = self.model
        tokens, places = model.embed(x)
        if torch.is_autocast_enabled(x.device.type):
            tokens = tokens.to(torch.get_autocast_dtype(x.device.type))
        *blocks, last = (cast("Block", block) for block in model.blocks)
        for block in blocks:
            tokens = self._run(_all_tokens, block, tokens, places)
        return model._classify(self._run(_one_token, last, tokens, places))

    def _run(
        self, function: Callable[[Block, Tensor, Places], Tensor], block: Block, tokens: Tensor, places: Places
    ) -> Tensor:
        """Run one block, forgetting its activations until the backward pass where the model is told to."""
        if self.model.gradient_checkpointing and self.model.training:
            return cast("Tensor", checkpoint(function, block, tokens, places, use_reentrant=False))
        return function(block, tokens, places)


def _all_tokens(block: Block, x: Tensor, places: Places) -> Tensor:
    """Map (B, T, D) to (B, T, D), in the dtype it came in."""
    x = block.place(x, places).to(x.dtype)
    return _added(block, x, block.attn(block.norm1(x), places))


def _one_token(block: Block, x: Tensor, places: Places) -> Tensor:
    """Map (B, T, D) to the token that is read, (B, 1, D)."""
    x = block.place(x, places).to(x.dtype)
    normed = block.norm1(x)
    read = token_read(block.config) or 0  # asked for each time: a model can be resized
    here = slice(read, read + 1)
    return _added(block, x[:, here], _attended(block, normed[:, here], normed))


def _attended(block: Block, asking: Tensor, x: Tensor) -> Tensor:
    """Let some tokens (B, t, D) look at all of (B, T, D); what `Attention` returns for them."""
    attention = block.attn
    shape, inner = (attention.heads, attention.head_width), attention.heads * attention.head_width
    weight, bias = attention.qkv.weight, attention.qkv.bias
    query = F.linear(asking, weight[:inner], None if bias is None else bias[:inner]).unflatten(-1, shape)
    key, value = F.linear(x, weight[inner:], None if bias is None else bias[inner:]).chunk(2, dim=-1)
    query, key = attention.q_norm(query), attention.k_norm(key.unflatten(-1, shape))
    heads = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.unflatten(-1, shape).transpose(1, 2),
        dropout_p=attention.dropout if attention.training else 0.0,
    )
    return cast("Tensor", attention.proj_drop(attention.proj(heads.transpose(1, 2).flatten(2))))


def _added(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    """Add the attention's branch, then the MLP's. LayerScale's factors are float32, so each sum is cast back."""
    x = (x + block.drop_path(block.ls1(attended))).to(x.dtype)
    return cast("Tensor", (x + block.drop_path(block.ls2(block.mlp(block.norm2(x))))).to(x.dtype))
