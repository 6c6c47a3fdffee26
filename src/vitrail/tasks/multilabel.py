"""Multi-label classification: every image has any number of K labels, each with its own sigmoid.

A label is predicted if its probability reaches the label's threshold: the one with the best F1 on the validation split.
The thresholds are constants of the task, which the bundle records.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.acceleration.agreement import Agreement
from vitrail.data.augmentation.mixing import mix_targets
from vitrail.data.sources.matching import match_labels
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import Kind
from vitrail.errors import CheckpointError, ConfigError, DataError
from vitrail.metrics.multilabel import (
    best_thresholds,
    exact_match,
    log_losses,
    macro_f1,
    mean_average_precision,
    predicted_labels,
)
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.multilabel_metrics import (
    EXACT_MATCH,
    LABEL_ACCURACY,
    LOSS,
    MACRO_F1,
    MAP,
    MultilabelMetrics,
    multilabel_metrics,
)
from vitrail.tasks.objective import Objective, only_in_training
from vitrail.tasks.task import (
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

USUAL_THRESHOLD = 0.5
JOINT = ";"
"""Between the labels of an image in a CSV file."""
MAX_BALANCE = 100.0
"""The most that class_weights=balanced lets a positive count."""


@dataclass(frozen=True)
class LabelsPrediction(Prediction):
    """A model's prediction for one image: its labels, and the most likely ones with their probabilities."""

    labels: tuple[str, ...] = ()
    """The predicted labels, those with the highest probability first."""
    names: tuple[str, ...] = ()
    """The most likely labels; indices as text if the bundle has no names."""
    probabilities: tuple[float, ...] = ()
    indices: tuple[int, ...] = ()

    def __repr__(self) -> str:
        if self.error is not None:
            return f"LabelsPrediction(error: {self.error})"
        pairs = zip(self.names, self.probabilities, strict=True)
        most = ", ".join(f"{name} {percent(probability)}%" for name, probability in pairs)
        return f"LabelsPrediction({', '.join(self.labels) or 'no label'}; {most})"

    def fields(self) -> dict[str, Any]:
        """Return the predicted labels, and the most likely ones with their probabilities."""
        return {"labels": self.labels, "top_labels": self.names, "probabilities": self.probabilities}

    def response(self) -> dict[str, Any]:
        """Return the predicted labels, and a list of the most likely ones, each with name, index and probability."""
        rows = zip(self.names, self.indices, self.probabilities, strict=True)
        top = [{"name": name, "index": index, "probability": p} for name, index, p in rows]
        return {"labels": list(self.labels), "top_labels": top}


class LabelRows(RowFormat):
    """Rows with the predicted and the most likely labels."""

    types: ClassVar[Mapping[str, FieldType]] = {
        "labels": "strings", "top_labels": "strings", "probabilities": "floats"
    }  # fmt: skip
    schema: ClassVar[Mapping[str, Any]] = {
        "labels": {"type": "array", "items": {"type": "string"}},
        "top_labels": NAMED_PROBABILITIES,
    }
    title: ClassVar[tuple[str, str, str]] = ("labels", "highest", "probabilities")

    def csv_header(self, top: int) -> list[str]:
        """Return one column for the predicted labels, and two for each of the most likely ones."""
        pairs = [column for place in range(1, top + 1) for column in (f"label_{place}", f"probability_{place}")]
        return ["labels", *pairs]

    def csv_cells(self, fields: Mapping[str, Any], top: int) -> list[Any]:
        """Return the predicted labels, joined, then label and probability in turns."""
        pairs = [cell for pair in zip(fields["top_labels"], fields["probabilities"], strict=True) for cell in pair]
        return [JOINT.join(fields["labels"]), *pairs, *[""] * (2 * top - len(pairs))]

    def table_cells(self, fields: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the predicted labels, the highest probability, and the most likely labels."""
        labels = ", ".join(printable(name, line=True) for name in fields["labels"]) or "none"
        shares = [f"{percent(p)}%" for p in fields["probabilities"]]
        names = [printable(name, line=True) for name in fields["top_labels"]]
        return labels, shares[0], ", ".join(f"{name} {share}" for name, share in zip(names, shares, strict=True))


@dataclass(frozen=True)
class Multilabel(Task):
    """Predicts any number of labels."""

    thresholds: tuple[float, ...] = ()
    """Of each label; empty: 0.5."""

    name: ClassVar[str] = "multilabel"
    kind: ClassVar[Kind] = "labels"
    output_noun: ClassVar[tuple[str, str]] = ("label", "labels")
    activation: ClassVar[str] = "sigmoid; a label is predicted if it reaches its threshold in task_constants"
    training_metric: ClassVar[MetricSpec] = LABEL_ACCURACY._replace(key="label_accuracy")
    criteria: ClassVar[Mapping[str, MetricSpec]] = {
        "map": MAP._replace(key="val_map"),
        "macro_f1": MACRO_F1._replace(key="val_macro_f1"),
        "exact_match": EXACT_MATCH._replace(key="val_exact_match"),
        "loss": LOSS._replace(name="loss", key="val_loss"),
    }
    rows: ClassVar[RowFormat] = LabelRows()
    sections: ClassVar[tuple[str, ...]] = (
        "label_mistakes", "labels", "curves", "model", "inside", "data", "reproduce"
    )  # fmt: skip
    compared_sections: ClassVar[tuple[str, ...]] = ("pairs", "settings", "curves", "labels", "reproduce")
    losses: ClassVar[tuple[str, ...]] = ("sigmoid",)
    settings: ClassVar[frozenset[str]] = frozenset({"mixing", "objective.label_smoothing", "objective.class_weights"})
    metrics: ClassVar[type[MultilabelMetrics]] = MultilabelMetrics
    is_tuned: ClassVar[bool] = True

    # ── constants ──

    def tuned(self, predictions: Predictions) -> Self:
        """Return the task with the thresholds that give the best F1."""
        return type(self)(tuple(best_thresholds(predictions.outputs, predictions.labels).tolist()))

    @property
    def constants(self) -> dict[str, Any]:
        """The thresholds."""
        return {"thresholds": list(self.thresholds)} if self.thresholds else {}

    def with_constants(self, constants: Mapping[str, Any], outputs: int) -> Self:
        """Return the task with recorded thresholds; 0.5 if there are none."""
        values = constants.get("thresholds", [])
        good = isinstance(values, list) and all(isinstance(value, float) and 0 < value < 1 for value in values)
        if not good or len(values) not in (0, outputs):
            raise CheckpointError(
                f"the bundle's task_constants should have {outputs} thresholds between 0 and 1, found {values!r}; was "
                "it edited?"
            )
        return type(self)(tuple(values))

    def thresholds_of(self, outputs: int) -> tuple[float, ...]:
        """Return the threshold of each label."""
        return self.thresholds or (USUAL_THRESHOLD,) * outputs

    # ── head and targets ──

    def outputs(self, classes: Sequence[str]) -> int:
        """Return one output per label."""
        return len(classes)

    def output_names(self, classes: Sequence[str]) -> tuple[str, ...] | None:
        """Return the labels."""
        return tuple(classes)

    def match(self, source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
        """Match the labels by name, or by index."""
        return match_labels(source, names, outputs, by_number=by_number)

    # ── training ──

    def placeholders(self, pixels: Tensor, outputs: int) -> Tensor:
        """Return images without labels."""
        return torch.zeros(len(pixels), outputs, dtype=torch.uint8, device=pixels.device)

    def training_loss(
        self, objective: Objective, labels: NDArray[Any], classes: Sequence[str], device: torch.device
    ) -> TrainingLoss:
        """Return the mean binary cross-entropy of the labels."""
        weights = positive_weights(labels, classes, objective)
        on_device = None if weights is None else weights.to(device)
        smoothing = objective.label_smoothing

        def loss(outputs: Tensor, labels: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor]:
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            wanted = labels.to(outputs.dtype)
            if lam is not None:
                wanted = mix_targets(wanted, lam)
            right = ((outputs.detach() > 0) == (wanted > 0.5)).float().mean(dim=1).sum()
            smoothed = wanted * (1 - smoothing) + smoothing / 2
            return F.binary_cross_entropy_with_logits(outputs, smoothed, pos_weight=on_device), right

        return loss

    def loss_note(self, recipe: Mapping[str, Any]) -> LossNote:
        """Name what only the training loss includes."""
        return note_of_additions(only_in_training(recipe))

    def default_criterion(self, *, class_balanced: bool) -> str:  # noqa: ARG002
        """Return the mean average precision."""
        return "map"

    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:
        """Return mean average precision, loss, and macro-F1 and exact matches at a threshold of 0.5."""
        probabilities, truth = predictions.outputs, predictions.labels
        predicted = predicted_labels(probabilities, np.full(len(classes), USUAL_THRESHOLD))
        return {
            "val_map": mean_average_precision(probabilities, truth),
            "val_loss": float(log_losses(probabilities, truth).mean()),
            "val_macro_f1": macro_f1(predicted, truth),
            "val_exact_match": exact_match(predicted, truth),
        }

    # ── evaluation and predictions ──

    def activate(self, outputs: Tensor) -> Tensor:
        """Return probabilities."""
        return outputs.sigmoid()

    def agreement(self, exact: Tensor, quick: Tensor) -> Agreement:
        """Compare probabilities."""
        change = float((exact.sigmoid() - quick.sigmoid()).abs().max())
        return Agreement(len(exact), change, "a probability", "probabilities")

    def explained(self, outputs: Tensor, names: tuple[str, ...] | None, index: int | None) -> Explained:
        """Return the label that an explanation is about: the given one, or else the most likely one."""
        place = int(outputs.argmax()) if index is None else index
        probability, name = float(outputs.sigmoid()[place]), place if names is None else names[place]
        return Explained(place, name, probability, f"{percent(probability)}%", is_probability=True)

    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> MultilabelMetrics:
        """Compute mean average precision, F1 at the thresholds and the metrics of each label."""
        thresholds = self.thresholds_of(predictions.outputs.shape[1])
        return multilabel_metrics(predictions, source, kind=kind, thresholds=thresholds)

    def predict(self, outputs: Tensor, names: tuple[str, ...] | None, top: int) -> list[LabelsPrediction]:
        """Return the labels of each image, and the most likely ones."""
        probabilities = self.activate(outputs)
        limits = torch.tensor(self.thresholds_of(outputs.shape[1]), dtype=probabilities.dtype)
        ranked = probabilities.sort(dim=1, descending=True, stable=True)
        has = (ranked.values >= limits[ranked.indices]).tolist()
        known = [str(index) for index in range(outputs.shape[1])] if names is None else names
        made = []
        for values, indices, chosen in zip(ranked.values.tolist(), ranked.indices.tolist(), has, strict=True):
            labels = tuple(known[index] for index, is_chosen in zip(indices, chosen, strict=True) if is_chosen)
            first = indices[:top]
            top_names = tuple(known[index] for index in first)
            made.append(LabelsPrediction(labels, top_names, tuple(map(rounded, values[:top])), tuple(first)))
        return made

    def unread(self, error: str) -> LabelsPrediction:
        """Return a prediction without labels."""
        return LabelsPrediction(error=error)

    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        """Return the true and predicted labels, the probability of every label, and the loss."""
        import pyarrow as pa

        probabilities, truth = predictions.outputs, predictions.labels.astype(bool)
        predicted = predicted_labels(probabilities, np.array(self.thresholds_of(len(classes))))
        known = np.array(classes, object)
        return {
            "true": pa.array([known[row].tolist() for row in truth], pa.list_(pa.string())),
            "predicted": pa.array([known[row].tolist() for row in predicted], pa.list_(pa.string())),
            "correct": pa.array((truth == predicted).all(axis=1)),
            "loss": pa.array(log_losses(probabilities, truth), pa.float64()),
            "probabilities": pa.FixedSizeListArray.from_arrays(
                pa.array(np.ascontiguousarray(probabilities, np.float32).ravel()), len(classes)
            ),
        }


def positive_weights(labels: NDArray[Any], classes: Sequence[str], objective: Objective) -> Tensor | None:
    """Return how much a positive of each label (K) counts in the loss; None if as much as a negative.

    `labels` (N, K) are those of the whole training split. "balanced" is negatives / positives.
    """
    chosen = objective.class_weights
    if chosen == "none":
        return None
    if isinstance(chosen, tuple):
        if len(chosen) != len(classes):
            raise ConfigError(f"class_weights has {len(chosen)} numbers, but there are {len(classes)} labels")
        return torch.tensor(chosen, dtype=torch.float32)
    if labels.ndim != 2:
        raise DataError(f"the labels have shape {labels.shape}; class_weights=balanced needs one column per label")
    positives = labels.sum(axis=0, dtype=np.int64)
    weights = (len(labels) - positives) / np.maximum(positives, 1)
    return torch.from_numpy(np.clip(weights, 1 / MAX_BALANCE, MAX_BALANCE).astype(np.float32))
