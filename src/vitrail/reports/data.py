"""The dataset: findings of the data check, class samples and statistics."""

from PIL import Image

from vitrail.charts.bars import Bar, bar_chart
from vitrail.charts.svg import escape
from vitrail.io import ContentError, read_json
from vitrail.reports.page import WIDTH, Cell, Column, Section, absent, chart, embedded_image, name, paragraph, table
from vitrail.reports.run_record import Check, Record
from vitrail.text import plural
from vitrail.training.samples import INDEX, SAMPLES, Sample, read_samples

SMALL = 128
"""Longer side of a class sample, in pixels."""
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
    drawn = f'<div class="pair">{_counts(check)}<div>{_sizes(check)}{_kinds(check)}</div></div>'
    return Section("data", "Data", "Dataset", where + text + _samples(run) + drawn)


def _samples(run: Record) -> str:
    """Return a few training images of each class, from the run's samples."""
    by_class: dict[str, list[str]] = {}
    for sample in read_samples(run.folder):
        image = _opened(sample)
        if image is None:
            continue
        image.thumbnail((SMALL, SMALL))
        alt = f"a training image of {sample.label}"
        by_class.setdefault(sample.label, []).append(embedded_image(image, alt))
    if not by_class:
        return ""
    rows = "".join(
        f'<li><p>{name(label)}</p><div class="row">{"".join(images)}</div></li>' for label, images in by_class.items()
    )
    count = sum(map(len, by_class.values()))
    text = f"{plural(count, 'training image')}, reduced in size."
    classes = len(by_class) if run.check is None else len(_class_names(run.check))
    if classes > len(by_class):
        text += f" They show {len(by_class):,} of {classes:,} classes."
    return f'<h3>Example images</h3>{paragraph(text, "quiet small")}<ul class="classes">{rows}</ul>'


def _opened(sample: Sample) -> Image.Image | None:
    try:
        with Image.open(sample.file, formats=("JPEG",)) as opened:
            return opened.convert("RGB")
    except (OSError, ValueError, SyntaxError):
        return None


def unreadable_samples(run: Record) -> tuple[str, ...]:
    """Return a sentence if the class samples or their index exist but cannot be read."""
    place = run.folder / SAMPLES / INDEX
    consequence = "so the report lacks images of the classes"
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
    total = [Cell("all"), *(Cell(f"{sum(check.counts[split].values()):,}") for split in splits)]
    rows = [
        [
            Cell(name(one)),
            *(Cell(f"{check.counts[split].get(one, 0):,}", check.counts[split].get(one, 0)) for split in splits),
        ]
        for one in names
    ]
    columns = [Column("Class"), *(Column(split, number=True) for split in splits)]
    return table(columns, rows, foot=total, caption="Images by split")


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
