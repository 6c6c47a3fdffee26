"""The page around a report: one file, no network, and only the script and the style that are meant to be in it."""

import base64
import hashlib
import io
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

from vitrail._version import __version__
from vitrail.charts.svg import STYLE as CHART_STYLE
from vitrail.charts.svg import escape
from vitrail.reports.formatting import ended

if TYPE_CHECKING:
    from PIL import Image

GENERATOR = "vitrail report"
"""By this a file says that it is a report and may be written anew."""
QUALITY = 88
WIDTH, HEIGHT = 440, 270
"""Of a chart: half the page, and small enough that its letters can be read on a phone."""


class Section(NamedTuple):
    """A part of a page."""

    mark: str
    """What an address calls it."""
    short: str
    """What the list of parts calls it."""
    title: str
    body: str
    """HTML."""


class Column(NamedTuple):
    """A column of a table."""

    title: str
    number: bool = False
    hint: str = ""


class Cell(NamedTuple):
    """What a table shows in a place, and by what it is sorted; without that, by what it shows."""

    shown: str
    """HTML."""
    key: float | str | None = None


def page(*, title: str, head: str, sections: Sequence[Section]) -> str:
    """Return a whole page. `head` is HTML; so are the bodies of the sections."""
    style = f"{CHART_STYLE}\n{_own('page.css')}"
    script = _own("page.js")
    # By their hashes: whatever a class is called, no other script can run and nothing can be fetched.
    policy = (
        f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    links = "".join(f'<li><a href="#{one.mark}">{escape(one.short)}</a></li>' for one in sections)
    bodies = "\n".join(
        f'<section id="{one.mark}" aria-labelledby="{one.mark}-title"><h2 id="{one.mark}-title">{escape(one.title)}'
        f"</h2>\n{one.body}\n</section>"
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
<nav aria-label="Parts of this page"><ul>{links}</ul></nav>
<main>
{bodies}
</main>
<footer>Made by vitrail {__version__}. This file needs nothing else: it can be sent, kept and printed as it is.</footer>
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
    """Return a table in a box of its own, which scrolls where the page is narrow; a click on a title sorts it."""
    heads = []
    for column in columns:
        kind = ' class="number"' if column.number else ""
        hint = f' title="{escape(column.hint)}"' if column.hint else ""
        title = escape(column.title)
        said = f'<button type="button"{hint}>{title}</button>' if sortable else f"<span{hint}>{title}</span>"
        heads.append(f'<th scope="col"{kind}>{said}</th>')
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
    """Return a chart with words below it."""
    words = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    kind = 'drawn wide" tabindex="0' if wide else "drawn"  # what scrolls must be reached by the keyboard
    return f'<figure class="{kind}">{svg}{words}</figure>'


def embedded_image(image: "Image.Image", alt: str, *, exact: bool = False) -> str:
    """Return an image that is in the page itself: as JPEG, or `exact` as PNG where edges and flat colours count."""
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
    """Return a name as HTML that does not turn around what stands beside it where it is written from right to left."""
    return f"<bdi>{escape(text)}</bdi>"


def path(text: str) -> str:
    """Return a path as HTML, its parts in their order whichever way each is written."""
    return "/".join(map(name, text.split("/")))


def absent(sentence: str) -> str:
    """Return what stands in the place of something that is missing."""
    return f'<p class="absent">{escape(sentence)}</p>'


def paragraph(text: str, kind: str = "") -> str:
    """Return text as a paragraph."""
    return f"<p{f' class={chr(34)}{kind}{chr(34)}' if kind else ''}>{escape(text)}</p>"


def warnings(sentences: Sequence[str]) -> str:
    """Return what must not be overlooked, a paragraph each; each becomes a whole sentence."""
    return "".join(paragraph(ended(f"{text[:1].upper()}{text[1:]}"), "warn") for text in sentences)


def _own(file: str) -> str:
    return files("vitrail.reports").joinpath(file).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"
