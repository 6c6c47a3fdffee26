"""The curves of a run, or of two over each other."""

from collections.abc import Sequence
from typing import Any

from vitrail.charts.lines import Series, line_chart
from vitrail.reports.page import Section, absent, chart
from vitrail.reports.record import Record
from vitrail.training.curves import Curve, curve

Rows = Sequence[dict[str, Any]]


def curves(run: Record) -> Section:
    """Return loss, accuracy, learning rate and gradient norm over the steps."""
    if not run.rows:
        return Section(
            "curves", "Training", "How training went", absent("metrics.jsonl holds no steps, so there are no curves.")
        )
    rows = run.rows
    drawn = [
        line_chart(
            [*_noisy("training", curve(rows, "loss"), 1), _seldom("val part", curve(rows, "val_loss"), 2)],
            title="Loss", x_label="step", log=_wide(rows), x_unit="whole", standalone=False,
        ),
        line_chart(
            [
                _line("training, as augmented", curve(rows, "accuracy").smooth(), 1),
                _seldom("val part", curve(rows, "val_top1"), 2),
            ],
            title="Accuracy", x_label="step", x_unit="whole", y_unit="percent", y_high=1.0, standalone=False,
        ),
        line_chart(
            [_line("", curve(rows, "lr"), 3)],
            title="Learning rate", x_label="step", x_unit="whole", y_low=0.0, height=200, standalone=False,
        ),
        line_chart(
            _noisy("", curve(rows, "gradient_norm"), 4),
            title="Gradient norm", x_label="step", x_unit="whole", height=200, standalone=False,
        ),
    ]  # fmt: skip
    return Section("curves", "Training", "How training went", f'<div class="pair">{"".join(map(chart, drawn))}</div>')


def curves_of_two(one: Record, other: Record, names: tuple[str, str]) -> Section:
    """Return the curves of two runs, over each other."""
    if not one.rows and not other.rows:
        return Section(
            "curves", "Training", "How training went", absent("Neither run has taken a step, so there are no curves.")
        )
    both = [(name, run.rows, place + 1) for place, (name, run) in enumerate(zip(names, (one, other), strict=True))]
    drawn = [
        line_chart(
            [_seldom(name, curve(rows, "val_top1"), colour) for name, rows, colour in both],
            title="Accuracy on the val part", x_label="step", x_unit="whole", y_unit="percent", y_high=1.0,
            standalone=False,
        ),
        line_chart(
            [_seldom(name, curve(rows, "val_loss"), colour) for name, rows, colour in both],
            title="Loss on the val part", x_label="step", x_unit="whole", log=True, standalone=False,
        ),
        line_chart(
            [_line(name, curve(rows, "loss").smooth(), colour) for name, rows, colour in both],
            title="Training loss", x_label="step", x_unit="whole", log=any(_wide(rows) for _, rows, _ in both),
            standalone=False,
        ),
        line_chart(
            [_line(name, curve(rows, "lr"), colour) for name, rows, colour in both],
            title="Learning rate", x_label="step", x_unit="whole", y_low=0.0, standalone=False,
        ),
    ]  # fmt: skip
    return Section("curves", "Training", "How training went", f'<div class="pair">{"".join(map(chart, drawn))}</div>')


def _line(name: str, points: Curve, colour: int) -> Series:
    return Series(name if len(points) else "", points.steps.tolist(), points.values.tolist(), colour)


def _seldom(name: str, points: Curve, colour: int) -> Series:
    return _line(name, points, colour)._replace(marks=True)


def _noisy(name: str, points: Curve, colour: int) -> list[Series]:
    """A curve as it is, faint, and smooth over it."""
    return [_line("", points, colour)._replace(faint=True), _line(name, points.smooth(), colour)]


def _wide(rows: Rows) -> bool:
    """Say whether a loss spans so much that only a logarithmic axis shows all of it."""
    smooth = curve(rows, "loss").smooth().values
    return bool(len(smooth)) and bool(smooth.min() > 0) and bool(smooth.max() > 8 * smooth.min())
