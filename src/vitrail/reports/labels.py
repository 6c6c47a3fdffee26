"""The sections of a multi-label run: curves and metrics of each label, mistakes that occur together, worst images."""

from collections.abc import Collection, Sequence

import numpy as np

from vitrail.charts.heat import NAMED, WRITTEN, heat_map
from vitrail.charts.precision_recall import precision_recall_chart
from vitrail.metrics.multilabel import mistake_matrix, precision_recall_curve
from vitrail.reports.classes import SMALL, percent_cell
from vitrail.reports.image_views import SHOWN, ImageCard, image_cards, image_notes, map_kind
from vitrail.reports.page import WIDTH, Cell, Column, Section, absent, chart, name, paragraph, table
from vitrail.reports.run_artifacts import RunArtifacts
from vitrail.reports.test_predictions import LabelPredictions
from vitrail.tasks.multilabel_metrics import LabelScore, MultilabelMetrics, WrongLabels
from vitrail.text import as_percent, number, plural

FEW = 12
"""Up to this many labels, each has its curve."""
EXTREMES = 4
"""Weakest and best labels whose curves are drawn if there are more."""
PAIRS = 12
"""Most frequent pairs of mistakes to list."""
POINTS = 80
"""Points of a curve."""
LISTED = 8
"""Labels of an image to list."""


# ── labels ──


def labels(artifacts: RunArtifacts) -> Section:
    """Return precision-recall curves, a table of all labels, and the mistakes that occur together."""
    title = "Per-label metrics"
    result = artifacts.run.result
    if not isinstance(result, MultilabelMetrics):
        return Section("labels", "Labels", title, absent(artifacts.run.why_no_result))
    stored, why = artifacts.predictions
    drawn = _curves(result, stored) if isinstance(stored, LabelPredictions) else absent(why)
    together = _together(result, stored if isinstance(stored, LabelPredictions) else None)
    return Section("labels", "Labels", title, drawn + _table(result) + together)


def _curves(result: MultilabelMetrics, stored: LabelPredictions) -> str:
    order = result.weakest_first
    intro = paragraph(
        "Precision is the fraction of a label's predictions that are right; recall, the fraction of the images with "
        "the label that are predicted to have it. A lower threshold predicts the label for more images: recall rises, "
        "and precision usually falls. The dot is the threshold in use; the dotted line is the precision of chance."
    )
    if len(order) <= FEW:
        return intro + _group(order, stored)
    weakest, best = order[:EXTREMES], order[::-1][:EXTREMES]
    return (
        f"{intro}<h3>Lowest average precision</h3>{_group(weakest, stored)}"
        f"<h3>Highest average precision</h3>{_group(best, stored)}<h3>All labels</h3>"
    )


def _group(scores: Sequence[LabelScore], stored: LabelPredictions) -> str:
    return f'<div class="curves">{"".join(_curve(score, stored) for score in scores)}</div>'


def _curve(score: LabelScore, stored: LabelPredictions) -> str:
    if score.name not in stored.labels:
        return ""
    place = stored.labels.index(score.name)
    curve = precision_recall_curve(stored.probabilities[:, place], stored.true[:, place], POINTS)
    at = None if score.recall is None or score.precision is None else (score.recall, score.precision)
    drawn = precision_recall_chart(
        curve.recall.tolist(), curve.precision.tolist(), title=score.name, at=at,
        chance=score.images / max(1, len(stored.names)), standalone=False,
    )  # fmt: skip
    return chart(drawn, f"average precision {as_percent(score.average_precision)}, {plural(score.images, 'image')}")


def _table(result: MultilabelMetrics) -> str:
    numbered = len(result.labels) > NAMED  # then the matrix labels them by number
    columns = [
        Column("Label"),
        *([Column("No.", number=True)] if numbered else []),
        Column("Images", number=True, hint="images with the label"),
        Column("Average precision", number=True),
        Column("F1", number=True),
        Column("Precision", number=True),
        Column("Recall", number=True),
        Column("Threshold", number=True, hint="with the best F1 on the validation split"),
    ]
    rows = [
        [
            Cell(name(row.name)),
            *([Cell(f"{place + 1}")] if numbered else []),
            Cell(f"{row.images:,}", row.images),
            *(percent_cell(value) for value in (row.average_precision, row.f1, row.precision, row.recall)),
            Cell(number(row.threshold), row.threshold),
        ]
        for place, row in enumerate(result.per_label)
    ]
    return table(columns, rows, caption="All labels")


# ── mistakes that occur together ──


def _together(result: MultilabelMetrics, stored: LabelPredictions | None) -> str:
    heading = "<h3>Co-occurrence of mistakes</h3>"
    if not result.confused:
        return heading + paragraph("No image has a missed label and another one that was wrongly added.")
    pairs = _pairs(result)
    if stored is None or len(stored.labels) > NAMED:
        return heading + pairs
    counts = mistake_matrix(stored.predicted, stored.true)
    shares = counts / np.maximum(stored.true.sum(axis=0), 1)[:, None]
    small = len(stored.labels) <= SMALL
    drawn = heat_map(
        shares.tolist(), rows=stored.labels, columns=stored.labels, counts=counts.tolist(),
        title="Missed and added labels", x_label="predicted label", y_label="true label", standalone=False,
        width=WIDTH + 40 if small else 1050,
    )  # fmt: skip
    caption = (
        "Rows are the images with a label. Blue: the label is predicted, too. Orange: it is missed, and another one, "
        "which the image does not have, is added. Colours show the fraction of the row, on the same scale for both. "
    )
    caption += "Numbers are image counts." if len(stored.labels) <= WRITTEN else "Hover over a mistake for its counts."
    if small:
        return f'{heading}<div class="pair">{chart(drawn, caption)}<div>{pairs}</div></div>'
    return heading + chart(drawn, caption, wide=True) + pairs


def _pairs(result: MultilabelMetrics) -> str:
    images = {row.name: row.images for row in result.per_label}
    rows = [
        [
            Cell(name(pair.missed)),
            Cell(name(pair.added)),
            Cell(f"{pair.images:,}", pair.images),
            percent_cell(pair.images / images[pair.missed] if images.get(pair.missed) else None),
        ]
        for pair in result.confused[:PAIRS]
    ]
    columns = [
        Column("Missed"),
        Column("Wrongly added"),
        Column("Images", number=True),
        Column("% of the missed label", number=True, hint="of all images with the missed label"),
    ]
    return table(columns, rows, caption="Most frequent pairs of mistakes")


# ── mistakes ──


def label_mistakes(artifacts: RunArtifacts) -> Section:
    """Return the images with the worst predictions."""
    title = "The worst predictions"
    result = artifacts.run.result
    if not isinstance(result, MultilabelMetrics):
        return Section("mistakes", "Mistakes", title, absent(artifacts.run.why_no_result))
    if not result.worst:
        return Section("mistakes", "Mistakes", title, paragraph("All labels of every image are right."))
    shown = result.worst[:SHOWN]
    text = (
        "The images with the largest loss among those with a wrong label. Labels in bold are wrong: missed, or "
        "predicted although the image is not labelled with them. Look for missing and wrong labels in the data here, "
        "too. Each image is shown as stored; below it are the model's input and the "
        f"{map_kind(artifacts).caption('the wrong label that is named')}."
    )
    missing: set[str] = set()
    cards = image_cards(artifacts, [_card(artifacts, result, one) for one in shown], missing)
    return Section("mistakes", "Mistakes", title, image_notes(artifacts, missing) + paragraph(text) + cards)


def _card(artifacts: RunArtifacts, result: MultilabelMetrics, one: WrongLabels) -> ImageCard:
    label, why = _most_wrong(artifacts, one)
    missed, added = set(one.true) - set(one.predicted), set(one.predicted) - set(one.true)
    text = (
        f"<p>True: {_listed(one.true, missed)}<br>Predicted: {_listed(one.predicted, added)}</p>"
        f'<p class="quiet small">Map: {name(label)} ({why})</p>'
    )
    place = result.labels.index(label) if label in result.labels else None
    return ImageCard(one.index, one.name, frozenset(one.true), place, label, text)


def _listed(names: Sequence[str], wrong: Collection[str]) -> str:
    """Return labels, the right ones first and the wrong ones in bold."""
    order = sorted(names, key=lambda one: one in wrong)
    shown = [f"<strong>{name(one)}</strong>" if one in wrong else name(one) for one in order[:LISTED]]
    more = [f"and {len(order) - LISTED:,} more"] if len(order) > LISTED else []
    return ", ".join([*shown, *more]) or "none"


def _most_wrong(artifacts: RunArtifacts, one: WrongLabels) -> tuple[str, str]:
    """Return the wrong label of an image whose probability is furthest from the truth, and what is wrong with it."""
    wrong = [*(label for label in one.predicted if label not in one.true)]
    missed = [label for label in one.true if label not in one.predicted]
    stored, _ = artifacts.predictions
    row = stored.rows.get(one.index) if isinstance(stored, LabelPredictions) else None
    if not isinstance(stored, LabelPredictions) or row is None:
        return (wrong[0], "wrongly predicted") if wrong else (missed[0], "missed")
    probabilities = dict(zip(stored.labels, stored.probabilities[row].tolist(), strict=True))
    off = {label: probabilities.get(label, 0.0) for label in wrong}
    off |= {label: 1 - probabilities.get(label, 1.0) for label in missed}
    worst = max(off, key=lambda label: off[label])
    what = "wrongly predicted" if worst in wrong else "missed"
    return worst, f"{what}, probability {as_percent(probabilities.get(worst))}"
