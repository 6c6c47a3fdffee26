"""k-nearest neighbours as in DINO (arXiv 2104.14294): how well do features separate classes?

The k examples with the highest cosine similarity vote for their classes, each with weight exp(similarity / 0.07).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.errors import ConfigError

TEMPERATURE = 0.07
NEIGHBOURS_AT_ONCE = 2**24
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
    rows = max(1, NEIGHBOURS_AT_ONCE // len(examples))
    for start in range(0, len(features), rows):
        similar = features[start : start + rows] @ examples.T
        votes[start : start + rows] = _votes(similar, labels, classes, k, temperature)
    return votes


def _votes(similar: Tensor, labels: Tensor, classes: int, k: int, temperature: float) -> Tensor:
    """Return the votes for similarities (N, examples)."""
    nearest = _nearest(similar, k)
    weights = (similar.gather(1, nearest).double() / temperature).exp()
    votes = torch.zeros(len(similar), classes, dtype=torch.float64, device=similar.device)
    return votes.scatter_add_(1, labels[nearest], weights)


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


def leave_one_out(features: Tensor, labels: Tensor, classes: int, *, k: int = 20) -> float:
    """Return the accuracy if every image is classified by its k nearest among the others, or as many as there are."""
    k = min(k, len(features) - 1)
    check_k(k, len(features) - 1)
    features = F.normalize(features, dim=1)
    correct, rows = 0, max(1, NEIGHBOURS_AT_ONCE // len(features))
    for start in range(0, len(features), rows):
        similar = features[start : start + rows] @ features.T
        similar[torch.arange(len(similar)), torch.arange(start, start + len(similar))] = -torch.inf
        votes = _votes(similar, labels, classes, k, TEMPERATURE)
        correct += int((votes.argmax(dim=1) == labels[start : start + rows]).sum())
    return correct / len(features)
