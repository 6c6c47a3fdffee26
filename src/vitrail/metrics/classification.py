"""Accuracy, per-class metrics, confusions and calibration of a classifier.

Shapes: N images, K classes. `probabilities` (N, K), `labels` and `predicted` (N,), `matrix` (K, K) with true classes as
rows and predicted classes as columns. Every function needs at least one image.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


def top_k_right(probabilities: Floats, labels: Integers, k: int) -> NDArray[np.bool_]:
    """Return whether each image's class is among the k most probable; ties go to the lower class index."""
    check_labels(probabilities, labels)
    own = probabilities[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(probabilities.shape[1]) < labels[:, None]
    before = (probabilities > own) | ((probabilities == own) & earlier)
    return np.asarray(before.sum(axis=1) < k)


def confusion_matrix(labels: Integers, predicted: Integers, classes: int) -> NDArray[np.int64]:
    """Count the images of each class (row) by predicted class (column)."""
    cells = np.bincount(np.asarray(labels, np.int64) * classes + predicted, minlength=classes**2)
    return cells.reshape(classes, classes).astype(np.int64)


class PerClass(NamedTuple):
    """One value per class; NaN where undefined."""

    images: NDArray[np.int64]
    """The number of images of the class."""
    precision: NDArray[np.float64]
    """The fraction of images predicted as the class that belong to it."""
    recall: NDArray[np.float64]
    """The fraction of images of the class that are predicted as it."""
    f1: NDArray[np.float64]
    """The harmonic mean of both; 0 if no prediction is right, NaN if the class does not occur."""


def per_class(matrix: NDArray[np.int64]) -> PerClass:
    """Return count, precision, recall and F1 of each class."""
    right, count, predicted = np.diagonal(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    return PerClass(count, _ratio(right, predicted), _ratio(right, count), _ratio(2 * right, count + predicted))


def macro_f1(matrix: NDArray[np.int64]) -> float:
    """Return the mean F1 of the classes that have images.

    If every class has images, this equals scikit-learn's. A class without images is skipped here; in scikit-learn it
    counts as 0 if it was predicted.
    """
    scores = per_class(matrix)
    return float(scores.f1[scores.images > 0].mean())


def balanced_accuracy(matrix: NDArray[np.int64]) -> float:
    """Return the mean recall of the classes that have images."""
    return float(np.nanmean(per_class(matrix).recall))


def log_losses(probabilities: Floats, labels: Integers) -> NDArray[np.float64]:
    """Return -log of the probability of each image's class, clamped at the smallest positive float32."""
    check_labels(probabilities, labels)
    own = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    return np.asarray(-np.log(np.maximum(own, np.finfo(np.float32).tiny)))


def log_loss(probabilities: Floats, labels: Integers) -> float:
    """Return the mean of -log of the probability of the true class."""
    return float(log_losses(probabilities, labels).mean())


class Confusion(NamedTuple):
    """Images of one class that were predicted as another."""

    true: int
    predicted: int
    images: int


def most_confused(matrix: NDArray[np.int64], most: int) -> list[Confusion]:
    """Return the most frequent confusions, in descending order."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    true, predicted = np.nonzero(wrong)
    order = np.argsort(-wrong[true, predicted], kind="stable")[:most]
    return [Confusion(int(t), int(p), int(wrong[t, p])) for t, p in zip(true[order], predicted[order], strict=True)]


def check_labels(probabilities: Floats, labels: Integers) -> None:
    """Raise unless there is at least one image, and a valid label for each."""
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise InputError(f"probabilities {probabilities.shape} with labels {labels.shape}; pass (N, K) and (N,)")
    if not len(labels):
        raise InputError("no images to evaluate")
    if labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise InputError(
            f"labels range from {labels.min()} to {labels.max()}; with {probabilities.shape[1]} classes they must be "
            f"0 to {probabilities.shape[1] - 1}"
        )


def _ratio(numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> NDArray[np.float64]:
    ratios = np.full(len(denominator), np.nan)
    return np.asarray(np.divide(numerator, denominator, out=ratios, where=denominator > 0))


# ── calibration ──

BINS = 15
"""The usual number of bins (Guo et al., arXiv 1706.04599)."""


class ReliabilityBin(NamedTuple):
    """The images whose predicted class has a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float | None
    """The mean probability of the predicted classes; None in an empty bin."""
    accuracy: float | None
    """The fraction of correct predictions; None in an empty bin."""


def reliability(probabilities: Floats, labels: Integers, bins: int = BINS) -> tuple[ReliabilityBin, ...]:
    """Bin images by confidence into bins of equal width, and compute the accuracy of each bin."""
    check_labels(probabilities, labels)
    confidence = probabilities.max(axis=1).astype(np.float64)
    right = probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    confidences = np.bincount(index, confidence, bins) / np.maximum(counts, 1)
    accuracies = np.bincount(index, right, bins) / np.maximum(counts, 1)
    return tuple(
        ReliabilityBin(
            float(edges[i]),
            float(edges[i + 1]),
            int(counts[i]),
            float(confidences[i]) if counts[i] else None,
            float(accuracies[i]) if counts[i] else None,
        )
        for i in range(bins)
    )


def expected_calibration_error(table: tuple[ReliabilityBin, ...]) -> float:
    """Return the expected calibration error (ECE): the mean gap between confidence and accuracy, weighted by images."""
    gaps = [
        row.images * abs(row.accuracy - row.confidence)
        for row in table
        if row.accuracy is not None and row.confidence is not None
    ]
    return sum(gaps) / sum(row.images for row in table)
