"""The training curves of a run: its metrics over the steps, their charts, and curves.svg with all of them."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.charts.axis import Unit
from vitrail.charts.lines import Series, line_chart
from vitrail.charts.svg import sheet
from vitrail.text import capitalised, number
from vitrail.training.learner import ShownMetrics
from vitrail.training.run_folder import best_row, write_text

WIDTH, HIGH, LOW, GAP = 440, 270, 190, 20
"""The width of a chart, the height of a main and of a secondary one, and the gap between two in curves.svg."""
Rows = Sequence[dict[str, Any]]
"""The rows of a metrics file."""


class Curve(NamedTuple):
    """A metric over the steps."""

    steps: NDArray[np.float64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)

    def smooth(self) -> "Curve":
        """Return a centred moving average over a twentieth of the run, which does not lag."""
        half = len(self) // 40
        sums = np.concatenate([[0.0], np.cumsum(self.values)])
        first = np.maximum(np.arange(len(self)) - half, 0)
        behind = np.minimum(np.arange(len(self)) + half + 1, len(self))
        return Curve(self.steps, (sums[behind] - sums[first]) / (behind - first))


def curve(rows: Rows, name: str) -> Curve:
    """Return a metric over the steps, skipping missing and non-finite values."""
    finite = [(row["step"], row[name]) for row in rows if math.isfinite(row.get(name, math.nan))]
    points = np.array(finite, np.float64).reshape(-1, 2)
    return Curve(points[:, 0], points[:, 1])


def draw_curves(rows: Rows, path: Path, shown: ShownMetrics, note: Sequence[str] = ()) -> None:
    """Draw the rows of a metrics file; `note` says how the two losses differ. Without rows, draw nothing."""
    if rows:
        write_text(path, curves_svg(rows, path.parent.name, shown, note))


def curves_svg(rows: Rows, name: str, shown: ShownMetrics, note: Sequence[str] = ()) -> str:
    """Return all charts in one drawing, with the run's name in the title."""
    title, facts = headlines(rows, name, shown)
    right, below = WIDTH + GAP, HIGH + GAP
    places = [(0, 0), (right, 0), (0, below), (right, below)]
    charts = [(x, y, chart) for (x, y), chart in zip(places, curve_charts(rows, shown), strict=True)]
    lines = [facts, f"Loss: {'; '.join(note)}"] if note else [facts]
    return sheet(charts, title=title, lines=lines, width=right + WIDTH, height=below + LOW)


def headlines(rows: Rows, name: str, shown: ShownMetrics) -> tuple[str, str]:
    """Return the title (the run and the headline metric of its best checkpoint) and the subtitle (final numbers)."""
    steps, best = max(row["step"] for row in rows), best_row(rows)
    epochs, losses, val = curve(rows, "epoch"), curve(rows, "loss"), curve(rows, "val_loss")
    facts = [
        *([f"step {best['step']:,} of {steps:,} kept"] if best else []),
        *([f"{epochs.values[-1]:.1f} epochs"] if len(epochs) else []),
        *([f"training loss {number(losses.smooth().values[-1])} at the end"] if len(losses) else []),
        *([f"validation loss {number(val.values[-1])} at the end"] if len(val) else []),
    ]
    main = shown.headline
    result = f"validation {main.name} {main.show(best[main.key])}" if best else f"step {steps:,}"
    return f"{name if len(name) <= 60 else f'{name[:59]}…'}: {result}", " · ".join(facts)


def curve_charts(rows: Rows, shown: ShownMetrics) -> tuple[str, str, str, str]:
    """Return the charts of a run over the steps: loss, the headline metric, learning rate and gradient norm."""
    main = shown.headline
    loss = [*noisy("training", curve(rows, "loss"), 1), sparse("validation split", curve(rows, "val_loss"), 2)]
    headline = [sparse("validation split", curve(rows, main.key), 2)]
    # Another metric is not comparable with the headline, and the loss has its own chart.
    if shown.training_metric.name == main.name and shown.training_metric.key != "loss":
        headline.insert(0, line("training (augmented)", curve(rows, shown.training_metric.key).smooth(), 1))
    low, high = main.axis
    best = best_row(rows)
    if best is not None and math.isfinite(best[main.key]):
        floor = min(value for series in headline for value in series.y) if low is None else low
        down = [best["step"]] * 2, [floor, best[main.key]]
        headline.append(Series(f"kept: {main.show(best[main.key])}", *down, colour=2, dashed=True))
    return (
        over_steps("Loss", loss, log=wide(rows)),
        over_steps(capitalised(main.name), headline, unit=main.unit, low=low, high=high),
        over_steps("Learning rate", [line("", curve(rows, "lr"), 3)], low=0.0, height=LOW),
        over_steps("Gradient norm", noisy("", curve(rows, "gradient_norm"), 4), low=0.0, height=LOW),
    )


def over_steps(
    title: str,
    series: Sequence[Series],
    *,
    log: bool = False,
    unit: Unit = "number",
    low: float | None = None,
    high: float | None = None,
    height: int = HIGH,
) -> str:
    """Return a chart with the steps on the x axis, to be placed in a page or a sheet."""
    return line_chart(
        series, title=title, x_label="step", x_unit="integer", log=log, y_unit=unit, y_low=low, y_high=high,
        width=WIDTH, height=height, standalone=False,
    )  # fmt: skip


def line(name: str, points: Curve, colour: int) -> Series:
    """Return a curve as a line."""
    return Series(name if len(points) else "", points.steps.tolist(), points.values.tolist(), colour)


def sparse(name: str, points: Curve, colour: int) -> Series:
    """Return a curve of few points as a line with markers."""
    return line(name, points, colour)._replace(marks=True)


def noisy(name: str, points: Curve, colour: int) -> list[Series]:
    """Return the raw curve, faint, with a smoothed one on top."""
    return [line("", points, colour)._replace(faint=True), line(name, points.smooth(), colour)]


def wide(rows: Rows) -> bool:
    """Whether the loss spans a range that needs a logarithmic axis."""
    smooth = curve(rows, "loss").smooth().values
    return bool(len(smooth)) and bool(smooth.min() > 0) and bool(smooth.max() > 8 * smooth.min())
