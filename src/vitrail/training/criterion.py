"""The criterion: the validation metric that selects the best checkpoint, and the best run of a sweep."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import numpy as np

from vitrail.evaluation import Predictions
from vitrail.metrics.classification import balanced_accuracy, confusion_matrix, log_losses, macro_f1

Criterion = Literal["accuracy", "balanced_accuracy", "macro_f1", "loss"]
COLUMNS: dict[Criterion, str] = {
    "accuracy": "val_top1",
    "balanced_accuracy": "val_balanced_accuracy",
    "macro_f1": "val_macro_f1",
    "loss": "val_loss",
}
"""The key of each criterion in the metrics file."""
TITLES: dict[Criterion, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "loss": "loss",
}
TIE = 1e-6
"""Weight of the loss in a score, so that it breaks ties."""


def default_criterion(*, class_balanced: bool) -> Criterion:
    """Return the default criterion: balanced accuracy if classes are balanced or weighted, else accuracy."""
    return "balanced_accuracy" if class_balanced else "accuracy"


def validation_metrics(predictions: Predictions) -> dict[str, float]:
    """Return every metric that can be the criterion, by its key in the metrics file."""
    probabilities, labels = predictions.probabilities, predictions.labels
    predicted = probabilities.argmax(axis=1)
    matrix = confusion_matrix(labels, predicted, probabilities.shape[1])
    return {
        "val_top1": float(np.mean(predicted == labels)),
        "val_loss": float(log_losses(probabilities, labels).mean()),
        "val_balanced_accuracy": balanced_accuracy(matrix),
        "val_macro_f1": macro_f1(matrix),
    }


def score(row: Mapping[str, Any], criterion: Criterion) -> float:
    """Return the score of a row of the metrics file: higher is better, the loss breaks ties."""
    loss = float(row["val_loss"])
    return -loss if criterion == "loss" else float(row[COLUMNS[criterion]]) - TIE * loss


def as_good(reached: float, highest: float, criterion: Criterion, images: int) -> bool:
    """Whether a score is as good as the highest: lower by at most its standard error on that many images.

    A small validation split cannot separate checkpoints that differ by less, and then the one trained longer is the
    better choice. For the loss only the lowest counts, because it does rise when a run is too long.
    """
    if criterion == "loss":
        return reached > highest
    # Add two successes and two failures (Agresti and Coull), so that 0% and 100% have a standard error, too.
    accuracy = (min(max(highest, 0.0), 1.0) * images + 2) / (images + 4)
    return reached >= highest - math.sqrt(accuracy * (1 - accuracy) / images)


def shared_criterion(criteria: Iterable[Criterion]) -> Criterion:
    """Return the one criterion to compare several runs by.

    They differ only if some of the runs weight classes; then all are compared by balanced accuracy.
    """
    distinct = set(criteria)
    return distinct.pop() if len(distinct) == 1 else "balanced_accuracy"
