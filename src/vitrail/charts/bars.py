"""Bars: counts side by side, and whether a classifier is right as often as it says."""

from collections.abc import Sequence
from typing import NamedTuple

from vitrail.charts.axis import Axis, Panel, Unit, around, panel
from vitrail.charts.lines import legend, shade
from vitrail.charts.svg import HEAD, MARGIN, drawing, empty_drawing, number, text_at, titled

FEW = 10
"""A bin of fewer answers is drawn paler: its place is partly chance."""
BAR = 22
"""How high a lying bar is, with the room around it."""


class Bar(NamedTuple):
    """A name and a number."""

    name: str
    value: float
    note: str = ""
    """What shows when the bar is pointed at; by default name and number."""


class Bin(NamedTuple):
    """The answers with a probability from `low` to `high`: how many, how sure, and how often right."""

    low: float
    high: float
    answers: int
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
    """Draw bars that lie, one below the other, each with its name and its number."""
    if not bars:
        return empty_drawing(title, "there is nothing to draw", width=width, height=120, standalone=standalone)
    axis = around([bar.value for bar in bars], label=x_label, unit=unit, low=0.0, high=high)
    names = min(24, max(len(bar.name) for bar in bars))
    left, top = MARGIN + 6.8 * names + 10, HEAD + 6.0
    length = width - left - 56
    parts = []
    for place, bar in enumerate(bars):
        y, long = top + place * BAR, length * axis.place(bar.value)
        said = bar.note or f"{bar.name}: {axis.said(bar.value)}"
        parts.append(text_at(left - 8, y + 15, bar.name, anchor="end", most=24))
        parts.append(
            f'<rect class="fill{shade(colour)}" x="{number(left)}" y="{number(y + 4)}" width="{number(max(long, 1))}" '
            f'height="{BAR - 7}" rx="2">{titled(said)}</rect>'
        )
        parts.append(text_at(left + long + 6, y + 15, axis.said(bar.value), style="quiet"))
    height = top + BAR * len(bars) + MARGIN
    said = "; ".join(f"{bar.name}: {axis.said(bar.value)}" for bar in bars)
    return drawing("".join(parts), title=title, description=said, width=width, height=height, standalone=standalone)


def reliability_diagram(
    bins: Sequence[Bin],
    *,
    title: str = "Reliability",
    width: float = 520,
    height: float = 380,
    standalone: bool = True,
) -> str:
    """Draw how often answers are right over how sure they are, and below it how many answers there are of each.

    On the dotted line a classifier is right exactly as often as it says.
    """
    full = [one for one in bins if one.answers and one.accuracy is not None and one.confidence is not None]
    if not full:
        return empty_drawing(title, "there are no answers", width=width, height=height, standalone=standalone)
    sure = Axis(0, 1, "how sure the answer is", unit="percent")
    names, top = legend([("right this often", 1, False), ("missing to what it says", 2, False)], width)
    below = 62
    place = panel(width, height - below, sure._replace(label=""), Axis(0, 1, "right", unit="percent"), top=top)
    counts = Panel(place.left, place.top + place.height + 30, place.width, below - 26, sure, Axis(0, 1))
    diagonal = (
        f'<path class="guide" d="M{number(place.across(0))} {number(place.down(0))}'
        f'L{number(place.across(1))} {number(place.down(1))}"/>'
    )
    most = max(one.answers for one in full)
    body = names + place.frame() + "".join(_reliability_bar(one, place, counts, most) for one in full) + diagonal
    body += text_at(place.left + place.width, counts.top + counts.height + 15, sure.label, style="quiet", anchor="end")
    body += text_at(place.left - 6, counts.top + counts.height, "answers", style="quiet small", anchor="end")
    said = "; ".join(_said(one) for one in full)
    return drawing(body, title=title, description=said, width=width, height=height, standalone=standalone)


def _reliability_bar(one: Bin, place: Panel, counts: Panel, most: int) -> str:
    accuracy, confidence = one.accuracy or 0.0, one.confidence or 0.0
    left = place.across(one.low) + 1
    wide = place.across(one.high) - left - 1
    kind = "fill1" if one.answers >= FEW else "fill1 faded"
    parts = [_rect(kind, left, place.down(accuracy), wide, place.down(0) - place.down(accuracy))]
    if confidence > accuracy:  # what is missing to what it says
        gap = place.down(accuracy) - place.down(confidence)
        parts.append(_rect("fill2 pale", left, place.down(confidence), wide, gap))
    high = max(1.0, counts.height * one.answers / most)
    parts.append(_rect("fill1 pale", left, counts.top + counts.height - high, wide, high))
    return f"<g>{titled(_said(one))}{''.join(parts)}</g>"


def _rect(kind: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{number(x)}" y="{number(y)}" width="{number(width)}" height="{number(height)}"/>'


def _said(one: Bin) -> str:
    answers = "1 answer" if one.answers == 1 else f"{one.answers:,} answers"
    return f"{answers}, {100 * (one.confidence or 0):.1f}% sure on average, {100 * (one.accuracy or 0):.1f}% right"
