"""Axes: where a number lies between two ends, and which numbers are written beside it."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from vitrail.charts.svg import MARGIN, number, text_at

Unit = Literal["number", "percent", "whole"]
"""How the numbers of an axis are written: 0.5, 50% (for 0.5), or 1,000 with nothing in between."""


class Axis(NamedTuple):
    """The numbers from `low` to `high`, evenly or, with `log`, each power of ten as far as the next."""

    low: float
    high: float
    label: str = ""
    log: bool = False
    unit: Unit = "number"

    def place(self, value: float) -> float:
        """Return where a number lies, from 0 at the low end to 1 at the high one; what lies outside is at an end."""
        if self.log:
            share = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, share))

    def ticks(self, most: int = 6) -> list[float]:
        """Return the numbers that a person would write beside it."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = -(-len(powers) // most)
            if every == 1 and len(powers) <= 3:
                found = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            else:
                found = [10.0**power for power in powers if power % every == 0]
            there = [tick for tick in found if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(there) > 1:
                return there
            # So short a stretch is nearly even, and round numbers lie between the powers.
        step = _round_step((self.high - self.low) / max(most - 1, 1), whole=self.unit == "whole")
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [place * step for place in range(first, last + 1)]

    def said(self, value: float) -> str:
        """Write a number as this axis does."""
        if self.unit == "percent":
            return f"{round(100 * value, 1):g}%"
        return f"{value:,.0f}" if self.unit == "whole" else short(value)


def around(
    values: Iterable[float],
    *,
    label: str = "",
    log: bool = False,
    unit: Unit = "number",
    low: float | None = None,
    high: float | None = None,
) -> Axis:
    """Return an axis for numbers, with a little room at both ends but those that are given.

    A logarithmic one is possible only for numbers above 0; otherwise it is an even one.
    """
    found = [value for value in values if math.isfinite(value)]
    if log and found and min(found) > 0:
        return Axis((low or min(found) * 0.9), (high or max(found) * 1.1), label, True, unit)
    least, most = min(found, default=0.0), max(found, default=1.0)
    room = 0.06 * (most - least) or 0.05 * abs(most) or 0.5
    start = low if low is not None else (max(0.0, least - room) if least >= 0 else least - room)
    end = high if high is not None else most + room
    return Axis(start, end if end > start else start + 1, label, False, unit)


def short(value: float) -> str:
    """Write a number as a person would: 0.5, 12,000, but 5e-4."""
    value = float(f"{value:.4g}")
    if not value or 0.001 <= abs(value) < 1_000_000:
        return f"{value:,.0f}" if value == round(value) else f"{value:g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _round_step(least: float, *, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= 0.75 * least)
    return max(1.0, step) if whole else step


class Panel(NamedTuple):
    """The part of a drawing that has axes: its corner, its size, and what its axes span."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def across(self, value: float) -> float:
        """Return how far to the right a number lies."""
        return self.left + self.width * self.x.place(value)

    def down(self, value: float) -> float:
        """Return how far down a number lies."""
        return self.top + self.height * (1 - self.y.place(value))

    def frame(self) -> str:
        """Return the grid and the numbers beside it."""
        bottom, right = self.top + self.height, self.left + self.width
        parts = []
        for tick in self.y.ticks(max(2, int(self.height // 32))):
            y = number(self.down(tick))
            parts.append(f'<path class="grid" d="M{number(self.left)} {y}H{number(right)}"/>')
            parts.append(text_at(self.left - 6, self.down(tick) + 4, self.y.said(tick), style="quiet", anchor="end"))
        for tick in self.x.ticks(max(2, int(self.width // 70))):
            x = self.across(tick)
            parts.append(f'<path class="grid" d="M{number(x)} {number(bottom)}v4"/>')
            parts.append(text_at(x, bottom + 17, self.x.said(tick), style="quiet", anchor="middle"))
        parts.append(f'<path class="grid" d="M{number(self.left)} {number(bottom)}H{number(right)}"/>')
        if self.x.label:
            parts.append(text_at(right, bottom + 33, self.x.label, style="quiet", anchor="end"))
        if self.y.label:
            parts.append(text_at(MARGIN + 5, self.top, self.y.label, style="quiet", anchor="end", turned=True))
        return "".join(parts)


def panel(width: float, height: float, x: Axis, y: Axis, *, top: float) -> Panel:
    """Lay out a panel in a drawing, with room for its numbers and names."""
    letters = max((len(y.said(tick)) for tick in y.ticks()), default=1)
    left = MARGIN + 10 + 7 * letters + (14 if y.label else 0)
    below = 24 + (16 if x.label else 0)
    return Panel(left, top, width - left - 2 * MARGIN, height - top - below - 4, x, y)
