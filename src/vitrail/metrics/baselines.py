"""What a result is worth: beside what guessing gives, and where it should not be believed without a second look."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.metrics.intervals import Interval, wilson_interval

CLEARLY_ABOVE = 0.1
"""A result this far above the majority class, whose interval reaches it all the same, lacks images, not training."""
NEARLY_ALL, BEYOND_TRUTH = 0.9, 0.05
"""One class takes nearly all predictions, and more of them by this share than it has images."""
FAR_APART = 0.2
"""Training accuracy above validation accuracy by this share says that the model has learned its images by heart."""
TOO_FEW = 10
"""Fewer images than this say nothing about overfitting, nor about one class that takes nearly all predictions."""
PRETRAINED = "timm:vit_small_patch16_224.augreg_in21k"
"""A pretrained model to start from: 22 million parameters, trained on 14 million photographs of 21,843 classes."""
START_PRETRAINED = f"if training began from scratch, start from a pretrained model (--from {PRETRAINED})"


class Baselines(NamedTuple):
    """The accuracy of two classifiers that do not look at an image."""

    majority_class: int
    """The class with the most images."""
    majority: float
    """Of always predicting it."""
    chance: float
    """Of a uniform guess among all classes of the model."""


def baselines(matrix: NDArray[np.int64]) -> Baselines:
    """Return what guessing gives on the images of a confusion matrix (true class by row)."""
    images = matrix.sum(axis=1)
    largest = int(images.argmax())
    return Baselines(largest, float(images[largest] / images.sum()), 1 / len(matrix))


def warnings_about(matrix: NDArray[np.int64], interval: Interval, classes: Sequence[str]) -> list[str]:
    """Say why a result may be worth less than it looks, each with the next step. `interval` is of the accuracy."""
    return [*_about_guessing(matrix, interval, classes), *_about_one_class(matrix, classes)]


def warning_about_gap(training: float, validation: float, images: int) -> list[str]:
    """Say that training and validation accuracy are far apart, where the validation split has enough `images` to tell.

    The gap has to reach beyond the 95% interval of the validation accuracy, or it may be chance.
    """
    if images < TOO_FEW or training - validation < FAR_APART:
        return []
    low, high = wilson_interval(round(validation * images), images)
    if training <= high:
        return []
    return [
        f"overfitting: {_percent(training)}% on the training images, as augmented, and {_percent(validation)}% on the "
        f"{images:,} images of the validation split (95% interval {_percent(low)}–{_percent(high)}); next: more "
        "images, stronger augmentation or mixing, fewer epochs (--set patience=5 stops early), or "
        f"{START_PRETRAINED}"
    ]


def _about_guessing(matrix: NDArray[np.int64], interval: Interval, classes: Sequence[str]) -> list[str]:
    found = baselines(matrix)
    if interval.low > found.majority or (matrix.sum(axis=1) > 0).sum() < 2:  # one class alone cannot be mistaken
        return []
    accuracy = float(np.trace(matrix) / matrix.sum())
    reached = (
        f"the 95% interval {_percent(interval.low)}–{_percent(interval.high)} reaches {_percent(found.majority)}%, "
        f"what always predicting {classes[found.majority_class]!r} gives"
    )
    if accuracy - found.majority > CLEARLY_ABOVE:
        return [f"too few images to tell this from guessing: {reached}; next: evaluate on more images"]
    return [
        f"no better than guessing: {reached} (chance {_percent(found.chance)}%); next: look at the data with vitrail "
        f"check, train longer (--set epochs=…), or {START_PRETRAINED}"
    ]


def _about_one_class(matrix: NDArray[np.int64], classes: Sequence[str]) -> list[str]:
    count = int(matrix.sum())
    images, taken = matrix.sum(axis=1) / count, matrix.sum(axis=0) / count
    largest = int(taken.argmax())
    if count < TOO_FEW or taken[largest] < NEARLY_ALL or taken[largest] - images[largest] < BEYOND_TRUTH:
        return []
    return [
        f"nearly all predictions ({_percent(float(taken[largest]))}%) are {classes[largest]!r}, the class of "
        f"{_percent(float(images[largest]))}% of the images: the others are hardly told apart; next: "
        f"--set data.balance=true where classes are uneven, another optimizer.lr, or {START_PRETRAINED}"
    ]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
