"""A post-norm Transformer built from `torch.nn`, without our code."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS, HIDDEN, PATCH, CLASSES = 24, 4, 40, 4, 5


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention head by head, in a loop."""
    out = []
    for q, k, v in zip(*(t.chunk(HEADS, dim=-1) for t in (query, key, value)), strict=True):
        weights = F.softmax(q @ k.transpose(1, 2) / (D // HEADS) ** 0.5, dim=-1)
        out.append(weights @ v)
    return torch.cat(out, dim=-1)


class PostNormLayer(nn.Module):
    """The original Transformer's encoder layer: separate projections without bias, ReLU, norm after the sum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.norm_a, self.norm_b = nn.LayerNorm(D), nn.LayerNorm(D)
        self.up, self.down = nn.Linear(D, HIDDEN), nn.Linear(HIDDEN, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_a(x + self.o(attend(self.q(x), self.k(x), self.v(x))))
        y: Tensor = self.norm_b(x + self.down(torch.relu(self.up(x))))
        return y


class PostNormTransformer(nn.Module):
    """Patches, then the class token, positions, post-norm layers, and logits for every token."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(3 * PATCH * PATCH, D)
        self.token = nn.Parameter(torch.empty(D))
        self.place = nn.Parameter(torch.empty(10, D))
        self.layers = nn.ModuleList(PostNormLayer() for _ in range(2))
        self.out = nn.Linear(D, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        tokens = [
            self.patch(x[:, :, r : r + PATCH, c : c + PATCH].flatten(1))
            for r in range(0, 12, PATCH)
            for c in range(0, 12, PATCH)
        ]
        tokens.append(self.token.expand(len(x), D))
        t = torch.stack(tokens, dim=1) + self.place
        for layer in self.layers:
            t = layer(t)
        y: Tensor = self.out(t)
        return y
