"""Per-class metrics, the confusion matrix, calibration, and the most confident mistakes."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.charts.bars import FEW, Bar, Bin, bar_chart, reliability_diagram
from vitrail.charts.heat import NAMED, WRITTEN, heat_map
from vitrail.charts.svg import escape
from vitrail.errors import VitrailError
from vitrail.explanations.explain import Explainer, as_image
from vitrail.explanations.explanation import enlarged
from vitrail.explanations.request import ExplanationRequest, Method
from vitrail.metrics.intervals import wilson_interval
from vitrail.reports.page import (
    WIDTH,
    Cell,
    Column,
    Section,
    absent,
    chart,
    embedded_image,
    name,
    paragraph,
    path,
    span,
    table,
)
from vitrail.reports.run_artifacts import SIDE, RunArtifacts
from vitrail.reports.run_record import Record
from vitrail.tasks.classification_metrics import ClassificationMetrics, Mistake
from vitrail.text import as_percent, plural, shorten, shorten_path

EXTREMES = 8
"""Number of classes with the lowest and the highest recall to show."""
PAIRS = 12
"""Number of most frequent confusions to list."""
NUMBER = Column("No.", number=True, hint="class number in the confusion matrix")
SMALL = 12
"""Up to this many classes, the matrix fits in half the page width."""
SHOWN = 12
HIGH = 0.8
"""Predictions with at least this confidence count as confident."""


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
                _percent_cell(row.recall),
                Cell("–", "") if interval is None else Cell(span(interval), interval[0]),
                _percent_cell(row.precision),
                _percent_cell(row.f1),
                Cell(_most_confused_with(result, matrix, place)),
            ]
        )
    return table(columns, rows, caption="All classes")


def _percent_cell(value: float | None) -> Cell:
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
            _percent_cell(one.images / int(matrix[one.true].sum())),
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


# ── mistakes ──

WHAT = "Look for wrong labels here, too. Each image is shown as stored"


class MapKind(NamedTuple):
    """How a model's predictions are explained."""

    method: Method
    name: str
    caption: str


RELEVANCE = MapKind(
    "relevance",
    "relevance",
    "relevance map of the prediction (attention times gradient): bright regions contributed most",
)
GRADCAM = MapKind(
    "gradcam",
    "Grad-CAM",
    "Grad-CAM map of the prediction (last feature map times gradient): bright regions support it most",
)


def map_kind(artifacts: RunArtifacts) -> MapKind:
    """Return the kind of map: a ResNet without encoder blocks has no attention, which relevance needs."""
    return RELEVANCE if artifacts.bundle is None or artifacts.bundle.model.config.depth else GRADCAM


class ImageViews(NamedTuple):
    """An image as stored and as the model's input, and the map of its prediction, if available."""

    original: Image.Image | None
    image: Image.Image
    map: Image.Image | None


def mistakes(artifacts: RunArtifacts) -> Section:
    """Return the most confident mistakes with their images."""
    result = artifacts.run.classified
    if result is None:
        return Section("mistakes", "Mistakes", "Mistakes", absent(artifacts.run.why_no_result))
    if not result.worst:
        return Section("mistakes", "Mistakes", "Mistakes", paragraph("Every prediction is correct."))
    shown = result.worst[:SHOWN]
    confident = [one for one in shown if one.confidence >= HIGH]
    others = [one for one in shown if one.confidence < HIGH]
    missing: set[str] = set()
    body = paragraph(f"{WHAT}; below it are the model's input and the {map_kind(artifacts).caption}.")
    if confident:
        title = "Confident mistakes"
        body += f"{_cards(artifacts, confident, missing)}"
        body += f"<h3>Mistakes with less than {as_percent(HIGH)} confidence</h3>" if others else ""
    else:
        title = "Most confident mistakes"
        body = (
            paragraph(
                f"No mistake has a confidence of {as_percent(HIGH)} or more; the highest is "
                f"{as_percent(shown[0].confidence)}."
            )
            + body
        )
    body += _cards(artifacts, others, missing) if others else ""
    return Section("mistakes", "Mistakes", title, _notes(artifacts, missing) + body)


def load_views(artifacts: RunArtifacts, index: int, image_name: str, true: str, predicted: str) -> ImageViews | None:
    """Return an image and the map of a prediction; None without a model or data."""
    from vitrail.data.inputs import fitted

    if artifacts.bundle is None or artifacts.source is None:
        return None
    item = artifacts.item(index, image_name, true)
    original = artifacts.original(item)
    try:
        explained = Explainer(
            artifacts.bundle,
            ExplanationRequest(map_kind(artifacts).method),
            target=artifacts.class_indices.get(predicted),
        ).explain(item, image_name)
    except VitrailError:
        return ImageViews(original, enlarged(as_image(fitted(item, artifacts.bundle.preprocess)), SIDE), None)
    return ImageViews(original, enlarged(explained.image, SIDE), explained.overlay(side=SIDE))


def pair(views: ImageViews | None, image_name: str, map_name: str) -> str:
    """Return the stored image, with the model's input and the map below it."""
    if views is None:
        return ""
    original = (
        "" if views.original is None else f'<div class="original">{embedded_image(views.original, image_name)}</div>'
    )
    first = embedded_image(views.image, f"{image_name}, model input")
    second = "" if views.map is None else embedded_image(views.map, map_name)
    return f'{original}<div class="two">{first}{second}</div>'


def _notes(artifacts: RunArtifacts, missing: set[str]) -> str:
    if artifacts.source is None:
        return absent(artifacts.why_no_images)
    if artifacts.bundle is None:
        return absent(artifacts.why_no_bundle)
    return absent(f"Some images or maps are missing: {'; '.join(sorted(missing)[:3])}.") if missing else ""


def _cards(artifacts: RunArtifacts, mistakes: list[Mistake], missing: set[str]) -> str:
    """Return mistakes as cards; reasons for missing images are added to `missing`."""
    kind = map_kind(artifacts).name
    cards = []
    for mistake in mistakes:
        try:
            views = load_views(artifacts, mistake.index, mistake.name, mistake.true, mistake.predicted)
        except (VitrailError, OSError) as error:
            views = None
            missing.add(str(error))
        if views is not None and views.map is None:
            missing.add(f"{kind} maps are not available for this model")
        cards.append(_card(mistake, views, kind))
    return f'<ul class="mistakes">{"".join(cards)}</ul>'


def _card(mistake: Mistake, views: ImageViews | None, kind: str) -> str:
    return (
        f"<li>{pair(views, shorten(mistake.name), f'{kind} for {mistake.predicted}')}"
        f"<p><strong>{name(mistake.true)}</strong> predicted as <strong>{name(mistake.predicted)}</strong>, "
        f'confidence {as_percent(mistake.confidence)}</p><p class="quiet small file" title="{escape(mistake.name)}">'
        f"{path(shorten_path(mistake.name))}</p></li>"
    )
