"""Metrics of a regressor: errors, R² and rank correlation of each column, with intervals and a baseline.

Shapes: N images, K columns. `predicted` and `true` are (N, K), in the units of the dataset. Every function needs at
least one image. What is undefined is NaN.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.errors import InputError
from vitrail.metrics.intervals import RESAMPLES, Interval
from vitrail.metrics.resampling import bootstrap, weighted_sums

Floats = NDArray[np.floating]


class PerColumn(NamedTuple):
    """One value per column; NaN where undefined."""

    mean_absolute_error: NDArray[np.float64]
    median_absolute_error: NDArray[np.float64]
    root_mean_squared_error: NDArray[np.float64]
    r_squared: NDArray[np.float64]
    spearman: NDArray[np.float64]


def per_column(predicted: Floats, true: Floats) -> PerColumn:
    """Return the errors, R² and the rank correlation of each column."""
    errors = np.abs(_errors(predicted, true))
    return PerColumn(
        errors.mean(axis=0),
        np.asarray(np.median(errors, axis=0)),
        np.sqrt((errors**2).mean(axis=0)),
        r_squared(predicted, true),
        spearman(predicted, true),
    )


def r_squared(predicted: Floats, true: Floats) -> NDArray[np.float64]:
    """Return R² of each column, 1 - SS_res / SS_tot; NaN if all true values are equal.

    It is 1 for perfect predictions, 0 for always predicting the mean of the true values, and has no lower bound.
    """
    residual = (_errors(predicted, true) ** 2).sum(axis=0)
    exact = true.astype(np.float64)
    total = ((exact - exact.mean(axis=0)) ** 2).sum(axis=0)
    defined = ~_constant(exact) & (total > 0)
    return np.asarray(1 - np.divide(residual, total, out=np.full(len(total), np.nan), where=defined))


def spearman(predicted: Floats, true: Floats) -> NDArray[np.float64]:
    """Return Spearman's correlation of each column: that of the ranks, with average ranks for ties.

    It is NaN if all predictions are equal, or all true values.
    """
    check_values(predicted, true)
    once = np.ones((1, len(true)))
    return np.array(
        [
            _spearman_of_each(_grouped(ours), _grouped(theirs), once)[0]
            for ours, theirs in zip(predicted.T, true.T, strict=True)
        ]
    )


class ConstantBaseline(NamedTuple):
    """The errors of a regressor that ignores the image, per column."""

    mean_absolute_error: NDArray[np.float64]
    """Of always predicting the median of the training split, the constant with the lowest one."""
    root_mean_squared_error: NDArray[np.float64]
    """Of always predicting the mean of the training split, the constant with the lowest one."""


def constant_baseline(true: Floats, *, mean: Floats, median: Floats) -> ConstantBaseline:
    """Return the errors of always predicting the `mean` or `median` (K,) of the training split."""
    for constant in (mean, median):
        if true.ndim != 2 or constant.shape != true.shape[1:]:
            raise InputError(f"true values {true.shape} with a constant {constant.shape}; pass (N, K) and (K,)")
    from_median, from_mean = (_errors(np.broadcast_to(constant, true.shape), true) for constant in (median, mean))
    return ConstantBaseline(np.abs(from_median).mean(axis=0), np.sqrt((from_mean**2).mean(axis=0)))


def largest_errors(predicted: Floats, true: Floats, most: int) -> NDArray[np.int64]:
    """Return the indices of the images with the largest errors, in descending order; ties go to the lower index.

    The error of an image with several columns is the root of the sum of its squared errors, each divided by the
    standard deviation of the column's true values (by 1 if they are all equal).
    """
    errors, exact = _errors(predicted, true), true.astype(np.float64)
    deviation = exact.std(axis=0)
    scaled = errors / np.where(_constant(exact) | (deviation == 0), 1.0, deviation)
    size = np.abs(errors[:, 0]) if errors.shape[1] == 1 else np.sqrt((scaled**2).sum(axis=1))
    return np.argsort(-size, kind="stable")[:most].astype(np.int64)


class ColumnIntervals(NamedTuple):
    """The intervals of one column's scores; NaN where the score is undefined."""

    mean_absolute_error: Interval
    root_mean_squared_error: Interval
    r_squared: Interval
    spearman: Interval


def bootstrap_columns(
    predicted: Floats, true: Floats, *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> list[ColumnIntervals]:
    """Return bootstrap percentile intervals for each column, from resampled images.

    From half a million values on there are fewer resamples, from five million on only 100. Resamples in which all
    values of a column are equal do not count for its R² and rank correlation.
    """
    scores = per_column(predicted, true)
    errors, exact = _errors(predicted, true), true.astype(np.float64)
    centred = exact - exact.mean(axis=0)  # so that the sums of squares do not cancel
    ranked = [(_grouped(ours), _grouped(theirs)) for ours, theirs in zip(predicted.T, true.T, strict=True)]
    images = len(exact)

    def score(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        absolute, squared = (weighted_sums(weights, values) / images for values in (np.abs(errors), errors**2))
        second = weighted_sums(weights, centred**2) / images
        variance = second - (weighted_sums(weights, centred) / images) ** 2
        ratio = np.full(variance.shape, np.nan)
        np.divide(squared, variance, out=ratio, where=variance > _ROUNDING * second)
        correlation = np.stack([_spearman_of_each(*groups, weights) for groups in ranked])
        return np.concatenate([absolute, np.sqrt(squared), 1 - ratio, correlation])

    estimates = [scores.mean_absolute_error, scores.root_mean_squared_error, scores.r_squared, scores.spearman]
    intervals = bootstrap(score, np.concatenate(estimates), errors.shape, seed=seed, resamples=resamples, level=level)
    columns = errors.shape[1]
    return [ColumnIntervals(*intervals[column::columns]) for column in range(columns)]


_ROUNDING = 1e-12
"""A variance below this fraction of the mean square is rounding noise: all values are equal."""


class _Grouped(NamedTuple):
    """A column sorted into groups of equal values."""

    order: NDArray[np.intp]
    starts: NDArray[np.intp]
    """Where each group starts in the order."""
    group: NDArray[np.intp]
    """The group of each image."""


def _grouped(values: Floats) -> _Grouped:
    order = np.argsort(values, kind="stable")
    ordered = values[order]
    first = np.append(True, ordered[1:] != ordered[:-1])
    group = np.empty(len(values), np.intp)
    group[order] = np.cumsum(first) - 1
    return _Grouped(order, np.flatnonzero(first), group)


def _spearman_of_each(one: _Grouped, other: _Grouped, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the rank correlation of R resamples, from how often each draws each image (R, N)."""
    first, second = _centred_ranks(one, weights), _centred_ranks(other, weights)
    shared, own, others = (
        np.einsum("rn,rn,rn->r", weights, a, b) for a, b in ((first, second), (first, first), (second, second))
    )
    size = np.sqrt(own) * np.sqrt(others)
    correlation = np.full(len(size), np.nan)
    np.divide(shared, size, out=correlation, where=size > 0)
    return np.asarray(np.clip(correlation, -1.0, 1.0))


def _centred_ranks(column: _Grouped, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the average rank of each image in each resample (R, N), minus the mean rank."""
    drawn = np.add.reduceat(np.take(weights, column.order, axis=1), column.starts, axis=1)
    ranks = np.cumsum(drawn, axis=1) - drawn / 2
    return np.take(ranks - weights.shape[1] / 2, column.group, axis=1)


def _errors(predicted: Floats, true: Floats) -> NDArray[np.float64]:
    check_values(predicted, true)
    return predicted.astype(np.float64) - true


def _constant(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which columns have a single value; their variance may be rounding noise."""
    return np.asarray((values == values[0]).all(axis=0))


def check_values(predicted: Floats, true: Floats) -> None:
    """Raise unless there is an image, and a finite prediction and true value for each column."""
    if predicted.ndim != 2 or true.shape != predicted.shape:
        raise InputError(f"predictions {predicted.shape} with true values {true.shape}; pass (N, K) and (N, K)")
    if not true.size:
        raise InputError("no columns to evaluate" if len(true) else "no images to evaluate")
    for name, values in (("predictions", predicted), ("true values", true)):
        if wrong := int((~np.isfinite(values)).sum()):
            raise InputError(f"{wrong:,} of the {name} are not finite")
