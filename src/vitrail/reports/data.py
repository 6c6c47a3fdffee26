"""The dataset: findings of the data check, example images, and counts of classes or labels, or ranges of numbers."""

import numpy as np
from PIL import Image

from vitrail.charts.bars import Bar, bar_chart
from vitrail.charts.svg import escape
from vitrail.errors import InputError
from vitrail.io import ContentError, read_json
from vitrail.reports.classes import percent_cell
from vitrail.reports.mask_views import coloured, coloured_names
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
    sentences,
    table,
)
from vitrail.reports.run_record import Check, ColumnFacts, Record
from vitrail.text import isolated, number, plural
from vitrail.training.samples import INDEX, SAMPLES, Sample, read_samples

SMALL = 128
"""Longer side of an example image, in pixels."""
DETAILS = 4
"""Examples to list per finding."""


def data(run: Record) -> Section:
    """Return the section about the dataset."""
    if run.check is None:
        return Section("data", "Data", "Dataset", absent(run.why_no_check) + _samples(run))
    check = run.check
    where = f"<p>From <code>{escape(run.data)}</code>: {escape(check.summary)}.</p>" if run.data else ""
    findings = "".join(
        f"<li>{escape(one.text)}{f'; {escape(one.advice)}' if one.advice else ''}.{_details(one.details)}</li>"
        for one in check.findings
    )
    text = (
        f"<h3>Findings of the data check</h3><ul>{findings}</ul>"
        if findings
        else paragraph("The data check found no problems.")
        if not where  # the summary says it already
        else ""
    )
    if check.checked < check.images:
        text += paragraph(
            f"The check covered {plural(check.checked, 'image')} of {check.images:,}; vitrail check covers all.",
            "quiet small",
        )
    if check.not_checked:
        text += paragraph(f"Not checked: {'; '.join(check.not_checked)}.", "quiet small")
    counts = f"{_ranges(check)}{_counts(check)}"
    drawn = f'<div class="pair"><div>{counts}</div><div>{_sizes(check)}{_kinds(check)}</div></div>'
    return Section("data", "Data", "Dataset", where + text + _label_facts(check) + _samples(run) + drawn)


def _label_facts(check: Check) -> str:
    """Return how many labels images have."""
    facts = None if check.targets is None else check.targets.labels
    if facts is None:
        return ""
    none = plural(facts.without, "image has none", "images have none")
    without = none if facts.without else "every image has at least one"
    most, fewest = ((isolated(one.name), plural(one.images, "image")) for one in (facts.most, facts.fewest))
    text = (
        f"An image has {facts.per_image:.3g} of {plural(facts.labels, 'label')} on average; {without}. The most "
        f"frequent label is {most[0]}, on {most[1]}; the rarest is {fewest[0]}, on {fewest[1]}."
    )
    return f"<p>{sentences(text)}</p>"


def _ranges(check: Check) -> str:
    """Return the range of the numbers in each column."""
    columns = [] if check.targets is None else check.targets.columns
    if not columns:
        return ""
    titles = [Column(title, number=True) for title in ("Minimum", "Mean", "Maximum", "Missing")]
    rows = [
        [
            Cell(name(one.name)),
            *(Cell(number(value, _size(one)), value) for value in (one.minimum, one.mean, one.maximum)),
            Cell(f"{one.missing:,}", one.missing),
        ]
        for one in columns
    ]
    return table([Column("Column"), *titles], rows, caption="Numbers", sortable=len(rows) > 1)


def _size(column: ColumnFacts) -> float:
    return max(abs(column.minimum), abs(column.maximum))


def _samples(run: Record) -> str:
    """Return a few training images of each class, label or range, from the run's samples."""
    kind, column = run.task.kind, _first_column(run)
    groups: dict[str, list[str]] = {}
    classes = 0 if run.check is None or run.check.targets is None else len(run.check.targets.pixels)
    for sample in read_samples(run.folder):
        image = _opened(sample)
        if image is None:
            continue
        image = _with_mask(image, sample, classes)
        image.thumbnail((SMALL, SMALL))
        of = f"with {column} {sample.label}" if kind == "values" else f"of {sample.label}"
        groups.setdefault(sample.label, []).append(embedded_image(image, f"a training image {of}"))
    if not groups:
        return ""
    before = f"{name(column)} " if kind == "values" else ""
    rows = "".join(
        f'<li><p>{before}{name(label)}</p><div class="row">{"".join(images)}</div></li>'
        for label, images in groups.items()
    )
    text = f"{plural(sum(map(len, groups.values())), 'training image')}, reduced in size. {_grouped(run, len(groups))}"
    return f'<h3>Example images</h3>{paragraph(text.strip(), "quiet small")}<ul class="classes">{rows}</ul>'


def _grouped(run: Record, groups: int) -> str:
    """Say how the example images are grouped, unless each class has some."""
    if run.task.kind == "labels":
        return "Each is shown under the rarest of its labels."
    if run.task.kind == "masks":
        return "Each is shown in the colours of its mask, under the rarest of its classes."
    if run.task.kind == "values":
        return f"They are grouped by {_first_column(run)}."
    classes = groups if run.check is None else len(_class_names(run.check))
    return f"They show {groups:,} of {classes:,} classes." if classes > groups else ""


def _first_column(run: Record) -> str:
    """Return the column by whose numbers the images are grouped."""
    facts = None if run.check is None else run.check.targets
    return facts.columns[0].name if facts is not None and facts.columns else "the first column"


def _with_mask(image: Image.Image, sample: Sample, classes: int) -> Image.Image:
    """Return a sample in the colours of its mask, if it has one."""
    if sample.mask is None:
        return image
    try:
        with Image.open(sample.mask, formats=("PNG",)) as opened:
            mask = np.array(opened, np.uint8)
        return Image.fromarray(coloured(np.asarray(image), mask, classes))
    except (OSError, ValueError, SyntaxError, InputError):  # such as another size
        return image


def _opened(sample: Sample) -> Image.Image | None:
    try:
        with Image.open(sample.file, formats=("JPEG",)) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        return None


def unreadable_samples(run: Record) -> tuple[str, ...]:
    """Return a sentence if the example images or their index exist but cannot be read."""
    place = run.folder / SAMPLES / INDEX
    consequence = "so the report lacks example images"
    try:
        is_list = isinstance(read_json(place), list)
    except FileNotFoundError:
        return ()
    except (OSError, ContentError):
        is_list = False
    if not is_list:
        return (f"{place} cannot be read, {consequence}",)
    bad = [sample.file for sample in read_samples(run.folder) if _opened(sample) is None]
    more = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
    return (f"{bad[0]}{more} cannot be read, {consequence}",) if bad else ()


def _details(details: list[str]) -> str:
    if not details:
        return ""
    more = f" and {len(details) - DETAILS:,} more" if len(details) > DETAILS else ""
    return f' <span class="quiet small">({escape(", ".join(details[:DETAILS]))}{more})</span>'


def _class_names(check: Check) -> list[str]:
    return list(dict.fromkeys(one for counts in check.counts.values() for one in counts))


def _counts(check: Check) -> str:
    splits = list(check.counts)
    names = _class_names(check)
    images = {split: sum(check.counts[split].values()) for split in splits}
    if check.targets is not None:  # an image has any number of labels
        images |= check.targets.images
    pixels = [] if check.targets is None else check.targets.pixels
    shares = {one.name: one.fraction for one in pixels}
    coloured_name = coloured_names([one.name for one in pixels])
    names.sort(key=lambda one: -shares.get(one, 0.0))
    rows = [
        [
            Cell(coloured_name.get(one, name(one)), one),
            *([percent_cell(shares.get(one))] if pixels else []),
            *(Cell(f"{check.counts[split].get(one, 0):,}", check.counts[split].get(one, 0)) for split in splits),
        ]
        for one in names
    ]
    columns = [
        Column(_grouped_by(check)),
        *([Column("% of pixels", number=True, hint="of all labelled pixels")] if pixels else []),
        *(Column(split, number=True, hint="images with pixels of the class" if pixels else "") for split in splits),
    ]
    total = [Cell("all images"), *([Cell("")] if pixels else []), *(Cell(f"{images[split]:,}") for split in splits)]
    return table(columns, rows, foot=total, caption="Images by split")


def _grouped_by(check: Check) -> str:
    """Return the title of the column with classes, labels or ranges."""
    if check.targets is None:
        return "Class"
    if check.targets.columns:
        return f"Range of {check.targets.columns[0].name}"
    return "Class" if check.targets.labels is None else "Label"


def _sizes(check: Check) -> str:
    bars = [
        Bar(
            f"{span['low']:,} or more" if span["high"] is None else f"{span['low']:,} to {span['high']:,}",
            span["images"] or 0,
        )
        for span in check.short_sides
    ]
    return (
        chart(bar_chart(bars, title="Shorter side in pixels", unit="integer", width=WIDTH, standalone=False))
        if bars
        else ""
    )


def _kinds(check: Check) -> str:
    def listed(counts: dict[str, int]) -> str:
        return ", ".join(f"{escape(kind)} {count:,}" for kind, count in counts.items()) or "–"

    rows = {"Formats": listed(check.formats), "Colours": listed(check.modes)}
    return f'<dl class="facts">{"".join(f"<dt>{title}</dt><dd>{kinds}</dd>" for title, kinds in rows.items())}</dl>'
