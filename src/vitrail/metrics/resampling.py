"""The bootstrap of scores that are not a mean over images, such as average precision, R² or a rank correlation."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.intervals import Interval

FEWEST_RESAMPLES = 100
"""However many images there are: fewer would not give the 2.5% and 97.5% percentiles."""
WORK = 500_000_000
"""Image-output pairs to score over all resamples: 10 to 40 seconds on a CPU core."""
_AT_ONCE = 500_000
"""Images drawn at a time: few enough that the arrays stay in the cache."""

Score = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""The scores (scores, R) of R resamples, from how often each draws each image (R, N); NaN where undefined."""


def bootstrap(
    score: Score,
    estimates: NDArray[np.float64],
    shape: tuple[int, int],
    *,
    seed: int,
    resamples: int,
    level: float,
) -> list[Interval]:
    """Return the percentile interval of each score, widened to include its estimate; NaN if the estimate is.

    `shape` is the number of images and of outputs. To limit the work, there are fewer resamples if it is large. The
    resamples in which a score is undefined are left out.
    """
    images, outputs = shape
    if not 0 < level < 1:
        raise InputError(f"the level of an interval is {level}; it must be between 0 and 1, such as 0.95")
    resamples = min(resamples, max(FEWEST_RESAMPLES, WORK // (images * outputs)))
    generator, at_once = np.random.default_rng(seed), max(1, _AT_ONCE // images)
    scores = []
    for done in range(0, resamples, at_once):
        draws = generator.integers(0, images, (min(at_once, resamples - done), images))
        scores.append(score(np.array([np.bincount(row, minlength=images) for row in draws], np.float64)))
    resampled = np.concatenate(scores, axis=1)
    return [_percentiles(row, float(estimate), level) for row, estimate in zip(resampled, estimates, strict=True)]


def weighted_sums(weights: NDArray[np.floating], values: NDArray[np.floating]) -> NDArray[np.floating]:
    """Return the sums (K, R) of values (N, K) over the images that each resample draws, from its weights (R, N).

    This is a matmul, but BLAS takes up to a second for each of these small ones if other processes use its cores.
    """
    return np.asarray(np.einsum("rn,nk->kr", weights, values))


def _percentiles(resampled: NDArray[np.float64], estimate: float, level: float) -> Interval:
    defined = resampled[~np.isnan(resampled)]
    if np.isnan(estimate) or not len(defined):
        return Interval(estimate, estimate)
    low, high = np.quantile(defined, [(1 - level) / 2, (1 + level) / 2])
    return Interval(min(float(low), estimate), max(float(high), estimate))
