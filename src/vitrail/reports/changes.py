"""The classes or labels of two runs on the same images, by how much their metrics differ."""

from typing import NamedTuple

from vitrail.reports.page import Cell, Column, Section, absent, name, points, table
from vitrail.reports.run_record import Record
from vitrail.tasks.multilabel_metrics import MultilabelMetrics
from vitrail.tasks.segmentation_metrics import SegmentationMetrics
from vitrail.text import as_percent


class _Row(NamedTuple):
    """A class or label of one run."""

    name: str
    value: float | None
    images: int


def changed_classes(one: Record, other: Record, *, alike: bool) -> Section:
    """Return the recall of each class of two classifiers."""
    rows = [
        None if run.classified is None else [_Row(row.name, row.recall, row.images) for row in run.classified.per_class]
        for run in (one, other)
    ]
    return _changed("class", "classes", "Recall", rows, alike=alike)


def changed_labels(one: Record, other: Record, *, alike: bool) -> Section:
    """Return the average precision of each label of two multi-label classifiers."""
    rows = [
        [_Row(row.name, row.average_precision, row.images) for row in run.result.per_label]
        if isinstance(run.result, MultilabelMetrics)
        else None
        for run in (one, other)
    ]
    return _changed("label", "labels", "Average precision", rows, alike=alike)


def changed_mask_classes(one: Record, other: Record, *, alike: bool) -> Section:
    """Return the IoU of each class of two segmentation models."""
    rows = [
        [_Row(row.name, row.iou, row.images) for row in run.result.per_class]
        if isinstance(run.result, SegmentationMetrics)
        else None
        for run in (one, other)
    ]
    return _changed("class", "classes", "IoU", rows, alike=alike)


def _changed(noun: str, nouns: str, metric: str, both: list[list[_Row] | None], *, alike: bool) -> Section:
    """Return a table of what both runs have, the largest difference first."""
    short = nouns.capitalize()
    title = f"{short} that changed most"
    if not alike:
        return Section(nouns, short, title, absent(f"{short} are compared only on the same images."))
    first, second = both
    if first is None or second is None:
        return Section(nouns, short, title, absent(f"A run without a result has no {nouns} to compare."))
    before = {row.name: row for row in first}
    changes = [
        (old.value, row, row.value - old.value)
        for row in second
        if (old := before.get(row.name)) is not None and old.value is not None and row.value is not None
    ]
    if not changes:
        return Section(nouns, short, title, absent(f"The two runs have no {noun} in common."))
    changes.sort(key=lambda change: -abs(change[2]))
    rows = [
        [
            Cell(name(row.name)),
            Cell(as_percent(value), value),
            Cell(as_percent(row.value), row.value),
            Cell(_coloured(change), change),
            Cell(f"{row.images:,}", row.images),
        ]
        for value, row, change in changes
    ]
    columns = [
        Column(noun.capitalize()),
        Column(f"{metric}, A", number=True),
        Column(f"{metric}, B", number=True),
        Column("B − A, percentage points", number=True),
        Column("Images", number=True),
    ]
    return Section(nouns, short, title, table(columns, rows, caption=title))


def _coloured(change: float) -> str:
    kind = "up" if change > 0 else "down" if change < 0 else "quiet"
    return f'<span class="{kind}">{points(change)}</span>'
