"""A linear probe: multinomial logistic regression on standardised features.

    minimise  mean over examples of cross-entropy(x W + b)  +  decay / 2 · ‖W‖²

The problem is convex, so each `decay` has one solution, which L-BFGS finds in float64. Unlike SGD, it depends neither
on a learning rate nor on a seed. (In scikit-learn's LogisticRegression, C = 1 / (decay · N).)
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.inference.fewshot import EPSILON

DECAYS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)
"""Tried in decreasing order, each warm-started from the previous solution."""
ITERATIONS = 1000
TOLERANCE = 1e-6
"""Convergence threshold for the largest gradient component; the loss is then accurate to about this."""
AT_ONCE = 2**22
"""Values computed at a time in float64; examples are kept in float32."""


class Linear(NamedTuple):
    """A linear classifier on standardised features."""

    mean: Tensor
    scale: Tensor
    weights: Tensor
    """(D + 1, K), the last row is the bias."""
    decay: float

    def scores(self, features: Tensor) -> Tensor:
        """Return the logits (N, K) of features (N, D)."""
        logits = (_standard(some, self.mean, self.scale) @ self.weights for some in _chunks(features, self.weights))
        return torch.cat(list(logits))


def fit_linear(
    features: Tensor,
    labels: Tensor,
    classes: int,
    *,
    decay: float,
    start: Linear | None = None,
    tolerance: float = TOLERANCE,
) -> Linear:
    """Fit the weights for one `decay`; `start` is a nearby solution for the same features."""
    mean, scale = _statistics(features) if start is None else (start.mean, start.scale)
    shape = (features.shape[1] + 1, classes)
    weights = torch.zeros(shape, dtype=torch.float64, device=features.device)
    if start is not None:
        weights.copy_(start.weights)
    optimiser = torch.optim.LBFGS(
        [weights],
        max_iter=ITERATIONS,
        max_eval=2 * ITERATIONS,
        tolerance_grad=tolerance,
        tolerance_change=0,
        history_size=20,
        line_search_fn="strong_wolfe",
    )

    def closure() -> float:
        loss, weights.grad = _loss_and_gradient(features, labels, mean, scale, weights, decay)
        return loss

    optimiser.step(closure)
    return Linear(mean, scale, weights, decay)


def choose_linear(
    features: Tensor,
    labels: Tensor,
    val_features: Tensor,
    val_labels: Tensor,
    classes: int,
    *,
    decays: Sequence[float] = DECAYS,
    on_progress: Callable[[int, int], None] | None = None,
) -> Linear:
    """Fit with every decay; return the best by validation accuracy, on ties by loss."""
    tried: list[tuple[float, float, Linear]] = []
    for done, decay in enumerate(sorted(decays, reverse=True), start=1):
        linear = fit_linear(features, labels, classes, decay=decay, start=tried[-1][2] if tried else None)
        scores = linear.scores(val_features)
        accuracy = float((scores.argmax(dim=1) == val_labels).double().mean())
        tried.append((accuracy, -float(F.cross_entropy(scores, val_labels)), linear))
        if on_progress is not None:
            on_progress(done, len(decays))
    return max(tried, key=lambda trial: trial[:2])[2]


def _loss_and_gradient(
    features: Tensor, labels: Tensor, mean: Tensor, scale: Tensor, weights: Tensor, decay: float
) -> tuple[float, Tensor]:
    """Return the loss and its gradient, derived by hand so that no intermediate tensors are kept."""
    free = weights.clone()
    free[-1] = 0  # the bias is not regularised
    gradient, loss, done = decay * free, decay / 2 * float(free.square().sum()), 0
    for some in _chunks(features, weights):
        x, own = _standard(some, mean, scale), labels[done : done + len(some)]
        logged = F.log_softmax(x @ weights, dim=1)
        loss -= float(logged.gather(1, own[:, None]).sum()) / len(features)
        wrong = logged.exp()
        wrong[torch.arange(len(own), device=own.device), own] -= 1
        gradient += x.T @ wrong / len(features)
        done += len(some)
    return loss, gradient


def _chunks(features: Tensor, weights: Tensor) -> Iterable[Tensor]:
    rows = max(1, AT_ONCE // sum(weights.shape))
    return (features[start : start + rows] for start in range(0, len(features), rows))


def _statistics(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every feature, in float64."""
    chunks = features.split(max(1, AT_ONCE // features.shape[1]))
    mean = torch.stack([some.double().sum(dim=0) for some in chunks]).sum(dim=0) / len(features)
    variance = torch.stack([(some.double() - mean).square().sum(dim=0) for some in chunks]).sum(dim=0) / len(features)
    return mean, variance.sqrt() + EPSILON


def _standard(features: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """Standardise features, and add a column of ones for the bias."""
    return F.pad((features.double() - mean) / scale, (0, 1), value=1.0)
