"""Classification: every image has one of K classes."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.acceleration.agreement import Agreement
from vitrail.data.sources.selection import match_classes
from vitrail.data.sources.source import Source
from vitrail.errors import DataError
from vitrail.metrics.baselines import warning_about_gap
from vitrail.metrics.classification import balanced_accuracy, confusion_matrix, log_losses, macro_f1
from vitrail.tasks.classification_metrics import (
    ACCURACY,
    BALANCED_ACCURACY,
    LOG_LOSS,
    MACRO_F1,
    ClassificationMetrics,
    classification_metrics,
)
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.objective import Objective, class_weights, loss, only_in_training, targets
from vitrail.tasks.task import (
    CLASS_SETTINGS,
    NAMED_PROBABILITIES,
    Explained,
    FieldType,
    LossNote,
    Prediction,
    Predictions,
    RowFormat,
    Task,
    TrainingLoss,
    note_of_additions,
)
from vitrail.text import percent, printable, rounded

TOP = 5
"""Classes per image in test_predictions.parquet. All of them would take 200 MB for 50,000 images of 1,000 classes."""


@dataclass(frozen=True)
class ClassPrediction(Prediction):
    """A model's prediction for one image: the most likely classes, in order of probability."""

    names: tuple[str, ...] = ()
    """Class names; class indices as text if the bundle has no names."""
    probabilities: tuple[float, ...] = ()
    indices: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """The most likely class."""
        self._check()
        return self.names[0]

    @property
    def probability(self) -> float:
        """Its probability, from 0 to 1."""
        self._check()
        return self.probabilities[0]

    def _check(self) -> None:
        if self.error is not None:
            raise DataError(f"the image has no prediction: {self.error}")

    def __iter__(self) -> Iterator[tuple[str, float]]:
        """Iterate over (class, probability)."""
        return zip(self.names, self.probabilities, strict=True)

    def __repr__(self) -> str:
        if self.error is not None:
            return f"ClassPrediction(error: {self.error})"
        return "ClassPrediction(" + ", ".join(f"{name} {percent(probability)}%" for name, probability in self) + ")"

    def fields(self) -> dict[str, Any]:
        """Return the classes and their probabilities."""
        return {"classes": self.names, "probabilities": self.probabilities}

    def response(self) -> dict[str, Any]:
        """Return a list of classes, each with name, index and probability."""
        rows = zip(self.names, self.indices, self.probabilities, strict=True)
        return {"classes": [{"name": name, "index": index, "probability": p} for name, index, p in rows]}


class ClassRows(RowFormat):
    """Rows with the most likely classes."""

    types: ClassVar[Mapping[str, FieldType]] = {"classes": "strings", "probabilities": "floats"}
    schema: ClassVar[Mapping[str, Any]] = {"classes": NAMED_PROBABILITIES}
    title: ClassVar[tuple[str, str, str]] = ("class", "confidence", "then")

    def csv_header(self, top: int) -> list[str]:
        """Return two columns for each of the top classes."""
        return [column for place in range(1, top + 1) for column in (f"class_{place}", f"probability_{place}")]

    def csv_cells(self, fields: Mapping[str, Any], top: int) -> list[Any]:
        """Return class and probability in turns."""
        pairs = [cell for pair in zip(fields["classes"], fields["probabilities"], strict=True) for cell in pair]
        return pairs + [""] * (2 * top - len(pairs))

    def table_cells(self, fields: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the most likely class, its probability, and the others."""
        percentages = [f"{percent(p)}%" for p in fields["probabilities"]]
        names = [printable(name, line=True) for name in fields["classes"]]  # also in a file: a table is for people
        others = ", ".join(f"{name} {value}" for name, value in zip(names[1:], percentages[1:], strict=True))
        return names[0], percentages[0], others


class Classification(Task):
    """Softmax classification."""

    name = "classification"
    activation = "softmax"
    output_noun = ("class", "classes")
    training_metric = ACCURACY._replace(key="accuracy")
    criteria: ClassVar[Mapping[str, MetricSpec]] = {
        "accuracy": ACCURACY._replace(key="val_top1"),
        "balanced_accuracy": BALANCED_ACCURACY._replace(key="val_balanced_accuracy"),
        "macro_f1": MACRO_F1._replace(key="val_macro_f1"),
        "loss": LOG_LOSS._replace(name="loss", key="val_loss"),
    }
    rows = ClassRows()
    sections = ("mistakes", "classes", "confusion", "calibration", "curves", "model", "inside", "data", "reproduce")
    compared_sections = ("pairs", "settings", "curves", "classes", "reproduce")
    losses = ("softmax", "sigmoid")
    settings = CLASS_SETTINGS - {"objective.loss"}
    metrics = ClassificationMetrics

    def outputs(self, classes: Sequence[str]) -> int:
        """Return one output per class."""
        return len(classes)

    def output_names(self, classes: Sequence[str]) -> tuple[str, ...] | None:
        """Return the class names."""
        return tuple(classes)

    def match(self, source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
        """Match the classes by name, or by index."""
        return match_classes(source, names, outputs, by_number=by_number)

    def training_loss(
        self, objective: Objective, labels: NDArray[np.int64], classes: Sequence[str], device: torch.device
    ) -> TrainingLoss:
        """Return cross-entropy, with what the objective adds."""
        weights = class_weights(labels, len(classes), objective)
        return partial(classification_loss, objective, None if weights is None else weights.to(device))

    def loss_note(self, recipe: Mapping[str, Any]) -> LossNote:
        """Name what only the training loss includes."""
        return loss_note(recipe)

    def default_criterion(self, *, class_balanced: bool) -> str:
        """Return balanced accuracy if classes are balanced or weighted, else accuracy."""
        return "balanced_accuracy" if class_balanced else "accuracy"

    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:  # noqa: ARG002
        """Return accuracy, loss, balanced accuracy and macro-F1."""
        probabilities, labels = predictions.outputs, predictions.labels
        predicted = probabilities.argmax(axis=1)
        matrix = confusion_matrix(labels, predicted, probabilities.shape[1])
        return {
            "val_top1": float(np.mean(predicted == labels)),
            "val_loss": float(log_losses(probabilities, labels).mean()),
            "val_balanced_accuracy": balanced_accuracy(matrix),
            "val_macro_f1": macro_f1(matrix),
        }

    def standard_error(self, criterion: str, value: float, images: int) -> float | None:
        """Return the standard error of a fraction; for the loss only the lowest counts, since long runs overfit it."""
        if criterion == "loss":
            return None
        # Add two successes and two failures (Agresti and Coull), so that 0% and 100% have a standard error, too.
        accuracy = (min(max(value, 0.0), 1.0) * images + 2) / (images + 4)
        return math.sqrt(accuracy * (1 - accuracy) / images)

    def overfitting(self, training: float, validation: float, images: int) -> list[str]:
        """Warn if training and validation accuracy are far apart."""
        return warning_about_gap(training, validation, images)

    def activate(self, outputs: Tensor) -> Tensor:
        """Return probabilities."""
        return outputs.softmax(dim=1)

    def agreement(self, exact: Tensor, quick: Tensor) -> Agreement:
        """Compare probabilities and the top class of logits (B, …, K)."""
        changed = (exact.argmax(dim=-1) != quick.argmax(dim=-1)).view(len(exact), -1).any(dim=1)
        change = float((exact.softmax(dim=-1) - quick.softmax(dim=-1)).abs().max())
        return Agreement(len(exact), change, "a probability", "probabilities", int(changed.sum()), "top class")

    def explained(self, outputs: Tensor, names: tuple[str, ...] | None, index: int | None) -> Explained:
        """Return the class (of logits (K)) that an explanation is about: the given one, or else the predicted one."""
        place = int(outputs.argmax()) if index is None else index
        probability, name = float(outputs.softmax(dim=0)[place]), place if names is None else names[place]
        return Explained(place, name, probability, f"{percent(probability)}%", is_probability=True)

    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> ClassificationMetrics:
        """Compute accuracy, per-class metrics, confusions and calibration."""
        return classification_metrics(predictions, source, kind=kind)

    def predict(self, outputs: Tensor, names: tuple[str, ...] | None, top: int) -> list[ClassPrediction]:
        """Return the most likely classes of each image."""
        best = self.activate(outputs).topk(min(top, outputs.shape[1]), dim=1)
        return [
            ClassPrediction(
                tuple(str(index) if names is None else names[index] for index in indices),
                tuple(map(rounded, values)),
                tuple(indices),
            )
            for values, indices in zip(best.values.tolist(), best.indices.tolist(), strict=True)
        ]

    def unread(self, error: str) -> ClassPrediction:
        """Return a prediction without classes."""
        return ClassPrediction(error=error)

    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        """Return true and predicted class, probabilities and losses."""
        import pyarrow as pa

        probabilities, labels = predictions.outputs, predictions.labels
        rows = np.arange(len(labels))
        ranked = np.argsort(-probabilities, axis=1, kind="stable")[:, :TOP]
        predicted, count = ranked[:, 0], ranked.shape[1]
        known = pa.array(classes, pa.string())

        def named(numbers: NDArray[Any]) -> Any:
            return pa.DictionaryArray.from_arrays(pa.array(numbers.ravel(), pa.int32()), known)

        top = pa.array(np.take_along_axis(probabilities, ranked, axis=1).ravel())
        return {
            "true": named(labels),
            "predicted": named(predicted),
            "correct": pa.array(predicted == labels),
            "confidence": pa.array(probabilities[rows, predicted]),
            "true_probability": pa.array(probabilities[rows, labels]),
            "log_loss": pa.array(log_losses(probabilities, labels), pa.float64()),
            "top_classes": pa.FixedSizeListArray.from_arrays(named(ranked), count),
            "top_probabilities": pa.FixedSizeListArray.from_arrays(top, count),
        }


def classification_loss(
    objective: Objective, weights: Tensor | None, outputs: Tensor, labels: Tensor, lam: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the loss and the number of correct predictions; with mixing, the label of the larger weight counts."""
    wanted = targets(labels, outputs.shape[-1], objective, lam)
    return loss(outputs, wanted, objective, weights), (outputs.argmax(dim=-1) == wanted.argmax(dim=-1)).sum()


def loss_note(recipe: Mapping[str, Any]) -> LossNote:
    """Describe how the plotted losses of a resolved recipe differ."""
    objective = recipe.get("objective") or {}
    if objective.get("loss") == "sigmoid":
        return LossNote(
            "training: sum of sigmoid losses",
            "validation: log loss, on another scale",
            "The training loss is a sum of sigmoid losses, the validation loss a log loss, so the scales differ.",
        )
    added, more = only_in_training(recipe), ""
    smoothing, classes = float(objective.get("label_smoothing", 0) or 0), (recipe.get("model") or {}).get("classes", 0)
    if smoothing and classes > 1 and not {"class weights", "the teacher's targets"} & set(added):
        lowest = smoothed_entropy(smoothing, classes)
        more = f" With this smoothing and {classes} classes, training cannot fall below {lowest:.2f}."
    return note_of_additions(added, more)


def smoothed_entropy(smoothing: float, classes: int) -> float:
    """Return the lowest possible cross-entropy with smoothed labels: their entropy."""
    off = smoothing / classes
    on = 1 - smoothing + off
    return -on * math.log(on) - (classes - 1) * off * math.log(off)
