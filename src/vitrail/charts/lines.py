"""Curves and clouds of points."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from vitrail.charts.axis import Axis, Panel, Unit, around, panel
from vitrail.charts.svg import COLOURS, HEAD, MARGIN, drawing, empty_drawing, finite, number, text_at, titled

MOST_POINTS = 600
"""More points of a curve than this cannot be seen."""
MOST_MARKS = 60
"""A curve of more points has none of them marked."""


class Series(NamedTuple):
    """Points with a name."""

    name: str
    """Without a name it is not in the legend."""
    x: Sequence[float]
    y: Sequence[float]
    colour: int = 1
    """From 1 on."""
    faint: bool = False
    dashed: bool = False
    marks: bool = False
    """Whether each point is marked, and says its numbers when it is pointed at."""


def line_chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    log: bool = False,
    x_unit: Unit = "number",
    y_unit: Unit = "number",
    y_low: float | None = None,
    y_high: float | None = None,
    width: float = 520,
    height: float = 300,
    standalone: bool = True,
) -> str:
    """Draw curves over one another. With `log` the upright axis is logarithmic, if every number allows it."""
    axes = _axes(series, x_label, y_label, log, (x_unit, y_unit), y_low, y_high)
    if axes is None:
        return empty_drawing(title, "there is nothing to draw", width=width, height=height, standalone=standalone)
    names, top = legend([(one.name, one.colour, one.dashed) for one in series if one.name], width)
    place = panel(width, height, *axes, top=top)
    body = names + place.frame() + "".join(_curve(one, place) for one in series)
    said = "; ".join(f"{one.name}: {_summary(one, place)}" for one in series if one.name and len(one.x))
    return drawing(body, title=title, description=said, width=width, height=height, standalone=standalone)


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
    y_low: float | None = None,
    y_high: float | None = None,
    radius: float = 3.5,
    width: float = 520,
    height: float = 300,
    standalone: bool = True,
) -> str:
    """Draw points, over `lines` that say what to compare them with."""
    axes = _axes([*series, *lines], x_label, y_label, log, (x_unit, y_unit), y_low, y_high)
    if axes is None:
        return empty_drawing(title, "there is nothing to draw", width=width, height=height, standalone=standalone)
    named = [(one.name, one.colour, one.dashed) for one in [*series, *lines] if one.name]
    names, top = legend(named, width, dots=sum(bool(one.name) for one in series))
    place = panel(width, height, *axes, top=top)
    body = names + place.frame() + "".join(_curve(one, place) for one in lines)
    body += "".join(_marks(one, place, radius) for one in series)
    said = "; ".join(f"{one.name or 'points'}: {_summary(one, place)}" for one in [*series, *lines] if len(one.x))
    return drawing(body, title=title, description=said, width=width, height=height, standalone=standalone)


def legend(names: Sequence[tuple[str, int, bool]], width: float, *, dots: int = 0) -> tuple[str, float]:
    """Return the names of series (name, colour, dashed) in a row below the title, and where the panel begins.

    The first `dots` of them are shown by a point and not by a line.
    """
    if not names:
        return "", HEAD + 6
    parts, x, y = [], float(MARGIN), HEAD + 10.0
    for place, (name, colour, dashed) in enumerate(names):
        shown = name if len(name) <= 40 else f"{name[:39]}…"
        room = 30 + 6.6 * len(shown)
        if x > MARGIN and x + room > width:
            x, y = float(MARGIN), y + 17
        style = f"curve line{shade(colour)}{' dashed' if dashed else ''}"
        if place < dots:
            parts.append(f'<circle class="mark fill{shade(colour)}" cx="{number(x + 8)}" cy="{number(y - 4)}" r="4"/>')
        else:
            parts.append(f'<path class="{style}" d="M{number(x)} {number(y - 4)}h16"/>')
        parts.append(text_at(x + 21, y, shown, style="quiet"))
        x += room + 6
    return "".join(parts), y + 14


def shade(colour: int) -> int:
    """Return the number of a colour that there is."""
    return (colour - 1) % COLOURS + 1


def _axes(
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    log: bool,
    units: tuple[Unit, Unit],
    low: float | None,
    high: float | None,
) -> tuple[Axis, Axis] | None:
    xs = finite([value for one in series for value in one.x])
    ys = finite([value for one in series for value in one.y])
    if not xs or not ys:
        return None
    start = 0.0 if 0 <= min(xs) <= 0.25 * max(xs) else min(xs)
    x = around(xs, label=x_label, unit=units[0], low=start, high=max(xs) if max(xs) > start else None)
    return x, around(ys, label=y_label, log=log, unit=units[1], low=low, high=high)


def _points(one: Series) -> list[tuple[float, float]]:
    every = -(-len(one.x) // MOST_POINTS) or 1
    pairs = list(zip(one.x, one.y, strict=True))
    return [pair for pair in pairs[::-1][::every][::-1] if math.isfinite(pair[0]) and math.isfinite(pair[1])]


def _curve(one: Series, place: Panel) -> str:
    points = _points(one)
    if not points:
        return ""
    path = "L".join(f"{number(place.across(x))} {number(place.down(y))}" for x, y in points)
    kinds = f"curve line{shade(one.colour)}{' faint' if one.faint else ''}{' dashed' if one.dashed else ''}"
    line = f'<path class="{kinds}" d="M{path}">{titled(one.name) if one.name else ""}</path>'
    marked = len(points) == 1 or (one.marks and len(points) <= MOST_MARKS)
    return line + (_marks(one, place, 3.5) if marked else "")


def _marks(one: Series, place: Panel, radius: float) -> str:
    return "".join(
        f'<circle class="mark fill{shade(one.colour)}" cx="{number(place.across(x))}" cy="{number(place.down(y))}" '
        f'r="{number(radius)}">{titled(_said(one, x, y, place))}</circle>'
        for x, y in _points(one)
    )


def _said(one: Series, x: float, y: float, place: Panel) -> str:
    where = f"{place.x.label} " if place.x.label else ""
    return f"{one.name + ', ' if one.name else ''}{where}{place.x.said(x)}: {_fine(y, place)}"


def _fine(value: float, place: Panel) -> str:
    return f"{100 * value:.1f}%" if place.y.unit == "percent" else place.y.said(value)


def _summary(one: Series, place: Panel) -> str:
    points = _points(one)
    if not points:
        return "no points"
    values = [y for _, y in points]
    span = f"from {_fine(min(values), place)} to {_fine(max(values), place)}"
    return f"{len(one.x):,} points, {span}, at the end {_fine(values[-1], place)}"
