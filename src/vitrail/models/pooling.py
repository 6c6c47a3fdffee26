"""Pool tokens (B, T, D) into the input of the head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.blocks import Mlp
from vitrail.models.config import ViTConfig


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
