"""The sections of a regression run: predicted against true values, errors, and the images with the largest ones."""

import math
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.points import MOST_DOTS, point_chart
from vitrail.reports.image_views import SHOWN, ImageCard, image_cards, image_notes, map_kind
from vitrail.reports.page import WIDTH, Cell, Column, Section, absent, chart, name, paragraph, signed, table
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.test_predictions import ValuePredictions
from vitrail.tasks.metrics import Metric
from vitrail.tasks.regression_metrics import MAE, ColumnScore, LargeError, RegressionMetrics
from vitrail.text import number, plural, shorten, shorten_path

DRAWN = 4
"""Columns with charts; of more, the weakest ones."""
LISTED = 4
"""Columns below an image; of more, those with the largest errors."""
GROUPS, FEWEST = 10, 5
"""Groups of images for the line of mean errors, and the fewest images of a group."""
MEAN_ERROR = "mean error"


def predictions(artifacts: RunArtifacts) -> Section:
    """Return charts of predicted against true values and of the errors, and a table of the columns."""
    title = "Predicted and true values"
    result = artifacts.run.result
    if not isinstance(result, RegressionMetrics):
        return Section("predictions", "Predictions", title, absent(artifacts.run.why_no_result))
    stored, why = artifacts.predictions
    body = _charts(result, stored) if isinstance(stored, ValuePredictions) else absent(why)
    return Section("predictions", "Predictions", title, body + _table(result))


# ── charts ──


def _charts(result: RegressionMetrics, stored: ValuePredictions) -> str:
    columns = weakest_first(result.per_column)
    drawn = [column for column in columns[:DRAWN] if column.name in stored.columns]
    intro = (
        "On the dotted diagonal, a prediction equals the true value. An error is the predicted minus the true value: "
        "above the dotted line the prediction is too high. Where the mean error slopes down, high values are "
        "predicted too low and low ones too high, as a model does that can hardly tell them apart."
    )
    if len(stored.names) > MOST_DOTS:
        intro += f" The {len(stored.names):,} images are counted in cells: a stronger colour is more images."
    body = paragraph(intro)
    if len(columns) > len(drawn):
        body += paragraph(
            f"The charts show the {len(drawn)} weakest of {len(columns):,} columns, those with the lowest R². The "
            "table has all columns."
        )
    for column in drawn:
        place = stored.columns.index(column.name)
        true, predicted = stored.true[:, place], stored.predicted[:, place]
        both = "".join(map(chart, _pair(column.name, true, predicted, stored.names)))
        body += f'<div class="pair">{both}</div>'
    return body


def _pair(column: str, true: NDArray[np.float64], predicted: NDArray[np.float64], images: list[str]) -> list[str]:
    """Return the charts of one column."""
    named, errors = shorten(column, 24), predicted - true
    notes = [
        f"{shorten_path(image, 40)}: true {number(one)}, predicted {number(other)}"
        for image, one, other in zip(images, true.tolist(), predicted.tolist(), strict=True)
    ] if len(images) <= MOST_DOTS else []  # fmt: skip
    means = mean_errors(true, errors)
    return [
        point_chart(
            true.tolist(), predicted.tolist(), title=f"{named}: predicted and true", x_label=f"true {named}",
            y_label=f"predicted {named}", diagonal=True, guide="predicted = true", notes=notes, width=WIDTH,
            standalone=False,
        ),
        point_chart(
            true.tolist(), errors.tolist(), title=f"{named}: errors", x_label=f"true {named}", y_label="error",
            guide="no error", notes=notes, trend=(MEAN_ERROR, means) if means else None, width=WIDTH, standalone=False,
        ),
    ]  # fmt: skip


def mean_errors(true: NDArray[np.float64], errors: NDArray[np.float64]) -> list[tuple[float, float]]:
    """Return the mean true value and the mean error of groups of images with similar values; none for few images."""
    groups = min(GROUPS, len(true) // FEWEST)
    if groups < 3:
        return []
    parts = np.array_split(np.argsort(true, kind="stable"), groups)
    means = [(float(true[part].mean()), float(errors[part].mean())) for part in parts]
    distinct = all(before[0] < after[0] for before, after in pairwise(means))
    return means if distinct else []


# ── columns ──


def weakest_first(columns: tuple[ColumnScore, ...]) -> list[ColumnScore]:
    """Return the columns sorted by R²; those without one, whose true values are all equal, come last."""
    return sorted(columns, key=lambda column: math.inf if column.r2 is None else column.r2)


def _table(result: RegressionMetrics) -> str:
    columns = [
        Column("Column"),
        Column("Mean absolute error", number=True),
        Column("95% interval", number=True, hint="bootstrap interval of the mean absolute error"),
        Column("Always the median", number=True, hint="mean absolute error of predicting the median of training"),
        Column("RMSE", number=True, hint="root mean squared error"),
        Column("R²", number=True, hint="fraction of the variance that predictions explain"),
        Column("Spearman", number=True, hint="rank correlation"),
        Column("True values", number=True),
    ]
    rows = [
        [
            Cell(name(column.name)),
            Cell(number(column.mae), column.mae),
            Cell(Metric(MAE, column.mae, column.mae_interval).span, column.mae_interval.low),
            *(_cell(value) for value in (column.baseline, column.rmse, column.r2, column.spearman)),
            Cell(_range(*column.true_range), column.true_range[0]),
        ]
        for column in result.per_column
    ]
    return table(columns, rows, caption="Columns", sortable=len(rows) > 1)


def _range(low: float, high: float) -> str:
    scale = max(abs(low), abs(high))
    return f"{number(low, scale)} to {number(high, scale)}"


def _cell(value: float | None) -> Cell:
    return Cell("–", "") if value is None else Cell(number(value), value)


# ── errors ──


def errors(artifacts: RunArtifacts) -> Section:
    """Return the images with the largest errors."""
    title = "The largest errors"
    result = artifacts.run.result
    if not isinstance(result, RegressionMetrics):
        return Section("errors", "Errors", title, absent(artifacts.run.why_no_result))
    shown = [row for row in result.worst if row.true != row.predicted][:SHOWN]
    if not shown:
        return Section("errors", "Errors", title, paragraph("Every prediction is exact."))
    several = len(result.per_column) > 1
    of = "the column with the largest error" if several else "the predicted number"
    caption = map_kind(artifacts).caption(of, "raise the number most")
    text = (
        "Look for wrong values here, too: a mistyped number is a large error. Each image is shown as stored; below it "
        f"are the model's input and the {caption}."
    )
    if several:
        text += " Errors of different columns are compared in standard deviations of the true values."
    missing: set[str] = set()
    cards = image_cards(artifacts, [_card(result, row) for row in shown], missing)
    return Section("errors", "Errors", title, image_notes(artifacts, missing) + paragraph(text) + cards)


def _card(result: RegressionMetrics, row: LargeError) -> ImageCard:
    spreads = [_spread(column) for column in result.per_column]
    scaled = [abs(p - t) / spread for p, t, spread in zip(row.predicted, row.true, spreads, strict=True)]
    order = sorted(range(len(scaled)), key=lambda place: -scaled[place])
    lines = [_line(result.columns[place], row.true[place], row.predicted[place]) for place in order[:LISTED]]
    more = len(order) - len(lines)
    rest = f'<p class="quiet small">and {plural(more, "more column")}</p>' if more else ""
    worst = result.columns[order[0]]
    true = dict(zip(result.columns, row.true, strict=True))
    return ImageCard(row.index, row.name, true, order[0], worst, "".join(lines) + rest)


def _line(column: str, true: float, predicted: float) -> str:
    return (
        f"<p>{name(column)}: true <strong>{number(true)}</strong>, predicted <strong>{number(predicted)}</strong> "
        f'<span class="quiet">({signed(predicted - true, max(abs(true), abs(predicted)))})</span></p>'
    )


def _spread(column: ColumnScore) -> float:
    """Return the standard deviation of the true values, which follows from R² and the root mean squared error."""
    if column.r2 is None or column.r2 >= 1 or not column.rmse:
        return 1.0
    return column.rmse / math.sqrt(1 - column.r2)
