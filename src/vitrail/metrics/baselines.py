"""Baselines, and warnings about results that should not be trusted as they are."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.intervals import Interval, wilson_interval
from vitrail.text import percent

CLEARLY_ABOVE = 0.1
"""Margin over the majority class above which an interval that still includes it means too few images."""
NEARLY_ALL, EXCESS = 0.9, 0.05
"""Warn if one class gets this fraction of the predictions, and exceeds its fraction of the images by this much."""
GAP = 0.2
"""The gap between training and validation accuracy that indicates overfitting."""
TOO_FEW = 10
"""Below this number of images, do not warn about overfitting or about one class with nearly all predictions."""
PRETRAINED = "timm:vit_small_patch16_224.augreg_in21k"
"""A pretrained model to fine-tune: 22 million parameters, trained on 14 million photos of 21,843 classes."""
START_PRETRAINED = f"if you trained from scratch, start from a pretrained model (--from {PRETRAINED})"


class Baselines(NamedTuple):
    """The accuracy of two classifiers that ignore the image."""

    majority_class: int
    """The class with the most images."""
    majority: float
    """The accuracy of always predicting it."""
    chance: float
    """The accuracy of a uniform guess among all classes of the model."""


def baselines(matrix: NDArray[np.int64]) -> Baselines:
    """Return the baselines for a confusion matrix (rows are true classes)."""
    images = matrix.sum(axis=1)
    largest = int(images.argmax())
    return Baselines(largest, float(images[largest] / images.sum()), 1 / len(matrix))


def warnings_about(matrix: NDArray[np.int64], interval: Interval, classes: Sequence[str]) -> list[str]:
    """Return reasons not to trust a result, each with the next step. `interval` is that of the accuracy."""
    return [*_about_guessing(matrix, interval, classes), *_about_one_class(matrix, classes)]


def warning_about_gap(training: float, validation: float, images: int) -> list[str]:
    """Warn if training and validation accuracy are far apart, given enough validation `images`.

    The gap must exceed the 95% interval of the validation accuracy, or it may be chance.
    """
    if images < TOO_FEW or training - validation < GAP:
        return []
    low, high = wilson_interval(round(validation * images), images)
    if training <= high:
        return []
    return [
        f"overfitting: {percent(training)}% on the augmented training images, {percent(validation)}% on the "
        f"{images:,} images of the validation split (95% interval {percent(low)}–{percent(high)}); next: more "
        "images, stronger augmentation or mixing, fewer epochs (--set patience=5 stops early), or "
        f"{START_PRETRAINED}"
    ]


def _about_guessing(matrix: NDArray[np.int64], interval: Interval, classes: Sequence[str]) -> list[str]:
    baseline = baselines(matrix)
    if interval.low > baseline.majority or (matrix.sum(axis=1) > 0).sum() < 2:  # a single class cannot be confused
        return []
    accuracy = float(np.trace(matrix) / matrix.sum())
    reached = (
        f"the 95% interval {percent(interval.low)}–{percent(interval.high)} reaches {percent(baseline.majority)}%, "
        f"the accuracy of always predicting {classes[baseline.majority_class]!r}"
    )
    if accuracy - baseline.majority > CLEARLY_ABOVE:
        return [f"too few images to distinguish this from guessing: {reached}; next: evaluate on more images"]
    return [
        f"no better than guessing: {reached} (chance {percent(baseline.chance)}%); next: check the data with vitrail "
        f"check, train longer (--set epochs=…), or {START_PRETRAINED}"
    ]


def _about_one_class(matrix: NDArray[np.int64], classes: Sequence[str]) -> list[str]:
    count = int(matrix.sum())
    images, predicted = matrix.sum(axis=1) / count, matrix.sum(axis=0) / count
    largest = int(predicted.argmax())
    if count < TOO_FEW or predicted[largest] < NEARLY_ALL or predicted[largest] - images[largest] < EXCESS:
        return []
    return [
        f"nearly all predictions ({percent(float(predicted[largest]))}%) are {classes[largest]!r}, the class of "
        f"{percent(float(images[largest]))}% of the images: the model hardly distinguishes the others; next: "
        f"--set data.balance=true if classes are imbalanced, another optimizer.lr, or {START_PRETRAINED}"
    ]
