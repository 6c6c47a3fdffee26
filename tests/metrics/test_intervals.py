"""Intervals, against SciPy and against drawing pictures again one by one."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import InputError
from vitrail.metrics import intervals
from vitrail.metrics.classification import confusion_matrix, macro_f1
from vitrail.metrics.intervals import bootstrap_macro_f1, bootstrap_mean, wilson_interval

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


@PROPERTY
@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_is_scipys(pictures: int, share: float, level: float) -> None:
    right = round(share * pictures)
    expected = scipy.stats.binomtest(right, pictures).proportion_ci(level, method="wilson")
    found = wilson_interval(right, pictures, level)
    assert found == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= found.low <= right / pictures <= found.high <= 1


def test_wilson_at_the_ends() -> None:
    assert wilson_interval(0, 10).low == 0
    assert wilson_interval(10, 10).high == 1
    assert [round(100 * end, 1) for end in wilson_interval(354, 360)] == [96.4, 99.2]


@PROPERTY
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(0, 99))
def test_the_mean_lies_in_its_interval(values: list[float], seed: int) -> None:
    found = bootstrap_mean(np.array(values), seed=seed, resamples=200)
    assert found.low <= np.mean(values) <= found.high
    assert found == bootstrap_mean(np.array(values), seed=seed, resamples=200)
    assert min(values) - 1e-6 <= found.low
    assert found.high <= max(values) + 1e-6


def test_the_mean_of_many_has_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(5, 2, 2000)
    half = 1.96 * values.std() / 2000**0.5
    found = bootstrap_mean(values, resamples=4000)
    assert found == pytest.approx((values.mean() - half, values.mean() + half), abs=0.07 * half)
    assert found != bootstrap_mean(values, resamples=4000, seed=1)


def test_drawing_in_chunks_changes_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values, matrix = np.random.default_rng(0).random(50), np.array([[8, 2], [3, 7]])
    whole = bootstrap_mean(values, resamples=99), bootstrap_macro_f1(matrix, resamples=99)
    monkeypatch.setattr(intervals, "_AT_ONCE", 500)
    assert (bootstrap_mean(values, resamples=99), bootstrap_macro_f1(matrix, resamples=99)) == whole


def test_macro_f1_is_that_of_pictures_drawn_again() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 120)
    predicted = np.where(rng.random(120) < 0.8, labels, rng.integers(0, 4, 120))
    found = bootstrap_macro_f1(confusion_matrix(labels, predicted, 4), resamples=4000)
    drawn = []
    for _ in range(4000):
        again = rng.integers(0, 120, 120)
        drawn.append(macro_f1(confusion_matrix(labels[again], predicted[again], 4)))
    assert found == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.01)


@PROPERTY
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 8))
def test_macro_f1_of_each_resample(seed: int, pictures: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = confusion_matrix(rng.integers(0, classes, pictures), rng.integers(0, classes, pictures), classes)
    true, predicted = np.nonzero(matrix)
    cells = rng.multinomial(pictures, matrix[true, predicted] / pictures, 5)
    expected = []
    for row in cells:
        full = np.zeros((classes, classes), np.int64)
        full[true, predicted] = row
        expected.append(macro_f1(full))
    assert intervals._macro_f1_of_each(cells, true, predicted, classes).tolist() == pytest.approx(expected)
    found = bootstrap_macro_f1(matrix, seed=seed, resamples=100)
    assert 0 <= found.low <= macro_f1(matrix) <= found.high <= 1
    assert found == bootstrap_macro_f1(matrix, seed=seed, resamples=100)


def test_what_does_not_fit() -> None:
    for wrong in (
        lambda: wilson_interval(1, 0),
        lambda: wilson_interval(3, 2),
        lambda: wilson_interval(1, 2, level=1),
        lambda: bootstrap_mean(np.zeros(0)),
        lambda: bootstrap_macro_f1(np.zeros((2, 2), np.int64)),
    ):
        with pytest.raises(InputError):
            wrong()
