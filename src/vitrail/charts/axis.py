"""Axes: scaling, ticks and tick labels."""

import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

from vitrail.charts.svg import MARGIN, number, text_at

Unit = Literal["number", "percent", "integer"]
"""The number format of an axis: 0.5, 50% (for 0.5), or integers such as 1,000."""


class Axis(NamedTuple):
    """An axis from `low` to `high`, linear or logarithmic."""

    low: float
    high: float
    label: str = ""
    log: bool = False
    unit: Unit = "number"

    def position(self, value: float) -> float:
        """Map a value to 0 (low) … 1 (high); clips values outside."""
        if self.log:
            fraction = math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return min(1.0, max(0.0, fraction))

    def ticks(self, limit: int = 6) -> list[float]:
        """Return round tick values."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            every = -(-len(powers) // limit)
            if every == 1 and len(powers) <= 3:
                ticks = [digit * 10.0**power for power in powers for digit in (1, 2, 5)]
            else:
                ticks = [10.0**power for power in powers if power % every == 0]
            inside = [tick for tick in ticks if self.low * 0.999 <= tick <= self.high * 1.001]
            if len(inside) > 1:
                return inside
            # Over such a short range the axis is nearly linear, and round numbers are between the powers.
        ticks = []
        for count in (limit, limit + 1, limit + 2):  # one or two ticks would not show a scale
            step = _round_step((self.high - self.low) / max(count - 1, 1), integer=self.unit == "integer")
            first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
            ticks = [index * step for index in range(first, last + 1)]
            if len(ticks) > 2:
                break
        return ticks

    def format(self, value: float) -> str:
        """Format a value as a tick label."""
        if self.unit == "percent":
            return f"{round(100 * value, 1):g}%"
        return f"{value:,.0f}" if self.unit == "integer" else short(value)


def around(
    values: Iterable[float],
    *,
    label: str = "",
    log: bool = False,
    unit: Unit = "number",
    low: float | None = None,
    high: float | None = None,
) -> Axis:
    """Return an axis that fits the values, with a margin at both ends unless `low` or `high` is set.

    A logarithmic axis needs positive values; otherwise it is linear.
    """
    finite = [value for value in values if math.isfinite(value)]
    if log and finite and min(finite) > 0:
        return Axis((low or min(finite) * 0.9), (high or max(finite) * 1.1), label, True, unit)
    least, most = min(finite, default=0.0), max(finite, default=1.0)
    margin = 0.06 * (most - least) or 0.05 * abs(most) or 0.5
    start = low if low is not None else (max(0.0, least - margin) if least >= 0 else least - margin)
    end = high if high is not None else most + margin
    return Axis(start, end if end > start else start + 1, label, False, unit)


def short(value: float) -> str:
    """Format a number briefly: 0.5, 12,000, 5e-4."""
    value = float(f"{value:.4g}")
    if not value or 0.001 <= abs(value) < 1_000_000:
        return f"{value:,.0f}" if value == round(value) else f"{value:g}"
    digits, _, power = f"{value:.2e}".partition("e")
    return f"{float(digits):g}e{int(power)}"


def _round_step(least: float, *, integer: bool) -> float:
    power = 10.0 ** math.floor(math.log10(least))
    step = next(digit * power for digit in (1, 2, 5, 10) if digit * power >= 0.75 * least)
    return max(1.0, step) if integer else step


class Panel(NamedTuple):
    """A plot area: its corner, its size and its axes."""

    left: float
    top: float
    width: float
    height: float
    x: Axis
    y: Axis

    def across(self, value: float) -> float:
        """Return the x coordinate of a value."""
        return self.left + self.width * self.x.position(value)

    def down(self, value: float) -> float:
        """Return the y coordinate of a value."""
        return self.top + self.height * (1 - self.y.position(value))

    def frame(self) -> str:
        """Return the grid lines and tick labels."""
        bottom, right = self.top + self.height, self.left + self.width
        elements = []
        for tick in self.y.ticks(max(2, int(self.height // 32))):
            y = number(self.down(tick))
            elements.append(f'<path class="grid" d="M{number(self.left)} {y}H{number(right)}"/>')
            elements.append(
                text_at(self.left - 6, self.down(tick) + 4, self.y.format(tick), style="quiet", anchor="end")
            )
        for tick in self.x.ticks(max(2, int(self.width // 70))):
            x = self.across(tick)
            elements.append(f'<path class="grid" d="M{number(x)} {number(bottom)}v4"/>')
            elements.append(text_at(x, bottom + 17, self.x.format(tick), style="quiet", anchor="middle"))
        elements.append(f'<path class="grid" d="M{number(self.left)} {number(bottom)}H{number(right)}"/>')
        if self.x.label:
            elements.append(text_at(right, bottom + 33, self.x.label, style="quiet", anchor="end"))
        if self.y.label:
            elements.append(text_at(MARGIN + 5, self.top, self.y.label, style="quiet", anchor="end", turned=True))
        return "".join(elements)


def panel(width: float, height: float, x: Axis, y: Axis, *, top: float) -> Panel:
    """Lay out a panel, leaving space for tick labels and axis labels."""
    letters = max((len(y.format(tick)) for tick in y.ticks()), default=1)
    left = MARGIN + 10 + 7 * letters + (14 if y.label else 0)
    right = max(2.0 * MARGIN, MARGIN + 3.5 * len(x.format(x.high)))  # the last tick label is centred on its tick
    below = 24 + (16 if x.label else 0)
    return Panel(left, top, width - left - right, height - top - below - 4, x, y)
