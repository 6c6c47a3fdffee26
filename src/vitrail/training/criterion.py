"""The criterion: the number of the validation split that picks the best checkpoint, and the best run of a sweep."""

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
"""What the journal calls the number of each criterion."""
TITLES: dict[Criterion, str] = {
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "loss": "loss",
}
TIE = 1e-6
"""How much of the loss is taken off a score, so that it decides between equals."""


def default_criterion(*, classes_count_alike: bool) -> Criterion:
    """Return what a recipe that names no criterion is judged by: who weights classes wants every class to count."""
    return "balanced_accuracy" if classes_count_alike else "accuracy"


def validated(predictions: Predictions) -> dict[str, float]:
    """Return every number that can be the criterion, as the journal calls it."""
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
    """Return how good a row of the journal is: the larger the better, the loss deciding between equals."""
    loss = float(row["val_loss"])
    return -loss if criterion == "loss" else float(row[COLUMNS[criterion]]) - TIE * loss


def why_best(row: Mapping[str, Any], before: Mapping[str, Any] | None, criterion: Criterion) -> str:
    """Say by what a row of the journal beat the best one before it; nothing where there was none.

    >>> why_best({"val_top1": 0.9, "val_loss": 0.3}, {"val_top1": 0.9, "val_loss": 0.4}, "accuracy")
    'same accuracy, lower loss'
    """
    if before is None:
        return ""
    if criterion == "loss":
        return "lower loss"
    column, title = COLUMNS[criterion], TITLES[criterion]
    return f"higher {title}" if row[column] > before[column] else f"same {title}, lower loss"


def shared_criterion(criteria: Iterable[Criterion]) -> Criterion:
    """Return the one criterion that several runs are compared by.

    They differ only where one of them weights classes by itself: then all are compared by balanced accuracy.
    """
    found = set(criteria)
    return found.pop() if len(found) == 1 else "balanced_accuracy"
