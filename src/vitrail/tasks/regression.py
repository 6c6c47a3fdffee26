"""Regression: every image has numbers, one per column.

A model learns numbers that are standardised: minus the mean of the training split, divided by its standard deviation.
Both are constants of the task, which the bundle records; predictions and metrics are in the units of the data.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from vitrail.data.sources.matching import match_values
from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import AUTOMATIC, Kind, Labelling
from vitrail.errors import CheckpointError, DataError
from vitrail.metrics.regression import per_column
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.objective import Objective
from vitrail.tasks.regression_metrics import MAE, R2, RMSE, RegressionMetrics, regression_metrics, scaled_errors
from vitrail.tasks.task import FieldType, LossNote, Prediction, Predictions, RowFormat, Task, TrainingLoss
from vitrail.text import number, printable

RESERVED = frozenset({"number", "path", "error"})
"""The fields that every row has."""
DIGITS = 6
"""Significant digits of a predicted number."""


def field_name(column: str) -> str:
    """Return the name of a row's field for a column."""
    return f"{column} (predicted)" if column in RESERVED else column


@dataclass(frozen=True)
class ValuePrediction(Prediction):
    """A model's prediction for one image: a number per column."""

    names: tuple[str, ...] = ()
    """The columns; "value 0" and so on if the bundle has no names."""
    values: tuple[float, ...] = ()

    @property
    def value(self) -> float:
        """The number, if there is one column."""
        if self.error is not None:
            raise DataError(f"the image has no prediction: {self.error}")
        if len(self.values) != 1:
            raise DataError(f"the model predicts {len(self.values)} numbers, {', '.join(self.names)}; use .values")
        return self.values[0]

    def __repr__(self) -> str:
        if self.error is not None:
            return f"ValuePrediction(error: {self.error})"
        pairs = zip(self.names, self.values, strict=True)
        return "ValuePrediction(" + ", ".join(f"{name} {number(value)}" for name, value in pairs) + ")"

    def fields(self) -> dict[str, Any]:
        """Return the number of each column, by its name."""
        return {field_name(name): value for name, value in zip(self.names, self.values, strict=True)}

    def response(self) -> dict[str, Any]:
        """Return a list of columns, each with name and value."""
        pairs = zip(self.names, self.values, strict=True)
        return {"values": [{"name": name, "value": value} for name, value in pairs]}


class ValueRows(RowFormat):
    """Rows with a field for each column."""

    schema: ClassVar[Mapping[str, Any]] = {
        "values": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "value": {"type": "number"}},
                "required": ["name", "value"],
            },
        }
    }
    title: ClassVar[tuple[str, str, str]] = ("column", "value", "then")

    def __init__(self, names: Sequence[str] = ()) -> None:
        self.fields = [field_name(name) for name in names]

    @property
    def types(self) -> Mapping[str, FieldType]:  # type: ignore[override]  # depends on the columns
        """A float per column."""
        return dict.fromkeys(self.fields, "float")

    def csv_header(self, top: int) -> list[str]:  # noqa: ARG002
        """Return the columns."""
        return self.fields

    def csv_cells(self, fields: Mapping[str, Any], top: int) -> list[Any]:  # noqa: ARG002
        """Return the number of each column; empty cells without a prediction."""
        return [fields.get(name, "") for name in self.fields]

    def table_cells(self, fields: Mapping[str, Any]) -> tuple[str, str, str]:
        """Return the first column, its number, and the others."""
        cells = [(printable(name, line=True), number(fields[name])) for name in self.fields]
        return *cells[0], ", ".join(f"{name} {value}" for name, value in cells[1:])


@dataclass(frozen=True)
class Regression(Task):
    """Predicts numbers."""

    mean: tuple[float, ...] = ()
    """Of each column in the training split."""
    std: tuple[float, ...] = ()
    """The standard deviation of each column in the training split."""
    median: tuple[float, ...] = ()
    """Of each column in the training split, which is what a baseline predicts."""

    name: ClassVar[str] = "regression"
    kind: ClassVar[Kind] = "values"
    output_noun: ClassVar[tuple[str, str]] = ("column", "columns")
    activation: ClassVar[str] = "none: standardised numbers; times task_constants.std plus task_constants.mean"
    training_metric: ClassVar[MetricSpec] = MAE._replace(key="mae")
    criteria: ClassVar[Mapping[str, MetricSpec]] = {
        "mae": MAE._replace(key="val_mae"),
        "rmse": RMSE._replace(key="val_rmse"),
        "r2": R2._replace(key="val_r2"),
        "loss": MetricSpec("loss", "number", lower_is_better=True, key="val_loss", ends=(0.0, None)),
    }
    rows: ClassVar[RowFormat] = ValueRows()
    sections: ClassVar[tuple[str, ...]] = ("predictions", "errors", "curves", "model", "inside", "data", "reproduce")
    compared_sections: ClassVar[tuple[str, ...]] = ("pairs", "settings", "curves", "reproduce")
    losses: ClassVar[tuple[str, ...]] = ("l2", "l1", "huber")
    metrics: ClassVar[type[RegressionMetrics]] = RegressionMetrics

    def labelling(self, names: tuple[str, ...] | None) -> Labelling:
        """Return the columns to read."""
        return Labelling(self.kind, names or ())

    # ── constants ──

    def fitted(self, labels: NDArray[Any], labelling: Labelling = AUTOMATIC) -> Self:  # noqa: ARG002
        """Return the task with mean, standard deviation and median of the training split."""
        values = np.asarray(labels, np.float64)
        std = values.std(axis=0)
        std = np.where(std > 1e-12 * np.maximum(1.0, np.abs(values).max(axis=0)), std, 1.0)  # rounding, not a spread
        columns = values.mean(axis=0), std, np.median(values, axis=0)
        return type(self)(*(tuple(map(float, column)) for column in columns))

    @property
    def constants(self) -> dict[str, Any]:
        """Mean, standard deviation and median of each column."""
        return {"mean": list(self.mean), "std": list(self.std), "median": list(self.median)} if self.mean else {}

    def with_constants(self, constants: Mapping[str, Any], outputs: int) -> Self:
        """Return the task with recorded constants."""
        columns = []
        for name in ("mean", "std", "median"):
            values = constants.get(name)
            good = isinstance(values, list) and all(
                isinstance(value, int | float) and not isinstance(value, bool) and np.isfinite(value)
                for value in values
            )
            if not isinstance(values, list) or not good or len(values) != outputs:
                raise CheckpointError(
                    f"the bundle's task_constants should have {outputs} numbers as {name}, found {values!r}; was it "
                    "edited?"
                )
            columns.append(tuple(map(float, values)))
        if min(columns[1]) <= 0:
            raise CheckpointError(f"the bundle's task_constants have the std {list(columns[1])}; it should be above 0")
        return type(self)(*columns)

    # ── head and targets ──

    def outputs(self, classes: Sequence[str]) -> int:
        """Return one output per column."""
        return len(classes)

    def output_names(self, classes: Sequence[str]) -> tuple[str, ...] | None:
        """Return the columns."""
        return tuple(classes)

    def match(self, source: Source, names: tuple[str, ...] | None, outputs: int, *, by_number: bool = False) -> Source:
        """Match the columns by name, or by index."""
        return match_values(source, names, outputs, by_number=by_number)

    # ── training ──

    def placeholders(self, pixels: Tensor, outputs: int) -> Tensor:
        """Return numbers."""
        return torch.zeros(len(pixels), outputs, dtype=torch.float32, device=pixels.device)

    def training_loss(
        self,
        objective: Objective,
        labels: NDArray[Any],  # noqa: ARG002
        classes: Sequence[str],
        device: torch.device,
    ) -> TrainingLoss:
        """Return the loss of standardised numbers."""
        count = len(classes)
        precise = torch.float32 if device.type == "mps" else torch.float64  # a year needs more digits than its spread
        mean = torch.tensor(self.mean or (0.0,) * count, dtype=precise, device=device)
        std = torch.tensor(self.std or (1.0,) * count, dtype=precise, device=device)
        unit = float(std[0]) if count == 1 else 1.0
        kind = objective.loss or self.losses[0]

        def loss(outputs: Tensor, labels: Tensor, lam: Tensor | None) -> tuple[Tensor, Tensor]:  # noqa: ARG001
            outputs = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
            wanted = ((labels.to(precise) - mean) / std).to(outputs.dtype)
            errors = (outputs.detach() - wanted).abs().mean(dim=1) * unit
            return regression_loss(outputs, wanted, kind), errors.sum()

        return loss

    def loss_note(self, recipe: Mapping[str, Any]) -> LossNote:
        """Name the loss."""
        kind = str((recipe.get("objective") or {}).get("loss") or self.losses[0])
        return LossNote(
            f"training: {kind}, augmented images",
            "validation: l2, original images",
            f"The training loss is the {kind} loss of standardised numbers for augmented images, with dropout; the "
            "validation loss is their l2 loss for original images.",
        )

    def default_criterion(self, *, class_balanced: bool) -> str:  # noqa: ARG002
        """Return the mean absolute error."""
        return "mae"

    def validation(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, float]:  # noqa: ARG002
        """Return errors and R²; of several columns their mean, errors in standard deviations."""
        scores = per_column(predictions.outputs, predictions.labels)
        errors, squared = scaled_errors(scores, self.std)
        standardised = (predictions.outputs - predictions.labels) / np.array(self.std or 1.0)
        return {
            "val_mae": errors,
            "val_rmse": squared,
            "val_r2": float(np.nanmean(scores.r_squared)) if not np.isnan(scores.r_squared).all() else float("nan"),
            "val_loss": float(np.mean(standardised**2)),
        }

    # ── evaluation and predictions ──

    def activate(self, outputs: Tensor) -> Tensor:
        """Return numbers in the units of the data."""
        if not self.mean:
            return outputs
        precise = torch.float32 if outputs.device.type == "mps" else torch.float64
        mean, std = (torch.tensor(c, dtype=precise, device=outputs.device) for c in (self.mean, self.std))
        return outputs.to(precise) * std + mean

    def evaluate(self, predictions: Predictions, source: Source, *, kind: str) -> RegressionMetrics:
        """Compute errors, R² and rank correlation of each column."""
        return regression_metrics(predictions, source, kind=kind, std=self.std, median=self.median)

    def predict(self, outputs: Tensor, names: tuple[str, ...] | None, top: int) -> list[ValuePrediction]:  # noqa: ARG002
        """Return the numbers of each image."""
        columns = tuple(f"value {place}" for place in range(outputs.shape[1])) if names is None else names
        return [
            ValuePrediction(columns, tuple(float(f"{value:.{DIGITS}g}") for value in row))
            for row in self.activate(outputs).tolist()
        ]

    def unread(self, error: str) -> ValuePrediction:
        """Return a prediction without numbers."""
        return ValuePrediction(error=error)

    def row_format(self, names: tuple[str, ...] | None) -> RowFormat:
        """Return rows with a field for each column."""
        count = len(names) if names is not None else len(self.mean)
        return ValueRows(tuple(f"value {place}" for place in range(count)) if names is None else names)

    def columns(self, predictions: Predictions, classes: Sequence[str]) -> dict[str, Any]:
        """Return the true and the predicted number of each column."""
        made: dict[str, Any] = {}
        for place, name in enumerate(classes):
            made[f"true {name}"] = predictions.labels[:, place]
            made[f"predicted {name}"] = predictions.outputs[:, place].astype(np.float64)
        return made


def regression_loss(outputs: Tensor, wanted: Tensor, kind: str) -> Tensor:
    """Return the mean loss of standardised numbers (B, K): over the batch, and over columns."""
    match kind:
        case "l1":
            return F.l1_loss(outputs, wanted)
        case "huber":
            return F.huber_loss(outputs, wanted)
        case _:
            return F.mse_loss(outputs, wanted)
