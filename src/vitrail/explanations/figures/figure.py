"""`Figure`: a drawing with a caption; `Absent`: the reason why a model has none; and drawing a grid of grids."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.checkpoints.writing import atomic_file, check_target
from vitrail.errors import CheckpointError
from vitrail.models.config import ViTConfig

PAPER, INK, PALE, LINE = "#ffffff", "#22211f", "#6d6a63", "#d9d6cf"
# Monotonic in lightness, so that it also works in greyscale.
_RAMP = np.array(
    [(36, 22, 76), (44, 62, 130), (34, 106, 143), (28, 147, 136), (83, 186, 108), (171, 214, 70), (250, 232, 64)],
    np.float64,
)


def coloured(numbers: NDArray[np.floating], low: float, high: float) -> NDArray[np.uint8]:
    """Map numbers to colours, dark at `low` and bright at `high`: (…) becomes (…, 3)."""
    place = np.clip((np.asarray(numbers, np.float64) - low) / (high - low), 0, 1)
    steps = np.linspace(0, 1, len(_RAMP))
    return np.stack([np.interp(place, steps, _RAMP[:, c]) for c in range(3)], axis=-1).round().astype(np.uint8)


# ── figures ──


@dataclass(frozen=True)
class Figure:
    """A drawing, as pixels or SVG."""

    name: str
    """The file's stem: filters, positions, distance or rollout."""
    title: str
    caption: str
    """What it shows, and how it was computed."""
    image: Image.Image | None = None
    svg: str | None = None

    @property
    def file_name(self) -> str:
        """The name of its file."""
        return f"{self.name}.svg" if self.image is None else f"{self.name}.png"

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the drawing into a folder atomically, and return its path."""
        path = Path(folder) / self.file_name
        with atomic_file(path, overwrite=overwrite) as temporary:
            if self.image is not None:
                self.image.save(temporary, "PNG", optimize=True)
            else:
                temporary.write_text(self.svg or "", encoding="utf-8")
        return path


@dataclass(frozen=True)
class Absent:
    """A figure that a model does not have."""

    name: str
    title: str
    reason: str
    """Why there is none, and what there is instead."""


def check_writable(folder: Path, names: list[str], *, overwrite: bool) -> None:
    """Raise, before anything is computed, if writing would overwrite other files."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{folder} is a file, but figures need a folder; choose another name")
    for name in names:
        check_target(folder / name, overwrite=overwrite, folder=False)


# ── grid of grids ──

CHOICES = (16, 12, 8, 6, 4)
"""Candidates for the number of rows and columns of maps; the first at which maps are not too thin is used."""
THINNEST = 8
"""Minimum side of a map in pixels, where possible."""
LARGEST_MAP, LARGEST_PATCH = 64, 24
"""Maximum side in pixels of a map with a large grid, and of one patch in a small grid."""
EXTENT, EXTENT_OF_MANY = 840, 440
"""Approximate width or height of all maps together, in pixels: of a single panel, and of one of several."""
MARGIN, TEXT, SCALE = 20, 34, 220
"""In pixels: the margin, the font size (a phone shows a third of it), and the width of the colour scale."""
COLUMN, ROW = "column of the patch", "row of the patch"
LEAST_HEIGHT = 220
"""In pixels, so that the colour scale fits."""


class MapGrid(NamedTuple):
    """Which maps are drawn, and their size."""

    rows: list[int]
    columns: list[int]
    down: int
    across: int
    """The height and width of one map, in pixels."""


def arranged(config: ViTConfig, extent: int) -> MapGrid:
    """Choose which maps are drawn, and their size; a map has the aspect ratio of the image."""
    height, width = config.grid
    tall = min(4.0, max(0.25, config.patch_size[0] / config.patch_size[1]))
    # The shorter side of a patch is 1, so that no patch is lost at the smallest scale.
    patch = (tall, 1.0) if tall >= 1 else (1.0, 1 / tall)
    shrink = LARGEST_MAP / max(height * patch[0], width * patch[1], LARGEST_MAP)
    for most in CHOICES:
        rows, columns = evenly(height, most), evenly(width, most)
        zoom = min(extent / (len(rows) * height * patch[0]), extent / (len(columns) * width * patch[1]))
        scale = max(shrink, min(LARGEST_PATCH / max(patch), float(int(zoom))))
        down, across = (max(THINNEST // 2, round(n * side * scale)) for n, side in zip(config.grid, patch, strict=True))
        if min(down, across) >= THINNEST:
            break
    return MapGrid(rows, columns, down, across)


def panel(similar: NDArray[np.float64], maps: MapGrid, heading: str) -> Image.Image:
    """Draw maps (R, C, rows, columns), each at its patch's position, with row and column numbers."""
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
    _write_margins(sheet, maps, gap, (left, top, width, height))
    return sheet


def joined(panels: list[Image.Image]) -> Image.Image:
    """Arrange panels two per row, with the colour scale to their right."""
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


def evenly(count: int, most: int) -> list[int]:
    """Choose at most `most` of `count` indices evenly, including the first and the last.

    >>> evenly(3, 5), evenly(9, 3)
    ([0, 1, 2], [0, 4, 8])
    """
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]


def _write_margins(sheet: Image.Image, maps: MapGrid, gap: int, inner: tuple[int, int, int, int]) -> None:
    """Draw the axis labels, and as many row and column numbers as fit."""
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


def _draw_scale(sheet: Image.Image, place: tuple[int, int], length: int) -> None:
    """Draw the colour scale."""
    pen, font = ImageDraw.Draw(sheet), _font()
    left, top = place
    pen.text((left, top + TEXT), "similarity", fill=INK, font=font, anchor="ls")
    start, bar = top + 2 * TEXT, max(24, length - 3 * TEXT)
    ramp = coloured(np.linspace(1, -1, bar), -1, 1)[:, None].repeat(22, axis=1)
    sheet.paste(Image.fromarray(ramp), (left, start))
    words = ((0, "1, the same"), (0.5, "0"), (1, "-1")) if bar > 4 * TEXT else ((0, "1"), (1, "-1"))
    for position, text in words:
        pen.text((left + 30, start + position * (bar - 1)), text, fill=PALE, font=font, anchor="lm")


def _font() -> "ImageFont.FreeTypeFont | ImageFont.ImageFont":
    return ImageFont.load_default(size=TEXT)
