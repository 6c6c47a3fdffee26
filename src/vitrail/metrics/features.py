"""Collapse of features: whether an encoder still maps different images to different features.

A self-supervised loss may fall although the features become useless, because all images get the same ones, or because
they differ in few directions only. Both show in these numbers, without labels.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.errors import InputError


class FeatureDiversity(NamedTuple):
    """How different the features of a sample of images are."""

    rank: float
    """Effective rank: how many directions the features use, from 1 to min(N, D); 0 if all features are zero."""
    spread: float
    """Mean standard deviation per dimension: 0 if all are equal, 1/√D if they cover the sphere evenly."""


def feature_diversity(features: Tensor) -> FeatureDiversity:
    """Return the diversity of features (N, D), each divided by its length; both numbers drop in a collapse."""
    if features.ndim != 2 or 0 in features.shape:
        raise InputError(f"expected features (images, width), found a tensor of shape {tuple(features.shape)}")
    if not features.isfinite().all():
        raise InputError("the features contain NaN or infinity; training has diverged")
    directions = F.normalize(features.detach().double(), dim=1)
    return FeatureDiversity(effective_rank(directions), float(directions.std(dim=0, correction=0).mean()))


def effective_rank(matrix: Tensor) -> float:
    """Return exp of the entropy of the singular values, which are divided by their sum (Roy and Vetterli, 2007).

    >>> round(effective_rank(torch.diag(torch.tensor([1.0, 1.0, 1e-9]))), 3)
    2.0
    """
    values = torch.linalg.svdvals(matrix.double())
    total = values.sum()
    if total == 0:
        return 0.0
    return float(torch.special.entr(values / total).sum().exp())
