"""SVG helpers for all charts: escaped text, one style for light, dark and print, the SVG element, and colour scales.

Hits and errors have two hues and one scale: at the same fraction both have the same lightness and chroma in OKLCH, a
perceptually uniform colour space. So an error of 20% never looks as strong as a hit of 80%.

Colours are CSS variables, so that a page can override them; a standalone chart includes them.
"""

import math
import re
from collections.abc import Sequence
from typing import NamedTuple

LEVELS = 10
"""The number of colour steps of a heat map."""
HUES = {"hit": 245.0, "miss": 50.0}
"""Blue and orange, safe for colour-blind readers, in degrees."""
COLOURS = 6
"""The number of series colours; more series cycle through them."""
MARGIN, HEAD, LINE = 8, 30, 19
"""The margin around a drawing, the height of its title, and the height of a line of text below the title of a sheet."""
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


# ── colour scales ──


class Scheme(NamedTuple):
    """The lightness and chroma of the weakest and the strongest colour."""

    lightness: tuple[float, float]
    chroma: tuple[float, float]


SCHEMES = {"light": Scheme((0.93, 0.43), (0.035, 0.1)), "dark": Scheme((0.3, 0.84), (0.035, 0.1))}
"""More is darker on a light page, and lighter on a dark page."""


def level(fraction: float) -> int:
    """Return the colour step of a fraction.

    >>> level(0.0), level(0.2), level(0.8), level(1.0)
    (0, 2, 8, 9)
    """
    return min(LEVELS - 1, int(fraction * LEVELS + 1e-9))


def colour(scheme: str, kind: str, step: int) -> tuple[int, int, int]:
    """Return the RGB colour of a step, 0 to 255."""
    (dim, strong), (grey, vivid) = SCHEMES[scheme]
    fraction = step / (LEVELS - 1)
    return _rgb(dim + (strong - dim) * fraction, grey + (vivid - grey) * fraction, HUES[kind])


def ink(background: tuple[int, int, int]) -> str:
    """Return black or white, whichever has more contrast with a background: always at least 4.58 to 1."""
    light, dark = contrast((255, 255, 255), background), contrast((0, 0, 0), background)
    return "#fff" if light > dark else "#000"


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """Return the contrast of two colours as WCAG 2 defines it, from 1 to 21.

    >>> round(contrast((0, 0, 0), (255, 255, 255)), 1)
    21.0
    """
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def rules(scheme: str) -> str:
    """Return the CSS of all steps: fill colours and text colours."""
    css = []
    for kind in HUES:
        for step in range(LEVELS):
            made = colour(scheme, kind, step)
            code = "#{:02x}{:02x}{:02x}".format(*made)
            css.append(f".chart .{kind}{step}{{fill:{code}}}.chart text.on-{kind}{step}{{fill:{ink(made)}}}")
    return "".join(css)


def _luminance(rgb: tuple[int, int, int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _rgb(lightness: float, chroma: float, hue: float) -> tuple[int, int, int]:
    """Convert OKLCH to sRGB (Björn Ottosson's matrices)."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    red, green, blue = (
        round(255 * max(0.0, min(1.0, 12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055))) for c in linear
    )
    return red, green, blue


# ── style ──

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


# ── elements ──


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


def empty_drawing(title: str, reason: str, *, width: float, height: float, standalone: bool) -> str:
    """Return an empty chart with a reason."""
    body = text_at(width / 2, height / 2, reason, style="quiet", anchor="middle")
    return drawing(body, title=title, description=reason, width=width, height=height, standalone=standalone)


def finite(values: list[float]) -> list[float]:
    """Return the finite values."""
    return [value for value in values if math.isfinite(value)]


def _element(body: str, title: str, description: str, width: float, height: float, *, standalone: bool) -> str:
    style = (
        f'<style>{STYLE}</style><rect width="100%" height="100%" style="fill:var(--chart-paper)"/>'
        if standalone
        else ""
    )
    size = f'width="{number(width)}" height="{number(height)}"'
    if standalone:  # in a browser, the window around the drawing gets its colour, too
        size += ' style="background:var(--chart-paper)"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="chart" role="img" aria-label="{escape(title)}" '
        f'viewBox="0 0 {number(width)} {number(height)}" {size}>'
        f"{titled(title)}<desc>{escape(description)}</desc>{style}{body}</svg>"
    )
