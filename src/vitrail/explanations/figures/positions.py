"""How alike positions are (the paper's figure 7, centre): every patch's position embedding beside all others."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import Diverged, InputError
from vitrail.explanations.figures.colours import INK, PALE, PAPER, coloured
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.models.checks import read_layer
from vitrail.models.config import ViTConfig
from vitrail.models.position import read_table
from vitrail.models.vit import ViT

NAME, TITLE = "positions", "How alike positions are to the model"
MOST_SHOWN = 16
"""Most rows and columns of patches whose maps are drawn; of larger grids an even choice is."""
LARGEST_MAP = 64
"""Most pixels along a side of one map; larger grids are drawn smaller."""
WIDTH = 840
"""About how many pixels the maps are wide, all together."""
GAP, MARGIN, TEXT = 3, 20, 17
MOST_BLOCKS = 4
"""Where every block has a table of its own, so many are drawn."""
_INSTEAD = "the figure of attention distance shows how its heads use where patches lie"
_WHY = {
    "none": "this model is told nothing about where a patch lies (position 'none'), so it has no position "
    "embeddings to compare.",
    "rope_2d": "this model has no table of positions: it rotates queries and keys by where their patches lie (position "
    f"'rope_2d'); {_INSTEAD}.",
    "relative": "this model has no embedding for a position, but one for every offset between two patches (position "
    f"'relative'); {_INSTEAD}.",
}


def position_similarity(model: ViT, block: int = 0) -> NDArray[np.float64]:
    """Return the cosine similarity of all pairs of patches' position embeddings, (rows, columns, rows, columns).

    Entry [r, c] is a map over the grid: how alike the position of every patch is to that of the patch in row r and
    column c; a row of zeros is like nothing. Where every block has a table of its own, `block` says whose. InputError
    says why a model has no table.
    """
    grid = model.config.grid
    return _similarity(_directions(model, block), None).reshape(*grid, *grid)


def positions_figure(bundle: Bundle) -> Figure | Absent:
    """Draw the similarity of positions as a grid of grids."""
    model, config = bundle.model, bundle.model.config
    if config.position in _WHY:
        return Absent(NAME, TITLE, _WHY[config.position])
    if config.patches == 1:
        return Absent(NAME, TITLE, "the whole picture is one patch, so there is nothing to compare its position with.")
    blocks = _shown(config.depth, MOST_BLOCKS) if config.table_owner == "blocks" else [0]
    tables = {block: _directions(model, block) for block in blocks}
    if not any(table.any() for table in tables.values()):
        return Absent(NAME, TITLE, "the position embeddings are all zero: this model has not learned them yet.")
    rows, columns = (_shown(count, MOST_SHOWN) for count in config.grid)
    queries = np.array([row * config.grid[1] + column for row in rows for column in columns])
    panels = [
        _panel(
            _similarity(table, queries).reshape(len(rows), len(columns), *config.grid),
            rows,
            columns,
            f"block {block + 1}" if len(blocks) > 1 else "",
        )
        for block, table in tables.items()
    ]
    return Figure(NAME, TITLE, _caption(config, len(rows) * len(columns), blocks), picture=_joined(panels))


# ── numbers ──


def _directions(model: ViT, block: int) -> NDArray[np.float64]:
    """Return the patches' position embeddings, (N, D), each of length 1; zeros stay zeros."""
    config = model.config
    if config.position in _WHY:
        raise InputError(_WHY[config.position].removesuffix("."))
    number = read_layer(block, config.depth)
    owner = model.blocks[number] if config.table_owner == "blocks" else model
    with torch.no_grad():
        table = read_table(owner, config)[0, config.layout.patches].double().cpu().numpy()
    if not np.isfinite(table).all():
        raise Diverged("the position embeddings are not all finite numbers; the weights are damaged")
    # Scaled first, so that the squares of very small numbers do not vanish.
    largest = np.abs(table).max(axis=1, keepdims=True)
    table = table / np.where(largest > 0, largest, 1)
    length = np.linalg.norm(table, axis=1, keepdims=True)
    directions: NDArray[np.float64] = table / np.where(length > 0, length, 1)
    return directions


def _similarity(directions: NDArray[np.float64], queries: NDArray[np.int64] | None) -> NDArray[np.float64]:
    """Return the cosines of some positions, or of all, with all: (queries, N)."""
    chosen = directions if queries is None else directions[queries]
    return np.clip(chosen @ directions.T, -1, 1)


def _shown(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` numbers evenly, the first and the last among them.

    >>> _shown(3, 5), _shown(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


# ── drawing ──


def _panel(maps: NDArray[np.float64], rows: list[int], columns: list[int], heading: str) -> Image.Image:
    """Draw maps (R, C, rows, columns), each where its patch lies, with the numbers of rows and columns beside them."""
    height, width = maps.shape[2:]
    zoom = max(1, min(WIDTH // (width * len(columns)), WIDTH // (height * len(rows))))
    shrink = min(1.0, LARGEST_MAP / max(height, width))
    down, across = (max(1, round(side * zoom * shrink)) for side in (height, width))
    font = ImageFont.load_default(size=TEXT)
    left, top = round(font.getlength("000")) + 2 * TEXT, (2 * TEXT if heading else 0)
    inner = (len(columns) * (across + GAP) - GAP, len(rows) * (down + GAP) - GAP)
    words = "column of the patch"
    panel = Image.new(
        "RGB", (left + max(inner[0], round(font.getlength(words))), top + inner[1] + 3 * TEXT + TEXT // 2), PAPER
    )
    pen = ImageDraw.Draw(panel)
    if heading:
        pen.text((left, TEXT), heading, fill=INK, font=ImageFont.load_default(size=TEXT * 1.15), anchor="ls")
    pixels = coloured(maps, -1, 1)
    method = Image.Resampling.NEAREST if shrink == 1 else Image.Resampling.BOX
    for r in range(len(rows)):
        for c in range(len(columns)):
            tile = Image.fromarray(pixels[r, c]).resize((across, down), method)
            panel.paste(tile, (left + c * (across + GAP), top + r * (down + GAP)))
    room = round(font.getlength("000"))
    for c in _shown(len(columns), max(2, inner[0] // room)) if len(columns) > 1 else [0]:
        place = (left + c * (across + GAP) + across / 2, top + inner[1] + TEXT * 1.3)
        pen.text(place, str(columns[c] + 1), fill=PALE, font=font, anchor="ms")
    for r in _shown(len(rows), max(2, inner[1] // (TEXT + 2))) if len(rows) > 1 else [0]:
        place = (left - 8, top + r * (down + GAP) + down / 2)
        pen.text(place, str(rows[r] + 1), fill=PALE, font=font, anchor="rm")
    pen.text(
        (left + inner[0] / 2 if inner[0] > 200 else left, top + inner[1] + 2.7 * TEXT),
        words,
        fill=INK,
        font=font,
        anchor="ms" if inner[0] > 200 else "ls",
    )
    _write_upwards(panel, "row of the patch" if inner[1] > 160 else "row", (0, top + inner[1] // 2))
    return panel


def _write_upwards(panel: Image.Image, words: str, place: tuple[int, int]) -> None:
    """Write words that run from bottom to top, with their middle at `place`."""
    font = ImageFont.load_default(size=TEXT)
    width = round(font.getlength(words))
    strip = Image.new("RGB", (width, round(TEXT * 1.4)), PAPER)
    ImageDraw.Draw(strip).text((0, TEXT), words, fill=INK, font=font, anchor="ls")
    turned = strip.rotate(90, expand=True)
    panel.paste(turned, (place[0], max(0, place[1] - width // 2)))


def _joined(panels: list[Image.Image]) -> Image.Image:
    """Put panels side by side, two in a row, and the scale of colours to their right."""
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    width, height = panels[0].size
    scale = 130
    sheet = Image.new(
        "RGB", (2 * MARGIN + columns * (width + MARGIN) + scale, 2 * MARGIN + lines * (height + MARGIN) - MARGIN), PAPER
    )
    for number, panel in enumerate(panels):
        line, column = divmod(number, columns)
        sheet.paste(panel, (MARGIN + column * (width + MARGIN), MARGIN + line * (height + MARGIN)))
    _draw_scale(sheet, (MARGIN + columns * (width + MARGIN), MARGIN), min(240, sheet.height - 2 * MARGIN))
    return sheet


def _draw_scale(sheet: Image.Image, place: tuple[int, int], length: int) -> None:
    """Draw which colour means which similarity."""
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=TEXT)
    left, top = place
    pen.text((left, top + TEXT), "similarity", fill=INK, font=font, anchor="ls")
    start, bar = top + 2 * TEXT, max(24, length - 3 * TEXT)
    ramp = coloured(np.linspace(1, -1, bar), -1, 1)[:, None].repeat(22, axis=1)
    sheet.paste(Image.fromarray(ramp), (left, start))
    words = ((0, "1, the same"), (0.5, "0"), (1, "-1")) if bar > 4 * TEXT else ((0, "1"), (1, "-1"))
    for share, text in words:
        pen.text((left + 30, start + share * (bar - 1)), text, fill=PALE, font=font, anchor="lm")


def _caption(config: ViTConfig, drawn: int, blocks: list[int]) -> str:
    kind = {
        "learned_1d": "learned position embeddings",
        "learned_2d": "position embeddings, each joined from a learned one of its row and a learned one of its column,",
        "sincos_2d": "position embeddings, which are sines and cosines and were not learned,",
    }[config.position]
    rows, columns = config.grid
    where = (
        f"one for each of the {rows}×{columns} patches"
        if drawn == config.patches
        else (f"drawn for {drawn} of the {rows}×{columns} patches, chosen evenly")
    )
    own = ""
    if config.table_owner == "blocks":
        own = (
            f" Every block has a table of its own; shown {'are' if len(blocks) > 1 else 'is'} block"
            f"{'s' * (len(blocks) > 1)} {', '.join(str(block + 1) for block in blocks)} of {config.depth}."
        )
    return (
        f"Cosine similarity of {kind} as a grid of maps, {where}: the map in row r and column c shows how alike the "
        f"position of every patch is to that of the patch in row r and column c. A bright spot around a map's own "
        f"place means that near patches have like positions; a bright cross, that the model has found rows and "
        f"columns; one lone bright patch, that it has learned no neighbourhood.{own}"
    )
