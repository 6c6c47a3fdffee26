"""Confidence intervals of metrics, and the paired comparison of two classifiers on the same images."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.classification import balanced_accuracy, macro_f1

RESAMPLES = 1000
_AT_ONCE = 4_000_000
"""Samples drawn at a time, to limit memory."""


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson_interval(right: int, images: int, level: float = 0.95) -> Interval:
    """Return the Wilson interval of the fraction right / images (without continuity correction).

    >>> [round(end, 3) for end in wilson_interval(354, 360)]
    [0.964, 0.992]
    """
    _check(images, level)
    if not 0 <= right <= images:
        raise InputError(f"{right} of {images} images cannot be right")
    z = _z(level)
    fraction, extra = right / images, z**2 / images
    centre = (fraction + extra / 2) / (1 + extra)
    half = z * (fraction * (1 - fraction) / images + extra / images / 4) ** 0.5 / (1 + extra)
    # The formula gives these bounds up to rounding.
    return Interval(0.0 if right == 0 else centre - half, 1.0 if right == images else centre + half)


def t_interval(values: Sequence[float], level: float = 0.95) -> Interval | None:
    """Return Student's interval of the mean of some values, such as one per seed; None for a single value.

    >>> [round(end, 3) for end in t_interval([0.96, 0.97, 0.98])]
    [0.945, 0.995]
    """
    _check(len(values), level)
    if len(values) == 1:
        return None
    half = t_quantile((1 + level) / 2, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return Interval(fmean(values) - half, fmean(values) + half)


def t_quantile(probability: float, freedom: int) -> float:
    """Return a quantile above 0.5 of Student's distribution, by bisection.

    >>> round(t_quantile(0.975, 2), 3)
    4.303
    """
    low, high = 0.0, 1.0
    while _t_below(high, freedom) < probability:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _t_below(middle, freedom) < probability else (low, middle)
    return high


def _t_below(t: float, freedom: int) -> float:
    """Return the probability below t >= 0, by the finite sums for whole degrees of freedom (Abramowitz and Stegun)."""
    angle = math.atan(t / freedom**0.5)
    odd = freedom % 2
    term, total = (math.cos(angle) if odd else 1.0), 0.0
    for k in range(2 + odd, freedom + 1, 2):  # cos θ + 2/3 cos³ θ + …, or 1 + 1/2 cos² θ + …
        total += term
        term *= (k - 1) / k * math.cos(angle) ** 2
    inside = 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total
    return 0.5 + inside / 2


def paired_interval(only_first: int, only_second: int, images: int, level: float = 0.95) -> Interval:
    """Return the interval of the difference of two accuracies on the same images (Bonett and Price).

    Only the images on which exactly one classifier is right matter; one is added to each count, so that the interval of
    two classifiers that agree on every image is not empty.

    >>> [round(end, 3) for end in paired_interval(0, 0, 100)]
    [-0.027, 0.027]
    """
    _check(images, level)
    first, second = (only_first + 1) / (images + 2), (only_second + 1) / (images + 2)
    half = _z(level) * ((first + second - (second - first) ** 2) / (images + 2)) ** 0.5
    difference = (only_second - only_first) / images
    low, high = second - first - half, second - first + half
    return Interval(max(-1.0, min(low, difference)), min(1.0, max(high, difference)))


def bootstrap_mean(
    values: NDArray[np.floating | np.bool_], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> Interval:
    """Return the bootstrap percentile interval of the mean of a per-image value, such as the loss."""
    _check(len(values), level)
    numbers, generator = np.asarray(values, np.float64), np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // len(numbers))
    means = [
        numbers[generator.integers(0, len(numbers), (min(at_once, resamples - done), len(numbers)))].mean(axis=1)
        for done in range(0, resamples, at_once)
    ]
    return _percentiles(np.concatenate(means), float(numbers.mean()), level)


class ScoreIntervals(NamedTuple):
    """The intervals of the two scores that weight all classes equally."""

    balanced_accuracy: Interval
    macro_f1: Interval


def bootstrap_scores(
    matrix: NDArray[np.int64], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> ScoreIntervals:
    """Return bootstrap percentile intervals of balanced accuracy and macro-F1, from the confusion matrix.

    Resampling images is the same as resampling cells of the matrix in proportion to their counts, so the images are not
    needed. A plain bootstrap never draws a mistake that did not happen, so a perfect result would get an empty
    interval. So it is repeated with z²/2 right and z²/2 wrong images added, as Agresti and Coull do for a proportion
    (the centre of Wilson's interval); the result covers both intervals. If all predictions are right, or none, it is
    at least as wide as Wilson's interval of the accuracy.
    """
    images, right = int(matrix.sum()), int(np.trace(matrix))
    _check(images, level)
    true, predicted, added = _smoothed_cells(matrix, level)
    generator, at_once = np.random.default_rng(seed), max(1, _AT_ONCE // len(true))
    drawn = []
    for weights in (matrix[true, predicted].astype(np.float64), matrix[true, predicted] + added):
        resampled = []
        for done in range(0, resamples, at_once):
            cells = generator.multinomial(images, weights / weights.sum(), min(at_once, resamples - done))
            counts = _counts_of_each(cells, true, predicted, len(matrix))
            resampled.append((_balanced_accuracy_of_each(counts), _macro_f1_of_each(counts)))
        drawn.append(np.concatenate(resampled, axis=1))
    wilson = wilson_interval(right, images, level)
    ends = []
    for plain, smoothed, estimate in zip(*drawn, (balanced_accuracy(matrix), macro_f1(matrix)), strict=True):
        low, high = _over_both(plain, smoothed, estimate, level)
        ends.append(
            Interval(min(low, wilson.low) if right == images else low, max(high, wilson.high) if right == 0 else high)
        )
    return ScoreIntervals(*ends)


def _over_both(plain: NDArray[np.float64], smoothed: NDArray[np.float64], estimate: float, level: float) -> Interval:
    """Return the interval that covers both bootstraps.

    With few images per class, macro-F1 is biased low, and resampling adds about the same bias again. So the bounds are
    shifted by the bias of the plain bootstrap.
    """
    one, other = _percentiles(plain, estimate, level), _percentiles(smoothed, estimate, level)
    bias = estimate - float(plain.mean())
    low, high = min(one.low, one.low + bias, other.low), max(one.high, one.high + bias, other.high)
    return Interval(max(0.0, low), min(1.0, high))


def _smoothed_cells(
    matrix: NDArray[np.int64], level: float
) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.float64]]:
    """Return the cells to sample from, as true and predicted classes, and the weight added to each.

    The added images are distributed over the classes like the images. Wrong ones are assigned to the next class with
    images: which class hardly matters, and a cell for every pair of 1,000 classes would be a million cells.
    """
    images, classes = matrix.sum(axis=1), len(matrix)
    present = np.flatnonzero(images)
    others = np.roll(present, -1) if len(present) > 1 else (present + 1) % classes
    added = _z(level) ** 2 / 2 * images[present] / images.sum()
    right, wrong = present * classes + present, present * classes + others
    occupied = np.unique(np.concatenate([np.flatnonzero(matrix), right, wrong]))
    weights = np.zeros(len(occupied))
    for cells in (right, wrong):
        weights[np.searchsorted(occupied, cells)] += added
    return occupied // classes, occupied % classes, weights


class _Counts(NamedTuple):
    """Per-class counts of many matrices, each (matrices, classes)."""

    right: NDArray[np.int64]
    images: NDArray[np.int64]
    """Images of the class."""
    predicted: NDArray[np.int64]
    """Images predicted as the class."""


def _counts_of_each(
    cells: NDArray[np.int64], true: NDArray[np.intp], predicted: NDArray[np.intp], classes: int
) -> _Counts:
    """Count per class in many matrices, given their possibly non-empty cells (matrices, cells)."""
    right, count, guesses = (np.zeros((len(cells), classes), np.int64) for _ in range(3))
    for target, by in ((count, true), (guesses, predicted)):
        order = np.argsort(by, kind="stable")
        present, starts = np.unique(by[order], return_index=True)
        target[:, present] = np.add.reduceat(cells[:, order], starts, axis=1)
    hits = true == predicted
    right[:, true[hits]] = cells[:, hits]
    return _Counts(right, count, guesses)


def _macro_f1_of_each(counts: _Counts) -> NDArray[np.float64]:
    """Return macro-F1 of many matrices; skips classes without images, as `macro_f1` does."""
    right, count, predicted = counts
    scores = np.where(count > 0, 2 * right / np.maximum(count + predicted, 1), 0.0)
    return np.asarray(scores.sum(axis=1) / (count > 0).sum(axis=1))


def _balanced_accuracy_of_each(counts: _Counts) -> NDArray[np.float64]:
    """Return the mean recall of many matrices, over the classes with images."""
    right, count, _ = counts
    recalls = np.where(count > 0, right / np.maximum(count, 1), 0.0)
    return np.asarray(recalls.sum(axis=1) / (count > 0).sum(axis=1))


def _percentiles(resampled: NDArray[np.float64], estimate: float, level: float) -> Interval:
    """Return the percentile interval of the resamples, widened to include the estimate."""
    low, high = np.quantile(resampled, [(1 - level) / 2, (1 + level) / 2])
    return Interval(min(float(low), estimate), max(float(high), estimate))


def _z(level: float) -> float:
    """Return the half-width of a normal interval in standard deviations: 1.96 for 95%."""
    return NormalDist().inv_cdf((1 + level) / 2)


def _check(images: int, level: float) -> None:
    if images < 1:
        raise InputError("no images to evaluate")
    if not 0 < level < 1:
        raise InputError(f"the level of an interval is {level}; it must be between 0 and 1, such as 0.95")


# ── paired comparison ──


class Paired(NamedTuple):
    """The comparison of two classifiers on the same images."""

    images: int
    both: int
    """Images on which both are right."""
    only_first: int
    only_second: int
    neither: int
    difference: float
    """The accuracy of the second minus that of the first."""
    interval: Interval
    """The 95% interval of the difference (Bonett and Price)."""
    chance: float
    """The p-value of the exact McNemar test."""


def paired(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Paired:
    """Compare two classifiers, given which images each gets right."""
    if first.shape != second.shape or first.ndim != 1:
        raise InputError(
            f"predictions of shape {first.shape} and {second.shape}; pass one per image, for the same images"
        )
    if not len(first):
        raise InputError("no images to compare two classifiers on")
    only_first, only_second = int((first & ~second).sum()), int((~first & second).sum())
    return Paired(
        images=len(first),
        both=int((first & second).sum()),
        only_first=only_first,
        only_second=only_second,
        neither=int((~first & ~second).sum()),
        difference=(only_second - only_first) / len(first),
        interval=paired_interval(only_first, only_second, len(first)),
        chance=exact_mcnemar(only_first, only_second),
    )


def exact_mcnemar(only_first: int, only_second: int) -> float:
    """Return the two-sided p-value of the exact McNemar test.

    >>> round(exact_mcnemar(1, 7), 4)
    0.0703
    """
    differing, fewer = only_first + only_second, min(only_first, only_second)
    if 2 * fewer >= differing:
        return 1.0
    # In log space, because binomial coefficients overflow floats from about 1,000 images on.
    terms = [
        math.lgamma(differing + 1) - math.lgamma(k + 1) - math.lgamma(differing - k + 1) - differing * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, terms)))
