"""Bootstrap intervals of the metrics of a multi-label classifier. Shapes as in `metrics.multilabel`."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.intervals import RESAMPLES, Interval, wilson_interval
from vitrail.metrics.multilabel import (
    Floats,
    Truth,
    check_truth,
    macro_f1,
    mean_average_precision,
    predicted_labels,
)
from vitrail.metrics.resampling import bootstrap, weighted_sums


class MultilabelIntervals(NamedTuple):
    """The intervals of the two scores that weight all labels equally; NaN if no label occurs."""

    mean_average_precision: Interval
    macro_f1: Interval


def bootstrap_multilabel(
    probabilities: Floats,
    truth: Truth,
    thresholds: Floats,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> MultilabelIntervals:
    """Return bootstrap percentile intervals of mAP and macro-F1, from resampled images.

    From half a million image-label pairs on there are fewer resamples, from five million on only 100. A resample skips
    the labels that do not occur in it. A bootstrap never draws a mistake that did not happen, so a perfect score gets
    at least Wilson's interval of all images being right, and a macro-F1 of 0 that of none.
    """
    own = check_truth(probabilities, truth)
    predicted = predicted_labels(probabilities, thresholds)
    estimates = np.array([mean_average_precision(probabilities, own), macro_f1(predicted, own)])
    rankings = [_ranking(scores, has) for scores, has in zip(probabilities.T, own.T, strict=True) if has.any()]
    # float32 counts exactly up to 2**24 images, and is precise enough for an interval beyond.
    pairs = [which.astype(np.float32) for which in (predicted & own, own, predicted)]

    def score(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        drawn = weights.astype(np.float32)
        right, images, guesses = (weighted_sums(drawn, which) for which in pairs)
        f1 = np.where(images > 0, 2 * right / np.maximum(images + guesses, 1), np.nan)
        return np.stack([_mean_average_precision_of_each(rankings, drawn), _mean_of_defined(f1)])

    intervals = bootstrap(score, estimates, own.shape, seed=seed, resamples=resamples, level=level)
    images = len(own)
    for number, (low, high) in enumerate(intervals):
        if estimates[number] == 1:
            low = min(low, wilson_interval(images, images, level).low)
        elif estimates[number] == 0:
            high = max(high, wilson_interval(0, images, level).high)
        intervals[number] = Interval(low, high)
    return MultilabelIntervals(*intervals)


def bootstrap_difference(
    first: Floats,
    second: Floats,
    truth: Truth,
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
    level: float = 0.95,
) -> Interval:
    """Return the bootstrap percentile interval of the mAP of `second` minus that of `first`, for the same images.

    Both are (N, K). Each resample draws the same images for both; there are fewer of them for many images, see
    `bootstrap_multilabel`. NaN if no label occurs.
    """
    own = check_truth(first, truth)
    check_truth(second, truth)
    estimates = [mean_average_precision(probabilities, own) for probabilities in (first, second)]
    rankings = [
        [_ranking(scores, has) for scores, has in zip(probabilities.T, own.T, strict=True) if has.any()]
        for probabilities in (first, second)
    ]

    def score(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        drawn = weights.astype(np.float32)
        before, after = (_mean_average_precision_of_each(each, drawn) for each in rankings)
        return (after - before)[None]

    difference = np.array([estimates[1] - estimates[0]])
    (interval,) = bootstrap(score, difference, own.shape, seed=seed, resamples=resamples, level=level)
    return interval


class _Ranking(NamedTuple):
    """The images of one label by decreasing probability, in bins: each ends with equal ones that include a positive."""

    order: NDArray[np.int32]
    """All images down to the last positive."""
    starts: NDArray[np.int64]
    positives: NDArray[np.int32]
    positive_starts: NDArray[np.int64]


def _ranking(scores: Floats, truth: NDArray[np.bool_]) -> _Ranking:
    order = np.argsort(-scores, kind="stable").astype(np.int32)
    ordered, has = scores[order], truth[order]
    last = np.append(ordered[1:] != ordered[:-1], True)
    right = np.cumsum(has)
    ends = np.flatnonzero(last)
    kept = np.diff(right[ends], prepend=0) > 0
    ends = ends[kept] + 1
    positive_ends = right[ends - 1]
    return _Ranking(order[: ends[-1]], np.append(0, ends[:-1]), order[has], np.append(0, positive_ends[:-1]))


def _mean_average_precision_of_each(rankings: list[_Ranking], drawn: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return the mAP of R resamples, from how often each draws each image (R, N)."""
    scores = np.full((max(1, len(rankings)), len(drawn)), np.nan)
    for row, ranking in zip(scores, rankings, strict=False):
        right = _sums(drawn, ranking.positives, ranking.positive_starts)
        predicted = _sums(drawn, ranking.order, ranking.starts).cumsum(axis=1)
        reached = right.cumsum(axis=1)
        total = (right * (reached / np.maximum(predicted, 1))).sum(axis=1)
        np.divide(total, reached[:, -1], out=row, where=reached[:, -1] > 0)
    return _mean_of_defined(scores)


def _sums(drawn: NDArray[np.float32], order: NDArray[np.int32], starts: NDArray[np.int64]) -> NDArray[np.float32]:
    """Return how often each resample draws the images of each bin (R, bins)."""
    return np.asarray(np.add.reduceat(np.take(drawn, order, axis=1), starts, axis=1))


def _mean_of_defined(values: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the mean over the rows, of the values that are not NaN; NaN for a column without."""
    defined = ~np.isnan(values)
    means = np.full(values.shape[1], np.nan)
    total = np.where(defined, values, 0).sum(axis=0, dtype=np.float64)
    return np.asarray(np.divide(total, defined.sum(axis=0), out=means, where=defined.any(axis=0)))
