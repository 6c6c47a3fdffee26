"""Bar charts and reliability diagrams."""

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.charts.axis import Axis, Panel, Unit, around, panel
from vitrail.charts.lines import legend, shade
from vitrail.charts.svg import HEAD, MARGIN, drawing, empty_drawing, number, text_at, titled

FEW = 10
"""A bin with fewer predictions is drawn faded, because its accuracy is noisy."""
BAR = 22
"""The height of a bar, including its spacing."""


class Bar(NamedTuple):
    """A bar: name and value."""

    name: str
    value: float
    note: str = ""
    """The tooltip; by default name and value."""


class Bin(NamedTuple):
    """The predictions with a confidence from `low` to `high`: count, mean confidence and accuracy."""

    low: float
    high: float
    predictions: int
    confidence: float | None
    accuracy: float | None


def bar_chart(
    bars: Sequence[Bar],
    *,
    title: str,
    x_label: str = "",
    unit: Unit = "number",
    colour: int = 1,
    high: float | None = None,
    width: float = 520,
    standalone: bool = True,
) -> str:
    """Draw horizontal bars, each with its name and value."""
    if not bars:
        return empty_drawing(title, "nothing to draw", width=width, height=120, standalone=standalone)
    axis = around([bar.value for bar in bars], label=x_label, unit=unit, low=0.0, high=high)
    names = min(24, max(len(bar.name) for bar in bars))
    left, top = MARGIN + 6.8 * names + 10, HEAD + 6.0
    length = width - left - 56
    elements = []
    for index, bar in enumerate(bars):
        y, extent = top + index * BAR, length * axis.position(bar.value)
        tooltip = bar.note or f"{bar.name}: {axis.format(bar.value)}"
        elements.append(text_at(left - 8, y + 15, bar.name, anchor="end", limit=24))
        elements.append(
            f'<rect class="fill{shade(colour)}" x="{number(left)}" y="{number(y + 4)}" '
            f'width="{number(max(extent, 1))}" height="{BAR - 7}" rx="2">{titled(tooltip)}</rect>'
        )
        elements.append(text_at(left + extent + 6, y + 15, axis.format(bar.value), style="quiet"))
    height = top + BAR * len(bars) + MARGIN
    description = "; ".join(f"{bar.name}: {axis.format(bar.value)}" for bar in bars)
    return drawing(
        "".join(elements), title=title, description=description, width=width, height=height, standalone=standalone
    )


def reliability_diagram(
    bins: Sequence[Bin],
    *,
    title: str = "Reliability",
    width: float = 520,
    height: float = 380,
    standalone: bool = True,
) -> str:
    """Draw accuracy over confidence, with a histogram of the confidence below.

    On the dotted line a classifier is perfectly calibrated.
    """
    full = [one for one in bins if one.predictions and one.accuracy is not None and one.confidence is not None]
    if not full:
        return empty_drawing(title, "no predictions", width=width, height=height, standalone=standalone)
    confidence = Axis(0, 1, "confidence", unit="percent")
    gap = [("gap to confidence", 2, False)] if any(_overconfident(one) for one in full) else []
    names, top = legend([("accuracy", 1, False), *gap], width)
    below = 62
    place = panel(width, height - below, confidence._replace(label=""), Axis(0, 1, "accuracy", unit="percent"), top=top)
    counts = Panel(place.left, place.top + place.height + 30, place.width, below - 26, confidence, Axis(0, 1))
    diagonal = (
        f'<path class="guide" d="M{number(place.across(0))} {number(place.down(0))}'
        f'L{number(place.across(1))} {number(place.down(1))}"/>'
    )
    most = max(one.predictions for one in full)
    body = names + place.frame() + "".join(_reliability_bar(one, place, counts, most) for one in full) + diagonal
    body += text_at(
        place.left + place.width, counts.top + counts.height + 15, confidence.label, style="quiet", anchor="end"
    )
    body += text_at(place.left - 6, counts.top + counts.height, "images", style="quiet small", anchor="end")
    description = "; ".join(_tooltip(one) for one in full)
    return drawing(body, title=title, description=description, width=width, height=height, standalone=standalone)


def _reliability_bar(one: Bin, place: Panel, counts: Panel, most: int) -> str:
    accuracy, confidence = one.accuracy or 0.0, one.confidence or 0.0
    left = place.across(one.low) + 1
    wide = place.across(one.high) - left - 1
    kind = "fill1" if one.predictions >= FEW else "fill1 faded"
    elements = [_rect(kind, left, place.down(accuracy), wide, place.down(0) - place.down(accuracy))]
    if _overconfident(one):
        gap = place.down(accuracy) - place.down(confidence)
        elements.append(_rect("fill2 pale", left, place.down(confidence), wide, gap))
    high = max(1.0, counts.height * one.predictions / most)
    elements.append(_rect("fill1 pale", left, counts.top + counts.height - high, wide, high))
    return f"<g>{titled(_tooltip(one))}{''.join(elements)}</g>"


def _overconfident(one: Bin) -> bool:
    return (one.confidence or 0.0) > (one.accuracy or 0.0)


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"/>'


def _tooltip(one: Bin) -> str:
    count = "1 prediction" if one.predictions == 1 else f"{one.predictions:,} predictions"
    return f"{count}, mean confidence {100 * (one.confidence or 0):.1f}%, accuracy {100 * (one.accuracy or 0):.1f}%"
