"""The encoder block: attention, then an MLP, each on a residual branch."""

from collections.abc import Callable
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrail.models.attention import Attention
from vitrail.models.config import ViTConfig
from vitrail.models.position import Places, add_table, pick, read_table


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
    """Two layers with an activation between. `swiglu` makes two hidden vectors and lets one gate the other."""

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
        """Make the hidden layer of what its first layer returns."""
        if self.activation is None:
            gate, x = x.chunk(2, dim=-1)
            return F.silu(gate) * x
        return self.activation(x)


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch (arXiv 2103.17239)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        """Scale the branch."""
        return x * self.gamma


class StochasticDepth(nn.Module):
    """In training, leave a branch out for a random share of the images (arXiv 1603.09382)."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x: Tensor) -> Tensor:
        """Zero the branch of some images and scale the others so that the mean stays."""
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

    def forward(self, x: Tensor, places: Places) -> Tensor:
        """Map (B, T, D) to (B, T, D)."""
        x = self.place(x, places)
        if self.config.norm_order == "pre":
            x = x + self._attended(self.attn(self.norm1(x), places))
            return x + self._thought(self.norm2(x))
        x = self.norm1(x + self._attended(self.attn(x, places)))
        return cast("Tensor", self.norm2(x + self._thought(x)))

    def traced(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        """Return what `forward` returns, and this block's attention weights (B, H, T, T)."""
        x = self.place(x, places)
        if self.config.norm_order == "pre":
            y, weights = self.attn.traced(self.norm1(x), places)
            x = x + self._attended(y)
            return x + self._thought(self.norm2(x)), weights
        y, weights = self.attn.traced(x, places)
        x = self.norm1(x + self._attended(y))
        return self.norm2(x + self._thought(x)), weights

    def place(self, x: Tensor, places: Places) -> Tensor:
        """Add the position, where the config wants it in every block."""
        if self.config.table_owner == "blocks":
            x = x + pick(read_table(self, self.config), places.kept)
        if places.table is not None:
            x = x + places.table
        return x

    def _attended(self, y: Tensor) -> Tensor:
        return cast("Tensor", self.drop_path(self.ls1(y)))

    def _thought(self, y: Tensor) -> Tensor:
        return cast("Tensor", self.drop_path(self.ls2(self.mlp(y))))
