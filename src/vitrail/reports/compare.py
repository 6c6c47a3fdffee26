"""The comparison of two runs."""

from collections.abc import Callable, Sequence

from vitrail.charts.svg import escape
from vitrail.checkpoints.bundle import TEACHER
from vitrail.reports.changes import changed_classes, changed_labels, changed_mask_classes
from vitrail.reports.curves import curves_of_two
from vitrail.reports.model import command
from vitrail.reports.page import (
    Cell,
    Column,
    Section,
    absent,
    name,
    page,
    paragraph,
    points,
    signed,
    table,
    warnings,
)
from vitrail.reports.pair import TITLE, Pair
from vitrail.reports.pairs import evaluated_on_same_images, pair_runs
from vitrail.reports.run_record import Record, settings
from vitrail.tasks.metrics import Metric, Metrics
from vitrail.tasks.regression_metrics import RegressionMetrics
from vitrail.text import capitalised, plural, shorten


def compare(one: Record, other: Record, unreadable: Sequence[str] = ()) -> str:
    """Return a page that compares two runs; `unreadable` lists their files that could not be read."""
    names = (f"A: {shorten(one.name, 28)}", f"B: {shorten(other.name, 28)}")
    if one.purpose != other.purpose:
        head, sections = _different_tasks(one, other, names)
        return page(title=f"{one.name} and {other.name}", head=head + warnings(unreadable), sections=sections)
    both, why_not = pair_runs(one, other)
    alike = both is not None or evaluated_on_same_images(one, other)
    made: dict[str, Callable[[], Section]] = {
        "pairs": lambda: _pairs(one, both, why_not),
        "settings": lambda: _settings(one, other, names),
        "curves": lambda: curves_of_two(one, other, names),
        "classes": lambda: changed_classes(one, other, alike=alike),
        "labels": lambda: changed_labels(one, other, alike=alike),
        "mask_classes": lambda: changed_mask_classes(one, other, alike=alike),
        "reproduce": lambda: _reproduce(one, other, names),
    }
    sections = [_numbers(one, other, names, alike=alike), *(made[name]() for name in one.compared_sections)]
    head = _head(one, other, both, alike=alike) + warnings(unreadable)
    return page(title=f"{one.name} and {other.name}", head=head, sections=sections)


def _different_tasks(one: Record, other: Record, names: tuple[str, str]) -> tuple[str, list[Section]]:
    """Return the head and the sections for runs of two tasks, which have no metric to compare them by."""
    title = f"Different tasks: A is {one.purpose}, B is {other.purpose}"
    lead = "Models of different tasks have different metrics, so neither run is the better one."
    columns = [Column("Run"), Column("Metric"), Column("Value", number=True)]
    rows = [
        [Cell(escape(of)), Cell(name(capitalised(metric.name))), _value(metric)]
        for of, run in zip(names, (one, other), strict=True)
        for metric in ([] if run.result is None else run.result.numbers)
    ]
    missing = "".join(absent(f"{run.name}: {run.why_no_result}") for run in (one, other) if run.result is None)
    metrics = missing + (table(columns, rows, caption="Metrics", sortable=False) if rows else "")
    sections = [
        Section("result", "Metrics", "Metrics", metrics),
        _settings(one, other, names),
        _reproduce(one, other, names),
    ]
    return _titled(one, other, title, lead), sections


def _head(one: Record, other: Record, both: Pair | None, *, alike: bool) -> str:
    a, b = one.result, other.result
    if a is None or b is None:
        why = " ".join(f"{run.name}: {run.why_no_result}" for run in (one, other) if run.result is None)
        return _titled(one, other, "The runs do not both have a result yet", why)
    values = f"{a.headline.text} vs. {b.headline.text}"
    if not alike:
        what = "columns" if _other_columns(one, other) else "test images"
        title = f"Different {what}: A {a.headline.text}, B {b.headline.text}"
        lead = _different(one, other)
    elif both is not None:
        title = f"{both.winner}: {values}"
        lead = both.statement
    else:
        better, lead = _by_intervals(a.headline, b.headline)
        title = f"{better}: {values}"
    return _titled(one, other, title, lead)


def _titled(one: Record, other: Record, title: str, lead: str) -> str:
    who = f"A is <strong>{name(one.name)}</strong>, B is <strong>{name(other.name)}</strong>"
    return f'<p class="over-title">{who}</p><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>'


def _by_intervals(a: Metric, b: Metric) -> tuple[str, str]:
    """Compare two metrics by their intervals, where they cannot be compared image by image."""
    if a.interval is None or b.interval is None or a.value is None or b.value is None:
        return "No clear difference", f"The {a.name} has no confidence interval."
    if a.interval[1] >= b.interval[0] and b.interval[1] >= a.interval[0]:
        return "No clear difference", "Their 95% confidence intervals overlap."
    better = "B" if (b.value > a.value) != a.spec.lower_is_better else "A"
    return f"{better} is better", "Their 95% confidence intervals do not overlap."


def _different(one: Record, other: Record) -> str:
    """Explain that two results cannot be compared, and how to make them comparable."""
    if columns := _other_columns(one, other):
        return f"A predicts {columns[0]} and B {columns[1]}, so the numbers do not show which model is better."
    on_a, on_b = map(_images, (one, other))
    return (
        f"A was evaluated on {on_a} and B on {on_b}, and these are not the same images, so the numbers do not show "
        "which model is better. Evaluate both on the same images (vitrail eval) to compare them."
    )


def _other_columns(one: Record, other: Record) -> tuple[str, str] | None:
    """Return what two regression runs predict, if that is not the same."""
    a, b = one.result, other.result
    if not (isinstance(a, RegressionMetrics) and isinstance(b, RegressionMetrics)) or set(a.columns) == set(b.columns):
        return None
    first, second = (shorten(", ".join(result.columns)) for result in (a, b))
    return first, second


def _images(run: Record) -> str:
    images = plural(0 if run.result is None else run.result.images, "image")
    if run.classified is None:
        return images
    return f"{images} of {plural(len(run.classified.classes), 'class', 'classes')}"


def _numbers(one: Record, other: Record, names: tuple[str, str], *, alike: bool) -> Section:
    title = "Metrics"
    a, b = one.result, other.result
    if a is None or b is None:
        return Section("result", "Metrics", title, absent("A run without a result has no numbers to compare."))
    columns = [Column(""), *(Column(name, number=True) for name in names)]
    rows = [_number_row(*pair) for pair in _rows(a, b)]
    notes = "" if alike else paragraph(_different(one, other), "warn")
    if alike:
        columns.append(Column("B − A", number=True))
    else:
        rows = [row[:-1] for row in rows]  # across different images a difference would be misleading
    return Section("result", "Metrics", title, notes + table(columns, rows, caption=title, sortable=False))


def _rows(a: Metrics, b: Metrics) -> list[tuple[Metric, Metric]]:
    """Return the metrics that both runs have."""
    others = {metric.name: metric for metric in b.numbers}
    return [(metric, others[metric.name]) for metric in a.numbers if metric.name in others]


def _number_row(first: Metric, second: Metric) -> list[Cell]:
    difference = Cell("–")
    if first.value is not None and second.value is not None:
        spec, apart = first.spec, second.value - first.value
        equal = abs(apart) < 5e-4 if spec.unit == "percent" else first.text == second.text
        sign = "" if equal else "up" if (apart < 0) == spec.lower_is_better else "down"
        shown = points(apart) if spec.unit == "percent" else signed(apart, max(abs(first.value), abs(second.value)))
        difference = Cell(f'<span class="{sign}">{shown}</span>' if sign else shown)
    return [Cell(name(capitalised(first.name))), _value(first), _value(second), difference]


def _value(metric: Metric) -> Cell:
    unit = "%" if metric.spec.unit == "percent" else ""
    interval = f'<br><span class="quiet small">{metric.span}{unit}</span>' if metric.span else ""
    return Cell(f"{metric.text}{interval}")


def _pairs(one: Record, both: Pair | None, why_not: str) -> Section:
    return Section("pairs", "Images", TITLE, absent(why_not) if both is None else both.body(one))


def _settings(one: Record, other: Record, names: tuple[str, str]) -> Section:
    title = "Different settings"
    there, here = settings(one.recipe), settings(other.recipe)
    rows = [
        [Cell(f"<code>{escape(name)}</code>"), _setting(there, name), _setting(here, name)]
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    ]
    if one.data != other.data:
        rows.insert(0, [Cell("data"), Cell(escape(one.data)), Cell(escape(other.data))])
    if one.origin.get("pretrained") != other.origin.get("pretrained"):
        initial = [Cell(escape(_initialisation(run))) for run in (one, other)]
        rows.insert(0, [Cell("initialisation"), *initial])
    if one.origin.get("teacher") != other.origin.get("teacher"):
        rows.insert(0, [Cell("teacher"), *(Cell(escape(_teacher(run))) for run in (one, other))])
    if not rows:
        return Section(
            "settings", "Settings", title, paragraph("None: both runs have the same recipe and the same data.")
        )
    columns = [Column("Setting"), *(Column(name) for name in names)]
    return Section("settings", "Settings", title, table(columns, rows, caption=title))


def _initialisation(run: Record) -> str:
    pretrained = str(run.origin.get("pretrained", ""))
    return f"{run.provenance.get('source', 'a model')} ({pretrained[:8]})" if pretrained else "from scratch"


def _teacher(run: Record) -> str:
    digest, teacher = str(run.origin.get("teacher") or ""), run.provenance.get(TEACHER)
    name = teacher.get("name") if isinstance(teacher, dict) else "a model"
    return f"{name} ({digest[:8]})" if digest else "none"


def _setting(settings: dict[str, object], name: str) -> Cell:
    if name not in settings:
        return Cell('<span class="quiet">not set</span>')
    return Cell(f"<code>{escape(str(settings[name]))}</code>")


def _reproduce(one: Record, other: Record, names: tuple[str, str]) -> Section:
    body = "".join(
        f'<h3>{escape(name)}</h3><pre class="wrap"><code>{escape(command(run))}</code></pre>'
        for name, run in zip(names, (one, other), strict=True)
    )
    return Section("reproduce", "Reproduce", "Reproduce these runs", body)
