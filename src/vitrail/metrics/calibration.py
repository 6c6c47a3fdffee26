"""Calibration: does the confidence match the accuracy?"""

from typing import NamedTuple

import numpy as np

from vitrail.metrics.classification import Floats, Integers, check_labels

BINS = 15
"""The usual number of bins (Guo et al., arXiv 1706.04599)."""


class ReliabilityBin(NamedTuple):
    """The images whose predicted class has a probability in (low, high]."""

    low: float
    high: float
    images: int
    confidence: float | None
    """The mean probability of the predicted classes; None in an empty bin."""
    accuracy: float | None
    """The fraction of correct predictions; None in an empty bin."""


def reliability(probabilities: Floats, labels: Integers, bins: int = BINS) -> tuple[ReliabilityBin, ...]:
    """Bin images by confidence into bins of equal width, and compute the accuracy of each bin."""
    check_labels(probabilities, labels)
    confidence = probabilities.max(axis=1).astype(np.float64)
    right = probabilities.argmax(axis=1) == labels
    edges = np.linspace(0, 1, bins + 1)
    index = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, bins - 1)
    counts = np.bincount(index, minlength=bins)
    confidences = np.bincount(index, confidence, bins) / np.maximum(counts, 1)
    accuracies = np.bincount(index, right, bins) / np.maximum(counts, 1)
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
    """Return the expected calibration error (ECE): the mean gap between confidence and accuracy, weighted by images."""
    gaps = [
        row.images * abs(row.accuracy - row.confidence)
        for row in table
        if row.accuracy is not None and row.confidence is not None
    ]
    return sum(gaps) / sum(row.images for row in table)
