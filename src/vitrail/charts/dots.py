"""Dot charts: repeated measurements in rows, with their mean and interval."""

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.charts.axis import Panel, Unit, around
from vitrail.charts.svg import HEAD, MARGIN, drawing, empty_drawing, number, text_at, titled

ROW = 34
"""The height of a row."""
NAME = 28
"""The longest name, in letters."""


class DotRow(NamedTuple):
    """A row: a name, a value per repetition, their mean and its interval."""

    name: str
    values: Sequence[float]
    mean: float | None
    """None: nothing was measured, and the note says why."""
    interval: tuple[float, float] | None = None
    note: str = ""
    """Small text below the name."""


def dot_chart(
    rows: Sequence[DotRow],
    *,
    title: str,
    x_label: str = "",
    unit: Unit = "number",
    width: float = 640,
    standalone: bool = True,
) -> str:
    """Draw a dot per value, a tick at the mean and a line over the interval; the mean is also at the end of the row."""
    ends = [end for row in rows for end in (*row.values, *(row.interval or ()))]
    if not ends:
        return empty_drawing(title, "nothing to draw", width=width, height=120, standalone=standalone)
    axis = around(ends, label=x_label, unit=unit)
    if unit == "percent":
        axis = axis._replace(high=min(1.0, axis.high))
    letters = max(min(NAME, len(row.name)) * 6.8 for row in rows)
    notes = max(min(NAME + 8, len(row.note)) * 5.4 for row in rows)
    left, top = MARGIN + max(letters, notes) + 14, HEAD + 4.0
    plot = Panel(left, top, width - left - 60, ROW * len(rows) + 4.0, axis, axis)
    body = _frame(plot) + "".join(_row(row, plot, top + ROW * (index + 0.5)) for index, row in enumerate(rows))
    height = top + plot.height + (40 if x_label else 24)
    description = "; ".join(_summary(row, plot) for row in rows)
    return drawing(body, title=title, description=description, width=width, height=height, standalone=standalone)


def _frame(plot: Panel) -> str:
    """Return vertical grid lines and their labels."""
    bottom, right = plot.top + plot.height, plot.left + plot.width
    elements = []
    for tick in plot.x.ticks(max(2, int(plot.width // 70))):
        x = plot.across(tick)
        elements.append(f'<path class="grid" d="M{number(x)} {number(plot.top)}V{number(bottom)}"/>')
        elements.append(text_at(x, bottom + 16, plot.x.format(tick), style="quiet", anchor="middle"))
    if plot.x.label:
        elements.append(text_at(right, bottom + 33, plot.x.label, style="quiet", anchor="end"))
    return "".join(elements)


def _row(row: DotRow, plot: Panel, y: float) -> str:
    shift = -3 if row.note else 4
    elements = [text_at(plot.left - 10, y + shift, row.name, anchor="end", limit=NAME)]
    if row.note:
        elements.append(text_at(plot.left - 10, y + 10, row.note, style="quiet small", anchor="end", limit=NAME + 8))
    if row.mean is None:
        return "".join(elements)
    if row.interval is not None:
        low, high = (plot.across(end) for end in row.interval)
        elements.append(f'<path class="curve line1" d="M{number(low)} {number(y)}H{number(high)}"/>')
    mean = plot.across(row.mean)
    elements.append(f'<path class="curve line1" d="M{number(mean)} {number(y - 9)}V{number(y + 9)}"/>')
    for value in row.values:
        elements.append(
            f'<circle class="mark fill2" cx="{number(plot.across(value))}" cy="{number(y)}" r="4">'
            f"{titled(f'{row.name}: {_exact(value, plot)}')}</circle>"
        )
    elements.append(text_at(plot.left + plot.width + 10, y + 4, _exact(row.mean, plot)))
    return f"<g>{titled(_summary(row, plot))}{''.join(elements)}</g>"


def _exact(value: float, plot: Panel) -> str:
    """Format a value with one more digit than the ticks, which are round."""
    return f"{100 * value:.2f}%" if plot.x.unit == "percent" else f"{value:.4g}"


def _summary(row: DotRow, plot: Panel) -> str:
    if row.mean is None:
        return f"{row.name}: {row.note or 'no value'}"
    span = "" if row.interval is None else f", 95% interval {' to '.join(_exact(end, plot) for end in row.interval)}"
    return f"{row.name}: mean {_exact(row.mean, plot)}{span}"
