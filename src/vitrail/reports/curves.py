"""Training curves of one run, or of two runs overlaid."""

from vitrail.charts.lines import Series
from vitrail.reports.page import Section, absent, chart
from vitrail.reports.run_record import Record
from vitrail.tasks.metrics import MetricSpec
from vitrail.tasks.regression_metrics import RegressionMetrics
from vitrail.tasks.task import AUGMENTED_ONLY
from vitrail.text import capitalised, ended
from vitrail.training.curves import curve, curve_charts, line, over_steps, sparse, wide
from vitrail.training.pretraining.metrics import LOSS, RANK, SPREAD


def curves(run: Record) -> Section:
    """Return loss, accuracy, learning rate and gradient norm over the steps."""
    if not run.rows:
        return _section(absent("metrics.jsonl has no steps, so the curves are missing."))
    loss, headline, *others = curve_charts(run.rows, run.shown)
    if run.method is None:
        note = run.task.loss_note(run.recipe)
        return _section(chart(loss, note.text), chart(headline, _unit_note(run)), *map(chart, others))
    of_features = [_explained(_validated(run, spec), spec) for spec in (RANK, SPREAD)]
    knn = [] if run.shown.headline is LOSS else [_explained(headline, run.shown.headline)]
    return _section(chart(loss, AUGMENTED_ONLY.text), *knn, *of_features, *map(chart, others))


def _unit_note(run: Record) -> str:
    """Return in which unit a mean over columns is."""
    several = isinstance(run.result, RegressionMetrics) and len(run.result.columns) > 1
    return "The mean over columns, in standard deviations of the training split." if several else ""


def _explained(drawn: str, spec: MetricSpec) -> str:
    return chart(drawn, ended(capitalised(spec.explanation)))


def _validated(run: Record, spec: MetricSpec) -> str:
    """Return a chart of a metric of the validation split."""
    return over_steps(capitalised(spec.name), [sparse("validation split", curve(run.rows, spec.key), 2)], low=0.0)


def curves_of_two(one: Record, other: Record, names: tuple[str, str]) -> Section:
    """Return the curves of two runs, overlaid."""
    both = [(name, run.rows, place) for place, (name, run) in enumerate(zip(names, (one, other), strict=True), 1)]
    if not any(rows for _, rows, _ in both):
        return _section(absent("Neither run has taken a step, so the curves are missing."))

    def validation(number: str) -> list[Series]:
        return [sparse(name, curve(rows, number), colour) for name, rows, colour in both]

    def training(number: str) -> list[Series]:
        return [line(name, curve(rows, number).smooth(), colour) for name, rows, colour in both]

    log, main = any(wide(rows) for _, rows, _ in both), one.shown.headline
    title, high = f"{capitalised(main.name)} on the validation split", main.axis[1]
    return _section(
        chart(over_steps(title, validation(main.key), unit=main.unit, high=high)),
        chart(over_steps("Loss on the validation split", validation("val_loss"), log=True)),
        chart(over_steps("Training loss", training("loss"), log=log), _note_of_two(one, other)),
        chart(over_steps("Learning rate", training("lr"), low=0.0)),
    )


def _note_of_two(one: Record, other: Record) -> str:
    """Return a note if two training losses are not comparable."""
    if all(one.recipe.get(key) == other.recipe.get(key) for key in ("objective", "mixing")):
        return ""
    return "The runs differ in objective or mixing, so these losses are not comparable."


def _section(*drawn: str) -> Section:
    return Section("curves", "Training", "Training curves", f'<div class="pair">{"".join(drawn)}</div>')
