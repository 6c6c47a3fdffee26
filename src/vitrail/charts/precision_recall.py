"""Precision-recall curves, small enough that those of several labels fit next to each other."""

import math
from collections.abc import Sequence

from vitrail.charts.axis import Axis, panel
from vitrail.charts.svg import HEAD, drawing, empty_drawing, number, titled

NAME = 34
"""The longest title, in letters."""


def precision_recall_chart(
    recall: Sequence[float],
    precision: Sequence[float],
    *,
    title: str,
    at: tuple[float, float] | None = None,
    chance: float | None = None,
    width: float = 280,
    height: float = 230,
    standalone: bool = True,
) -> str:
    """Draw precision over recall, by increasing recall.

    A dot is `at` the recall and precision of the chosen threshold, and a dotted line at `chance`, the precision of a
    random order.
    """
    points = [(x, y) for x, y in zip(recall, precision, strict=True) if math.isfinite(x) and math.isfinite(y)]
    shown = title if len(title) <= NAME else f"{title[: NAME - 1]}…"
    if not points:
        return empty_drawing(shown, "no image has this label", width=width, height=height, standalone=standalone)
    plot = panel(
        width, height, Axis(0, 1, "recall", unit="percent"), Axis(0, 1, "precision", unit="percent"), top=HEAD + 8.0
    )
    along = [(0.0, points[0][1]), *points]
    path = "L".join(f"{number(plot.across(x))} {number(plot.down(y))}" for x, y in along)
    body = plot.frame()
    if chance is not None:
        y = number(plot.down(chance))
        body += f'<path class="guide" d="M{number(plot.left)} {y}h{number(plot.width)}">'
        body += f"{titled(f'chance: {_percent(chance)}')}</path>"
    body += f'<path class="curve line1" d="M{path}">{titled(title)}</path>'
    description = f"precision from {_percent(min(y for _, y in points))} to {_percent(max(y for _, y in points))}"
    if at is not None:
        threshold = f"at the threshold: recall {_percent(at[0])}, precision {_percent(at[1])}"
        description += f"; {threshold}"
        body += f'<circle class="mark fill2" cx="{number(plot.across(at[0]))}" cy="{number(plot.down(at[1]))}" '
        body += f'r="4.5">{titled(threshold)}</circle>'
    return drawing(body, title=shown, description=description, width=width, height=height, standalone=standalone)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}%"
