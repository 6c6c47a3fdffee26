"""Metrics of a multi-label classifier: average precision, F1 at a threshold per label, and its mistakes.

Shapes: N images, K labels. `probabilities` (N, K); `truth` (N, K), 0 or 1 (or bool): which labels each image has;
`predicted` (N, K) bool, `thresholds` (K,). Every function needs at least one image. What is undefined is NaN.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError

Floats = NDArray[np.floating]
Truth = NDArray[np.bool_] | NDArray[np.integer]
CURVE_POINTS = 200
"""The most points of a precision-recall curve; a chart would not show more."""
_AT_ONCE = 4_000_000
"""Image-label pairs converted to floats at a time, to limit memory."""


# ── ranking: metrics without thresholds ──


def average_precision(probabilities: Floats, truth: Truth) -> NDArray[np.float64]:
    """Return the average precision of each label, not interpolated, as scikit-learn's; NaN without positives."""
    own = check_truth(probabilities, truth)
    return np.array([_average_precision(scores, has) for scores, has in zip(probabilities.T, own.T, strict=True)])


def mean_average_precision(probabilities: Floats, truth: Truth) -> float:
    """Return mAP: the mean average precision of the labels with positives ("macro"); NaN if there are none."""
    return mean_of_defined(average_precision(probabilities, truth))


def micro_average_precision(probabilities: Floats, truth: Truth) -> float:
    """Return the average precision over all image-label pairs, ranked together; NaN without positives."""
    own = check_truth(probabilities, truth)
    return _average_precision(probabilities.ravel(), own.ravel())


class Curve(NamedTuple):
    """The points of a precision-recall curve, by increasing recall."""

    recall: NDArray[np.float64]
    precision: NDArray[np.float64]
    """The highest precision at this recall."""
    thresholds: NDArray[np.float64]
    """Predicting the label from this probability on reaches both."""


def precision_recall_curve(probabilities: Floats, truth: Truth, most: int = CURVE_POINTS) -> Curve:
    """Return the curve of one label, from probabilities (N,) and truth (N,); without points if it has no positives.

    If there are more than `most` points, they are chosen evenly along the recall, with the first and the last.
    """
    own = check_truth(probabilities[..., None], truth[..., None])[:, 0]
    cuts = _cuts(probabilities, own)
    positives = cuts.right[-1]
    first = np.flatnonzero(np.diff(cuts.right, prepend=0))  # further cuts at the same recall only lose precision
    if len(first) > most:
        first = np.unique(first[np.searchsorted(cuts.right[first], np.linspace(cuts.right[first[0]], positives, most))])
    right = cuts.right[first]
    return Curve(right / max(positives, 1), right / cuts.predicted[first], cuts.scores[first])


class _Cuts(NamedTuple):
    """What predicting the images from each distinct score on gives, by decreasing score."""

    scores: NDArray[np.float64]
    right: NDArray[np.int64]
    """Positives among the predicted images."""
    predicted: NDArray[np.int64]


def _cuts(scores: Floats, truth: NDArray[np.bool_]) -> _Cuts:
    scores = np.ascontiguousarray(scores)
    order = np.argsort(scores)[::-1]
    ordered = scores[order]
    ends = np.flatnonzero(np.append(ordered[1:] != ordered[:-1], True))
    return _Cuts(ordered[ends].astype(np.float64), np.cumsum(truth[order], dtype=np.int64)[ends], ends + 1)


def _average_precision(scores: Floats, truth: NDArray[np.bool_]) -> float:
    if not truth.any():
        return float("nan")
    cuts = _cuts(scores, truth)
    gained = np.diff(cuts.right, prepend=0)
    return float((gained * (cuts.right / cuts.predicted)).sum() / cuts.right[-1])


# ── predictions: metrics at thresholds ──


def best_thresholds(probabilities: Floats, truth: Truth) -> NDArray[np.float64]:
    """Return the threshold of each label that maximises its F1, strictly between 0 and 1.

    A threshold is the midpoint between two neighbouring distinct probabilities, or between the lowest one and 0. Among
    equally good ones, the one nearest 0.5 is taken; it is 0.5 for a label without positives or without negatives.
    """
    own = check_truth(probabilities, truth)
    return np.array([_best_threshold(scores, has) for scores, has in zip(probabilities.T, own.T, strict=True)])


def _best_threshold(scores: Floats, truth: NDArray[np.bool_]) -> float:
    if truth.all() or not truth.any():
        return 0.5
    cuts = _cuts(scores, truth)
    lower = np.append(cuts.scores[1:], 0.0)
    middle = lower + (cuts.scores - lower) / 2
    thresholds = np.where(middle > lower, middle, cuts.scores)  # the midpoint of adjacent floats may round down
    inside = (thresholds > 0) & (thresholds < 1)
    if not inside.any():
        return 0.5
    f1 = np.where(inside, 2 * cuts.right / (cuts.right[-1] + cuts.predicted), -1.0)
    best = thresholds[f1 == f1.max()]
    return float(best[np.abs(best - 0.5).argmin()])


def predicted_labels(probabilities: Floats, thresholds: Floats) -> NDArray[np.bool_]:
    """Return which labels each image is predicted to have: those whose probability reaches the threshold."""
    if probabilities.ndim != 2 or thresholds.shape != probabilities.shape[1:]:
        raise InputError(
            f"probabilities {probabilities.shape} with thresholds {thresholds.shape}; pass (N, K) and (K,)"
        )
    return np.asarray(probabilities >= thresholds.astype(np.float64))


class PerLabel(NamedTuple):
    """One value per label; NaN where undefined."""

    images: NDArray[np.int64]
    """The number of images with the label."""
    precision: NDArray[np.float64]
    """The fraction of images predicted to have the label that have it."""
    recall: NDArray[np.float64]
    """The fraction of images with the label that are predicted to have it."""
    f1: NDArray[np.float64]
    """The harmonic mean of both; 0 if no prediction is right, NaN if the label neither occurs nor is predicted."""
    average_precision: NDArray[np.float64]


def per_label(probabilities: Floats, truth: Truth, thresholds: Floats) -> PerLabel:
    """Return count, precision, recall, F1 and average precision of each label."""
    right, images, predicted = _counts(predicted_labels(probabilities, thresholds), truth)
    return PerLabel(
        images,
        _ratio(right, predicted),
        _ratio(right, images),
        _ratio(2 * right, images + predicted),
        average_precision(probabilities, truth),
    )


def macro_f1(predicted: NDArray[np.bool_], truth: Truth) -> float:
    """Return the mean F1 of the labels with positives; NaN if there are none.

    If every label has positives, this equals scikit-learn's. A label without is skipped here; in scikit-learn it counts
    as 0 by default.
    """
    right, images, guesses = _counts(predicted, truth)
    return mean_of_defined(np.where(images > 0, _ratio(2 * right, images + guesses), np.nan))


def micro_f1(predicted: NDArray[np.bool_], truth: Truth) -> float:
    """Return F1 over all image-label pairs; NaN if no label occurs or is predicted."""
    right, images, guesses = _counts(predicted, truth)
    return float(_ratio(2 * right.sum(keepdims=True), (images + guesses).sum(keepdims=True))[0])


def exact_match(predicted: NDArray[np.bool_], truth: Truth) -> float:
    """Return the fraction of images whose labels are all right."""
    return float((predicted == check_truth(predicted, truth)).all(axis=1).mean())


def hamming_accuracy(predicted: NDArray[np.bool_], truth: Truth) -> float:
    """Return the fraction of image-label pairs that are right: 1 minus the Hamming loss."""
    return float((predicted == check_truth(predicted, truth)).mean())


def log_losses(probabilities: Floats, truth: Truth) -> NDArray[np.float64]:
    """Return the mean binary cross-entropy of each image's labels, clamped at the smallest positive float32."""
    own = check_truth(probabilities, truth)
    exact = probabilities.astype(np.float64)
    right = np.where(own, exact, 1 - exact)
    return np.asarray(-np.log(np.maximum(right, np.finfo(np.float32).tiny)).mean(axis=1))


class CoOccurringMistake(NamedTuple):
    """A label that images have, and another that is predicted in its place."""

    missed: int
    added: int
    images: int


def co_occurring_mistakes(predicted: NDArray[np.bool_], truth: Truth, most: int) -> list[CoOccurringMistake]:
    """Return the most frequent pairs of a missed and a wrongly added label of the same image, in descending order."""
    both = mistake_matrix(predicted, truth)
    np.fill_diagonal(both, 0)
    first, second = np.nonzero(both)
    order = np.argsort(-both[first, second], kind="stable")[:most]
    return [
        CoOccurringMistake(int(i), int(j), int(both[i, j])) for i, j in zip(first[order], second[order], strict=True)
    ]


def mistake_matrix(predicted: NDArray[np.bool_], truth: Truth) -> NDArray[np.int64]:
    """Count for each pair of labels the images on which one (row) is missed and the other (column) wrongly added.

    On the diagonal are the images for which the label is predicted rightly.
    """
    own = check_truth(predicted, truth)
    missed, added = own & ~predicted, predicted & ~own
    counts = np.zeros((own.shape[1], own.shape[1]), np.int64)
    rows = max(1, _AT_ONCE // own.shape[1])
    for start in range(0, len(own), rows):
        chunk = slice(start, start + rows)
        counts += (missed[chunk].T.astype(np.float32) @ added[chunk].astype(np.float32)).astype(np.int64)
    np.fill_diagonal(counts, np.count_nonzero(own & predicted, axis=0))
    return counts


# ── shared ──


def check_truth(probabilities: Floats | NDArray[np.bool_], truth: Truth) -> NDArray[np.bool_]:
    """Return the truth as bool; raise unless there is an image, and finite probabilities and 0 or 1 for each label."""
    if probabilities.ndim != 2 or truth.shape != probabilities.shape:
        raise InputError(f"predictions {probabilities.shape} with truth {truth.shape}; pass (N, K) and (N, K)")
    if not truth.size:
        raise InputError("no labels to evaluate" if len(truth) else "no images to evaluate")
    if not np.isfinite(probabilities).all():
        raise InputError(f"{int((~np.isfinite(probabilities)).sum()):,} of the probabilities are not finite")
    if not ((truth == 0) | (truth == 1)).all():
        raise InputError(f"truth ranges from {truth.min()} to {truth.max()}; each value must be 0 or 1")
    return truth.astype(np.bool_)


def mean_of_defined(values: NDArray[np.float64]) -> float:
    """Return the mean of the values that are not NaN; NaN if there are none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else float("nan")


def _counts(
    predicted: NDArray[np.bool_], truth: Truth
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Count per label: right predictions, images with it, images predicted to have it."""
    own = check_truth(predicted, truth)
    right, images, guesses = (np.count_nonzero(pairs, axis=0) for pairs in (predicted & own, own, predicted))
    return np.asarray(right), np.asarray(images), np.asarray(guesses)


def _ratio(numerator: NDArray[np.int64], denominator: NDArray[np.int64]) -> NDArray[np.float64]:
    ratios = np.full(len(denominator), np.nan)
    return np.asarray(np.divide(numerator, denominator, out=ratios, where=denominator > 0))
