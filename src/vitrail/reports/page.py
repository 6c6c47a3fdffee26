"""The HTML page of a report: one file, no network access, only its own script and style; and how it formats numbers."""

import base64
import hashlib
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from vitrail._version import __version__
from vitrail.charts.svg import STYLE as CHART_STYLE
from vitrail.charts.svg import escape
from vitrail.evaluation import percent

if TYPE_CHECKING:
    from PIL import Image


Interval = tuple[float, float]


def as_percent(value: float | None) -> str:
    """Format a fraction as a percentage; a dash for None."""
    return "–" if value is None else f"{percent(value)}%"


def span(interval: Interval) -> str:
    """Format an interval of fractions as percentages."""
    return f"{percent(interval[0])}–{percent(interval[1])}%"


def loss_span(interval: Interval) -> str:
    """Format an interval of losses."""
    return f"{interval[0]:.3f}–{interval[1]:.3f}"


def points(difference: float) -> str:
    """Format a difference of fractions in percentage points, with its sign."""
    rounded = round(100 * difference, 1)
    return f"{rounded:+.1f}".replace("-", "\N{MINUS SIGN}") if rounded else "0.0"


def plural(count: int, one: str, more: str = "") -> str:
    """Format a count with its noun: 1 image, 2 images."""
    return f"{count:,} {one if count == 1 else more or f'{one}s'}"


def ended(text: str) -> str:
    """Add a full stop unless the sentence already ends.

    >>> ended("it is gone"), ended("was it copied whole?")
    ('it is gone.', 'was it copied whole?')
    """
    return text if text.endswith((".", "?", "!")) else f"{text}."


def file_name(path: str, most: int = 56) -> str:
    """Shorten a path: keep the whole file name if possible, and as many parent folders as fit.

    >>> file_name("/home/someone/photos/of/many/kinds/cat/IMG_1118.JPG", 24)
    '…/kinds/cat/IMG_1118.JPG'
    >>> file_name("photos/a-name-that-is-far-too-long-to-be-shown.jpg", 25)
    '…/a-name-that…e-shown.jpg'
    """
    if len(path) <= most:
        return path
    folders, _, name = path.rpartition("/")
    if not folders or len(name) > most - 2:
        return f"…/{cut(name, most - 2)}" if folders else cut(name, most)
    kept = name
    for folder in reversed(folders.split("/")):
        if not folder or len(kept) + len(folder) + 3 > most:
            break
        kept = f"{folder}/{kept}"
    return f"…/{kept}"


def duration(seconds: float) -> str:
    """Format a duration.

    >>> duration(8.4), duration(95), duration(7300)
    ('8.4 s', '1 min 35 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"


def cut(text: str, most: int = 60) -> str:
    """Shorten a text in its middle, where file names differ least."""
    if len(text) <= most:
        return text
    half = (most - 1) // 2
    return f"{text[:half]}…{text[-half:]}"


GENERATOR = "vitrail report"
"""Marks a file as a report, which may be overwritten."""
QUALITY = 88
WIDTH = 440
"""Chart width: half the page width, and small enough to be legible on a phone."""


class Section(NamedTuple):
    """A section of a page."""

    anchor: str
    """The fragment of its URL."""
    short: str
    """Its title in the navigation."""
    title: str
    body: str
    """HTML."""


class Column(NamedTuple):
    """A column of a table."""

    title: str
    number: bool = False
    hint: str = ""


class Cell(NamedTuple):
    """A table cell and its sort key; by default its text."""

    shown: str
    """HTML."""
    key: float | str | None = None


def page(*, title: str, head: str, sections: Sequence[Section]) -> str:
    """Return the whole page. `head` and the bodies of the sections are HTML."""
    style = f"{CHART_STYLE}\n{_asset('page.css')}"
    script = _asset("page.js")
    # Only these hashes are allowed: no other script can run, and nothing can be fetched.
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<li><a href="#{one.anchor}">{escape(one.short)}</a></li>' for one in sections)
    bodies = "\n".join(
        f'<section id="{one.anchor}" aria-labelledby="{one.anchor}-title"><h2 id="{one.anchor}-title">'
        f"{escape(one.title)}</h2>\n{one.body}\n</section>"
        for one in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="{GENERATOR} {__version__}">
<title>{escape(title)}</title>
<style>{style}</style>
</head>
<body>
<div class="glass" aria-hidden="true"></div>
<header>{head}</header>
<nav aria-label="Sections"><ul>{links}</ul></nav>
<main>
{bodies}
</main>
<footer>Generated by vitrail {__version__}. This file is self-contained: share, archive or print it as is.</footer>
<script>{script}</script>
</body>
</html>
"""


def table(
    columns: Sequence[Column],
    rows: Sequence[Sequence[Cell]],
    *,
    caption: str,
    foot: Sequence[Cell] = (),
    sortable: bool = True,
) -> str:
    """Return a table that scrolls on narrow pages; clicking a column title sorts it."""
    heads = []
    for column in columns:
        kind = ' class="number"' if column.number else ""
        hint = f' title="{escape(column.hint)}"' if column.hint else ""
        title = escape(column.title)
        label = f'<button type="button"{hint}>{title}</button>' if sortable else f"<span{hint}>{title}</span>"
        heads.append(f'<th scope="col"{kind}>{label}</th>')
    lines = [_line(columns, row) for row in rows]
    last = f"<tfoot>{_line(columns, foot)}</tfoot>" if foot else ""
    kind = "sortable" if sortable else "plain"
    return (
        f'<div class="scroller"><p class="hint" aria-hidden="true">More columns to the right: scroll the table →</p>'
        f'<div class="box" tabindex="0" role="group" aria-label="{escape(caption)}"><table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{''.join(heads)}</tr></thead>"
        f"<tbody>{''.join(lines)}</tbody>{last}</table></div></div>"
    )


def _line(columns: Sequence[Column], row: Sequence[Cell]) -> str:
    cells = []
    for place, (column, cell) in enumerate(zip(columns, row, strict=True)):
        kind = ' class="number"' if column.number else ""
        key = "" if cell.key is None else f' data-key="{escape(str(cell.key))}"'
        tag = 'th scope="row"' if place == 0 else "td"
        cells.append(f"<{tag}{kind}{key}>{cell.shown}</{tag.partition(' ')[0]}>")
    return f"<tr>{''.join(cells)}</tr>"


def chart(svg: str, caption: str = "", *, wide: bool = False) -> str:
    """Return a chart with an optional caption."""
    below = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    kind = 'drawn wide" tabindex="0' if wide else "drawn"  # scrollable content must be focusable
    return f'<figure class="{kind}">{svg}{below}</figure>'


def embedded_image(image: "Image.Image", alt: str, *, exact: bool = False) -> str:
    """Return an image as a data URL: JPEG, or with `exact` PNG, for sharp edges and flat colours."""
    buffer, kind = io.BytesIO(), "png" if exact else "jpeg"
    if exact:
        image.save(buffer, "PNG", optimize=True)
    else:
        image.convert("RGB").save(buffer, "JPEG", quality=QUALITY, optimize=True)
    content = base64.b64encode(buffer.getvalue()).decode("ascii")
    return (
        f'<img src="data:image/{kind};base64,{content}" alt="{escape(alt)}" width="{image.width}" '
        f'height="{image.height}">'
    )


def name(text: str) -> str:
    """Return a name as HTML, isolated so that right-to-left names do not reorder the text around them."""
    return f"<bdi>{escape(text)}</bdi>"


def path(text: str) -> str:
    """Return a path as HTML, with its components in order even if some are right-to-left."""
    return "/".join(map(name, text.split("/")))


def absent(sentence: str) -> str:
    """Return a placeholder that explains why something is missing."""
    return f'<p class="absent">{escape(sentence)}</p>'


def paragraph(text: str, kind: str = "") -> str:
    """Return text as a paragraph."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</p>"


def warnings(sentences: Sequence[str]) -> str:
    """Return warnings as paragraphs, each made a full sentence."""
    return "".join(paragraph(ended(f"{text[:1].upper()}{text[1:]}"), "warn") for text in sentences)


def _asset(file: str) -> str:
    return files("vitrail.reports").joinpath(file).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
