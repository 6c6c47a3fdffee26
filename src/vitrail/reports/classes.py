"""Per-class metrics, the confusion matrix and calibration of a classifier."""

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.bars import FEW, Bar, Bin, bar_chart, reliability_diagram
from vitrail.charts.heat import NAMED, WRITTEN, heat_map
from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.page import (
    WIDTH,
    Cell,
    Column,
    Section,
    absent,
    chart,
    name,
    paragraph,
    span,
    table,
)
from vitrail.reports.run_record import Record
from vitrail.tasks.classification_metrics import ClassificationMetrics
from vitrail.text import as_percent, plural

EXTREMES = 8
"""Number of classes with the lowest and the highest recall to show."""
PAIRS = 12
"""Number of most frequent confusions to list."""
NUMBER = Column("No.", number=True, hint="class number in the confusion matrix")
SMALL = 12
"""Up to this many classes, the matrix fits in half the page width."""


# ── classes ──


def classes(run: Record) -> Section:
    """Return the per-class section: lowest and highest recall, and a table of all classes."""
    title = "Per-class metrics"
    result = run.classified
    if result is None:
        return Section("classes", "Classes", title, absent(run.why_no_result))
    shown = result.weakest_first
    intro = paragraph(
        "Recall is the fraction of a class's images that are predicted correctly; precision, the fraction of its "
        "predictions that are correct. Intervals are 95% confidence intervals: they are wide for classes with few "
        "images."
    )
    bars = _extremes(result) if len(shown) > 3 else ""
    return Section("classes", "Classes", title, intro + bars + _table(result))


def _extremes(result: ClassificationMetrics) -> str:
    order = result.weakest_first
    most = min(EXTREMES, len(order) // 2)
    lowest = [row for row in order[:most] if row.recall != 1]
    highest = [row for row in order[::-1][:most] if row.recall]
    if not lowest:
        return ""
    drawn = [
        bar_chart(
            [
                Bar(row.name, row.recall or 0, f"{row.name}: {as_percent(row.recall)} of {plural(row.images, 'image')}")
                for row in rows
            ],
            title=title, unit="percent", colour=colour, high=1.0, width=WIDTH, standalone=False,
        )
        for title, rows, colour in (("Lowest recall", lowest, 2), ("Highest recall", highest, 3))
    ]  # fmt: skip
    return f'<div class="pair">{"".join(map(chart, drawn))}</div>'


def _table(result: ClassificationMetrics) -> str:
    numbered = len(result.classes) > NAMED  # then the matrix labels classes by number
    columns = [
        Column("Class"),
        *([NUMBER] if numbered else []),
        Column("Images", number=True),
        Column("Recall", number=True),
        Column("95% interval", number=True, hint="Wilson interval of the recall"),
        Column("Precision", number=True),
        Column("F1", number=True),
        Column("Most often confused with"),
    ]
    matrix, rows = result.confusion, []
    for place, row in enumerate(result.per_class):
        interval = _recall_interval(matrix, place)
        rows.append(
            [
                Cell(name(row.name)),
                *([Cell(f"{place + 1}")] if numbered else []),
                Cell(f"{row.images:,}", row.images),
                percent_cell(row.recall),
                Cell("–", "") if interval is None else Cell(span(interval), interval[0]),
                percent_cell(row.precision),
                percent_cell(row.f1),
                Cell(_most_confused_with(result, matrix, place)),
            ]
        )
    return table(columns, rows, caption="All classes")


def percent_cell(value: float | None) -> Cell:
    """Return a cell with a fraction as a percentage; a dash for None."""
    return Cell(as_percent(value), "" if value is None else value)


def _recall_interval(matrix: NDArray[np.int64], place: int) -> tuple[float, float] | None:
    count = int(matrix[place].sum())
    return wilson_interval(int(matrix[place, place]), count) if count else None


def _most_confused_with(result: ClassificationMetrics, matrix: NDArray[np.int64], place: int) -> str:
    others = matrix[place].copy()
    others[place] = 0
    if not others.any():
        return '<span class="quiet">–</span>'
    other = int(others.argmax())
    return f'{name(result.classes[other])} <span class="quiet">×{others[other]:,}</span>'


# ── confusion matrix ──


def confusion(run: Record) -> Section:
    """Return the confusion matrix and the most frequent confusions."""
    title = "Confusion matrix"
    result = run.classified
    if result is None:
        return Section("confusion", "Confusions", title, absent(run.why_no_result))
    matrix = result.confusion
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    count = len(result.classes)
    drawn = heat_map(
        shares.tolist(), rows=result.classes, columns=result.classes, counts=matrix.tolist(),
        title="Confusion matrix", x_label="predicted class", y_label="true class", standalone=False,
        width=WIDTH + 40 if count <= SMALL else 1050,
    )  # fmt: skip
    caption = (
        "Rows are true classes, columns are predictions; blue is correct, orange is wrong. Colours show the fraction "
        "of the row, on the same scale for both. "
    )
    caption += "Numbers are image counts." if count <= WRITTEN else "Hover over a mistake for its counts."
    caption += "" if count <= NAMED else " Classes are labelled by their numbers in the table above."
    pairs = _pairs(result, matrix)
    if count <= SMALL:
        return Section(
            "confusion", "Confusions", title, f'<div class="pair">{chart(drawn, caption)}<div>{pairs}</div></div>'
        )
    return Section("confusion", "Confusions", title, chart(drawn, caption, wide=True) + pairs)


def _pairs(result: ClassificationMetrics, matrix: NDArray[np.int64]) -> str:
    pairs = result.most_confused(PAIRS)
    if not pairs:
        return paragraph("No class is confused with another: every prediction is correct.")
    rows = [
        [
            Cell(name(result.classes[one.true])),
            Cell(name(result.classes[one.predicted])),
            Cell(f"{one.images:,}", one.images),
            percent_cell(one.images / int(matrix[one.true].sum())),
        ]
        for one in pairs
    ]
    columns = [
        Column("True class"),
        Column("Predicted"),
        Column("Images", number=True),
        Column("% of the class", number=True),
    ]
    return table(columns, rows, caption="Most frequent confusions")


# ── calibration ──


def calibration(run: Record) -> Section:
    """Return the reliability diagram with a summary."""
    title = "Calibration"
    result = run.classified
    if result is None:
        return Section("calibration", "Calibration", title, absent(run.why_no_result))
    bins = [Bin(row.low, row.high, row.images, row.confidence, row.accuracy) for row in result.reliability]
    drawn = reliability_diagram(bins, width=WIDTH, height=WIDTH - 100, standalone=False)
    confidence = sum(row.images * (row.confidence or 0) for row in result.reliability) / result.images
    gap = confidence - result.top1
    low, high = result.top1_interval
    if abs(gap) < 0.01 or low <= confidence <= high:
        tends = "Overall the model is well calibrated, as far as this many images can tell."
    elif gap > 0:
        tends = "Overall the model is overconfident: its confidence is higher than its accuracy."
    else:
        tends = "Overall the model is underconfident: its accuracy is higher than its confidence."
    sentences = [
        f"The mean confidence is {as_percent(confidence)} and the accuracy {as_percent(result.top1)}. {tends}",
        f"The expected calibration error, the mean gap between confidence and accuracy over {len(result.reliability)} "
        f"bins, is {as_percent(result.ece)}.",
        "On the dotted line, accuracy equals confidence; bars that end below it are overconfident. The histogram "
        f"below counts the predictions in each bin; pale bars have fewer than {FEW}, so their height is uncertain.",
    ]
    body = f'<div class="pair">{chart(drawn)}<div>{"".join(map(paragraph, sentences))}</div></div>'
    return Section("calibration", "Calibration", title, body)
