"""Segmentation metrics, against scikit-learn, torchmetrics, brute force and values computed by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics
from tests.support.peers import import_peer

from vitrail.errors import InputError
from vitrail.metrics import resampling
from vitrail.metrics.intervals import wilson_interval
from vitrail.metrics.segmentation import (
    bootstrap_mean_iou_difference,
    bootstrap_segmentation,
    count_pixels,
    count_pixels_of_each,
    mean_class_accuracy,
    mean_dice,
    mean_iou,
    mean_iou_of_each,
    per_class,
    pixel_accuracy,
    pixel_accuracy_of_each,
)

PROPERTY = settings(derandomize=True, deadline=None, max_examples=60)
IGNORE = 255
cases = st.tuples(st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 6), st.booleans())
"""Seed, images, classes, and whether some pixels are ignored."""


def drawn(seed: int, images: int, classes: int, ignored: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return maps (N, H, W): about 60% of the pixels are right; some classes may not occur in an image."""
    rng = np.random.default_rng(seed)
    shape = (images, *rng.integers(1, 9, 2))
    true = np.minimum(rng.integers(0, classes, shape), rng.integers(0, classes, (images, 1, 1)))
    predicted = np.where(rng.random(shape) < 0.6, true, rng.integers(0, classes, shape))
    if ignored:
        true[rng.random(shape) < 0.2] = IGNORE
    return predicted.astype(np.int64), true.astype(np.int64)


def every_class(seed: int, images: int, classes: int) -> tuple[np.ndarray, np.ndarray]:
    """Return maps in which every class occurs, as some peers need: one more row per class, which is right."""
    predicted, true = drawn(seed, images, classes)
    rows = np.broadcast_to(np.arange(classes)[:, None], (images, classes, true.shape[2]))
    return np.concatenate([predicted, rows], axis=1), np.concatenate([true, rows], axis=1)


def counted(predicted: np.ndarray, true: np.ndarray, classes: int, ignore: int | None = IGNORE) -> np.ndarray:
    return np.stack([count_pixels(p, t, classes, ignore) for p, t in zip(predicted, true, strict=True)])


def of_labelled(predicted: np.ndarray, true: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the pixels that count, flattened, as the peers expect them."""
    return predicted[true != IGNORE], true[true != IGNORE]


# ── counts ──


@PROPERTY
@given(cases)
def test_counts_are_those_of_the_confusion_matrix(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    classes = case[2]
    counts = counted(predicted, true, classes)
    assert counts.shape == (case[1], 3, classes)
    assert counts.dtype == np.int64
    for p, t, (correct, guesses, labels) in zip(predicted, true, counts, strict=True):
        ours, own = of_labelled(p, t)
        # With one more class, which does not occur: scikit-learn warns if there is a single one.
        matrix = np.zeros((classes, classes), int)
        if len(own):
            matrix = sklearn_metrics.confusion_matrix(own, ours, labels=range(classes + 1))[:classes, :classes]
        np.testing.assert_array_equal(correct, np.diagonal(matrix))
        np.testing.assert_array_equal(guesses, matrix.sum(axis=0))
        np.testing.assert_array_equal(labels, matrix.sum(axis=1))


@PROPERTY
@given(cases)
def test_torch_counts_the_same(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    for ignore in (IGNORE, 0, None):
        if ignore is None and case[3]:
            continue
        counts = count_pixels_of_each(torch.from_numpy(predicted), torch.from_numpy(true), case[2], ignore)
        assert counts.dtype == torch.int64
        some = np.where(true == IGNORE, 0, true) if ignore == 0 else true
        np.testing.assert_array_equal(counts.numpy(), counted(predicted, some, case[2], ignore))


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint16])
def test_every_type_of_integer(dtype: type[np.integer]) -> None:
    predicted, true = drawn(3, 2, 4, ignored=True)
    expected = counted(predicted, true, 4)
    np.testing.assert_array_equal(counted(predicted.astype(dtype), true.astype(dtype), 4), expected)
    maps = torch.from_numpy(predicted.astype(dtype)), torch.from_numpy(true.astype(dtype))
    np.testing.assert_array_equal(count_pixels_of_each(*maps, 4, IGNORE).numpy(), expected)


def test_labels_that_do_not_exist_in_torch() -> None:
    """They cannot be an error without waiting for the device."""
    true, predicted = torch.tensor([[[0, 7, -1, 1]]]), torch.tensor([[[9, 0, 1, 1]]])
    assert count_pixels_of_each(predicted, true, 2).tolist() == [[[0, 1], [0, 1], [1, 1]]]


def test_no_images_and_no_pixels() -> None:
    nothing = torch.zeros(0, 2, 2, dtype=torch.int64)
    assert count_pixels_of_each(nothing, nothing, 3).shape == (0, 3, 3)
    assert count_pixels(np.zeros((0, 4), int), np.zeros((0, 4), int), 3).tolist() == [[0] * 3] * 3


@PROPERTY
@given(cases, st.integers(0, 8), st.integers(0, 8))
def test_the_counts_of_tiles_add_up(case: tuple[int, int, int, bool], row: int, column: int) -> None:
    predicted, true = (maps[0] for maps in drawn(*case))
    slices = [(rows, columns) for rows in (slice(None, row), slice(row, None))
              for columns in (slice(None, column), slice(column, None))]  # fmt: skip
    tiles = [count_pixels(predicted[tile], true[tile], case[2], IGNORE) for tile in slices]
    np.testing.assert_array_equal(sum(tiles), count_pixels(predicted, true, case[2], IGNORE))


@PROPERTY
@given(cases)
def test_predictions_at_ignored_pixels_are_irrelevant(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case[:3], ignored=True)
    other = np.where(true == IGNORE, np.random.default_rng(1).integers(-5, 300, true.shape), predicted)
    np.testing.assert_array_equal(counted(other, true, case[2]), counted(predicted, true, case[2]))
    both = [torch.from_numpy(maps) for maps in (other, predicted)]
    counts = [count_pixels_of_each(maps, torch.from_numpy(true), case[2], IGNORE) for maps in both]
    assert torch.equal(*counts)


# ── metrics ──


def test_a_case_by_hand() -> None:
    true = np.array([[0, 0, 1, 1], [0, 0, 1, IGNORE]])
    predicted = np.array([[0, 1, 1, 1], [0, 0, 2, 2]])
    counts = count_pixels(predicted, true, 4, IGNORE)[None]
    np.testing.assert_array_equal(counts[0], [[3, 2, 0, 0], [3, 3, 1, 0], [4, 3, 0, 0]])
    result = per_class(counts)
    np.testing.assert_array_equal(result.images, [1, 1, 0, 0])
    np.testing.assert_array_equal(result.pixels, [4, 3, 0, 0])
    np.testing.assert_allclose(result.precision, [1, 2 / 3, 0, math.nan])
    np.testing.assert_allclose(result.recall, [3 / 4, 2 / 3, math.nan, math.nan])
    np.testing.assert_allclose(result.iou, [3 / 4, 2 / 4, 0, math.nan])
    np.testing.assert_allclose(result.dice, [6 / 7, 4 / 6, 0, math.nan])
    assert mean_iou(counts) == pytest.approx((3 / 4 + 2 / 4) / 2)  # class 2 has no true pixel
    assert mean_dice(counts) == pytest.approx((6 / 7 + 4 / 6) / 2)
    assert pixel_accuracy(counts) == pytest.approx(5 / 7)
    assert mean_class_accuracy(counts) == pytest.approx((3 / 4 + 2 / 3) / 2)


@PROPERTY
@given(cases)
def test_scores_are_those_of_scikit_learn(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    ours, own = of_labelled(predicted, true)
    if not len(own):
        return
    counts, labels = counted(predicted, true, case[2]), range(case[2])
    result, occurs = per_class(counts), np.isin(labels, own)
    either = occurs | np.isin(labels, ours)
    assert (np.isnan(result.iou) == ~either).all()
    for values, function in (
        (result.iou, sklearn_metrics.jaccard_score),
        (result.dice, sklearn_metrics.f1_score),
        (np.where(np.isnan(result.recall), 0, result.recall), sklearn_metrics.recall_score),
        (np.where(np.isnan(result.precision), 0, result.precision), sklearn_metrics.precision_score),
    ):
        expected = function(own, ours, labels=labels, average=None, zero_division=0)
        np.testing.assert_allclose(values[either], expected[either], atol=1e-6)
    present = np.unique(own)
    settings = {"labels": present, "average": "macro", "zero_division": 0}
    assert mean_iou(counts) == pytest.approx(sklearn_metrics.jaccard_score(own, ours, **settings), abs=1e-6)
    assert mean_dice(counts) == pytest.approx(sklearn_metrics.f1_score(own, ours, **settings), abs=1e-6)
    assert mean_class_accuracy(counts) == pytest.approx(sklearn_metrics.recall_score(own, ours, **settings), abs=1e-6)
    assert pixel_accuracy(counts) == pytest.approx(sklearn_metrics.accuracy_score(own, ours), abs=1e-6)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(2, 6))
def test_scores_are_those_of_torchmetrics(seed: int, images: int, classes: int) -> None:
    """If every class occurs; else torchmetrics counts a class that is only predicted as 0."""
    peer = import_peer("torchmetrics.functional.classification")
    predicted, true = every_class(seed, images, classes)
    counts = counted(predicted, true, classes, None)
    maps = torch.from_numpy(predicted), torch.from_numpy(true)
    options = {"num_classes": classes, "average": "none"}
    result = per_class(counts)
    np.testing.assert_allclose(result.iou, peer.multiclass_jaccard_index(*maps, **options), atol=1e-6)
    np.testing.assert_allclose(result.dice, peer.multiclass_f1_score(*maps, **options), atol=1e-6)
    np.testing.assert_allclose(result.recall, peer.multiclass_accuracy(*maps, **options), atol=1e-6)
    macro, micro = ({"num_classes": classes, "average": kind} for kind in ("macro", "micro"))
    assert mean_iou(counts) == pytest.approx(float(peer.multiclass_jaccard_index(*maps, **macro)), abs=1e-6)
    assert mean_dice(counts) == pytest.approx(float(peer.multiclass_f1_score(*maps, **macro)), abs=1e-6)
    assert mean_class_accuracy(counts) == pytest.approx(float(peer.multiclass_accuracy(*maps, **macro)), abs=1e-6)
    assert pixel_accuracy(counts) == pytest.approx(float(peer.multiclass_accuracy(*maps, **micro)), abs=1e-6)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(st.integers(0, 10_000), st.integers(2, 6))
def test_ignored_pixels_are_those_of_torchmetrics(seed: int, classes: int) -> None:
    peer = import_peer("torchmetrics.functional.classification")
    predicted, true = every_class(seed, 2, classes)
    true[:, 0] = IGNORE
    maps = torch.from_numpy(predicted), torch.from_numpy(true)
    expected = peer.multiclass_jaccard_index(*maps, num_classes=classes, average="macro", ignore_index=IGNORE)
    assert mean_iou(counted(predicted, true, classes)) == pytest.approx(float(expected), abs=1e-6)


@PROPERTY
@given(cases)
def test_scores_of_each_image(case: tuple[int, int, int, bool]) -> None:
    counts = counted(*drawn(*case), case[2])
    each, right = mean_iou_of_each(counts), pixel_accuracy_of_each(counts)
    assert each.shape == right.shape == (case[1],)
    for number in range(case[1]):
        alone = counts[number : number + 1]
        assert each[number] == pytest.approx(mean_iou(alone), nan_ok=True)
        assert right[number] == pytest.approx(pixel_accuracy(alone), nan_ok=True)


@PROPERTY
@given(cases)
def test_bounds_order_and_perfect_predictions(case: tuple[int, int, int, bool]) -> None:
    predicted, true = drawn(*case)
    if (true == IGNORE).all():
        return
    classes, rng = case[2], np.random.default_rng(case[0])
    counts = counted(predicted, true, classes)
    functions = (mean_iou, mean_dice, mean_class_accuracy, pixel_accuracy)
    scores = [function(counts) for function in functions]
    assert all(0 <= score <= 1 for score in scores)
    assert scores[0] <= scores[1]
    assert scores[0] <= scores[2] + 1e-12
    result = per_class(counts)
    np.testing.assert_allclose(result.dice, 2 * result.iou / (1 + result.iou))
    other = counts[rng.permutation(len(counts))][:, :, rng.permutation(classes)]
    assert [function(other) for function in functions] == pytest.approx(scores)
    perfect = counted(np.where(true == IGNORE, 0, true), true, classes)
    assert [function(perfect) for function in functions] == [1, 1, 1, 1]
    each = mean_iou_of_each(perfect)
    assert (each[~np.isnan(each)] == 1).all()


def test_nothing_labelled() -> None:
    counts = np.zeros((2, 3, 4), np.int64)
    for function in (mean_iou, mean_dice, mean_class_accuracy, pixel_accuracy):
        assert math.isnan(function(counts))
    assert np.isnan(mean_iou_of_each(counts)).all()
    assert np.isnan(bootstrap_segmentation(counts, resamples=100)).all()


# ── intervals ──


@settings(derandomize=True, deadline=None, max_examples=20)
@given(cases)
def test_intervals_match_resampled_images(case: tuple[int, int, int, bool]) -> None:
    counts = counted(*drawn(*case), case[2])
    draws = np.random.default_rng(case[0]).integers(0, len(counts), (40, len(counts)))
    resampled = np.array([(mean_iou(counts[i]), pixel_accuracy(counts[i])) for i in draws])
    intervals = bootstrap_segmentation(counts, seed=case[0], resamples=40)
    np.testing.assert_array_equal(intervals, bootstrap_segmentation(counts, seed=case[0], resamples=40))
    for (low, high), values, estimate in zip(
        intervals, resampled.T, (mean_iou(counts), pixel_accuracy(counts)), strict=True
    ):
        if math.isnan(estimate):
            assert math.isnan(low)
            assert math.isnan(high)
            continue
        assert 0 <= low <= estimate <= high <= 1
        if 0 < estimate < 1:
            ends = np.nanquantile(values, [0.025, 0.975])
            assert (low, high) == pytest.approx((min(ends[0], estimate), max(ends[1], estimate)), abs=1e-9)


@settings(derandomize=True, deadline=None, max_examples=20)
@given(cases)
def test_the_difference_draws_the_same_images_for_both(case: tuple[int, int, int, bool]) -> None:
    seed, images, classes, ignored = case
    first = counted(*drawn(seed, images, classes, ignored), classes)
    second = counted(*drawn(seed + 1, images, classes, ignored), classes)
    more = np.concatenate([4 * second, np.zeros_like(second[:, :, :1])], axis=2)  # another size, and one more class
    draws = np.random.default_rng(seed).integers(0, images, (40, images))
    apart = [mean_iou(second[i]) - mean_iou(first[i]) for i in draws]
    estimate = mean_iou(second) - mean_iou(first)
    low, high = bootstrap_mean_iou_difference(first, more, seed=seed, resamples=40)
    if math.isnan(estimate):
        assert math.isnan(low)
        assert math.isnan(high)
        return
    ends = np.nanquantile(apart, [0.025, 0.975])
    assert (low, high) == pytest.approx((min(ends[0], estimate), max(ends[1], estimate)), abs=1e-9)
    assert bootstrap_mean_iou_difference(first, first, seed=seed, resamples=40) == pytest.approx((0, 0), abs=1e-12)


def test_intervals_cover_the_truth() -> None:
    rng, covered = np.random.default_rng(0), np.zeros(2)
    true = rng.integers(0, 4, (5000, 6, 6))
    right = rng.random(true.shape) < rng.random((5000, 1, 1))  # images differ in difficulty
    counts = counted(np.where(right, true, rng.integers(0, 4, true.shape)), true, 4, None)
    actual = mean_iou(counts), pixel_accuracy(counts)
    for _ in range(60):
        some = counts[rng.integers(0, len(counts), 150)]
        intervals = bootstrap_segmentation(some, resamples=100)
        covered += [low <= value <= high for (low, high), value in zip(intervals, actual, strict=True)]
    assert (covered / 60 > 0.85).all()


def test_intervals_of_perfect_and_wrong_predictions() -> None:
    true = np.random.default_rng(0).integers(0, 2, (60, 4, 4))
    assert set(bootstrap_segmentation(counted(true, true, 2), resamples=100)) == {wilson_interval(60, 60)}
    assert set(bootstrap_segmentation(counted(1 - true, true, 2), resamples=100)) == {wilson_interval(0, 60)}


def test_many_images_have_fewer_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = counted(*drawn(0, 100, 5), 5)
    fewer = bootstrap_segmentation(counts, resamples=100)
    assert fewer != bootstrap_segmentation(counts)
    monkeypatch.setattr(resampling, "WORK", 1000)
    assert fewer == bootstrap_segmentation(counts)


GOOD, MAPS = np.array([[[1], [2], [2]]]), np.zeros((2, 3), int)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: count_pixels(np.zeros((2, 3), int), np.zeros((3, 2), int), 2), r"\(2, 3\) with true labels \(3, 2\)"),
        (lambda: count_pixels(np.zeros(3, int), np.zeros(3, int), 2), r"pass \(H, W\) and \(H, W\)"),
        (lambda: count_pixels(MAPS.astype(float), MAPS, 2), "the predictions are float64; pass integers"),
        (lambda: count_pixels(MAPS, MAPS > 0, 2), "the true labels are bool; pass integers"),
        (lambda: count_pixels(MAPS, MAPS, 0), "there are 0 classes to count"),
        (lambda: count_pixels(MAPS, MAPS + 255, 21), "true labels range from 255 to 255; each .* 0 to 20, or the ign"),
        (lambda: count_pixels(MAPS - 1, MAPS, 2), "predictions range from -1 to -1; each must be a class from 0 to 1$"),
        (lambda: count_pixels_of_each(torch.zeros(2, 2), torch.zeros(2, 2), 2), r"pass \(B, H, W\) and \(B, H, W\)"),
        (lambda: count_pixels_of_each(torch.zeros(1, 2, 2), torch.zeros(1, 2, 2), 2), "are torch.float32; pass int"),
        (
            lambda: count_pixels_of_each(torch.ones(1, 2, 2).int(), torch.ones(1, 2, 2, device="meta").int(), 2),
            "the predictions are on cpu, the true labels on meta",
        ),
        (lambda: mean_iou(GOOD[0]), r"counts \(3, 1\); pass \(N, 3, K\)"),
        (lambda: mean_iou(GOOD[:0]), "no images to evaluate"),
        (lambda: per_class(GOOD[:, :, :0]), "no classes to evaluate"),
        (lambda: pixel_accuracy(GOOD / 2), "the counts are float64; pass integers"),
        (lambda: mean_iou_of_each(GOOD[:, ::-1]), "correct pixels of a class are fewer than 0, or more than"),
        (lambda: mean_dice(-GOOD), "fewer than 0"),
        (lambda: bootstrap_segmentation(GOOD, level=1), "level"),
        (lambda: bootstrap_mean_iou_difference(GOOD, GOOD.repeat(2, axis=0)), "counts of 1 and 2 images"),
        (lambda: bootstrap_mean_iou_difference(GOOD, -GOOD), "fewer than 0"),
    ],
)
def test_invalid_arguments(call: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
