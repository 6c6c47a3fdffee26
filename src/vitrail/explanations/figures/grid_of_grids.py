"""Drawing a grid of grids: for every patch a map over all patches, where the patch lies."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.explanations.figures.colours import INK, PALE, PAPER, coloured
from vitrail.models.config import ViTConfig

CHOICES = (16, 12, 8, 6, 4)
"""Most rows and columns of patches whose maps are drawn; fewer of them where the maps would be too thin to see."""
THINNEST = 8
"""Least pixels along a side of a map, where that is possible."""
LARGEST_MAP, LARGEST_PATCH = 64, 24
"""Most pixels along a side of a map whose grid is larger than that, and of one patch in a small one."""
ROOM, ROOM_OF_MANY = 840, 440
"""About how many pixels the maps are wide or high, all together."""
MARGIN, TEXT, SCALE = 20, 34, 220
"""In pixels: around all, the size of letters (a phone shows a third of it), and the width of the scale of colours."""
COLUMN, ROW = "column of the patch", "row of the patch"
LEAST_HEIGHT = 220
"""In pixels, so that the scale of colours has room."""


class MapGrid(NamedTuple):
    """Whose maps are drawn, and how large."""

    rows: list[int]
    columns: list[int]
    down: int
    across: int
    """The height and width of one map, in pixels."""


def arranged(config: ViTConfig, room: int) -> MapGrid:
    """Choose which maps are drawn, and their size; a map has the shape of the image."""
    height, width = config.grid
    tall = min(4.0, max(0.25, config.patch_size[0] / config.patch_size[1]))
    # Of a patch: the shorter side is 1, so that no patch is lost where the image is drawn as small as can be.
    patch = (tall, 1.0) if tall >= 1 else (1.0, 1 / tall)
    shrink = LARGEST_MAP / max(height * patch[0], width * patch[1], LARGEST_MAP)
    for most in CHOICES:
        rows, columns = evenly(height, most), evenly(width, most)
        zoom = min(room / (len(rows) * height * patch[0]), room / (len(columns) * width * patch[1]))
        scale = max(shrink, min(LARGEST_PATCH / max(patch), float(int(zoom))))
        down, across = (max(THINNEST // 2, round(n * side * scale)) for n, side in zip(config.grid, patch, strict=True))
        if min(down, across) >= THINNEST:
            break
    return MapGrid(rows, columns, down, across)


def panel(similar: NDArray[np.float64], maps: MapGrid, heading: str) -> Image.Image:
    """Draw maps (R, C, rows, columns), each where its patch lies, with the numbers of rows and columns beside them."""
    rows, columns, down, across = maps
    gap = max(3, min(down, across) // 10)
    left, top = round(_font().getlength("000")) + 2 * TEXT, (2 * TEXT if heading else 0)
    width, height = len(columns) * (across + gap) - gap, len(rows) * (down + gap) - gap
    size = (left + max(width, round(_font().getlength(COLUMN))), top + height + 3 * TEXT + TEXT // 2)
    sheet = Image.new("RGB", size, PAPER)
    if heading:
        font = ImageFont.load_default(size=TEXT * 1.15)
        ImageDraw.Draw(sheet).text((left, TEXT), heading, fill=INK, font=font, anchor="ls")
    pixels = coloured(similar, -1, 1)
    smaller = down < similar.shape[2] or across < similar.shape[3]
    method = Image.Resampling.BOX if smaller else Image.Resampling.NEAREST
    for r in range(len(rows)):
        for c in range(len(columns)):
            tile = Image.fromarray(pixels[r, c]).resize((across, down), method)
            sheet.paste(tile, (left + c * (across + gap), top + r * (down + gap)))
    _write_beside(sheet, maps, gap, (left, top, width, height))
    return sheet


def _write_beside(sheet: Image.Image, maps: MapGrid, gap: int, inner: tuple[int, int, int, int]) -> None:
    """Write the numbers of rows and columns, as many as have room, and what they are."""
    pen, font = ImageDraw.Draw(sheet), _font()
    left, top, width, height = inner
    bottom = top + height
    for c in evenly(len(maps.columns), max(2, width // round(font.getlength("000")))):
        place = (left + c * (maps.across + gap) + maps.across / 2, bottom + TEXT * 1.3)
        pen.text(place, str(maps.columns[c] + 1), fill=PALE, font=font, anchor="ms")
    for r in evenly(len(maps.rows), max(2, height // (TEXT + 2))):
        place = (left - 8, top + r * (maps.down + gap) + maps.down / 2)
        pen.text(place, str(maps.rows[r] + 1), fill=PALE, font=font, anchor="rm")
    fits = width > font.getlength(COLUMN)
    middle = left + (width / 2 if fits else 0)
    pen.text((middle, bottom + 2.7 * TEXT), COLUMN, fill=INK, font=font, anchor="ms" if fits else "ls")
    words = ROW if height > font.getlength(ROW) else ROW.partition(" ")[0]
    strip = Image.new("RGB", (round(font.getlength(words)), round(TEXT * 1.4)), PAPER)
    ImageDraw.Draw(strip).text((0, TEXT), words, fill=INK, font=font, anchor="ls")
    sheet.paste(strip.rotate(90, expand=True), (0, max(0, top + (height - strip.width) // 2)))


def joined(panels: list[Image.Image]) -> Image.Image:
    """Put panels side by side, two in a row, and the scale of colours to their right."""
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    width, height = panels[0].size
    size = (MARGIN + columns * (width + MARGIN) + SCALE, MARGIN + max(LEAST_HEIGHT, lines * (height + MARGIN)))
    sheet = Image.new("RGB", size, PAPER)
    for number, one in enumerate(panels):
        line, column = divmod(number, columns)
        sheet.paste(one, (MARGIN + column * (width + MARGIN), MARGIN + line * (height + MARGIN)))
    _draw_scale(sheet, (MARGIN + columns * (width + MARGIN), MARGIN), min(320, sheet.height - 2 * MARGIN))
    return sheet


def _draw_scale(sheet: Image.Image, place: tuple[int, int], length: int) -> None:
    """Draw which colour means which similarity."""
    pen, font = ImageDraw.Draw(sheet), _font()
    left, top = place
    pen.text((left, top + TEXT), "similarity", fill=INK, font=font, anchor="ls")
    start, bar = top + 2 * TEXT, max(24, length - 3 * TEXT)
    ramp = coloured(np.linspace(1, -1, bar), -1, 1)[:, None].repeat(22, axis=1)
    sheet.paste(Image.fromarray(ramp), (left, start))
    words = ((0, "1, the same"), (0.5, "0"), (1, "-1")) if bar > 4 * TEXT else ((0, "1"), (1, "-1"))
    for share, text in words:
        pen.text((left + 30, start + share * (bar - 1)), text, fill=PALE, font=font, anchor="lm")


def evenly(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` numbers evenly, the first and the last among them.

    >>> evenly(3, 5), evenly(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _font() -> "ImageFont.FreeTypeFont | ImageFont.ImageFont":
    return ImageFont.load_default(size=TEXT)
