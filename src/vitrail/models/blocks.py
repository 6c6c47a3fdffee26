"""The encoder block: attention, then an MLP, each on a residual branch."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.attention import Attention
from vitrail.models.config import ViTConfig
from vitrail.models.position import TokenPositions, add_table, gather_tokens, read_table


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
