"""The encoder block (attention, then an MLP, each on a residual branch), and pooling of its tokens.

Attention is not masked: every token attends to every other token of its image, and all images in a batch have the
same number of tokens. Axes: B batch, T tokens, D width, H heads, d width of a head.
"""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import ViTConfig
from vitrail.models.position import TokenPositions, add_table, gather_tokens, read_table, relative_term, rotate

# ── attention ──


class Attention(nn.Module):
    """Self-attention with torch's fused kernel; `traced` computes the same and also returns the weights."""

    rel_pos: nn.Parameter | None

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        inner = self.heads * self.head_width
        self.qkv = nn.Linear(config.width, 3 * inner, bias=config.qkv_bias)
        self.q_norm = nn.LayerNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(self.head_width, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        if config.position == "relative":
            self.rel_pos = nn.Parameter(self.qkv.weight.new_empty(2 * config.patches - 1, self.head_width))
        else:
            self.register_parameter("rel_pos", None)
        self.dropout = config.attention_dropout
        self.proj = nn.Linear(inner, config.width, bias=config.proj_bias) if config.out_proj else nn.Identity()
        self.proj_drop = nn.Dropout(config.proj_dropout)

    def forward(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        query, key, value, bias = self.project(x, positions)
        dropout = self.dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout)
        return self._merge(x)

    def traced(self, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Return the output of `forward` and the attention weights (B, H, T, T), whose rows sum to 1."""
        query, key, value, bias = self.project(x, positions)
        logits = (query * self.head_width**-0.5) @ key.transpose(-2, -1)
        if bias is not None:
            logits = logits + bias
        # In float32 even under bf16 autocast: rollout multiplies the weights of many layers, so rows must sum to 1.
        weights = logits.softmax(dim=-1, dtype=torch.float32)
        x = F.dropout(weights, self.dropout, self.training).to(value.dtype) @ value
        return self._merge(x), weights

    def project(self, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return queries, keys and values, each (B, H, T, d), and the attention bias."""
        B, T, _ = x.shape
        qkv = self.qkv(x).reshape(B, T, 3, self.heads, self.head_width)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = self.q_norm(query), self.k_norm(key)
        if positions.rotation is not None:
            query, key = rotate(query, positions.rotation), rotate(key, positions.rotation)
        bias = None
        if self.rel_pos is not None and positions.offsets is not None:
            bias = relative_term(query * self.head_width**-0.5, self.rel_pos, positions.offsets)
        return query, key, value, bias

    def _merge(self, x: Tensor) -> Tensor:
        """Concatenate the heads (B, H, T, d) and project them to (B, T, D)."""
        x = self.proj(x.transpose(1, 2).flatten(2))
        return cast("Tensor", self.proj_drop(x))


# ── MLP ──


def gelu_tanh(x: Tensor) -> Tensor:
    """The tanh approximation of GELU, which JAX computes by default."""
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's sigmoid approximation of GELU."""
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": F.relu,
}


class Mlp(nn.Module):
    """Two linear layers with an activation between them; `swiglu` gates one half of the hidden layer with the other."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.gated = config.activation == "swiglu"
        self.activation = None if self.gated else ACTIVATIONS[config.activation]
        self.fc1 = nn.Linear(config.width, config.mlp_hidden * (2 if self.gated else 1), bias=config.mlp_bias)
        self.drop1 = nn.Dropout(config.mlp_dropout)
        self.fc2 = nn.Linear(config.mlp_hidden, config.width, bias=config.mlp_bias)
        self.drop2 = nn.Dropout(config.mlp_dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = self.fc2(self.drop1(self.activated(self.fc1(x))))
        return cast("Tensor", self.drop2(x))

    def activated(self, x: Tensor) -> Tensor:
        """Apply the activation, gated or not, to the output of fc1."""
        if self.activation is None:
            gate, x = x.chunk(2, dim=-1)
            return F.silu(gate) * x
        return self.activation(x)


# ── block ──


class LayerScale(nn.Module):
    """A learned per-channel scale of a residual branch (arXiv 2103.17239)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the branch."""
        return x * self.gamma


class StochasticDepth(nn.Module):
    """Skip a residual branch for randomly chosen images during training (arXiv 1603.09382)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Zero the branch of some images and rescale the others to keep the expectation."""
        if not self.training or self.rate == 0:
            return x
        keep = 1 - self.rate
        return x * x.new_empty(x.shape[0], *(1,) * (x.ndim - 1)).bernoulli_(keep).div_(keep)


class Block(nn.Module):
    """One layer of the encoder, pre-norm (the paper's) or post-norm (the original Transformer's)."""

    def __init__(self, config: ViTConfig, index: int) -> None:
        super().__init__()
        self.config = config
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ls1 = LayerScale(config.width) if config.layer_scale is not None else nn.Identity()
        self.norm2 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)
        self.ls2 = LayerScale(config.width) if config.layer_scale is not None else nn.Identity()
        self.drop_path = StochasticDepth(config.stochastic_depth * index / max(1, config.depth - 1))
        if config.table_owner == "blocks":
            add_table(self, config)

    def forward(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = self.add_position(x, positions)
        if self.config.norm_order == "pre":
            x = x + self._attention_branch(self.attn(self.norm1(x), positions))
            return x + self._mlp_branch(self.norm2(x))
        x = self.norm1(x + self._attention_branch(self.attn(x, positions)))
        return cast("Tensor", self.norm2(x + self._mlp_branch(x)))

    def traced(self, x: Tensor, positions: TokenPositions) -> tuple[Tensor, Tensor]:
        """Return the output of `forward` and this block's attention weights (B, H, T, T)."""
        x = self.add_position(x, positions)
        if self.config.norm_order == "pre":
            y, weights = self.attn.traced(self.norm1(x), positions)
            x = x + self._attention_branch(y)
            return x + self._mlp_branch(self.norm2(x)), weights
        y, weights = self.attn.traced(x, positions)
        x = self.norm1(x + self._attention_branch(y))
        return self.norm2(x + self._mlp_branch(x)), weights

    def add_position(self, x: Tensor, positions: TokenPositions) -> Tensor:
        """Add the position embedding, if the config adds it in every block."""
        if self.config.table_owner == "blocks":
            x = x + gather_tokens(read_table(self, self.config), positions.kept)
        if positions.table is not None:
            x = x + positions.table
        return x

    def _attention_branch(self, y: Tensor) -> Tensor:
        return cast("Tensor", self.drop_path(self.ls1(y)))

    def _mlp_branch(self, y: Tensor) -> Tensor:
        return cast("Tensor", self.drop_path(self.ls2(self.mlp(y))))


# ── pooling ──


class AttentionPool(nn.Module):
    """A learned query attends to the tokens, followed by an MLP ("MAP head", arXiv 2106.04560)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.heads, self.head_width = config.heads, config.head_width
        inner = self.heads * self.head_width
        self.latent = nn.Parameter(torch.empty(1, 1, config.width))
        self.q = nn.Linear(config.width, inner)
        self.kv = nn.Linear(config.width, 2 * inner)
        self.proj = nn.Linear(inner, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, D) to (B, D)."""
        query, key, value = self._project(x)
        return self._merge(F.scaled_dot_product_attention(query, key, value))

    def traced(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output of `forward` and the attention weights of the query over the tokens, (B, H, T)."""
        query, key, value = self._project(x)
        logits = (query * self.head_width**-0.5) @ key.transpose(-2, -1)
        # The output is computed from the returned weights, so that gradients flow to them.
        weights = logits.softmax(dim=-1, dtype=torch.float32)[:, :, 0]
        return self._merge(weights[:, :, None].to(value.dtype) @ value), weights

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the query (B, H, 1, d), and keys and values, each (B, H, T, d)."""
        B, T, _ = x.shape
        query = self.q(self.latent).reshape(1, 1, self.heads, self.head_width).transpose(1, 2).expand(B, -1, -1, -1)
        key, value = self.kv(x).reshape(B, T, 2, self.heads, self.head_width).permute(2, 0, 3, 1, 4).unbind(0)
        return query, key, value

    def _merge(self, x: Tensor) -> Tensor:
        """Concatenate the heads (B, H, 1, d) and apply the MLP: (B, D)."""
        x = self.proj(x.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norm(x))
        return x[:, 0]


class PreLogits(nn.Module):
    """The paper's representation layer: Linear and tanh."""

    def __init__(self, width: int, representation: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, representation)

    def forward(self, x: Tensor) -> Tensor:
        """Map (…, D) to (…, representation)."""
        return torch.tanh(self.fc(x))


def pooled_token(config: ViTConfig) -> int | None:
    """Return the index of the token the head reads, or None if it reads several; the others can be skipped."""
    if config.pool != "cls" or config.distillation_token:
        return None
    return 0 if config.class_token == "first" else config.tokens - 1
