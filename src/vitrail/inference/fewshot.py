"""Few-shot classification by regularised least squares, the paper's protocol (arXiv 2010.11929, section 4.1).

    minimise ‖X W − Y‖² + l2 ‖W‖²

X holds features, standardised by the examples' mean and standard deviation, with a last column of 100, so large that
the bias is hardly regularised; Y is 1 for the class of an example and −1 for every other. The solution is in closed
form, so there is nothing to tune.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

L2 = 2.0**10
BIAS = 100.0
EPSILON = 1e-5


class LeastSquares(NamedTuple):
    """A linear classifier on standardised features."""

    mean: Tensor
    scale: Tensor
    weights: Tensor
    """(D + 1, K), the last row for the constant."""

    def scores(self, features: Tensor) -> Tensor:
        """Return the scores (N, K) of features (N, D); the prediction is the argmax."""
        return _with_constant((features.to(self.mean) - self.mean) / self.scale) @ self.weights


def fit_least_squares(features: Tensor, labels: Tensor, classes: int, *, l2: float = L2) -> LeastSquares:
    """Solve for the weights in float64, with the smaller of the two Gram matrices: XᵀX if N ≥ D, else XXᵀ."""
    features = features.double()
    mean, scale = features.mean(dim=0), features.std(dim=0, correction=0) + EPSILON
    x = _with_constant((features - mean) / scale)
    y = 2 * torch.nn.functional.one_hot(labels, classes).to(x) - 1
    if x.shape[0] >= x.shape[1]:
        values, vectors = torch.linalg.eigh(x.T @ x)
        left, right = vectors, vectors.T @ (x.T @ y)
    else:
        values, vectors = torch.linalg.eigh(x @ x.T)
        left, right = x.T @ vectors, vectors.T @ y
    return LeastSquares(mean, scale, left @ (right / (values[:, None] + l2)))


def draw_examples(labels: NDArray[np.int64], shots: int, seed: int) -> NDArray[np.int64]:
    """Draw `shots` examples of every class, a pure function of labels and seed; fewer shots draw a subset."""
    return np.concatenate([order[:shots] for order in _orders(labels, seed)])


def _orders(labels: NDArray[np.int64], seed: int) -> Iterator[NDArray[np.int64]]:
    """Yield the examples of each class in random order."""
    numbers, starts = np.unique(np.sort(labels), return_index=True)
    by_class = np.split(np.argsort(labels, kind="stable"), starts[1:])
    for number, own in zip(numbers.tolist(), by_class, strict=True):
        # Raw output and a stable sort: NumPy guarantees that neither changes between versions.
        draws = np.random.Philox(key=np.array([seed % 2**64, number], np.uint64)).random_raw(len(own))
        yield own[np.argsort(draws, kind="stable")]


def _with_constant(x: Tensor) -> Tensor:
    return torch.cat([x, torch.full_like(x[:, :1], BIAS)], dim=1)
