"""Calibration, against a loop over the bins and values computed by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.metrics.classification import BINS, expected_calibration_error, reliability

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
cases = st.tuples(st.integers(0, 10_000), st.integers(1, 200), st.integers(2, 6), st.integers(1, 20))


def drawn(seed: int, images: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.random((images, classes)) ** 4 + 1e-6
    return (scores / scores.sum(1, keepdims=True)).astype(np.float32), rng.integers(0, classes, images)


@PROPERTY
@given(cases)
def test_as_a_loop_over_the_bins(case: tuple[int, int, int, int]) -> None:
    probabilities, labels = drawn(*case[:3])
    bins, error = case[3], 0.0
    table = reliability(probabilities, labels, bins)
    edges = np.linspace(0, 1, bins + 1)
    rows = [(max(row), row.index(max(row)) == label) for row, label in zip(probabilities.tolist(), labels, strict=True)]
    for number, result in enumerate(table):
        inside = [(confidence, right) for confidence, right in rows if edges[number] < confidence <= edges[number + 1]]
        assert (result.low, result.high, result.images) == (edges[number], edges[number + 1], len(inside))
        if inside:
            confidence, accuracy = (sum(column) / len(inside) for column in zip(*inside, strict=True))
            assert (result.confidence, result.accuracy) == pytest.approx((confidence, accuracy))
            error += len(inside) / len(rows) * abs(accuracy - confidence)
        else:
            assert (result.confidence, result.accuracy) == (None, None)
    assert expected_calibration_error(table) == pytest.approx(error)


@PROPERTY
@given(cases)
def test_bounds_and_sums(case: tuple[int, int, int, int]) -> None:
    probabilities, labels = drawn(*case[:3])
    table = reliability(probabilities, labels, case[3])
    assert 0 <= expected_calibration_error(table) <= 1
    assert sum(row.images for row in table) == len(labels)
    right = sum(row.images * row.accuracy for row in table if row.images)
    assert right == pytest.approx((probabilities.argmax(1) == labels).sum())
    order = np.random.default_rng(case[0]).permutation(len(labels))
    again = reliability(probabilities[order], labels[order], case[3])
    assert expected_calibration_error(again) == pytest.approx(expected_calibration_error(table))


def test_values_worked_out_by_hand() -> None:
    probabilities = np.array([[0.9, 0.1], [0.1, 0.9], [0.75, 0.25], [0.75, 0.25]], np.float32)
    table = reliability(probabilities, np.array([0, 0, 0, 0]))
    assert len(table) == BINS
    # 0.9 is in (13/15, 14/15] with one right of two, 0.75 in (11/15, 12/15] with both right.
    assert [number for number, row in enumerate(table) if row.images] == [11, 13]
    assert (table[13].accuracy, table[11].accuracy) == (0.5, 1)
    assert expected_calibration_error(table) == pytest.approx(0.5 * 0.4 + 0.5 * 0.25)


def test_confident_and_right_is_calibrated_confident_and_wrong_is_not() -> None:
    confidence = np.eye(3, dtype=np.float32)
    assert expected_calibration_error(reliability(confidence, np.array([0, 1, 2]))) == 0
    assert expected_calibration_error(reliability(confidence, np.array([1, 2, 0]))) == 1
