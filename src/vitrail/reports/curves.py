"""Training curves of one run, or of two runs overlaid."""

import math

from vitrail.charts.lines import Series
from vitrail.reports.page import Section, absent, chart
from vitrail.reports.run_record import Record
from vitrail.tasks.classification_metrics import ClassificationMetrics
from vitrail.tasks.objective import only_in_training
from vitrail.text import capitalised
from vitrail.training.curves import curve, curve_charts, line, over_steps, sparse, wide


def curves(run: Record) -> Section:
    """Return loss, accuracy, learning rate and gradient norm over the steps."""
    if not run.rows:
        return _section(absent("metrics.jsonl has no steps, so the curves are missing."))
    loss, *others = curve_charts(run.rows, run.task)
    return _section(chart(loss, loss_note(run)), *(chart(one) for one in others))


def loss_note(run: Record) -> str:
    """Explain why training and validation loss are not comparable, if they are not."""
    objective = run.recipe.get("objective", {})
    if objective.get("loss", "softmax") == "sigmoid":
        return "The training loss is a sum of sigmoid losses, the validation loss a log loss, so the scales differ."
    extra = only_in_training(run.recipe)
    if not extra:
        return (
            "The training loss is computed on augmented images, with dropout; the validation loss on original images."
        )
    text = f"{', '.join(extra[:-1])} and {extra[-1]}" if len(extra) > 1 else extra[0]
    text = f"The training loss includes {text}; the validation loss does not, so the two are not comparable."
    classes = len(run.result.classes) if isinstance(run.result, ClassificationMetrics) else 0
    smoothing = float(objective.get("label_smoothing", 0) or 0)
    if smoothing and classes > 1 and "class weights" not in extra:
        text += (
            f" With this smoothing and {classes} classes, training cannot fall below {_floor(smoothing, classes):.2f}."
        )
    return text


def _floor(smoothing: float, classes: int) -> float:
    """Return the lowest possible cross-entropy with smoothed labels: their entropy."""
    off = smoothing / classes
    on = 1 - smoothing + off
    return -on * math.log(on) - (classes - 1) * off * math.log(off)


def curves_of_two(one: Record, other: Record, names: tuple[str, str]) -> Section:
    """Return the curves of two runs, overlaid."""
    both = [(name, run.rows, place) for place, (name, run) in enumerate(zip(names, (one, other), strict=True), 1)]
    if not any(rows for _, rows, _ in both):
        return _section(absent("Neither run has taken a step, so the curves are missing."))

    def validation(number: str) -> list[Series]:
        return [sparse(name, curve(rows, number), colour) for name, rows, colour in both]

    def training(number: str) -> list[Series]:
        return [line(name, curve(rows, number).smooth(), colour) for name, rows, colour in both]

    log, main = any(wide(rows) for _, rows, _ in both), one.task.headline
    title = f"{capitalised(main.title)} on the validation split"
    return _section(
        chart(over_steps(title, validation(main.key), unit=main.unit, high=1.0 if main.unit == "percent" else None)),
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
