"""Classification by the nearest neighbours, as DINO does it (arXiv 2104.14294).

The k examples whose features point most nearly the same way vote for their classes, each with the weight
exp(cosine similarity / 0.07).
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
    """Return the votes (N, K) for features (N, D); the largest is the answer, among equals the class that comes first.

    Of examples that are equally near, those that come first are taken.
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
    """Refuse more neighbours than there are."""
    if not 1 <= k <= examples:
        raise ConfigError(f"k is {k:,}; it should be from 1 to {examples:,}, the number of examples")


def _nearest(similar: Tensor, k: int) -> Tensor:
    """Return the k columns with the largest numbers of each row; among equals the first: topk promises no order."""
    least = similar.topk(k, dim=1).values[:, -1:]
    above, equal = similar > least, similar == least
    room = k - above.sum(dim=1, keepdim=True)
    taken = above | (equal & (equal.cumsum(dim=1) <= room))
    return taken.nonzero()[:, 1].view(len(similar), k)
