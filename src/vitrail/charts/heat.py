"""Heat maps: a table of numbers as a field of colour."""

from collections.abc import Sequence

from vitrail.charts.scale import LEVELS, level
from vitrail.charts.svg import HEAD, MARGIN, drawing, empty_drawing, number, text_at, titled

WRITTEN = 24
"""Up to so many rows and columns each cell has its number written in it."""
NAMED = 60
"""Up to so many rows and columns each has its name beside it; more are counted."""
LEGEND, LEGEND_WIDTH, LEGEND_WORD = 48, 280, 40
"""The size of the scale below a square table."""
MOST_NOTES = 400
"""So many cells of a large map say their numbers when they are pointed at: the strongest."""


def heat_map(
    shares: Sequence[Sequence[float]],
    *,
    title: str,
    rows: Sequence[str],
    columns: Sequence[str],
    counts: Sequence[Sequence[int]] | None = None,
    x_label: str = "",
    y_label: str = "",
    width: float = 620,
    standalone: bool = True,
) -> str:
    """Draw a table of shares from 0 to 1; the stronger the colour, the more. `counts` are written into the cells.

    In a square table the diagonal has a hue of its own: in a confusion matrix it holds the hits. Both hues have one
    scale, so that a strong colour is a large share, right or wrong. A large
    table is drawn without numbers, and its rows are counted instead of named.
    """
    if not shares or not shares[0]:
        return empty_drawing(title, "there is nothing to draw", width=width, height=120, standalone=standalone)
    named = max(len(rows), len(columns)) <= NAMED
    letters = min(18, max(map(len, [*rows, *columns]))) if named else 4
    left, top = MARGIN + 16 + 6.6 * letters + 8, HEAD + 4.0 + (16 if x_label else 0)
    # Short names stand upright over their columns; long ones are turned.
    side = min(64.0, (width - left - MARGIN) / len(columns))
    turned = named and letters * 6.6 > side - 4
    top += 6.6 * letters + 10 if turned else 20
    bottom = top + side * len(rows)
    field = _written if max(len(rows), len(columns)) <= WRITTEN else _packed
    body = f'<rect class="blank" x="{number(left)}" y="{number(top)}" width="{number(side * len(columns))}" '
    body += f'height="{number(bottom - top)}"/>'
    body += field(shares, counts, (rows, columns), (left, top, side))
    body += _names(rows, columns, (left, top, side), named=named, turned=turned)
    if x_label:
        body += text_at(left, HEAD + 14, x_label, style="quiet")
    if y_label:
        body += text_at(MARGIN + 10, top, y_label, style="quiet", anchor="end", turned=True)
    right = left + side * len(columns) + MARGIN
    if len(rows) == len(columns):
        beside = max(left, MARGIN + 7 + LEGEND_WORD)  # names of one letter leave less room than the legend's words need
        body += _legend(beside, bottom + 14)
        bottom += LEGEND + 10
        right = max(right, beside + LEGEND_WIDTH)
    said = f"{len(rows):,} rows by {len(columns):,} columns"
    return drawing(
        body, title=title, description=said, width=max(right, 300), height=bottom + MARGIN, standalone=standalone
    )


Names = tuple[Sequence[str], Sequence[str]]
Place = tuple[float, float, float]
"""Left and top of a field, and the side of a cell."""


def _kind(row: int, column: int, share: float, square: bool) -> str:
    """Return the colour of a cell: off the diagonal of a square table stand errors, on the same scale as hits."""
    return f"{'miss' if square and row != column else 'hit'}{level(share)}"


def _legend(left: float, top: float) -> str:
    """Draw the scale: hits above errors, so that it is seen that both are measured alike."""
    box, parts = 18, []
    for row, (kind, said) in enumerate((("hit", "right"), ("miss", "wrong"))):
        y = top + 14 * row
        parts.append(text_at(left - 7, y + 10, said, style="quiet", anchor="end"))
        for step in range(LEVELS):
            parts.append(f'<rect class="{kind}{step}" x="{number(left + step * box)}" y="{number(y)}" ')
            parts.append(f'width="{box - 1}" height="12" rx="1"/>')
    for share in (0, 50, 100):
        parts.append(text_at(left + LEVELS * box * share / 100, top + 42, f"{share}%", style="quiet", anchor="middle"))
    parts.append(text_at(left + LEVELS * box + 24, top + 42, "of the row", style="quiet"))
    return "".join(parts)


def _written(
    shares: Sequence[Sequence[float]], counts: Sequence[Sequence[int]] | None, names: Names, place: Place
) -> str:
    """Each cell with its number."""
    left, top, side = place
    square, parts = len(names[0]) == len(names[1]), []
    for r, line in enumerate(shares):
        for c, share in enumerate(line):
            if not share > 0:
                continue
            x, y = left + c * side, top + r * side
            said = _said(names[0][r], names[1][c], share, None if counts is None else counts[r][c])
            kind = _kind(r, c, share, square)
            parts.append(f'<g>{titled(said)}<rect class="{kind}" x="{number(x + 0.5)}" ')
            parts.append(f'y="{number(y + 0.5)}" width="{number(side - 1)}" height="{number(side - 1)}" rx="2"/>')
            shown = f"{counts[r][c]:,}" if counts is not None else f"{share:.2f}"
            style = f"on-{kind}" + (" small" if side < 34 or len(shown) > 3 else "")
            if len(shown) * 6 < side:
                parts.append(text_at(x + side / 2, y + side / 2 + 4, shown, style=style, anchor="middle"))
            parts.append("</g>")
    return "".join(parts)


def _packed(
    shares: Sequence[Sequence[float]], counts: Sequence[Sequence[int]] | None, names: Names, place: Place
) -> str:
    """All cells of one colour as one path: a table of 200 by 200 would be megabytes of single ones."""
    left, top, side = place
    square = len(names[0]) == len(names[1])
    cells = [(share, r, c) for r, line in enumerate(shares) for c, share in enumerate(line) if share > 0]
    paths: dict[str, list[str]] = {}
    for share, r, c in cells:
        kind = _kind(r, c, share, square)
        paths.setdefault(kind, []).append(f"M{c} {r}h1v1h-1z")
    field = "".join(f'<path class="{kind}" d="{"".join(path)}"/>' for kind, path in paths.items())
    loud = sorted((cell for cell in cells if cell[1] != cell[2] or not square), reverse=True)[:MOST_NOTES]
    notes = "".join(
        f'<rect x="{c}" y="{r}" width="1" height="1" fill-opacity="0">'
        f"{titled(_said(names[0][r], names[1][c], share, None if counts is None else counts[r][c]))}</rect>"
        for share, r, c in loud
    )
    return f'<g transform="translate({number(left)} {number(top)}) scale({side:.4f})">{field}{notes}</g>'


def _said(row: str, column: str, share: float, count: int | None) -> str:
    return f"{row} → {column}: {'' if count is None else f'{count:,}, '}{100 * share:.1f}%"


def _names(rows: Sequence[str], columns: Sequence[str], place: Place, *, named: bool, turned: bool) -> str:
    left, top, side = place
    small = "small" if side < 13 else ""
    parts = []
    for r, name in enumerate(rows):
        y = top + (r + 0.5) * side + 4
        if named:
            parts.append(text_at(left - 7, y, name, style=small, anchor="end", most=18))
        elif r % 10 == 0:
            parts.append(text_at(left - 7, y, f"{r + 1}", style="quiet small", anchor="end"))
    for c, name in enumerate(columns):
        x = left + (c + 0.5) * side
        if named and turned:
            parts.append(text_at(x + 4, top - 7, name, style=small, turned=True, most=18))
        elif named:
            parts.append(text_at(x, top - 7, name, style=small, anchor="middle", most=18))
        elif c % 20 == 0:
            parts.append(text_at(x, top - 7, f"{c + 1}", style="quiet small", anchor="middle"))
    return "".join(parts)
