"""Whether a classifier is right as often as it says it is."""

from typing import NamedTuple

import numpy as np

from vitrail.metrics.classification import Floats, Integers, check_labels

BINS = 15
"""The usual number of bins (Guo et al., arXiv 1706.04599)."""


class ReliabilityBin(NamedTuple):
    """The images whose answer had a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float | None
    """The mean probability of their answers; None in an empty bin."""
    accuracy: float | None
    """The share of right answers; None in an empty bin."""


def reliability(probabilities: Floats, labels: Integers, bins: int = BINS) -> tuple[ReliabilityBin, ...]:
    """Sort images into equally wide bins by the probability of their answer, and see how many of each are right."""
    check_labels(probabilities, labels)
    confidence = probabilities.max(axis=1).astype(np.float64)
    right = probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    place = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    counts = np.bincount(place, minlength=bins)
    confidences = np.bincount(place, confidence, bins) / np.maximum(counts, 1)
    accuracies = np.bincount(place, right, bins) / np.maximum(counts, 1)
    return tuple(
        ReliabilityBin(
            float(edges[i]),
            float(edges[i + 1]),
            int(counts[i]),
            float(confidences[i]) if counts[i] else None,
            float(accuracies[i]) if counts[i] else None,
        )
        for i in range(bins)
    )


def expected_calibration_error(table: tuple[ReliabilityBin, ...]) -> float:
    """Return the mean difference between probability and accuracy, each bin weighted by its images (ECE)."""
    gaps = [
        row.images * abs(row.accuracy - row.confidence)
        for row in table
        if row.accuracy is not None and row.confidence is not None
    ]
    return sum(gaps) / sum(row.images for row in table)
