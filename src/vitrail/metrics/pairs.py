"""Whether one classifier is better than another, when both were asked about the same images."""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.intervals import Interval, paired_interval


class Paired(NamedTuple):
    """How two classifiers fared with the same images."""

    images: int
    both: int
    """Images on which both are right."""
    only_first: int
    only_second: int
    neither: int
    difference: float
    """How much larger the second one's share of right answers is."""
    interval: Interval
    """Of the difference, 95% (Bonett and Price)."""
    chance: float
    """How often luck alone makes a difference at least as large (McNemar's test, exact)."""


def paired(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Paired:
    """Compare two classifiers by which of the same images each is right on."""
    if first.shape != second.shape or first.ndim != 1:
        raise InputError(f"answers to {first.shape} and {second.shape} images; give one for each of the same images")
    if not len(first):
        raise InputError("there are no images to compare two classifiers on")
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
    """Return how often fair coins, one for each image on which the two differ, fall at least as unevenly.

    >>> round(exact_mcnemar(1, 7), 4)
    0.0703
    """
    tosses, fewer = only_first + only_second, min(only_first, only_second)
    if 2 * fewer >= tosses:
        return 1.0
    # By logarithms, because the numbers of combinations outgrow floats from about a thousand tosses on.
    terms = [
        math.lgamma(tosses + 1) - math.lgamma(k + 1) - math.lgamma(tosses - k + 1) - tosses * math.log(2)
        for k in range(fewer + 1)
    ]
    return min(1.0, 2 * math.fsum(map(math.exp, terms)))
