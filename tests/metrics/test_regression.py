"""Regression metrics, against scikit-learn, SciPy, torchmetrics and values computed by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from tests.support.peers import import_peer

from vitrail.errors import InputError
from vitrail.metrics import resampling
from vitrail.metrics.regression import (
    bootstrap_columns,
    check_values,
    constant_baseline,
    largest_errors,
    per_column,
    r_squared,
    spearman,
)

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
cases = st.tuples(st.integers(0, 10_000), st.integers(3, 40), st.integers(1, 4), st.booleans())
HAND = np.array([[1.0], [2.0], [4.0]])
HAND_TRUE = np.array([[1.0], [3.0], [2.0]])


def drawn(seed: int, images: int, columns: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    true = rng.normal(30, 10, (images, columns)) * 10.0 ** np.arange(columns)
    predicted = true + rng.normal(0, 5, (images, columns)) * 10.0 ** np.arange(columns)
    if ties:
        scale = 10.0 ** (np.arange(columns) + 1)
        true, predicted = np.round(true / scale) * scale, np.round(predicted / scale) * scale
    true[:2], predicted[:2] = [[0], [40]], [[0], [50]]
    return predicted.astype(np.float32), true


@PROPERTY
@given(cases)
def test_metrics_are_those_of_scikit_learn_and_scipy(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    result = per_column(predicted, true)
    for own, theirs in (
        (result.mean_absolute_error, sklearn_metrics.mean_absolute_error),
        (result.root_mean_squared_error, sklearn_metrics.root_mean_squared_error),
        (result.median_absolute_error, sklearn_metrics.median_absolute_error),
        (result.r_squared, sklearn_metrics.r2_score),
    ):
        expected = theirs(true, predicted.astype(float), multioutput="raw_values")
        assert own.tolist() == pytest.approx(expected.tolist(), rel=1e-9, abs=1e-9)
    ranked = [scipy.stats.spearmanr(predicted[:, k], true[:, k]).statistic for k in range(true.shape[1])]
    assert result.spearman.tolist() == pytest.approx(ranked, abs=1e-9)


@pytest.mark.parametrize("ties", [False, True])
def test_the_same_metrics_as_torchmetrics(ties: bool) -> None:
    peer = import_peer("torchmetrics.functional.regression")
    predicted, true = drawn(4, 300, 3, ties)
    own, theirs = torch.from_numpy(predicted).double(), torch.from_numpy(true)
    result = per_column(predicted, true)
    for k in range(3):
        values = [
            (result.mean_absolute_error, peer.mean_absolute_error(own[:, k], theirs[:, k])),
            (result.root_mean_squared_error, peer.mean_squared_error(own[:, k], theirs[:, k], squared=False)),
            (result.r_squared, peer.r2_score(own[:, k], theirs[:, k])),
            (result.spearman, peer.spearman_corrcoef(own[:, k], theirs[:, k])),
        ]
        for column, expected in values:
            assert column[k] == pytest.approx(expected.item(), rel=1e-6)


def test_values_worked_out_by_hand() -> None:
    result = per_column(HAND, HAND_TRUE)
    assert [column.item() for column in result] == pytest.approx([1, 1, (5 / 3) ** 0.5, 1 - 5 / 2, 1 / 2])
    baseline = constant_baseline(HAND_TRUE, mean=np.array([2.0]), median=np.array([3.0]))
    assert [column.item() for column in baseline] == pytest.approx([1, (2 / 3) ** 0.5])


def test_constant_columns_are_undefined() -> None:
    true = np.stack([np.full(7, 0.1), np.arange(7)], axis=1)
    predicted = np.stack([np.arange(7), np.full(7, 0.1)], axis=1)
    result = per_column(predicted, true)
    assert np.isnan(result.r_squared).tolist() == [True, False]
    assert np.isnan(result.spearman).all()
    intervals = bootstrap_columns(predicted, true, resamples=100)
    assert np.isnan(intervals[0].r_squared).all()
    assert np.isnan(intervals[1].spearman).all()
    assert not np.isnan([intervals[0].mean_absolute_error, intervals[1].r_squared]).any()
    single = per_column(true[:1], true[:1])
    assert np.isnan([single.r_squared, single.spearman]).all()


@PROPERTY
@given(cases)
def test_bounds_order_and_perfect_predictions(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    rng = np.random.default_rng(case[0])
    images, columns = rng.permutation(len(true)), rng.permutation(true.shape[1])
    result, again = per_column(predicted, true), per_column(predicted[images][:, columns], true[images][:, columns])
    for one, other in zip(result, again, strict=True):
        assert other.tolist() == pytest.approx(one[columns].tolist())
    assert (result.mean_absolute_error <= result.root_mean_squared_error + 1e-9).all()
    assert (result.r_squared <= 1).all()
    assert (np.abs(result.spearman) <= 1).all()
    perfect = per_column(true, true)
    for column, expected in zip(perfect, (0, 0, 0, 1, 1), strict=True):
        assert column.tolist() == pytest.approx([expected] * true.shape[1])
    np.testing.assert_allclose(spearman(-true, true), -1)
    np.testing.assert_allclose(r_squared(np.broadcast_to(true.mean(axis=0), true.shape), true), 0, atol=1e-12)


@PROPERTY
@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(-1e3, 1e3)), min_size=3, max_size=30), st.integers(-3, 3))
def test_spearman_depends_on_the_order_only(pairs: list[tuple[int, float]], shift: int) -> None:
    one, other = np.array(pairs, float)[:, :1], np.array(pairs, float)[:, 1:]
    expected = spearman(one, other)
    np.testing.assert_allclose(spearman(one**3 + shift, other), expected, atol=1e-12)
    np.testing.assert_allclose(spearman(other, one), expected, atol=1e-12)
    if not np.isnan(expected):
        ranks = scipy.stats.rankdata(one), scipy.stats.rankdata(other)
        assert expected.item() == pytest.approx(np.corrcoef(*ranks)[0, 1], abs=1e-9)


@PROPERTY
@given(cases)
def test_no_constant_does_better_than_the_baseline(case: tuple[int, int, int, bool]) -> None:
    other, true = drawn(*case)
    baseline = constant_baseline(true, mean=true.mean(axis=0), median=np.median(true, axis=0))
    elsewhere = constant_baseline(true, mean=other.mean(axis=0), median=np.median(other, axis=0))
    for best, value in zip(baseline, elsewhere, strict=True):
        assert (best <= value + 1e-9).all()
    result = per_column(np.broadcast_to(true.mean(axis=0), true.shape), true)
    np.testing.assert_allclose(baseline.root_mean_squared_error, result.root_mean_squared_error)


def test_the_largest_errors() -> None:
    predicted, true = np.array([[1.0], [5.0], [0.0], [-2.0]]), np.zeros((4, 1))
    assert largest_errors(predicted, true, 2).tolist() == [1, 3]
    assert largest_errors(predicted, true, 9).tolist() == [1, 3, 0, 2]
    assert largest_errors(np.ones((3, 1)), np.zeros((3, 1)), 2).tolist() == [0, 1]
    # An error of 2 where the values deviate by 1 is larger than one of 100 where they deviate by 1,000.
    true = np.array([[-1.0, -1000], [1, 1000], [-1, -1000], [1, 1000]])
    assert largest_errors(true + np.array([[0, 100], [2, 0], [0, 0], [2, 1000]]), true, 3).tolist() == [3, 1, 0]


@PROPERTY
@given(cases)
def test_the_units_of_the_columns_do_not_matter(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    units = 2.0 ** np.arange(true.shape[1])
    assert largest_errors(predicted * units, true * units, 5).tolist() == largest_errors(predicted, true, 5).tolist()


# ── intervals ──


@settings(derandomize=True, deadline=None, max_examples=20)
@given(cases)
def test_intervals_match_resampled_images(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    draws = np.random.default_rng(case[0]).integers(0, len(true), (40, len(true)))
    resampled = [per_column(predicted[i], true[i]) for i in draws]
    estimates, intervals = per_column(predicted, true), bootstrap_columns(predicted, true, seed=case[0], resamples=40)
    assert intervals == bootstrap_columns(predicted, true, seed=case[0], resamples=40)
    for name in ("mean_absolute_error", "root_mean_squared_error", "r_squared", "spearman"):
        ends = np.nanquantile([getattr(each, name) for each in resampled], [0.025, 0.975], axis=0)
        for k, estimate in enumerate(getattr(estimates, name)):
            low, high = getattr(intervals[k], name)
            assert low <= estimate <= high
            expected = min(ends[0, k], estimate), max(ends[1, k], estimate)
            assert (low, high) == pytest.approx(expected, rel=1e-6, abs=1e-9)


def test_intervals_cover_the_truth() -> None:
    predicted, true = drawn(0, 50_000, 1)
    actual, rng, covered = per_column(predicted, true), np.random.default_rng(0), np.zeros(4)
    expected = (actual.mean_absolute_error, actual.root_mean_squared_error, actual.r_squared, actual.spearman)
    for _ in range(60):
        some = rng.integers(0, len(true), 150)
        (intervals,) = bootstrap_columns(predicted[some], true[some], resamples=100)
        covered += [low <= value.item() <= high for (low, high), value in zip(intervals, expected, strict=True)]
    assert (covered / 60 > 0.85).all()


def test_many_images_have_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    predicted, true = drawn(0, 100, 2)
    fewer = bootstrap_columns(predicted, true, resamples=100)
    assert fewer != bootstrap_columns(predicted, true)
    monkeypatch.setattr(resampling, "WORK", 1000)
    assert fewer == bootstrap_columns(predicted, true)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: per_column(np.zeros((0, 2)), np.zeros((0, 2))), "no images"),
        (lambda: check_values(np.zeros((2, 0)), np.zeros((2, 0))), "no columns"),
        (lambda: r_squared(np.zeros((3, 2)), np.zeros((2, 3))), "pass"),
        (lambda: spearman(np.zeros(3), np.zeros(3)), "pass"),
        (lambda: largest_errors(np.array([[math.inf], [0]]), np.zeros((2, 1)), 1), "1 of the predictions are not"),
        (lambda: per_column(np.zeros((2, 1)), np.array([[math.nan], [0]])), "1 of the true values are not finite"),
        (lambda: constant_baseline(np.zeros((2, 1)), mean=np.zeros(1), median=np.zeros(2)), "with a constant"),
        (lambda: constant_baseline(np.zeros((0, 1)), mean=np.zeros(1), median=np.zeros(1)), "no images"),
        (lambda: bootstrap_columns(np.zeros((0, 1)), np.zeros((0, 1))), "no images"),
        (lambda: bootstrap_columns(HAND, HAND_TRUE, level=0), "level"),
    ],
)
def test_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
