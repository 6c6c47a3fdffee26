"""Scatter plots of any number of points against a guide: the diagonal, or zero. Many points are counted in cells."""

import math
from collections.abc import Sequence

from vitrail.charts.axis import Axis, Panel, around, panel
from vitrail.charts.lines import legend
from vitrail.charts.svg import LEVELS, drawing, empty_drawing, number, text_at, titled

MOST_DOTS = 1000
"""More points are not drawn one by one: a cell is coloured by how many are in it."""
FEW_DOTS = 150
"""Up to this many, dots are large."""
CELL = 7.0
"""The side of a cell."""
SCALE_BOX = 14


def point_chart(
    x: Sequence[float],
    y: Sequence[float],
    *,
    title: str,
    x_label: str = "",
    y_label: str = "",
    diagonal: bool = False,
    guide: str = "",
    notes: Sequence[str] = (),
    trend: tuple[str, Sequence[tuple[float, float]]] | None = None,
    width: float = 440,
    height: float = 360,
    standalone: bool = True,
) -> str:
    """Draw points over a dotted guide: y = 0, or with `diagonal` y = x, on two axes with the same ends.

    `guide` names the guide in the legend, `notes` are tooltips, one per point, and `trend` is a named line. If there
    are more than `MOST_DOTS` points, a stronger colour is a cell with more of them, on a logarithmic scale.
    """
    kept = [place for place in range(len(x)) if math.isfinite(x[place]) and math.isfinite(y[place])]
    points = [(float(x[place]), float(y[place])) for place in kept]
    if not points:
        return empty_drawing(title, "nothing to draw", width=width, height=height, standalone=standalone)
    along, across = [one for one, _ in points], [other for _, other in points]
    if diagonal:
        x_axis = around([*along, *across], label=x_label)
        y_axis = x_axis._replace(label=y_label)
    else:
        x_axis, y_axis = around(along, label=x_label), around([*across, 0.0], label=y_label)
    dotted, line = (guide, 0, True), [(trend[0], 2, False)] if trend else []
    names, top = legend([dotted, *line] if guide else line, width)
    binned = len(points) > MOST_DOTS
    below = 30.0 if binned else 0.0
    plot = panel(width, height - below, x_axis, y_axis, top=top)
    body = names + plot.frame()
    if binned:
        field, most = _cells(points, plot)
        body += field + _scale(plot.left, height - below + 6, most)
    else:
        body += _dots(points, [notes[place] for place in kept] if notes else [], plot)
    body += _guide(plot, diagonal=diagonal) + (_trend(trend[1], plot) if trend else "")
    return drawing(
        body, title=title, description=_summary(points, plot), width=width, height=height, standalone=standalone
    )


def _dots(points: Sequence[tuple[float, float]], notes: Sequence[str], plot: Panel) -> str:
    radius = 3.5 if len(points) <= FEW_DOTS else 2.5
    elements = []
    for place, (x, y) in enumerate(points):
        tooltip = notes[place] if notes else f"{plot.x.format(x)}: {plot.y.format(y)}"
        elements.append(
            f'<circle class="mark fill1 faded" cx="{number(plot.across(x))}" cy="{number(plot.down(y))}" '
            f'r="{number(radius)}">{titled(tooltip)}</circle>'
        )
    return "".join(elements)


def _cells(points: Sequence[tuple[float, float]], plot: Panel) -> tuple[str, int]:
    """Return the cells that have points, as one path for each colour, and the most points of a cell."""
    columns, rows = max(1, round(plot.width / CELL)), max(1, round(plot.height / CELL))
    wide, high = plot.width / columns, plot.height / rows
    counts: dict[tuple[int, int], int] = {}
    for x, y in points:
        cell = (
            min(columns - 1, int((plot.across(x) - plot.left) / wide)),
            min(rows - 1, int((plot.down(y) - plot.top) / high)),
        )
        counts[cell] = counts.get(cell, 0) + 1
    most = max(counts.values())
    paths: dict[int, list[str]] = {}
    for (column, row), count in sorted(counts.items()):
        paths.setdefault(_level(count, most), []).append(f"M{column} {row}h1v1h-1z")
    turned = f"translate({number(plot.left)} {number(plot.top)}) scale({wide:.4f} {high:.4f})"
    field = "".join(f'<path class="hit{step}" d="{"".join(path)}"/>' for step, path in sorted(paths.items()))
    return f'<g transform="{turned}">{field}</g>', most


def _level(count: int, most: int) -> int:
    """Return the colour step of a count, on a logarithmic scale from 1 to `most`."""
    return LEVELS - 1 if most == 1 else min(LEVELS - 1, int(LEVELS * math.log(count) / math.log(most)))


def _scale(left: float, top: float, most: int) -> str:
    """Draw the colour scale."""
    elements = [text_at(left, top + 11, "images: 1", style="quiet")]
    start = left + 62
    for step in range(LEVELS):
        elements.append(f'<rect class="hit{step}" x="{number(start + step * SCALE_BOX)}" y="{number(top + 1)}" ')
        elements.append(f'width="{SCALE_BOX - 1}" height="12" rx="1"/>')
    elements.append(text_at(start + LEVELS * SCALE_BOX + 6, top + 11, f"{most:,}", style="quiet"))
    return "".join(elements)


def _guide(plot: Panel, *, diagonal: bool) -> str:
    start, end = (plot.x.low, plot.x.high) if diagonal else (0.0, 0.0)
    return (
        f'<path class="guide" d="M{number(plot.left)} {number(plot.down(start))}'
        f'L{number(plot.left + plot.width)} {number(plot.down(end))}"/>'
    )


def _trend(points: Sequence[tuple[float, float]], plot: Panel) -> str:
    path = "L".join(f"{number(plot.across(x))} {number(plot.down(y))}" for x, y in points)
    return f'<path class="curve line2" d="M{path}"/>' if points else ""


def _summary(points: Sequence[tuple[float, float]], plot: Panel) -> str:
    def span(axis: Axis, values: list[float], name: str) -> str:
        return f"{axis.label or name} from {axis.format(min(values))} to {axis.format(max(values))}"

    x, y = span(plot.x, [one for one, _ in points], "x"), span(plot.y, [other for _, other in points], "y")
    return f"{len(points):,} points, {x}, {y}"
