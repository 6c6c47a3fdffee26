"""Classification metrics, against loops that follow the definitions and values computed by hand."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitrail.errors import InputError
from vitrail.metrics.classification import (
    balanced_accuracy,
    check_labels,
    confusion_matrix,
    log_loss,
    log_losses,
    macro_f1,
    most_confused,
    per_class,
    top_k_right,
)

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
HAND = np.array([[3, 1, 0], [0, 2, 0], [2, 0, 2]])
"""4 images of class 0, 2 of class 1, 4 of class 2."""


def drawn(seed: int, images: int, classes: int, ties: bool = False) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    scores = rng.random((images, classes)) + 1e-3
    if ties:
        scores = np.ceil(scores * 3)
    return (scores / scores.sum(1, keepdims=True)).astype(np.float32), rng.integers(0, classes, images)


cases = st.tuples(st.integers(0, 10_000), st.integers(1, 40), st.integers(1, 8), st.booleans())


@PROPERTY
@given(cases, st.integers(1, 9))
def test_top_k_follows_the_sorted_list(case: tuple[int, int, int, bool], k: int) -> None:
    probabilities, labels = drawn(*case)
    right = [
        label in sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True)
    ]
    assert top_k_right(probabilities, labels, k).tolist() == right
    assert (top_k_right(probabilities, labels, 1) == (probabilities.argmax(1) == labels)).all()


@PROPERTY
@given(cases)
def test_confusion_matrix_counts_every_image_once(case: tuple[int, int, int, bool]) -> None:
    probabilities, labels = drawn(*case)
    classes, predicted = probabilities.shape[1], probabilities.argmax(1)
    matrix = confusion_matrix(labels, predicted, classes)
    naive = [[0] * classes for _ in range(classes)]
    for true, guess in zip(labels.tolist(), predicted.tolist(), strict=True):
        naive[true][guess] += 1
    assert matrix.tolist() == naive
    assert matrix.sum(1).tolist() == np.bincount(labels, minlength=classes).tolist()
    assert matrix.sum(0).tolist() == np.bincount(predicted, minlength=classes).tolist()
    assert np.trace(matrix) == top_k_right(probabilities, labels, 1).sum()


@PROPERTY
@given(cases)
def test_each_class_by_its_definition(case: tuple[int, int, int, bool]) -> None:
    probabilities, labels = drawn(*case)
    classes, predicted = probabilities.shape[1], probabilities.argmax(1).tolist()
    matrix = confusion_matrix(labels, np.array(predicted), classes)
    scores, result = per_class(matrix), []
    for number in range(classes):
        pairs = list(zip(labels.tolist(), predicted, strict=True))
        right = sum(t == p == number for t, p in pairs)
        taken, own = sum(p == number for _, p in pairs), sum(t == number for t, _ in pairs)
        precision, recall = right / taken if taken else math.nan, right / own if own else math.nan
        f1 = 0.0 if not right else 2 * precision * recall / (precision + recall)
        assert scores.images[number] == own
        assert scores.precision[number] == pytest.approx(precision, nan_ok=True)
        assert scores.recall[number] == pytest.approx(recall, nan_ok=True)
        assert scores.f1[number] == pytest.approx(f1 if taken or own else math.nan, nan_ok=True)
        if own:
            result.append((recall, f1))
    assert balanced_accuracy(matrix) == pytest.approx(sum(recall for recall, _ in result) / len(result))
    assert macro_f1(matrix) == pytest.approx(sum(f1 for _, f1 in result) / len(result))


def test_values_worked_out_by_hand() -> None:
    scores = per_class(HAND)
    assert scores.images.tolist() == [4, 2, 4]
    assert scores.precision.tolist() == pytest.approx([3 / 5, 2 / 3, 1])
    assert scores.recall.tolist() == pytest.approx([3 / 4, 1, 1 / 2])
    assert scores.f1.tolist() == pytest.approx([2 / 3, 4 / 5, 2 / 3])
    assert macro_f1(HAND) == pytest.approx(32 / 45)
    assert balanced_accuracy(HAND) == pytest.approx(3 / 4)


def test_classes_without_images_are_not_averaged() -> None:
    matrix = np.array([[2, 0, 0], [0, 1, 1], [0, 0, 0]])
    scores = per_class(matrix)
    assert math.isnan(scores.recall[2])
    assert (scores.precision[2], scores.f1[2]) == (0, 0)
    assert macro_f1(matrix) == pytest.approx((1 + 2 / 3) / 2)
    assert balanced_accuracy(matrix) == pytest.approx(3 / 4)


@PROPERTY
@given(cases)
def test_log_loss_by_its_definition(case: tuple[int, int, int, bool]) -> None:
    probabilities, labels = drawn(*case)
    naive = [-math.log(row[label]) for row, label in zip(probabilities.tolist(), labels.tolist(), strict=True)]
    assert log_losses(probabilities, labels).tolist() == pytest.approx(naive)
    assert log_loss(probabilities, labels) == pytest.approx(sum(naive) / len(naive))


def test_the_log_loss_of_probability_zero_is_finite() -> None:
    assert 87 < log_loss(np.array([[1, 0]], np.float32), np.array([1])) < 88


@PROPERTY
@given(cases)
def test_the_order_of_images_and_the_numbers_of_classes_do_not_matter(case: tuple[int, int, int, bool]) -> None:
    probabilities, labels = drawn(*case[:3])
    rng = np.random.default_rng(case[0])
    order, new = rng.permutation(len(labels)), rng.permutation(probabilities.shape[1])
    other, other_labels = probabilities[order][:, np.argsort(new)], new[labels[order]]
    for one, two in ((probabilities, labels), (other, other_labels)):
        matrix = confusion_matrix(two, one.argmax(1), one.shape[1])
        numbers = [macro_f1(matrix), balanced_accuracy(matrix), log_loss(one, two), top_k_right(one, two, 2).mean()]
        if one is probabilities:
            expected = numbers
    assert numbers == pytest.approx(expected)


def test_the_most_frequent_confusions() -> None:
    assert most_confused(HAND, 5) == [(2, 0, 2), (0, 1, 1)]
    assert most_confused(HAND, 1) == [(2, 0, 2)]
    assert most_confused(np.diag([3, 4]), 5) == []


@pytest.mark.parametrize(
    ("probabilities", "labels", "message"),
    [
        (np.zeros((0, 3)), np.zeros(0, int), "no images"),
        (np.ones((2, 3)) / 3, np.array([0]), "pass"),
        (np.ones((1, 3)) / 3, np.array([3]), "must be 0 to 2"),
        (np.ones((1, 3)) / 3, np.array([-1]), "from -1"),
    ],
)
def test_invalid_arguments(probabilities: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_labels(probabilities, labels)
