"""k-nearest-neighbour classification as in DINO (arXiv 2104.14294).

The k examples with the highest cosine similarity vote for their classes, each with weight exp(similarity / 0.07).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import ConfigError

TEMPERATURE = 0.07
AT_ONCE = 2**24
"""Similarities held in memory at a time."""


def vote(
    examples: Tensor, labels: Tensor, features: Tensor, classes: int, *, k: int = 20, temperature: float = TEMPERATURE
) -> Tensor:
    """Return the votes (N, K) for features (N, D); the prediction is the argmax, on ties the first class.

    Among equally near examples, the first ones count.
    """
    check_k(k, len(examples))
    examples, features = F.normalize(examples, dim=1), F.normalize(features, dim=1)
    votes = torch.zeros(len(features), classes, dtype=torch.float64, device=features.device)
    rows = max(1, AT_ONCE // len(examples))
    for start in range(0, len(features), rows):
        similar = features[start : start + rows] @ examples.T
        nearest = _nearest(similar, k)
        weights = (similar.gather(1, nearest).double() / temperature).exp()
        votes[start : start + rows].scatter_add_(1, labels[nearest], weights)
    return votes


def check_k(k: int, examples: int) -> None:
    """Raise if there are fewer than k examples."""
    if not 1 <= k <= examples:
        raise ConfigError(f"k is {k:,}; it should be from 1 to {examples:,}, the number of examples")


def _nearest(similar: Tensor, k: int) -> Tensor:
    """Return the k largest columns of each row, on ties the first; topk guarantees no order."""
    least = similar.topk(k, dim=1).values[:, -1:]
    above, equal = similar > least, similar == least
    ties = k - above.sum(dim=1, keepdim=True)
    chosen = above | (equal & (equal.cumsum(dim=1) <= ties))
    return chosen.nonzero()[:, 1].view(len(similar), k)
