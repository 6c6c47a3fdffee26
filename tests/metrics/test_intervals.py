"""Intervals, against SciPy and against resampling images."""

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import InputError
from vitrail.metrics import intervals
from vitrail.metrics.classification import balanced_accuracy, confusion_matrix, macro_f1
from vitrail.metrics.intervals import bootstrap_mean, bootstrap_scores, t_interval, t_quantile, wilson_interval

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)


@PROPERTY
@given(st.integers(1, 5000), st.floats(0, 1), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_wilson_is_scipys(images: int, fraction: float, level: float) -> None:
    right = round(fraction * images)
    expected = scipy.stats.binomtest(right, images).proportion_ci(level, method="wilson")
    actual = wilson_interval(right, images, level)
    assert actual == pytest.approx((expected.low, expected.high), abs=1e-12)
    assert 0 <= actual.low <= right / images <= actual.high <= 1


def test_wilson_at_the_ends() -> None:
    assert wilson_interval(0, 10).low == 0
    assert wilson_interval(10, 10).high == 1
    assert [round(100 * end, 1) for end in wilson_interval(354, 360)] == [96.4, 99.2]


@PROPERTY
@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=30), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_students_interval_is_scipys(values: list[float], level: float) -> None:
    assert t_quantile((1 + level) / 2, len(values) - 1) == pytest.approx(
        scipy.stats.t.ppf((1 + level) / 2, len(values) - 1), rel=1e-12
    )
    half = scipy.stats.t.ppf((1 + level) / 2, len(values) - 1) * scipy.stats.sem(values)
    assert t_interval(values, level) == pytest.approx((np.mean(values) - half, np.mean(values) + half), abs=1e-7)


def test_students_interval_of_one_value() -> None:
    assert t_interval([0.5]) is None
    with pytest.raises(InputError):
        t_interval([])


@PROPERTY
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.integers(0, 99))
def test_the_interval_contains_the_mean(values: list[float], seed: int) -> None:
    result = bootstrap_mean(np.array(values), seed=seed, resamples=200)
    assert result.low <= np.mean(values) <= result.high
    assert result == bootstrap_mean(np.array(values), seed=seed, resamples=200)
    assert min(values) - 1e-6 <= result.low
    assert result.high <= max(values) + 1e-6


def test_the_mean_of_many_has_the_normal_interval() -> None:
    values = np.random.default_rng(0).normal(5, 2, 2000)
    half = 1.96 * values.std() / 2000**0.5
    result = bootstrap_mean(values, resamples=4000)
    assert result == pytest.approx((values.mean() - half, values.mean() + half), abs=0.07 * half)
    assert result != bootstrap_mean(values, resamples=4000, seed=1)


def test_drawing_in_chunks_changes_nothing_but_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    values, matrix = np.random.default_rng(0).random(50), np.array([[8, 2], [3, 7]])
    whole = bootstrap_mean(values, resamples=99), bootstrap_scores(matrix, resamples=99)
    monkeypatch.setattr(intervals, "_AT_ONCE", 500)
    assert (bootstrap_mean(values, resamples=99), bootstrap_scores(matrix, resamples=99)) == whole


def test_bootstrap_scores_match_resampled_images() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 600)
    predicted = np.where(rng.random(600) < 0.8, labels, rng.integers(0, 4, 600))
    matrix = confusion_matrix(labels, predicted, 4)
    drawn = []
    for _ in range(2000):
        again = rng.integers(0, 600, 600)
        matrix_again = confusion_matrix(labels[again], predicted[again], 4)
        drawn.append([balanced_accuracy(matrix_again), macro_f1(matrix_again)])
    result = bootstrap_scores(matrix, resamples=4000)
    for interval, plain in zip(result, np.quantile(drawn, [0.025, 0.975], axis=0).T, strict=True):
        assert interval == pytest.approx(tuple(plain), abs=0.01)


@PROPERTY
@given(st.lists(st.integers(0, 60), min_size=2, max_size=6).filter(any), st.sampled_from([0.8, 0.95, 0.99]))
def test_perfect_results_are_at_least_as_wide_as_wilson(images: list[int], level: float) -> None:
    """120 images, all right: the plain bootstrap gave 100.0–100.0, Wilson's interval of the accuracy is 96.9–100.0."""
    total = sum(images)
    all_right, none_right = np.diag(images), np.roll(np.diag(images), 1, axis=1)
    for low, high in bootstrap_scores(all_right, resamples=200, level=level):
        assert high == 1
        assert low <= wilson_interval(total, total, level).low
    for low, high in bootstrap_scores(none_right, resamples=200, level=level):
        assert low == 0
        assert high >= wilson_interval(0, total, level).high


@pytest.mark.parametrize(
    ("right", "classes"), [(1.0, 4), (0.995, 4), (0.99, 4), (0.97, 4), (0.9, 4), (0.6, 4), (0.6, 24), (0.3, 24)]
)
def test_intervals_cover_the_truth(right: float, classes: int) -> None:
    """With equal classes and evenly spread mistakes, both scores equal the accuracy."""
    rng, covered, runs = np.random.default_rng(1), np.zeros(2), 150
    for _ in range(runs):
        labels = rng.integers(0, classes, 120)
        wrong = (labels + rng.integers(1, classes, 120)) % classes
        matrix = confusion_matrix(labels, np.where(rng.random(120) < right, labels, wrong), classes)
        covered += [low <= right <= high for low, high in bootstrap_scores(matrix, resamples=200)]
    # A plain bootstrap covers 0.99 in 0.72 of the runs. With five images per class, macro-F1 is covered too rarely.
    assert (covered / runs > (0.92 if classes == 4 else 0.88)).all()


def test_a_single_class() -> None:
    assert set(bootstrap_scores(np.array([[120]]))) == {wilson_interval(120, 120)}


@PROPERTY
@given(st.integers(0, 10_000), st.integers(1, 60), st.integers(1, 8))
def test_macro_f1_of_each_resample(seed: int, images: int, classes: int) -> None:
    rng = np.random.default_rng(seed)
    matrix = confusion_matrix(rng.integers(0, classes, images), rng.integers(0, classes, images), classes)
    true, predicted = np.nonzero(matrix)
    cells = rng.multinomial(images, matrix[true, predicted] / images, 5)
    expected = []
    for row in cells:
        full = np.zeros((classes, classes), np.int64)
        full[true, predicted] = row
        expected.append(macro_f1(full))
    counts = intervals._counts_of_each(cells, true, predicted, classes)
    assert intervals._macro_f1_of_each(counts).tolist() == pytest.approx(expected)
    actual = bootstrap_scores(matrix, seed=seed, resamples=100)
    for interval, score in zip(actual, (balanced_accuracy(matrix), macro_f1(matrix)), strict=True):
        assert 0 <= interval.low <= score <= interval.high <= 1
    assert actual == bootstrap_scores(matrix, seed=seed, resamples=100)


def test_invalid_arguments() -> None:
    for wrong in (
        lambda: wilson_interval(1, 0),
        lambda: wilson_interval(3, 2),
        lambda: wilson_interval(1, 2, level=1),
        lambda: bootstrap_mean(np.zeros(0)),
        lambda: bootstrap_scores(np.zeros((2, 2), np.int64)),
    ):
        with pytest.raises(InputError):
            wrong()
