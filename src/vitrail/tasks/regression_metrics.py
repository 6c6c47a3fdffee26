"""The metrics of a regression model."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from vitrail.data.sources.source import Source
from vitrail.data.sources.targets import output_names_of
from vitrail.metrics.intervals import Interval
from vitrail.metrics.regression import (
    ColumnIntervals,
    PerColumn,
    bootstrap_columns,
    constant_baseline,
    largest_errors,
    per_column,
)
from vitrail.tasks.metrics import HELD_OUT, Metric, Metrics, MetricSpec, ResultTable
from vitrail.tasks.task import Predictions
from vitrail.text import isolated, number

WORST = 20
"""How many of the largest errors are kept."""
LISTED = 10
"""Errors in the tables; the JSON has more."""
MAE = MetricSpec(
    "mean absolute error",
    "number",
    lower_is_better=True,
    ends=(0.0, None),
    explanation="How far predictions are from the true values on average.",
)
SCALED_MAE = MAE._replace(
    name="mean absolute error in standard deviations",
    explanation="The mean over columns of the mean absolute error, divided by the standard deviation in training.",
)
RMSE = MetricSpec(
    "root mean squared error",
    "number",
    lower_is_better=True,
    ends=(0.0, None),
    explanation="Like the mean absolute error, but large errors count more.",
)
R2 = MetricSpec(
    "R²",
    "number",
    ends=(None, 1.0),
    explanation="The fraction of the variance that predictions explain: 1 is perfect, 0 no better than the mean.",
)
SPEARMAN = MetricSpec(
    "Spearman correlation",
    "number",
    ends=(None, 1.0),
    explanation="How well predictions order the images: 1 is perfect.",
)
MEDIAN_ERROR = MetricSpec(
    "median absolute error", "number", lower_is_better=True, explanation="Half of the errors are smaller."
)
BASELINE = MetricSpec(
    "always the median",
    "number",
    lower_is_better=True,
    explanation="The mean absolute error of always predicting the median of the training split.",
)


class ColumnScore(NamedTuple):
    """The metrics of one column; None where undefined."""

    name: str
    mae: float
    mae_interval: Interval
    rmse: float
    rmse_interval: Interval
    r2: float | None
    r2_interval: Interval | None
    spearman: float | None
    spearman_interval: Interval | None
    median_error: float
    baseline: float | None
    """The mean absolute error of always predicting the median of the training split; None if it is not known."""
    true_range: tuple[float, float]
    """The smallest and the largest true value."""

    @property
    def numbers(self) -> list[Metric]:
        """Every metric."""
        return [
            Metric(MAE, self.mae, self.mae_interval),
            Metric(RMSE, self.rmse, self.rmse_interval),
            Metric(R2, self.r2, self.r2_interval),
            Metric(SPEARMAN, self.spearman, self.spearman_interval),
            Metric(MEDIAN_ERROR, self.median_error),
            *([Metric(BASELINE, self.baseline)] if self.baseline is not None else []),
        ]


@dataclass(frozen=True)
class LargeError:
    """An image whose prediction is far from the true values."""

    index: int
    """Its index in the source."""
    name: str
    true: tuple[float, ...]
    predicted: tuple[float, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class RegressionMetrics(Metrics):
    """The metrics of a regression model."""

    task: ClassVar[str] = "regression"
    per_column: tuple[ColumnScore, ...]
    scaled_mae: float
    """The mean absolute error; of several columns, the mean of theirs in standard deviations of the training split."""
    worst: tuple[LargeError, ...]
    """The images with the largest errors, in descending order."""

    def __post_init__(self) -> None:
        """Raise if the fields contradict each other, as after an edit of result.json."""
        widths = {len(row.true) for row in self.worst} | {len(row.predicted) for row in self.worst}
        if self.images < 1 or not self.per_column or widths - {len(self.per_column)}:
            raise ValueError("the fields of the result are inconsistent")

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(column.name for column in self.per_column)

    @property
    def headline(self) -> Metric:
        """The mean absolute error."""
        if len(self.per_column) == 1:
            return self.per_column[0].numbers[0]
        return Metric(SCALED_MAE, self.scaled_mae)

    @property
    def numbers(self) -> list[Metric]:
        """Every metric of the only column; of several, the headline and the mean absolute error and R² of each."""
        if len(self.per_column) == 1:
            return self.per_column[0].numbers
        each = [
            metric._replace(spec=metric.spec._replace(name=f"{metric.name} of {column.name}"))
            for column in self.per_column
            for metric in (column.numbers[0], column.numbers[2])
        ]
        return [self.headline, *each]

    @property
    def clauses(self) -> list[str]:
        """The baseline and R²; of several columns, the one with the lowest R²."""
        if len(self.per_column) == 1:
            (column,) = self.per_column
            always = [] if column.baseline is None else [f"always the median gives {number(column.baseline)}"]
            return [*always, *([f"R² {number(column.r2)}"] if column.r2 is not None else [])]
        known = [column for column in self.per_column if column.r2 is not None]
        if not known:
            return []
        weakest = min(known, key=lambda column: column.r2 or 0.0)
        return [f"weakest column {weakest.name}, R² {number(weakest.r2 or 0.0)}"]

    @property
    def lead(self) -> list[str]:
        """What is predicted, the baseline and R²; of several columns, the one with the lowest R²."""
        if len(self.per_column) == 1:
            (column,) = self.per_column
            sentences = [f"The model predicts {isolated(column.name)}."]
            if column.baseline is not None:
                sentences.append(
                    f"Always predicting the median of the training split has an error of {number(column.baseline)}."
                )
            return sentences if column.r2 is None else [*sentences, f"R² is {number(column.r2)}."]
        sentences = [
            f"The model predicts {len(self.per_column):,} columns; this is the mean of their errors, each divided by "
            "the column's standard deviation in the training split."
        ]
        known = [column for column in self.per_column if column.r2 is not None]
        if known:
            weakest = min(known, key=lambda column: column.r2 or 0.0)
            sentences.append(
                f"The weakest column is {isolated(weakest.name)}, with an R² of {number(weakest.r2 or 0.0)}."
            )
        return sentences

    @property
    def tables(self) -> list[ResultTable]:
        """A row per column, and the largest errors."""
        header = ("column", "mean absolute error", "always the median", "RMSE", "R²", "Spearman", "true values")
        columns = ResultTable(
            "Columns",
            header,
            [
                (
                    column.name,
                    f"{number(column.mae)} ({Metric(MAE, column.mae, column.mae_interval).span})",
                    *(
                        "–" if value is None else number(value)
                        for value in (column.baseline, column.rmse, column.r2, column.spearman)
                    ),
                    f"{number(column.true_range[0])} to {number(column.true_range[1])}",
                )
                for column in self.per_column
            ],
            header[1:],
        )
        errors = ResultTable(
            "The largest errors",
            ("image", *(f"{kind} {name}" for name in self.columns for kind in ("true", "predicted"))),
            [
                (row.name, *(number(value) for pair in zip(row.true, row.predicted, strict=True) for value in pair))
                for row in self.worst[:LISTED]
            ],
            tuple(f"{kind} {name}" for name in self.columns for kind in ("true", "predicted")),
        )
        return [columns, errors]

    @property
    def details(self) -> dict[str, Any]:
        """The metrics as JSON."""
        return {
            "scaled_mae": self.scaled_mae,
            "per_column": [row._asdict() for row in self.per_column],
            "worst": [asdict(row) for row in self.worst],
        }


def regression_metrics(
    predictions: Predictions,
    source: Source,
    *,
    kind: str = HELD_OUT,
    std: Sequence[float] = (),
    median: Sequence[float] = (),
) -> RegressionMetrics:
    """Compute the metrics of some predictions; `std` and `median` are those of the training split, if known."""
    predicted, true = predictions.outputs, predictions.labels
    names = output_names_of(source)
    scores, intervals = per_column(predicted, true), bootstrap_columns(predicted, true)
    baseline = None
    if len(median):
        middle = np.array(median, np.float64)
        baseline = constant_baseline(true, mean=middle, median=middle).mean_absolute_error
    columns = tuple(
        _column(
            names[place], place, scores, intervals[place], None if baseline is None else float(baseline[place]), true
        )
        for place in range(len(names))
    )
    worst = tuple(
        LargeError(
            int(predictions.indices[row]),
            source.name(int(predictions.indices[row])),
            tuple(map(float, true[row])),
            tuple(map(float, predicted[row])),
        )
        for row in largest_errors(predicted, true, WORST).tolist()
    )
    return RegressionMetrics(
        images=len(true),
        kind=kind,
        per_column=columns,
        scaled_mae=scaled_errors(scores, std)[0],
        worst=worst,
        bad=predictions.bad,
        warnings=tuple(_warnings(columns)),
    )


def scaled_errors(scores: PerColumn, std: Sequence[float]) -> tuple[float, float]:
    """Return mean absolute and root mean squared error; of several columns the means, in standard deviations."""
    mae, rmse = scores.mean_absolute_error, scores.root_mean_squared_error
    if len(mae) > 1 and len(std):
        mae, rmse = mae / np.array(std), rmse / np.array(std)
    return float(mae.mean()), float(rmse.mean())


def _column(
    name: str, place: int, scores: PerColumn, intervals: ColumnIntervals, baseline: float | None, true: Any
) -> ColumnScore:
    r2, spearman = (float(values[place]) for values in (scores.r_squared, scores.spearman))
    return ColumnScore(
        name,
        float(scores.mean_absolute_error[place]),
        intervals.mean_absolute_error,
        float(scores.root_mean_squared_error[place]),
        intervals.root_mean_squared_error,
        None if np.isnan(r2) else r2,
        None if np.isnan(r2) else intervals.r_squared,
        None if np.isnan(spearman) else spearman,
        None if np.isnan(spearman) else intervals.spearman,
        float(scores.median_absolute_error[place]),
        baseline,
        (float(true[:, place].min()), float(true[:, place].max())),
    )


def _warnings(columns: Sequence[ColumnScore]) -> list[str]:
    """Warn of columns that the model predicts no better than a constant."""
    return [
        f"the column {column.name} is predicted no better than by always giving the median (mean absolute error "
        f"{number(column.mae)}, the median {number(column.baseline)}); train longer, start from a pretrained model, or "
        "check that the images show it"
        for column in columns
        if column.baseline is not None and column.mae_interval.high >= column.baseline > 0
    ]
