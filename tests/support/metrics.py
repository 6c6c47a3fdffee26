"""Typed access to the metrics of a classifier."""

from vitrail.tasks.classification_metrics import ClassificationMetrics
from vitrail.tasks.metrics import Metrics


def classified(metrics: Metrics) -> ClassificationMetrics:
    """Return the metrics of a classifier as what they are."""
    assert isinstance(metrics, ClassificationMetrics)
    return metrics
