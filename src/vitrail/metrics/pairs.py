"""Paired comparison of two classifiers on the same images."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.intervals import Interval, paired_interval


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
