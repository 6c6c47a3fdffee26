"""Line charts and scatter plots."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.charts.axis import Axis, Panel, Unit, around, panel
from vitrail.charts.svg import COLOURS, HEAD, MARGIN, drawing, empty_drawing, finite, number, text_at, titled

MAX_POINTS = 600
"""The maximum number of points drawn per curve."""
MAX_MARKS = 60
"""Curves with more points have no markers."""


class Series(NamedTuple):
    """A named series of points."""

    name: str
    """An empty name is not in the legend."""
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 1
    """The colour index, from 1."""
    faint: bool = False
    dashed: bool = False
    marks: bool = False
    """Whether each point has a marker with a tooltip."""
    intervals: Sequence[tuple[float, float]] = ()
    """An interval around each point, or none."""


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    log: bool = False,
    x_log: bool = False,
    x_unit: Unit = "number",
    y_unit: Unit = "number",
    y_low: float | None = None,
    y_high: float | None = None,
    width: float = 520,
    height: float = 300,
    standalone: bool = True,
) -> str:
    """Draw curves. With `log` or `x_log` an axis is logarithmic, if all its values are positive."""
    axes = _axes(series, x_label, y_label, log, (x_unit, y_unit), y_low, y_high, x_log=x_log)
    if axes is None:
        return empty_drawing(title, "nothing to draw", width=width, height=height, standalone=standalone)
    names, top = legend([(one.name, one.colour, one.dashed) for one in series if one.name], width)
    plot = panel(width, height, *axes, top=top)
    body = names + plot.frame() + "".join(_curve(one, plot) for one in series)
    description = "; ".join(f"{one.name}: {_summary(one, plot)}" for one in series if one.name and len(one.x))
    return drawing(body, title=title, description=description, width=width, height=height, standalone=standalone)


def scatter(
    series: Sequence[Series],
    *,
    title: str,
    lines: Sequence[Series] = (),
    x_label: str = "",
    y_label: str = "",
    log: bool = False,
    x_unit: Unit = "number",
    y_unit: Unit = "number",
    x_low: float | None = None,
    y_low: float | None = None,
    y_high: float | None = None,
    radius: float = 3.5,
    width: float = 520,
    height: float = 300,
    standalone: bool = True,
) -> str:
    """Draw points, over `lines` for comparison."""
    axes = _axes([*series, *lines], x_label, y_label, log, (x_unit, y_unit), y_low, y_high, x_low)
    if axes is None:
        return empty_drawing(title, "nothing to draw", width=width, height=height, standalone=standalone)
    named = [(one.name, one.colour, one.dashed) for one in [*series, *lines] if one.name]
    names, top = legend(named, width, dots=sum(bool(one.name) for one in series))
    plot = panel(width, height, *axes, top=top)
    body = names + plot.frame() + "".join(_curve(one, plot) for one in lines)
    body += "".join(_marks(one, plot, radius) for one in series)
    description = "; ".join(f"{one.name or 'points'}: {_summary(one, plot)}" for one in [*series, *lines] if len(one.x))
    return drawing(body, title=title, description=description, width=width, height=height, standalone=standalone)


def legend(names: Sequence[tuple[str, int, bool]], width: float, *, dots: int = 0) -> tuple[str, float]:
    """Return the legend of series (name, colour, dashed) below the title, and the top of the panel.

    The first `dots` entries have a dot instead of a line. Colour 0 is a dotted guide.
    """
    if not names:
        return "", HEAD + 6
    elements, x, y = [], float(MARGIN), HEAD + 10.0
    for index, (name, colour, dashed) in enumerate(names):
        label = name if len(name) <= 40 else f"{name[:39]}…"
        extent = 30 + 6.6 * len(label)
        if x > MARGIN and x + extent > width:
            x, y = float(MARGIN), y + 17
        style = f"curve line{shade(colour)}{' dashed' if dashed else ''}" if colour else "guide"
        if index < dots:
            elements.append(
                f'<circle class="mark fill{shade(colour)}" cx="{number(x + 8)}" cy="{number(y - 4)}" r="4"/>'
            )
        else:
            elements.append(f'<path class="{style}" d="M{number(x)} {number(y - 4)}h16"/>')
        elements.append(text_at(x + 21, y, label, style="quiet"))
        x += extent + 6
    return "".join(elements), y + 14


def shade(colour: int) -> int:
    """Map a colour index to an existing one, cycling through the colours."""
    return (colour - 1) % COLOURS + 1


def _axes(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log: bool,
    units: tuple[Unit, Unit],
    low: float | None,
    high: float | None,
    start: float | None = None,
    *,
    x_log: bool = False,
) -> tuple[Axis, Axis] | None:
    xs = finite([value for one in series for value in one.x])
    ys = finite([value for one in series for value in (*one.y, *(end for ends in one.intervals for end in ends))])
    if not xs or not ys:
        return None
    if x_log and min(xs) > 0:
        x = around(xs, label=x_label, log=True, unit=units[0])
        return x, around(ys, label=y_label, log=log, unit=units[1], low=low, high=high)
    if start is None:
        start = 0.0 if 0 <= min(xs) <= 0.25 * max(xs) else min(xs)
    x = around(xs, label=x_label, unit=units[0], low=start, high=max(xs) if max(xs) > start else None)
    return x, around(ys, label=y_label, log=log, unit=units[1], low=low, high=high)


def _points(one: Series) -> list[tuple[float, float]]:
    every = -(-len(one.x) // MAX_POINTS) or 1
    pairs = list(zip(one.x, one.y, strict=True))
    return [pair for pair in pairs[::-1][::every][::-1] if math.isfinite(pair[0]) and math.isfinite(pair[1])]


def _curve(one: Series, plot: Panel) -> str:
    points = _points(one)
    if not points:
        return ""
    path = "L".join(f"{number(plot.across(x))} {number(plot.down(y))}" for x, y in points)
    kinds = f"curve line{shade(one.colour)}{' faint' if one.faint else ''}{' dashed' if one.dashed else ''}"
    line = f'<path class="{kinds}" d="M{path}">{titled(one.name) if one.name else ""}</path>'
    marked = len(points) == 1 or (one.marks and len(points) <= MAX_MARKS)
    return line + _intervals(one, plot) + (_marks(one, plot, 3.5) if marked else "")


def _intervals(one: Series, plot: Panel) -> str:
    """Return a vertical line over each interval."""
    return "".join(
        f'<path class="curve line{shade(one.colour)}" d="M{number(plot.across(x))} {number(plot.down(low))}'
        f'V{number(plot.down(high))}"/>'
        for x, (low, high) in zip(one.x, one.intervals, strict=False)
    )


def _marks(one: Series, plot: Panel, radius: float) -> str:
    return "".join(
        f'<circle class="mark fill{shade(one.colour)}" cx="{number(plot.across(x))}" cy="{number(plot.down(y))}" '
        f'r="{number(radius)}">{titled(_tooltip(one, x, y, plot))}</circle>'
        for x, y in _points(one)
    )


def _tooltip(one: Series, x: float, y: float, plot: Panel) -> str:
    where = f"{plot.x.label} " if plot.x.label else ""
    return f"{one.name + ', ' if one.name else ''}{where}{plot.x.format(x)}: {_fine(y, plot)}"


def _fine(value: float, plot: Panel) -> str:
    return f"{100 * value:.1f}%" if plot.y.unit == "percent" else plot.y.format(value)


def _summary(one: Series, plot: Panel) -> str:
    points = _points(one)
    if not points:
        return "no points"
    values = [y for _, y in points]
    span = f"from {_fine(min(values), plot)} to {_fine(max(values), plot)}"
    return f"{len(one.x):,} points, {span}, at the end {_fine(values[-1], plot)}"
