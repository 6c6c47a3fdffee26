"""Multi-head self-attention.

Attention is not masked: every token attends to every other token of its image, and all images in a batch have the
same number of tokens. Axes: B batch, T tokens, D width, H heads, d width of a head.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.config import ViTConfig
from vitrail.models.position import TokenPositions, relative_term, rotate


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
