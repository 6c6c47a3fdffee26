"""SVG helpers for all charts: escaped text, one style for light, dark and print, and the SVG element.

Colours are CSS variables, so that a page can override them; a standalone chart includes them.
"""

import math
import re
from collections.abc import Sequence

from vitrail.charts.scale import rules

COLOURS = 6
"""The number of series colours; more series cycle through them."""
MARGIN, HEAD, LINE = 8, 30, 19
"""The margin around a drawing, the height of its title, and the height of a line of text below the title of a sheet."""
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

# Okabe and Ito's colours, safe for colour-blind readers; lighter ones of the same hues for a dark page.
_LIGHT = {
    "ink": "#1f2328", "quiet": "#656d76", "line": "#d8dde3", "paper": "#ffffff",
    "1": "#0072b2", "2": "#d55e00", "3": "#00805e", "4": "#b0528a", "5": "#8a6d00", "6": "#3c4fc4",
}  # fmt: skip
_DARK = {
    "ink": "#e8eaed", "quiet": "#a2abb5", "line": "#3a424c", "paper": "#15181c",
    "1": "#58b0e6", "2": "#f28e4b", "3": "#3ec49b", "4": "#e08fc0", "5": "#d9b83f", "6": "#94a3ff",
}  # fmt: skip


def _variables(colours: dict[str, str]) -> str:
    return "".join(f"--chart-{name}:{colour};" for name, colour in colours.items())


STYLE = (
    f".chart{{{_variables(_LIGHT)}font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;"
    "font-variant-numeric:tabular-nums}"
    ".chart text{fill:var(--chart-ink);stroke:none}.chart .quiet{fill:var(--chart-quiet)}"
    ".chart .title{font-weight:600;font-size:18px}"
    ".chart .head{font-weight:600;font-size:14px}.chart .small{font-size:10px}"
    ".chart .grid{stroke:var(--chart-line);stroke-width:1;fill:none}"
    ".chart .guide{stroke:var(--chart-ink);stroke-width:1.2;stroke-dasharray:2 3;fill:none}"
    ".chart .curve{fill:none;stroke-width:2;stroke-linejoin:round;stroke-linecap:round}"
    ".chart .faint{stroke-width:1;opacity:.3}.chart .dashed{stroke-dasharray:5 4}"
    ".chart .mark{stroke:var(--chart-paper);stroke-width:1}"
    ".chart .fill{stroke:none}.chart .pale{opacity:.28}.chart .faded{opacity:.55}"
    ".chart .blank{fill:var(--chart-line);opacity:.35}"
    + "".join(
        f".chart .line{n}{{stroke:var(--chart-{n})}}.chart .fill{n}{{fill:var(--chart-{n})}}"
        for n in range(1, COLOURS + 1)
    )
    + rules("light")
    + f"@media screen and (prefers-color-scheme:dark){{.chart{{{_variables(_DARK)}}}{rules('dark')}}}"
)
"""The CSS that a page with charts needs once; a standalone chart includes it."""


def escape(text: str) -> str:
    """Escape text for XML, and replace characters that XML forbids."""
    text = _NOT_IN_XML.sub("\ufffd", text)
    for character, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        text = text.replace(character, entity)
    return text


def number(value: float) -> str:
    """Format a coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


def text_at(
    x: float, y: float, text: str, *, style: str = "", anchor: str = "start", turned: bool = False, limit: int = 200
) -> str:
    """Return a line of text; `turned` rotates it to read upwards. Text longer than `limit` is truncated."""
    shown = text if len(text) <= limit else f"{text[: limit - 1]}…"
    turn = f' transform="rotate(-90 {number(x)} {number(y)})"' if turned else ""
    kind = f' class="{style}"' if style else ""
    end = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text x="{number(x)}" y="{number(y)}"{kind}{end}{turn}>{escape(shown)}</text>'


def titled(title: str) -> str:
    """Return a tooltip, which screen readers read too."""
    return f"<title>{escape(title)}</title>"


def drawing(body: str, *, title: str, description: str, width: float, height: float, standalone: bool) -> str:
    """Return an SVG element with its title at the top; `standalone` adds style and background, for a file."""
    body = text_at(MARGIN, 19, title, style="head") + body
    return _element(body, title, description, width, height, standalone=standalone)


def sheet(
    charts: Sequence[tuple[float, float, str]], *, title: str, lines: Sequence[str], width: float, height: float
) -> str:
    """Return a standalone drawing of charts that are not, each at its x and y below a title and `lines` of text."""
    top = HEAD + LINE * len(lines) + MARGIN
    body = text_at(MARGIN, 24, title, style="title")
    for index, line in enumerate(lines, 1):
        body += text_at(MARGIN, 24 + LINE * index, line, style="quiet")
    for x, y, chart in charts:
        body += f'<g transform="translate({number(x)} {number(top + y)})">{chart}</g>'
    return _element(body, title, "; ".join(lines), width, top + height, standalone=True)


def _element(body: str, title: str, description: str, width: float, height: float, *, standalone: bool) -> str:
    style = (
        f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--chart-paper)"/>'
        if standalone
        else ""
    )
    size = f'width="{number(width)}" height="{number(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {number(width)} {number(height)}" {size}>'
        f"{titled(title)}<desc>{escape(description)}</desc>{style}{body}</svg>"
    )


def empty_drawing(title: str, reason: str, *, width: float, height: float, standalone: bool) -> str:
    """Return an empty chart with a reason."""
    body = text_at(width / 2, height / 2, reason, style="quiet", anchor="middle")
    return drawing(body, title=title, description=reason, width=width, height=height, standalone=standalone)


def finite(values: list[float]) -> list[float]:
    """Return the finite values."""
    return [value for value in values if math.isfinite(value)]
