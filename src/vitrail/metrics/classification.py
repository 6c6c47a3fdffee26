"""How often a classifier is right, and where it is wrong.

Shapes: N images, K classes. `probabilities` (N, K), `labels` and `predicted` (N,), `matrix` (K, K) with the true
class by row and the predicted one by column. Every function takes at least one image.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError

Floats = NDArray[np.floating]
Integers = NDArray[np.integer]


def top_k_right(probabilities: Floats, labels: Integers, k: int) -> NDArray[np.bool_]:
    """Say of each image whether its class is among the k most probable; of equal ones the first counts as more."""
    check_labels(probabilities, labels)
    own = probabilities[np.arange(len(labels)), labels][:, None]
    earlier = np.arange(probabilities.shape[1]) < labels[:, None]
    before = (probabilities > own) | ((probabilities == own) & earlier)
    return np.asarray(before.sum(axis=1) < k)


def top_k_accuracy(probabilities: Floats, labels: Integers, k: int = 1) -> float:
    """Return the share of images whose class is among the k most probable."""
    return float(top_k_right(probabilities, labels, k).mean())


def confusion_matrix(labels: Integers, predicted: Integers, classes: int) -> NDArray[np.int64]:
    """Count the images of each class (row) that were taken for each class (column)."""
    cells = np.bincount(np.asarray(labels, np.int64) * classes + predicted, minlength=classes**2)
    return cells.reshape(classes, classes).astype(np.int64)


class PerClass(NamedTuple):
    """One number for each class; NaN where there is nothing to divide by."""

    images: NDArray[np.int64]
    """How many the class has."""
    precision: NDArray[np.float64]
    """Of the images taken for the class, the share that is of it."""
    recall: NDArray[np.float64]
    """Of the images of the class, the share taken for it."""
    f1: NDArray[np.float64]
    """The harmonic mean of both; 0 where no image is right, NaN where the class occurs nowhere."""


def per_class(matrix: NDArray[np.int64]) -> PerClass:
    """Return count, precision, recall and F1 of each class."""
    right, count, taken = np.diagonal(matrix), matrix.sum(axis=1), matrix.sum(axis=0)
    return PerClass(count, _ratio(right, taken), _ratio(right, count), _ratio(2 * right, count + taken))


def macro_f1(matrix: NDArray[np.int64]) -> float:
    """Return the mean F1 of the classes that have images.

    Where every class has some, this is scikit-learn's; a class without images is left out here, and counts as 0 there
    if an image was taken for it.
    """
    scores = per_class(matrix)
    return float(scores.f1[scores.images > 0].mean())


def balanced_accuracy(matrix: NDArray[np.int64]) -> float:
    """Return the mean recall of the classes that have images."""
    return float(np.nanmean(per_class(matrix).recall))


def log_losses(probabilities: Floats, labels: Integers) -> NDArray[np.float64]:
    """Return -log of each image's probability of its class, of which 0 counts as the least float32 above it."""
    check_labels(probabilities, labels)
    own = probabilities[np.arange(len(labels)), labels].astype(np.float64)
    return np.asarray(-np.log(np.maximum(own, np.finfo(np.float32).tiny)))


def log_loss(probabilities: Floats, labels: Integers) -> float:
    """Return the mean of -log of the probability of the right class."""
    return float(log_losses(probabilities, labels).mean())


class Confusion(NamedTuple):
    """Images of one class that were taken for another."""

    true: int
    predicted: int
    images: int


def most_confused(matrix: NDArray[np.int64], most: int) -> list[Confusion]:
    """Return the most frequent confusions, the largest first."""
    wrong = matrix.copy()
    np.fill_diagonal(wrong, 0)
    true, predicted = np.nonzero(wrong)
    order = np.argsort(-wrong[true, predicted], kind="stable")[:most]
    return [Confusion(int(t), int(p), int(wrong[t, p])) for t, p in zip(true[order], predicted[order], strict=True)]


def check_labels(probabilities: Floats, labels: Integers) -> None:
    """See to it that there are images, and one known class for each."""
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1]:
        raise InputError(f"probabilities {probabilities.shape} with labels {labels.shape}; give (N, K) and (N,)")
    if not len(labels):
        raise InputError("there are no images to measure")
    if labels.min() < 0 or labels.max() >= probabilities.shape[1]:
        raise InputError(
            f"labels go from {labels.min()} to {labels.max()}; with {probabilities.shape[1]} classes they go from 0 to "
            f"{probabilities.shape[1] - 1}"
        )


def _ratio(part: NDArray[np.int64], whole: NDArray[np.int64]) -> NDArray[np.float64]:
    ratios = np.full(len(whole), np.nan)
    return np.asarray(np.divide(part, whole, out=ratios, where=whole > 0))
