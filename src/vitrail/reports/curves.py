"""Training curves of one run, or of two runs overlaid."""

import math
from collections.abc import Sequence
from typing import Any

from vitrail.charts.axis import Unit
from vitrail.charts.lines import Series, line_chart
from vitrail.reports.page import HEIGHT, WIDTH, Section, absent, chart
from vitrail.reports.run_record import Record
from vitrail.training.curves import Curve, curve
from vitrail.training.objectives import only_in_training

LOW = 190
"""Height of the secondary charts."""
Rows = Sequence[dict[str, Any]]


def curves(run: Record) -> Section:
    """Return loss, accuracy, learning rate and gradient norm over the steps."""
    rows = run.rows
    if not rows:
        return _section(absent("metrics.jsonl has no steps, so the curves are missing."))
    loss = [*_noisy("training", curve(rows, "loss"), 1), _sparse("validation split", curve(rows, "val_loss"), 2)]
    accuracy = [
        _line("training (augmented)", curve(rows, "accuracy").smooth(), 1),
        _sparse("validation split", curve(rows, "val_top1"), 2),
    ]
    return _section(
        _over_steps("Loss", loss, log=_wide(rows), note=loss_note(run)),
        _over_steps("Accuracy", accuracy, unit="percent", high=1.0),
        _over_steps("Learning rate", [_line("", curve(rows, "lr"), 3)], low=0.0, height=LOW),
        _over_steps("Gradient norm", _noisy("", curve(rows, "gradient_norm"), 4), height=LOW),
    )


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
    classes = len(run.result.classes) if run.result is not None else 0
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
        return [_sparse(name, curve(rows, number), colour) for name, rows, colour in both]

    def training(number: str) -> list[Series]:
        return [_line(name, curve(rows, number).smooth(), colour) for name, rows, colour in both]

    return _section(
        _over_steps("Accuracy on the validation split", validation("val_top1"), unit="percent", high=1.0),
        _over_steps("Loss on the validation split", validation("val_loss"), log=True),
        _over_steps(
            "Training loss",
            training("loss"),
            log=any(_wide(rows) for _, rows, _ in both),
            note=_note_of_two(one, other),
        ),
        _over_steps("Learning rate", training("lr"), low=0.0),
    )


def _note_of_two(one: Record, other: Record) -> str:
    """Return a note if two training losses are not comparable."""
    if all(one.recipe.get(key) == other.recipe.get(key) for key in ("objective", "mixing")):
        return ""
    return "The runs differ in objective or mixing, so these losses are not comparable."


def _section(*drawn: str) -> Section:
    return Section("curves", "Training", "Training curves", f'<div class="pair">{"".join(drawn)}</div>')


def _over_steps(
    title: str,
    series: Sequence[Series],
    *,
    log: bool = False,
    unit: Unit = "number",
    low: float | None = None,
    high: float | None = None,
    height: int = HEIGHT,
    note: str = "",
) -> str:
    return chart(
        line_chart(
            series, title=title, x_label="step", x_unit="integer", log=log, y_unit=unit, y_low=low, y_high=high,
            width=WIDTH, height=height, standalone=False,
        ),
        note,
    )  # fmt: skip


def _line(name: str, points: Curve, colour: int) -> Series:
    return Series(name if len(points) else "", points.steps.tolist(), points.values.tolist(), colour)


def _sparse(name: str, points: Curve, colour: int) -> Series:
    return _line(name, points, colour)._replace(marks=True)


def _noisy(name: str, points: Curve, colour: int) -> list[Series]:
    """Return the raw curve, faint, with a smoothed one on top."""
    return [_line("", points, colour)._replace(faint=True), _line(name, points.smooth(), colour)]


def _wide(rows: Rows) -> bool:
    """Whether the loss spans a range that needs a logarithmic axis."""
    smooth = curve(rows, "loss").smooth().values
    return bool(len(smooth)) and bool(smooth.min() > 0) and bool(smooth.max() > 8 * smooth.min())
