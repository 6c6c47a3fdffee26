"""Heat maps of tables, such as confusion matrices."""

from collections.abc import Sequence

from vitrail.charts.svg import HEAD, LEVELS, MARGIN, drawing, empty_drawing, level, number, text_at, titled

Names = tuple[Sequence[str], Sequence[str]]
Corner = tuple[float, float, float]
"""Left and top of the table, and the side of a cell."""

WRITTEN = 24
"""Up to this many rows and columns, each cell shows its number."""
NAMED = 60
"""Up to this many rows and columns, each has its name; above it, an index."""
LEGEND, LEGEND_WIDTH, LEGEND_WORD = 48, 280, 40
"""The size of the colour scale below a square table."""
MAX_TOOLTIPS = 400
"""How many cells of a large map, the strongest ones, have tooltips."""


def heat_map(
    fractions: Sequence[Sequence[float]],
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
    """Draw a table of fractions from 0 to 1; a stronger colour is a larger fraction. `counts` are shown in the cells.

    In a square table the diagonal, which in a confusion matrix holds the hits, has another hue. Both hues have the same
    scale, so that a strong colour is a large fraction, right or wrong. A large table is drawn without numbers, and with
    indices instead of names.
    """
    if not fractions or not fractions[0]:
        return empty_drawing(title, "nothing to draw", width=width, height=120, standalone=standalone)
    named = max(len(rows), len(columns)) <= NAMED
    letters = min(18, max(map(len, [*rows, *columns]))) if named else 4
    left, top = MARGIN + 16 + 6.6 * letters + 8, HEAD + 4.0 + (16 if x_label else 0)
    # Short column names are horizontal, long ones rotated.
    side = min(64.0, (width - left - MARGIN) / len(columns))
    turned = named and letters * 6.6 > side - 4
    top += 6.6 * letters + 10 if turned else 20
    bottom = top + side * len(rows)
    field = _with_numbers if max(len(rows), len(columns)) <= WRITTEN else _as_paths
    body = f'<rect class="blank" x="{number(left)}" y="{number(top)}" width="{number(side * len(columns))}" '
    body += f'height="{number(bottom - top)}"/>'
    body += field(fractions, counts, (rows, columns), (left, top, side))
    body += _names(rows, columns, (left, top, side), named=named, turned=turned)
    if x_label:
        body += text_at(left, HEAD + 14, x_label, style="quiet")
    if y_label:
        body += text_at(MARGIN + 10, top, y_label, style="quiet", anchor="end", turned=True)
    right = left + side * len(columns) + MARGIN
    if len(rows) == len(columns):
        legend_left = max(left, MARGIN + 7 + LEGEND_WORD)  # one-letter row names are narrower than the legend's labels
        body += _legend(legend_left, bottom + 14)
        bottom += LEGEND + 10
        right = max(right, legend_left + LEGEND_WIDTH)
    description = f"{len(rows):,} rows by {len(columns):,} columns"
    return drawing(
        body, title=title, description=description, width=max(right, 300), height=bottom + MARGIN, standalone=standalone
    )


def _kind(row: int, column: int, fraction: float, square: bool) -> str:
    """Return the colour class of a cell: off-diagonal cells of a square table are errors."""
    return f"{'miss' if square and row != column else 'hit'}{level(fraction)}"


def _legend(left: float, top: float) -> str:
    """Draw the colour scale: hits above errors, to show that both use the same scale."""
    box, elements = 18, []
    for row, (kind, word) in enumerate((("hit", "right"), ("miss", "wrong"))):
        y = top + 14 * row
        elements.append(text_at(left - 7, y + 10, word, style="quiet", anchor="end"))
        for step in range(LEVELS):
            elements.append(f'<rect class="{kind}{step}" x="{number(left + step * box)}" y="{number(y)}" ')
            elements.append(f'width="{box - 1}" height="12" rx="1"/>')
    for fraction in (0, 50, 100):
        elements.append(
            text_at(left + LEVELS * box * fraction / 100, top + 42, f"{fraction}%", style="quiet", anchor="middle")
        )
    elements.append(text_at(left + LEVELS * box + 24, top + 42, "of the row", style="quiet"))
    return "".join(elements)


def _with_numbers(
    fractions: Sequence[Sequence[float]], counts: Sequence[Sequence[int]] | None, names: Names, corner: Corner
) -> str:
    """Draw each cell with its number."""
    left, top, side = corner
    square, elements = len(names[0]) == len(names[1]), []
    for r, line in enumerate(fractions):
        for c, fraction in enumerate(line):
            if not fraction > 0:
                continue
            x, y = left + c * side, top + r * side
            tooltip = _tooltip(names[0][r], names[1][c], fraction, None if counts is None else counts[r][c])
            kind = _kind(r, c, fraction, square)
            elements.append(f'<g>{titled(tooltip)}<rect class="{kind}" x="{number(x + 0.5)}" ')
            elements.append(f'y="{number(y + 0.5)}" width="{number(side - 1)}" height="{number(side - 1)}" rx="2"/>')
            text = f"{counts[r][c]:,}" if counts is not None else f"{fraction:.2f}"
            style = f"on-{kind}" + (" small" if side < 34 or len(text) > 3 else "")
            if len(text) * 6 < side:
                elements.append(text_at(x + side / 2, y + side / 2 + 4, text, style=style, anchor="middle"))
            elements.append("</g>")
    return "".join(elements)


def _as_paths(
    fractions: Sequence[Sequence[float]], counts: Sequence[Sequence[int]] | None, names: Names, corner: Corner
) -> str:
    """Draw all cells of one colour as one path; separate cells of a 200×200 table would take megabytes."""
    left, top, side = corner
    square = len(names[0]) == len(names[1])
    cells = [(fraction, r, c) for r, line in enumerate(fractions) for c, fraction in enumerate(line) if fraction > 0]
    paths: dict[str, list[str]] = {}
    for fraction, r, c in cells:
        kind = _kind(r, c, fraction, square)
        paths.setdefault(kind, []).append(f"M{c} {r}h1v1h-1z")
    field = "".join(f'<path class="{kind}" d="{"".join(path)}"/>' for kind, path in paths.items())
    strongest = sorted((cell for cell in cells if cell[1] != cell[2] or not square), reverse=True)[:MAX_TOOLTIPS]
    tooltips = "".join(
        f'<rect x="{c}" y="{r}" width="1" height="1" fill-opacity="0">'
        f"{titled(_tooltip(names[0][r], names[1][c], fraction, None if counts is None else counts[r][c]))}</rect>"
        for fraction, r, c in strongest
    )
    return f'<g transform="translate({number(left)} {number(top)}) scale({side:.4f})">{field}{tooltips}</g>'


def _tooltip(row: str, column: str, fraction: float, count: int | None) -> str:
    return f"{row} → {column}: {'' if count is None else f'{count:,}, '}{100 * fraction:.1f}%"


def _names(rows: Sequence[str], columns: Sequence[str], corner: Corner, *, named: bool, turned: bool) -> str:
    left, top, side = corner
    small = "small" if side < 13 else ""
    elements = []
    for r, name in enumerate(rows):
        y = top + (r + 0.5) * side + 4
        if named:
            elements.append(text_at(left - 7, y, name, style=small, anchor="end", limit=18))
        elif r % 10 == 0:
            elements.append(text_at(left - 7, y, f"{r + 1}", style="quiet small", anchor="end"))
    for c, name in enumerate(columns):
        x = left + (c + 0.5) * side
        if named and turned:
            elements.append(text_at(x + 4, top - 7, name, style=small, turned=True, limit=18))
        elif named:
            elements.append(text_at(x, top - 7, name, style=small, anchor="middle", limit=18))
        elif c % 20 == 0:
            elements.append(text_at(x, top - 7, f"{c + 1}", style="quiet small", anchor="middle"))
    return "".join(elements)
