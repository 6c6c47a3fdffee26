"""Multi-label metrics, against scikit-learn, torchmetrics, brute force and values computed by hand."""

import math
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from tests.support.peers import import_peer

from vitrail.errors import InputError
from vitrail.metrics import multilabel, resampling
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.multilabel import (
    average_precision,
    best_thresholds,
    co_occurring_mistakes,
    exact_match,
    hamming_accuracy,
    log_losses,
    macro_f1,
    mean_average_precision,
    micro_average_precision,
    micro_f1,
    mistake_matrix,
    per_label,
    precision_recall_curve,
    predicted_labels,
)
from vitrail.metrics.multilabel_intervals import bootstrap_difference, bootstrap_multilabel

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
cases = st.tuples(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 6), st.booleans())
HAND = np.array([[0.9, 0.2], [0.8, 0.6], [0.3, 0.7], [0.1, 0.4]])
HAND_TRUTH = np.array([[1, 0], [0, 1], [1, 0], [0, 0]], np.uint8)


def drawn(seed: int, images: int, labels: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = rng.random((images, labels)) < rng.random(labels)
    scores = np.clip(0.6 * rng.random((images, labels)) + 0.3 * truth + 0.05, 0, 1)
    if ties:
        scores = np.round(scores * 4) / 4
    return scores.astype(np.float32), truth.astype(np.uint8)


def with_positives(seed: int, images: int, labels: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return a case in which every label has positives and negatives, which the peers need."""
    scores, truth = drawn(seed, images + 2, labels, ties)
    truth[0], truth[1] = 1, 0
    return scores, truth


@PROPERTY
@given(cases)
def test_average_precision_is_that_of_scikit_learn(case: tuple[int, int, int, bool]) -> None:
    scores, truth = with_positives(*case)
    expected = [sklearn_metrics.average_precision_score(truth[:, k], scores[:, k]) for k in range(truth.shape[1])]
    assert average_precision(scores, truth).tolist() == pytest.approx(expected, abs=1e-12)
    assert mean_average_precision(scores, truth) == pytest.approx(np.mean(expected), abs=1e-12)
    micro = sklearn_metrics.average_precision_score(truth.ravel(), scores.ravel())
    assert micro_average_precision(scores, truth) == pytest.approx(micro, abs=1e-12)


@pytest.mark.parametrize("ties", [False, True])
def test_the_same_metrics_as_torchmetrics(ties: bool) -> None:
    peer = import_peer("torchmetrics.functional.classification")
    scores, truth = with_positives(3, 300, 5, ties)
    own, theirs = torch.from_numpy(scores), torch.from_numpy(truth).long()
    for average, value in (("macro", mean_average_precision), ("micro", micro_average_precision)):
        expected = peer.multilabel_average_precision(own, theirs, 5, average=average)
        assert value(scores, truth) == pytest.approx(expected.item(), abs=1e-6)
    predicted = predicted_labels(scores, np.full(5, 0.45))
    guesses = torch.from_numpy(predicted).long()
    values: list[tuple[Callable[..., float], torch.Tensor]] = [
        (macro_f1, peer.multilabel_f1_score(guesses, theirs, 5, average="macro")),
        (micro_f1, peer.multilabel_f1_score(guesses, theirs, 5, average="micro")),
        (exact_match, peer.multilabel_exact_match(guesses, theirs, 5)),
        (hamming_accuracy, 1 - peer.multilabel_hamming_distance(guesses, theirs, 5)),
    ]
    for function, expected in values:
        assert function(predicted, truth) == pytest.approx(expected.item(), abs=1e-6)


@PROPERTY
@given(cases, st.floats(0.05, 0.95))
def test_metrics_at_thresholds_are_those_of_scikit_learn(case: tuple[int, int, int, bool], threshold: float) -> None:
    scores, truth = drawn(case[0], case[1], case[2] + 1, case[3])  # scikit-learn takes one label for two classes
    labels = truth.shape[1]
    thresholds = np.full(labels, threshold)
    predicted = predicted_labels(scores, thresholds)
    result = per_label(scores, truth, thresholds)
    precision, recall, f1, images = sklearn_metrics.precision_recall_fscore_support(
        truth, predicted, average=None, labels=range(labels), zero_division=np.nan
    )
    assert result.images.tolist() == images.tolist()
    for own, theirs in ((result.precision, precision), (result.recall, recall), (result.f1, f1)):
        assert own.tolist() == pytest.approx(theirs.astype(float).tolist(), nan_ok=True)
    np.testing.assert_array_equal(result.average_precision, average_precision(scores, truth))
    occurring = truth.any(axis=0)
    expected = f1[occurring].mean() if occurring.any() else math.nan
    assert macro_f1(predicted, truth) == pytest.approx(expected, nan_ok=True)
    both = sklearn_metrics.f1_score(truth.ravel(), predicted.ravel(), zero_division=np.nan)
    assert micro_f1(predicted, truth) == pytest.approx(both, nan_ok=True)
    assert hamming_accuracy(predicted, truth) == pytest.approx(1 - sklearn_metrics.hamming_loss(truth, predicted))
    assert exact_match(predicted, truth) == pytest.approx(sklearn_metrics.accuracy_score(truth, predicted))


def test_values_worked_out_by_hand() -> None:
    assert average_precision(HAND, HAND_TRUTH).tolist() == pytest.approx([(1 + 2 / 3) / 2, 1 / 2])
    assert mean_average_precision(HAND, HAND_TRUTH) == pytest.approx(2 / 3)
    result = per_label(HAND, HAND_TRUTH, np.array([0.5, 0.6]))
    assert result.images.tolist() == [2, 1]
    assert result.precision.tolist() == [1 / 2, 1 / 2]
    assert result.recall.tolist() == [1 / 2, 1]
    assert result.f1.tolist() == pytest.approx([1 / 2, 2 / 3])
    predicted = predicted_labels(HAND, np.array([0.5, 0.6]))
    assert predicted.tolist() == [[True, False], [True, True], [False, True], [False, False]]
    assert micro_f1(predicted, HAND_TRUTH) == pytest.approx(4 / 7)
    assert (exact_match(predicted, HAND_TRUTH), hamming_accuracy(predicted, HAND_TRUTH)) == (1 / 2, 5 / 8)


def test_labels_without_positives_are_not_averaged() -> None:
    scores, truth = np.array([[0.9, 0.9, 0.1], [0.1, 0.1, 0.2]]), np.array([[1, 0, 0], [0, 0, 0]])
    result = per_label(scores, truth, np.full(3, 0.5))
    np.testing.assert_array_equal(result.average_precision, [1, math.nan, math.nan])
    np.testing.assert_array_equal(result.precision, [1, 0, math.nan])
    np.testing.assert_array_equal(result.recall, [1, math.nan, math.nan])
    np.testing.assert_array_equal(result.f1, [1, 0, math.nan])
    assert mean_average_precision(scores, truth) == macro_f1(scores > 0.5, truth) == 1
    nothing = np.zeros_like(truth)
    empty = nothing.astype(bool)
    assert math.isnan(mean_average_precision(scores, nothing))
    assert math.isnan(micro_average_precision(scores, nothing))
    assert math.isnan(macro_f1(empty, nothing))
    assert math.isnan(micro_f1(empty, nothing))
    assert exact_match(empty, nothing) == hamming_accuracy(empty, nothing) == 1


@PROPERTY
@given(cases)
def test_bounds_order_and_perfect_predictions(case: tuple[int, int, int, bool]) -> None:
    scores, truth = with_positives(*case)
    rng = np.random.default_rng(case[0])
    images, labels = rng.permutation(len(truth)), rng.permutation(truth.shape[1])
    expected: list[float] = []
    for one, two in ((scores, truth), (scores[images][:, labels], truth[images][:, labels])):
        predicted = predicted_labels(one, best_thresholds(one, two))
        values = [mean_average_precision(one, two), micro_average_precision(one, two), log_losses(one, two).mean()]
        for function in (macro_f1, micro_f1, exact_match, hamming_accuracy):
            values.append(function(predicted, two))
        assert all(0 <= value <= 1 + 1e-12 for value in values[:2] + values[3:])
        assert values == pytest.approx(expected or values)
        expected = values
    perfect = 0.2 + 0.6 * truth
    assert (average_precision(perfect, truth) == 1).all()
    assert (best_thresholds(perfect, truth) == 0.5).all()
    assert macro_f1(perfect > 0.5, truth) == exact_match(perfect > 0.5, truth) == 1


@PROPERTY
@given(cases)
def test_thresholds_maximise_f1(case: tuple[int, int, int, bool]) -> None:
    scores, truth = drawn(*case)
    thresholds = best_thresholds(scores, truth)
    assert ((thresholds > 0) & (thresholds < 1)).all()
    for k, threshold in enumerate(thresholds):
        own, has = scores[:, k].astype(float), truth[:, k] == 1
        if has.all() or not has.any():
            assert threshold == 0.5
            continue
        points = sorted({0.0, *own.tolist()})
        candidates = [(low + high) / 2 for low, high in pairwise(points)]

        def f1(value: float, own: np.ndarray = own, has: np.ndarray = has) -> float:
            return float(2 * ((own >= value) & has).sum() / (has.sum() + (own >= value).sum()))

        best = max(map(f1, candidates))
        assert f1(threshold) == best
        distances = [abs(value - 0.5) for value in candidates if f1(value) == best]
        assert abs(threshold - 0.5) == pytest.approx(min(distances))


@PROPERTY
@given(
    st.lists(
        st.tuples(
            st.sampled_from([0, 5e-324, 1e-300, 0.5, np.nextafter(0.5, 1), np.nextafter(1, 0), 1]), st.booleans()
        ),
        min_size=1,
        max_size=8,
    )
)
def test_thresholds_between_adjacent_floats(pairs: list[tuple[float, bool]]) -> None:
    scores = np.array([[score] for score, _ in pairs], float)
    truth = np.array([[has] for _, has in pairs])
    (threshold,) = best_thresholds(scores, truth)
    assert 0 < threshold < 1
    if truth.all() or not truth.any():
        return
    reachable = [5e-324, 1e-300, 0.5, np.nextafter(0.5, 1), np.nextafter(1, 0)]
    f1 = [macro_f1(scores >= value, truth) for value in reachable]
    assert macro_f1(predicted_labels(scores, np.array([threshold])), truth) == max(f1)


def test_equally_good_thresholds() -> None:
    scores, truth = np.array([[0.9], [0.7], [0.5], [0.3]]), np.array([[1], [0], [0], [1]])
    # Predicting one image and predicting all four reach an F1 of 2/3.
    assert best_thresholds(scores, truth).tolist() == pytest.approx([0.8])
    assert best_thresholds(np.array([[0.0], [0.0]]), np.array([[1], [0]])).tolist() == [0.5]


@settings(derandomize=True, deadline=None, max_examples=15)
@given(cases)
def test_log_losses_are_those_of_scikit_learn(case: tuple[int, int, int, bool]) -> None:
    scores, truth = drawn(*case)
    scores = np.clip(scores, 0.01, 0.99).astype(np.float64)
    expected = [
        sklearn_metrics.log_loss(has, np.stack([1 - own, own], axis=1), labels=[0, 1])
        for own, has in zip(scores, truth, strict=True)
    ]
    assert log_losses(scores, truth).tolist() == pytest.approx(expected)
    theirs = torch.nn.functional.binary_cross_entropy(torch.from_numpy(scores), torch.from_numpy(truth).double())
    assert log_losses(scores, truth).mean() == pytest.approx(theirs.item())


def test_the_log_loss_of_probability_zero_is_finite() -> None:
    (loss,) = log_losses(np.array([[1, 0]], np.float32), np.array([[0, 1]]))
    assert 87 < loss < 88


@PROPERTY
@given(cases)
def test_the_curve_is_that_of_scikit_learn(case: tuple[int, int, int, bool]) -> None:
    scores, truth = (array[:, 0] for array in with_positives(*case))
    curve = precision_recall_curve(scores, truth)
    precision, recall, thresholds = sklearn_metrics.precision_recall_curve(truth, scores)
    for r, p, t in zip(*curve, strict=True):
        assert p == pytest.approx(precision[:-1][recall[:-1] == r].max())
        (index,) = np.flatnonzero(thresholds == t)
        assert (precision[index], recall[index]) == (pytest.approx(p), pytest.approx(r))
    assert curve.recall.tolist() == sorted(set(recall.tolist()) - {0})
    area = (np.diff(curve.recall, prepend=0) * curve.precision).sum()
    assert area == pytest.approx(average_precision(scores[:, None], truth[:, None])[0])


def test_a_curve_has_few_points() -> None:
    scores, truth = (array[:, 0] for array in with_positives(0, 20_000, 1))
    whole, chart = precision_recall_curve(scores, truth, len(scores)), precision_recall_curve(scores, truth)
    assert len(whole.recall) > 1000
    assert 150 <= len(chart.recall) <= multilabel.CURVE_POINTS
    assert (np.diff(chart.recall) > 0).all()
    assert np.diff(chart.recall).max() < 0.01
    assert (chart.recall[0], chart.recall[-1]) == (whole.recall[0], 1)
    assert set(zip(*chart, strict=True)) <= set(zip(*whole, strict=True))
    assert [len(column) for column in precision_recall_curve(scores, np.zeros_like(truth))] == [0, 0, 0]


@PROPERTY
@given(cases)
def test_co_occurring_mistakes_by_their_definition(case: tuple[int, int, int, bool]) -> None:
    scores, truth = drawn(*case)
    predicted, counts = scores > 0.5, Counter[tuple[int, int]]()
    for row, has in zip(predicted.tolist(), truth.tolist(), strict=True):
        for i in range(len(has)):
            for j in range(len(has)):
                if has[i] and not row[i] and row[j] and not has[j]:
                    counts[i, j] += 1
    expected = sorted(((i, j, count) for (i, j), count in counts.items()), key=lambda each: (-each[2], each[:2]))
    assert co_occurring_mistakes(predicted, truth, 100) == expected
    assert co_occurring_mistakes(predicted, truth, 2) == expected[:2]


@PROPERTY
@given(cases)
def test_the_mistake_matrix_has_right_predictions_on_its_diagonal(case: tuple[int, int, int, bool]) -> None:
    scores, truth = drawn(*case)
    predicted = scores > 0.5
    matrix = mistake_matrix(predicted, truth)
    assert matrix.diagonal().tolist() == (predicted & truth).sum(axis=0).tolist()
    pairs = co_occurring_mistakes(predicted, truth, 100)
    assert matrix.sum() - matrix.trace() == sum(pair.images for pair in pairs)
    assert all(matrix[pair.missed, pair.added] == pair.images for pair in pairs)


def test_counting_mistakes_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, truth = drawn(1, 200, 6)
    whole = co_occurring_mistakes(scores > 0.5, truth, 100)
    monkeypatch.setattr(multilabel, "_AT_ONCE", 42)
    assert co_occurring_mistakes(scores > 0.5, truth, 100) == whole != []


# ── intervals ──


def test_the_interval_of_a_difference_is_paired() -> None:
    """Both models make nearly the same mistakes, so the difference is far more certain than the two scores."""
    scores, truth = drawn(3, 300, 4)
    noise = np.random.default_rng(0).normal(0, 0.02, scores.shape)
    better = np.clip(scores + noise + 0.05 * truth, 0, 1)
    low, high = bootstrap_difference(scores, better, truth)
    apart = mean_average_precision(better, truth) - mean_average_precision(scores, truth)
    assert 0 < low < apart < high
    alone = bootstrap_multilabel(scores, truth, np.full(4, 0.5)).mean_average_precision
    assert high - low < 0.5 * (alone.high - alone.low)
    assert bootstrap_difference(scores, scores, truth) == (0, 0)
    with pytest.raises(InputError, match="pass"):
        bootstrap_difference(scores, better[:, :3], truth)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(cases)
def test_intervals_match_resampled_images(case: tuple[int, int, int, bool]) -> None:
    scores, truth = with_positives(*case)
    thresholds = np.full(truth.shape[1], 0.5)
    draws = np.random.default_rng(case[0]).integers(0, len(truth), (40, len(truth)))
    resampled = np.array(
        [(mean_average_precision(scores[i], truth[i]), macro_f1(scores[i] >= 0.5, truth[i])) for i in draws]
    )
    estimates = mean_average_precision(scores, truth), macro_f1(scores >= 0.5, truth)
    intervals = bootstrap_multilabel(scores, truth, thresholds, seed=case[0], resamples=40)
    assert intervals == bootstrap_multilabel(scores, truth, thresholds, seed=case[0], resamples=40)
    for (low, high), values, estimate in zip(intervals, resampled.T, estimates, strict=True):
        assert 0 <= low <= estimate <= high <= 1
        if 0 < estimate < 1:
            ends = np.nanquantile(values, [0.025, 0.975])
            assert (low, high) == pytest.approx((min(ends[0], estimate), max(ends[1], estimate)), abs=1e-6)


def test_intervals_cover_the_truth() -> None:
    scores, truth = drawn(0, 50_000, 4)
    thresholds, rng, covered = np.full(4, 0.5), np.random.default_rng(0), np.zeros(2)
    actual = mean_average_precision(scores, truth), macro_f1(scores >= 0.5, truth)
    for _ in range(60):
        some = rng.integers(0, len(truth), 150)
        intervals = bootstrap_multilabel(scores[some], truth[some], thresholds, resamples=100)
        covered += [low <= value <= high for (low, high), value in zip(intervals, actual, strict=True)]
    assert (covered / 60 > 0.85).all()


def test_intervals_of_perfect_and_undefined_scores() -> None:
    truth = np.tile(np.array([[1, 0], [0, 1]]), (30, 1))
    thresholds = np.full(2, 0.5)
    perfect = bootstrap_multilabel(truth.astype(float), truth, thresholds, resamples=100)
    assert set(perfect) == {wilson_interval(60, 60)}
    wrong = bootstrap_multilabel(1.0 - truth, truth, thresholds, resamples=100)
    assert wrong.macro_f1 == wilson_interval(0, 60)
    nothing = bootstrap_multilabel(truth.astype(float), np.zeros_like(truth), thresholds, resamples=100)
    assert np.isnan(nothing).all()


def test_many_images_have_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, truth = drawn(0, 100, 5)
    thresholds = np.full(5, 0.5)
    fewer = bootstrap_multilabel(scores, truth, thresholds, resamples=100)
    assert fewer != bootstrap_multilabel(scores, truth, thresholds)
    monkeypatch.setattr(resampling, "_AT_ONCE", 700)
    assert fewer == bootstrap_multilabel(scores, truth, thresholds, resamples=100)
    monkeypatch.setattr(resampling, "WORK", 1000)
    assert fewer == bootstrap_multilabel(scores, truth, thresholds)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: average_precision(np.zeros((0, 3)), np.zeros((0, 3))), "no images"),
        (lambda: average_precision(np.zeros((3, 0)), np.zeros((3, 0))), "no labels"),
        (lambda: best_thresholds(np.zeros((2, 3)), np.zeros((2, 2))), "pass"),
        (lambda: log_losses(np.zeros(3), np.zeros(3)), "pass"),
        (lambda: mean_average_precision(np.array([[math.nan, 1]]), np.array([[0, 1]])), "1 of the probabilities"),
        (
            lambda: micro_average_precision(np.zeros((1, 2)), np.array([[0, 2]])),
            "from 0 to 2; each",
        ),
        (lambda: precision_recall_curve(np.zeros(0), np.zeros(0)), "no images"),
        (lambda: per_label(np.zeros((1, 2)), np.zeros((1, 2), int), np.zeros(3)), "with thresholds"),
        (lambda: macro_f1(np.zeros((2, 3), bool), np.zeros((3, 3), int)), "pass"),
        (lambda: micro_f1(np.zeros((0, 3), bool), np.zeros((0, 3), int)), "no images"),
        (lambda: exact_match(np.zeros((0, 3), bool), np.zeros((0, 3), int)), "no images"),
        (lambda: hamming_accuracy(np.zeros((0, 3), bool), np.zeros((0, 3), int)), "no images"),
        (lambda: co_occurring_mistakes(np.zeros((0, 3), bool), np.zeros((0, 3), int), 5), "no images"),
        (lambda: bootstrap_multilabel(HAND, HAND_TRUTH, np.zeros(2), level=1), "level"),
    ],
)
def test_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
