"""Where a model is right and wrong, class by class; and whether it is as sure as it may be."""

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.bars import FEW, Bar, Bin, bar_chart, reliability_diagram
from vitrail.charts.heat import NAMED, WRITTEN, heat_map
from vitrail.metrics.classification import most_confused
from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.formatting import many, share, span
from vitrail.reports.page import WIDTH, Cell, Column, Section, absent, chart, name, paragraph, table
from vitrail.reports.run_record import Record, RunResult

EXTREMES = 8
"""How many of the classes with the lowest and the highest recall are shown."""
PAIRS = 12
"""How many of the most frequent confusions are listed."""
COUNTED = Column("No.", number=True, hint="the number of the class in the matrix")
SMALL = 12
"""Up to so many classes a matrix needs no more than half the page."""


def classes(run: Record) -> Section:
    """Return the classes with the lowest and the highest recall, and the table of all."""
    title = "Class by class"
    if run.result is None:
        return Section("classes", "Classes", title, absent(run.why_no_result))
    result = run.result
    shown = result.weakest_first
    few = paragraph(
        "Recall is the share of a class's images that are recognised; precision, the share of the answers naming it "
        "that are right. Intervals are of 95%: a class with few images may be far from its number."
    )
    bars = _extremes(result) if len(shown) > 3 else ""
    return Section("classes", "Classes", title, few + bars + _table(result))


def _extremes(result: RunResult) -> str:
    order = result.weakest_first
    most = min(EXTREMES, len(order) // 2)
    lowest = [row for row in order[:most] if row.recall != 1]
    highest = [row for row in order[::-1][:most] if row.recall]
    if not lowest:
        return ""
    drawn = [
        bar_chart(
            [
                Bar(row.name, row.recall or 0, f"{row.name}: {share(row.recall)} of {many(row.images, 'image')}")
                for row in rows
            ],
            title=title, unit="percent", colour=colour, high=1.0, width=WIDTH, standalone=False,
        )
        for title, rows, colour in (("Lowest recall", lowest, 2), ("Highest recall", highest, 3))
    ]  # fmt: skip
    return f'<div class="pair">{"".join(map(chart, drawn))}</div>'


def _table(result: RunResult) -> str:
    counted = len(result.classes) > NAMED  # then the matrix names classes by their numbers
    columns = [
        Column("Class"),
        *([COUNTED] if counted else []),
        Column("Images", number=True),
        Column("Recall", number=True),
        Column("95% interval", number=True, hint="of the recall, by Wilson"),
        Column("Precision", number=True),
        Column("F1", number=True),
        Column("Most often taken for"),
    ]
    matrix, rows = np.array(result.confusion, np.int64), []
    for place, row in enumerate(result.per_class):
        interval = _recall_interval(matrix, place)
        rows.append(
            [
                Cell(name(row.name)),
                *([Cell(f"{place + 1}")] if counted else []),
                Cell(f"{row.images:,}", row.images),
                _share_cell(row.recall),
                Cell("–", "") if interval is None else Cell(span(interval), interval[0]),
                _share_cell(row.precision),
                _share_cell(row.f1),
                Cell(_taken_for(result, matrix, place)),
            ]
        )
    return table(columns, rows, caption="Every class")


def _share_cell(value: float | None) -> Cell:
    return Cell(share(value), "" if value is None else value)


def _recall_interval(matrix: NDArray[np.int64], place: int) -> tuple[float, float] | None:
    count = int(matrix[place].sum())
    return wilson_interval(int(matrix[place, place]), count) if count else None


def _taken_for(result: RunResult, matrix: NDArray[np.int64], place: int) -> str:
    others = matrix[place].copy()
    others[place] = 0
    if not others.any():
        return '<span class="quiet">–</span>'
    other = int(others.argmax())
    return f'{name(result.classes[other])} <span class="quiet">×{others[other]:,}</span>'


def confusion(run: Record) -> Section:
    """Return the confusion matrix, and the most frequent confusions as a list."""
    title = "What is taken for what"
    if run.result is None:
        return Section("confusion", "Confusions", title, absent(run.why_no_result))
    result = run.result
    matrix = np.array(result.confusion, np.int64)
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    count = len(result.classes)
    drawn = heat_map(
        shares.tolist(), rows=result.classes, columns=result.classes, counts=matrix.tolist(),
        title="Confusion matrix", x_label="taken for", y_label="class", standalone=False,
        width=WIDTH + 40 if count <= SMALL else 1050,
    )  # fmt: skip
    caption = (
        "A row for each class, a column for each prediction; blue is right, orange is wrong. A colour is as strong as "
        "its share of the row, on one scale for both. "
    )
    caption += "The numbers count images." if count <= WRITTEN else "Point at a mistake for its numbers."
    caption += "" if count <= NAMED else " Classes go by their numbers in the table above."
    pairs = _pairs(result, matrix)
    if count <= SMALL:
        return Section(
            "confusion", "Confusions", title, f'<div class="pair">{chart(drawn, caption)}<div>{pairs}</div></div>'
        )
    return Section("confusion", "Confusions", title, chart(drawn, caption, wide=True) + pairs)


def _pairs(result: RunResult, matrix: NDArray[np.int64]) -> str:
    found = most_confused(matrix, PAIRS)
    if not found:
        return paragraph("No image was taken for another class.")
    rows = [
        [
            Cell(name(result.classes[one.true])),
            Cell(name(result.classes[one.predicted])),
            Cell(f"{one.images:,}", one.images),
            _share_cell(one.images / int(matrix[one.true].sum())),
        ]
        for one in found
    ]
    columns = [
        Column("Class"),
        Column("Taken for"),
        Column("Images", number=True),
        Column("Of the class", number=True),
    ]
    return table(columns, rows, caption="The most frequent confusions")


def calibration(run: Record) -> Section:
    """Return the reliability diagram with what it comes to."""
    title = "Can its certainty be trusted?"
    if run.result is None:
        return Section("calibration", "Certainty", title, absent(run.why_no_result))
    result = run.result
    bins = [Bin(row.low, row.high, row.images, row.confidence, row.accuracy) for row in result.reliability]
    drawn = reliability_diagram(bins, width=WIDTH, height=WIDTH - 100, standalone=False)
    sure = sum(row.images * (row.confidence or 0) for row in result.reliability) / result.images
    gap = sure - result.top1
    low, high = result.top1_interval
    if abs(gap) < 0.01 or low <= sure <= high:
        tends = "On the whole it is as sure as it may be, as far as so many images can tell."
    elif gap > 0:
        tends = "On the whole it is surer than it should be: it says so more often than it is right."
    else:
        tends = "On the whole it is less sure than it could be: it is right more often than it says."
    said = [
        f"Its answers are {share(sure)} sure on average, and {share(result.top1)} of them are right. {tends}",
        f"Over bins of like certainty, the two differ by {share(result.ece)} on average (expected calibration error, "
        f"{len(result.reliability)} bins).",
        "On the dotted line, answers would be right exactly as often as they say; where bars end below it, the model "
        f"is too sure. At the foot is how many answers each bar stands for; pale bars have fewer than {FEW}, and their "
        "place is partly chance.",
    ]
    body = f'<div class="pair">{chart(drawn)}<div>{"".join(map(paragraph, said))}</div></div>'
    return Section("calibration", "Certainty", title, body)
