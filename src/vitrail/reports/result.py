"""The result: the headline of a report, its metrics and its tables."""

from vitrail.charts.svg import escape
from vitrail.reports.page import Cell, Column, Section, absent, name, paragraph, sentences, table
from vitrail.reports.run_record import Record
from vitrail.tasks.metrics import Metric, Metrics
from vitrail.text import capitalised, plural
from vitrail.training.run_folder import best_row

WIDE = 0.06
"""A fraction whose interval is wider than this gets a warning."""
CARDS = 13
"""The most metrics that are shown large; a model with many columns has more."""


def head(run: Record) -> str:
    """Return the result as the headline, with a summary and warnings."""
    how = "" if run.method is None else f", pretrained with {run.method.replace('_', '-')}"
    above = f'<p class="over-title">Report on <strong>{escape(run.name)}</strong>{escape(how)}</p>'
    if run.result is None:
        return f'{above}<h1>{escape(_unfinished_title(run))}</h1><p class="lead">{escape(run.why_no_result)}</p>'
    result = run.result
    main = result.headline
    of = f"{main.text} {main.name}" if main.spec.unit == "percent" else f"{capitalised(main.name)} {main.text}"
    title = f"{of} on {result.images:,} {result.noun}"
    return f'{above}<h1>{escape(title)}</h1><p class="lead">{_lead(result)}</p>{_warnings(run, result)}'


def result(run: Record) -> Section:
    """Return the section with the headline metrics and their intervals."""
    if run.result is None:
        return Section("result", "Result", "Result", absent(run.why_no_result) + _so_far(run))
    cards = "".join(
        f'<div><dt>{escape(capitalised(one.name))}</dt><dd><div class="value">{escape(one.text)}</div>'
        f'<div class="span">{escape(one.interval_text)}</div>'
        f'<div class="says">{escape(one.spec.explanation)}</div></dd></div>'
        for one in run.result.numbers[:CARDS]
    )
    bad = run.result.bad
    skipped = paragraph(f"{plural(len(bad), 'image')} could not be read and were skipped.") if bad else ""
    return Section("result", "Result", "Result", f'<dl class="numbers">{cards}</dl>{_more(run.result)}{skipped}')


def _more(result: Metrics) -> str:
    """Say where the metrics are that have no card."""
    more = len(result.numbers) - CARDS
    return paragraph(f"{plural(more, 'more metric is', 'more metrics are')} in the tables below.") if more > 0 else ""


def tables(run: Record) -> Section:
    """Return the section with the tables of the result."""
    if run.result is None:
        return Section("tables", "Tables", "Tables", absent(run.why_no_result))
    body = "".join(
        table(
            [Column(title, number=title in one.numbers) for title in one.header],
            [[Cell(name(cell)) for cell in row] for row in one.rows],
            caption=one.title,
            sortable=False,
        )
        + (paragraph(one.note, "quiet small") if one.note else "")
        for one in run.result.tables
    )
    return Section("tables", "Tables", "Tables", body or absent("The result has no tables."))


def _lead(result: Metrics) -> str:
    interval = []
    if result.headline.ends is not None:
        low, high = result.headline.ends
        ends = f"<strong>{escape(low)}</strong> to <strong>{escape(high)}</strong>"
        interval = [f"The 95% confidence interval is {ends}."]
    return " ".join([*interval, *map(sentences, result.lead)])


def _warnings(run: Record, result: Metrics) -> str:
    notes = [f"{text[:1].upper()}{text[1:]}." for text in result.warnings]
    if result.on_training:
        notes.append(
            "No images were held out, so this is the result on the training images and says nothing about new "
            f"images. Set {'data.val' if run.method else 'data.val and data.test'} above 0 to get a result."
        )
    elif run.selected_on_test_images:
        notes.append(
            "The run has no test split: the best checkpoint was selected on these same images, so expect a slightly "
            "worse result on new ones."
        )
    if not result.on_training and _is_wide(result.headline):
        notes.append(
            f"The interval is wide because there are only {plural(result.images, 'image')}; more held-out images would "
            "narrow it."
        )
    return "".join(paragraph(text, "warn") for text in notes)


def _is_wide(metric: Metric) -> bool:
    return (
        metric.spec.unit == "percent" and metric.interval is not None and metric.interval[1] - metric.interval[0] > WIDE
    )


def _unfinished_title(run: Record) -> str:
    done, planned = run.steps
    if run.why_no_result.startswith("result.json"):
        return "The result of this run cannot be shown"
    if not done:
        return "This run has not taken a step yet"
    return f"Not finished: step {done:,}" + (f" of {planned:,}" if planned else "")


def _so_far(run: Record) -> str:
    best = best_row(run.rows)
    if best is None:
        return paragraph("The run has not been validated yet, either.")
    headline = run.shown.headline
    so_far = (
        f"So far the checkpoint of step {best['step']:,} is kept, with a validation {headline.name} of "
        f"{headline.show(best.get(headline.key))}."
    )
    if run.method is not None:
        return paragraph(so_far)
    return paragraph(f"{so_far} The validation split selects the checkpoint, so this is not a final result.")
