"""Metrics of semantic segmentation: IoU and Dice per class, their means, and the accuracy of pixels.

All are computed from counts of pixels. Shapes: N images, K classes; `counts` (N, 3, K) has for each image and class the
correct pixels, the predicted ones and the true ones. Pixels of an ignored label count nowhere. A metric of a dataset is
that of the sum over its images, as is usual for mean IoU; so large images weigh more. What is undefined is NaN.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.errors import InputError
from vitrail.metrics.intervals import RESAMPLES, Interval, wilson_interval
from vitrail.metrics.resampling import bootstrap, weighted_sums

Integers = NDArray[np.integer]
Counts = NDArray[np.int64]


# ── counting ──


def count_pixels(predicted: Integers, true: Integers, classes: int, ignore: int | None = None) -> Counts:
    """Return the correct, predicted and true pixels of each class (3, K) in an image, from two maps (H, W) of classes.

    Pixels whose true label is `ignore` count nowhere, whatever is predicted there.
    """
    _check_maps(predicted.shape, true.shape, 2, "(H, W)", classes)
    for name, labels in (("predictions", predicted), ("true labels", true)):
        if labels.dtype.kind not in "iu":
            raise InputError(f"the {name} are {labels.dtype}; pass integers")
    labelled = np.ones(true.shape, np.bool_) if ignore is None else true != ignore
    ours, labels = predicted[labelled].astype(np.int64), true[labelled].astype(np.int64)
    for name, values in (("predictions", ours), ("true labels", labels)):
        if len(values) and (values.min() < 0 or values.max() >= classes):
            raise InputError(
                f"the {name} range from {values.min()} to {values.max()}; each must be a class from 0 to {classes - 1}"
                f"{', or the ignored label' if name == 'true labels' else ''}"
            )
    return np.stack([np.bincount(values, minlength=classes) for values in (labels[labels == ours], ours, labels)])


def count_pixels_of_each(predicted: Tensor, true: Tensor, classes: int, ignore: int | None = None) -> Tensor:
    """Return the counts (B, 3, K) of images, from maps (B, H, W), on their device and without waiting for it.

    So it cannot raise for labels that do not exist: true ones are ignored, predicted ones count as wrong.
    """
    _check_maps(predicted.shape, true.shape, 3, "(B, H, W)", classes)
    for name, labels in (("predictions", predicted), ("true labels", true)):
        if labels.is_floating_point():
            raise InputError(f"the {name} are {labels.dtype}; pass integers")
    if predicted.device != true.device:
        raise InputError(f"the predictions are on {predicted.device}, the true labels on {true.device}; move one")
    ours, labels = predicted.flatten(1).long(), true.flatten(1).long()
    labelled = (labels >= 0) & (labels < classes)
    if ignore is not None:
        labelled &= labels != ignore
    exists = (ours >= 0) & (ours < classes)
    # Each image and kind has one more bin, for the pixels that do not count.
    first = (classes + 1) * torch.arange(len(labels), device=labels.device)[:, None]
    one = torch.ones((), dtype=torch.int64, device=labels.device)
    counted = []
    for values, counts in ((labels, labelled & (labels == ours)), (ours, labelled & exists), (labels, labelled)):
        bins = (values.where(counts, classes) + first).flatten()
        # Not bincount, which waits for the device.
        every = labels.new_zeros(len(labels) * (classes + 1)).scatter_add_(0, bins, one.expand_as(bins))
        counted.append(every.view(len(labels), classes + 1)[:, :classes])
    return torch.stack(counted, dim=1)


def _check_maps(predicted: tuple[int, ...], true: tuple[int, ...], axes: int, expected: str, classes: int) -> None:
    if len(predicted) != axes or predicted != true:
        raise InputError(
            f"predictions {tuple(predicted)} with true labels {tuple(true)}; pass {expected} and {expected}"
        )
    if classes < 1:
        raise InputError(f"there are {classes} classes to count; pass at least 1")


# ── metrics of a dataset ──


class PerClass(NamedTuple):
    """One value per class; NaN where undefined."""

    images: Counts
    """The number of images with pixels of the class."""
    pixels: Counts
    """The number of pixels of the class."""
    precision: NDArray[np.float64]
    """The fraction of the pixels predicted as the class that belong to it."""
    recall: NDArray[np.float64]
    """The fraction of the pixels of the class that are predicted as it: the accuracy of the class."""
    iou: NDArray[np.float64]
    """Intersection over union: correct pixels / (predicted or true pixels); NaN if there are none of both."""
    dice: NDArray[np.float64]
    """The Dice coefficient, which is F1: 2 × correct pixels / (predicted pixels + true pixels)."""


def per_class(counts: Counts) -> PerClass:
    """Return the pixels, precision, recall, IoU and Dice coefficient of each class."""
    correct, predicted, true = _summed(counts)
    return PerClass(
        (counts[:, 2] > 0).sum(axis=0),
        true,
        _ratio(correct, predicted),
        _ratio(correct, true),
        _ratio(correct, predicted + true - correct),
        _ratio(2 * correct, predicted + true),
    )


def mean_iou(counts: Counts) -> float:
    """Return mIoU: the mean IoU of the classes with true pixels; NaN if there are none.

    A class without true pixels is skipped, even if it is predicted somewhere; others count it as 0 then. If every class
    occurs, this is the same.
    """
    return float(_mean_iou(_summed(counts)))


def mean_dice(counts: Counts) -> float:
    """Return the mean Dice coefficient of the classes with true pixels; NaN if there are none."""
    correct, predicted, true = _summed(counts)
    return float(_mean_where(true > 0, _ratio(2 * correct, predicted + true)))


def pixel_accuracy(counts: Counts) -> float:
    """Return the fraction of pixels that are predicted right; NaN if there are none."""
    return float(_accuracy(_summed(counts)))


def mean_class_accuracy(counts: Counts) -> float:
    """Return the mean recall of the classes with true pixels; NaN if there are none."""
    correct, _, true = _summed(counts)
    return float(_mean_where(true > 0, _ratio(correct, true)))


# ── metrics of each image ──


def mean_iou_of_each(counts: Counts) -> NDArray[np.float64]:
    """Return the mean IoU (N,) of each image, over the classes with true pixels in it; NaN if there are none."""
    return _mean_iou(_checked(counts).transpose(1, 2, 0))


def pixel_accuracy_of_each(counts: Counts) -> NDArray[np.float64]:
    """Return the fraction of right pixels (N,) of each image; NaN if it has none."""
    return _accuracy(_checked(counts).transpose(1, 2, 0))


# ── intervals ──


class SegmentationIntervals(NamedTuple):
    """The intervals of two scores of a dataset; NaN if it has no labelled pixel."""

    mean_iou: Interval
    pixel_accuracy: Interval


def bootstrap_segmentation(
    counts: Counts, *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> SegmentationIntervals:
    """Return bootstrap percentile intervals of mean IoU and pixel accuracy, from resampled images.

    Pixels of an image are not independent, so images are drawn, not pixels. With many images and classes there are
    fewer resamples. A bootstrap never draws a mistake that did not happen, so a perfect score gets at least Wilson's
    interval of all images being right, and a score of 0 that of none.
    """
    images, kinds, classes = _checked(counts).shape
    values = counts.reshape(images, kinds * classes).astype(np.float64)
    estimates = np.array([mean_iou(counts), pixel_accuracy(counts)])

    def score(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        drawn = weighted_sums(weights, values).reshape(kinds, classes, len(weights))
        return np.stack([_mean_iou(drawn), _accuracy(drawn)])

    intervals = bootstrap(score, estimates, values.shape, seed=seed, resamples=resamples, level=level)
    for number, (low, high) in enumerate(intervals):
        if estimates[number] == 1:
            low = min(low, wilson_interval(images, images, level).low)
        elif estimates[number] == 0:
            high = max(high, wilson_interval(0, images, level).high)
        intervals[number] = Interval(low, high)
    return SegmentationIntervals(*intervals)


def bootstrap_mean_iou_difference(
    first: Counts, second: Counts, *, seed: int = 0, resamples: int = RESAMPLES, level: float = 0.95
) -> Interval:
    """Return the bootstrap percentile interval of the mean IoU of `second` minus that of `first`.

    Each resample draws the same images for both. The two may have different numbers of pixels and classes.
    """
    if len(first) != len(second):
        raise InputError(f"counts of {len(first):,} and {len(second):,} images; pass those of the same images")
    both = [_checked(counts).reshape(len(counts), -1).astype(np.float64) for counts in (first, second)]
    classes = [counts.shape[2] for counts in (first, second)]

    def score(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        before, after = (
            _mean_iou(weighted_sums(weights, values).reshape(3, count, len(weights)))
            for values, count in zip(both, classes, strict=True)
        )
        return (after - before)[None]

    estimate = np.array([mean_iou(second) - mean_iou(first)])
    shape = (len(first), sum(values.shape[1] for values in both))
    return bootstrap(score, estimate, shape, seed=seed, resamples=resamples, level=level)[0]


# ── shared: sums of counts (3, K, …) to scores (…) ──


def _mean_iou(sums: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
    correct, predicted, true = sums
    return _mean_where(true > 0, _ratio(correct, predicted + true - correct))


def _accuracy(sums: NDArray[np.integer | np.floating]) -> NDArray[np.float64]:
    correct, _, true = sums.sum(axis=1)
    return _ratio(correct, true)


def _mean_where(which: NDArray[np.bool_], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean over the first axis of the chosen values; NaN if none is."""
    return _ratio(np.where(which, values, 0.0).sum(axis=0), which.sum(axis=0))


def _ratio(
    numerator: NDArray[np.integer | np.floating], denominator: NDArray[np.integer | np.floating]
) -> NDArray[np.float64]:
    ratios = np.full(np.shape(denominator), np.nan)
    return np.asarray(np.divide(numerator, denominator, out=ratios, where=denominator > 0))


def _summed(counts: Counts) -> Counts:
    """Return the counts of a dataset (3, K)."""
    return np.asarray(_checked(counts).sum(axis=0))


def _checked(counts: Counts) -> Counts:
    """Return the counts; raise unless there is an image, and whole numbers of pixels that are consistent."""
    if counts.ndim != 3 or counts.shape[1] != 3:
        raise InputError(f"counts {counts.shape}; pass (N, 3, K): correct, predicted and true pixels of each class")
    if not counts.size:
        raise InputError("no classes to evaluate" if len(counts) else "no images to evaluate")
    if counts.dtype.kind not in "iu":
        raise InputError(f"the counts are {counts.dtype}; pass integers")
    correct, predicted, true = counts.transpose(1, 0, 2)
    if ((correct < 0) | (correct > predicted) | (correct > true)).any():
        raise InputError("the correct pixels of a class are fewer than 0, or more than the predicted or the true ones")
    return counts
