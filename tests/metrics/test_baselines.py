"""Baselines, and warnings about untrustworthy results."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.metrics.baselines import GAP, PRETRAINED, TOO_FEW, baselines, warning_about_gap, warnings_about
from vitrail.metrics.intervals import wilson_interval

PIECES = ("Bishop", "King", "Knight", "Pawn", "Queen", "Rook")


def warnings(matrix: np.ndarray) -> list[str]:
    interval = wilson_interval(int(np.trace(matrix)), int(matrix.sum()))
    return warnings_about(matrix, interval, PIECES[: len(matrix)])


def guessed(images: list[int], predicted: int) -> np.ndarray:
    matrix = np.zeros((len(images), len(images)), np.int64)
    matrix[:, predicted] = images
    return matrix


def test_guessed_chess_pieces() -> None:
    """Photographs of chess pieces from scratch gave 20.2% where always Pawn gives 19.3%."""
    images = [17, 15, 21, 21, 16, 19]
    right = [3, 3, 5, 5, 3, 3]
    matrix = np.diag(right) + np.roll(np.diag(np.subtract(images, right)), 1, axis=1)
    assert round(100 * np.trace(matrix) / matrix.sum(), 1) == 20.2
    result = baselines(matrix)
    assert (PIECES[result.majority_class], result.majority, result.chance) == ("Knight", 21 / 109, 1 / 6)
    warning = warnings(matrix)
    assert len(warning) == 1
    assert warning[0].startswith("no better than guessing: the 95% interval ")
    assert "reaches 19.3%, the accuracy of always predicting 'Knight' (chance 16.7%); next: " in warning[0]
    assert PRETRAINED in warning[0]


def test_one_class_takes_nearly_all_predictions() -> None:
    warning = warnings(guessed([40, 40, 40], 1))
    assert warning[0].startswith("no better than guessing")
    assert warning[1].startswith("nearly all predictions (100.0%) are 'King', the class of 33.3% of the images")
    # Rare classes that are never predicted: the accuracy of 90% is that of the largest class.
    assert [text.split()[0] for text in warnings(guessed([90, 5, 5], 0))] == ["no", "nearly"]


def test_a_good_result_has_no_warnings() -> None:
    assert warnings(np.diag([40, 40, 40])) == []
    assert warnings(np.array([[95, 1], [1, 23]])) == []
    assert warnings(np.diag([0, 20])) == [], "images of one class cannot be guessed wrongly"


def test_too_few_images() -> None:
    (warning,) = warnings(np.diag([2, 1]))
    assert warning.startswith("too few images to distinguish this from guessing")


@settings(derandomize=True, deadline=None, max_examples=80)
@given(st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=3, max_size=3))
def test_baselines_are_what_such_classifiers_reach(rows: list[list[int]]) -> None:
    matrix = np.array(rows)
    if not matrix.sum():
        return
    result = baselines(matrix)
    reached = [np.trace(guessed(matrix.sum(axis=1).tolist(), column)) / matrix.sum() for column in range(3)]
    assert result.majority == pytest.approx(max(reached))
    assert result.chance == pytest.approx(np.mean(reached))
    low = wilson_interval(int(np.trace(matrix)), int(matrix.sum())).low
    if low <= result.majority and (matrix.sum(axis=1) > 0).sum() > 1:
        assert warnings(matrix)


def test_training_and_validation_far_apart() -> None:
    assert warning_about_gap(0.9, 0.8, 1000) == []
    assert warning_about_gap(0.4, 0.8, 1000) == []
    (warning,) = warning_about_gap(0.982, 0.45, 40)
    assert warning.startswith(
        "overfitting: 98.2% on the augmented training images, 45.0% on the 40 images of the validation split "
        "(95% interval 30.7–60.2); next: "
    )


@given(st.floats(0, 1), st.integers(1, 500), st.data())
def test_overfitting_is_reported_only_beyond_the_interval(training: float, images: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, images))
    warning = warning_about_gap(training, right / images, images)
    beyond = training > wilson_interval(right, images).high and training - right / images >= GAP
    assert bool(warning) == (beyond and images >= TOO_FEW)


def test_four_images_do_not_show_that_one_class_takes_all() -> None:
    few, enough = np.array([[2, 0], [2, 0]]), np.array([[20, 0], [20, 0]])
    assert not any("nearly all predictions" in text for text in warnings(few))
    assert any("nearly all predictions" in text for text in warnings(enough))
