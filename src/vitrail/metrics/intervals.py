"""How far a number measured on a few pictures may be from the one that many would give."""

from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.classification import macro_f1

RESAMPLES = 1000
_AT_ONCE = 4_000_000
"""Numbers drawn at a time, so that memory stays small."""


class Interval(NamedTuple):
    """Where a number lies with the given confidence."""

    low: float
    high: float


def wilson_interval(right: int, pictures: int, level: float = 0.95) -> Interval:
    """Return Wilson's interval of the share right / pictures (without correction for continuity).

    >>> [round(end, 3) for end in wilson_interval(354, 360)]
    [0.964, 0.992]
    """
    _check(pictures, level)
    if not 0 <= right <= pictures:
        raise InputError(f"{right} of {pictures} pictures cannot be right")
    z = NormalDist().inv_cdf((1 + level) / 2)
    share, extra = right / pictures, z**2 / pictures
    centre = (share + extra / 2) / (1 + extra)
    half = z * (share * (1 - share) / pictures + extra / pictures / 4) ** 0.5 / (1 + extra)
    # The formula gives these ends but for rounding.
    return Interval(0.0 if right == 0 else centre - half, 1.0 if right == pictures else centre + half)


def bootstrap_mean(
    values: NDArray[np.floating | np.bool_], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> Interval:
    """Return the percentile interval of the mean of a number that every picture has: its loss, whether it is right."""
    _check(len(values), level)
    numbers, generator = np.asarray(values, np.float64), np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // len(numbers))
    means = [
        numbers[generator.integers(0, len(numbers), (min(at_once, resamples - done), len(numbers)))].mean(axis=1)
        for done in range(0, resamples, at_once)
    ]
    return _percentiles(np.concatenate(means), float(numbers.mean()), level)


def bootstrap_macro_f1(
    matrix: NDArray[np.int64], *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> Interval:
    """Return the percentile interval of macro-F1, from the confusion matrix.

    Drawing pictures again is drawing the matrix's cells again, each as often as it has pictures; so the pictures
    themselves are not needed.
    """
    pictures = int(matrix.sum())
    _check(pictures, level)
    true, predicted = np.nonzero(matrix)
    shares, generator = matrix[true, predicted] / pictures, np.random.default_rng(seed)
    at_once = max(1, _AT_ONCE // len(shares))
    found = [
        _macro_f1_of_each(
            generator.multinomial(pictures, shares, min(at_once, resamples - done)), true, predicted, len(matrix)
        )
        for done in range(0, resamples, at_once)
    ]
    return _percentiles(np.concatenate(found), macro_f1(matrix), level)


def _macro_f1_of_each(
    cells: NDArray[np.int64], true: NDArray[np.intp], predicted: NDArray[np.intp], classes: int
) -> NDArray[np.float64]:
    """Return macro-F1 of many matrices of which only the cells (matrices, cells) that can have pictures are given."""
    right, count, taken = (np.zeros((len(cells), classes), np.int64) for _ in range(3))
    for target, by in ((count, true), (taken, predicted)):
        order = np.argsort(by, kind="stable")
        present, starts = np.unique(by[order], return_index=True)
        target[:, present] = np.add.reduceat(cells[:, order], starts, axis=1)
    hits = true == predicted
    right[:, true[hits]] = cells[:, hits]
    # A class that was not drawn is left out, as `macro_f1` leaves out one without pictures.
    scores = np.where(count > 0, 2 * right / np.maximum(count + taken, 1), 0.0)
    return np.asarray(scores.sum(axis=1) / (count > 0).sum(axis=1))


def _percentiles(found: NDArray[np.float64], estimate: float, level: float) -> Interval:
    """Return what the middle of the resamples spans, widened where it would leave out the estimate itself."""
    low, high = np.quantile(found, [(1 - level) / 2, (1 + level) / 2])
    return Interval(min(float(low), estimate), max(float(high), estimate))


def _check(pictures: int, level: float) -> None:
    if pictures < 1:
        raise InputError("there are no pictures to measure")
    if not 0 < level < 1:
        raise InputError(f"the level of an interval is {level}; it lies between 0 and 1, such as 0.95")
