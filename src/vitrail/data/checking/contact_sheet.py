"""A contact sheet: a few images of each class with its name, for a first look at a dataset."""

import contextlib
import os
import unicodedata
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.data.augmentation.draws import draws
from vitrail.data.checking.survey import stored_format
from vitrail.data.decode import open_image
from vitrail.data.sources.masks import has_masks, mask_at
from vitrail.data.sources.source import Pixels, Source, reason_of
from vitrail.data.sources.targets import targets_of
from vitrail.errors import DataError
from vitrail.io import atomic_write
from vitrail.text import plural

MOST_CLASSES = 24
IMAGES = 7
"""Images per class."""
TILE, GAP, MARGIN, LINE = 124, 6, 32, 34
"""In pixels: a tile, the gap between two, the margin, and the line for a class name."""
ONE_COLUMN = 5
"""Up to this many classes are in one column, more in two."""
TRIES = 4
"""Images tried per tile before it stays empty."""
TINT = (255, 60, 0)
"""The colour over the pixels of a class, where images have masks."""
PAPER, INK, PALE, GROUND = "#fbfaf7", "#22211f", "#77736b", "#eeebe4"


class SheetRow(NamedTuple):
    """One class on the sheet."""

    name: str
    total: int
    images: list[Pixels]


def contact_sheet(source: Source, *, title: str, seed: int = 0) -> Image.Image:
    """Draw a sheet with random images, by `seed`, of each of the first classes of a source."""
    names, one, more_than_one = _names(source)
    rows = [_row(source, names, label, seed) for label in range(min(len(names), MOST_CLASSES))]
    columns = 1 if len(rows) <= ONE_COLUMN else 2
    block_width, block_height = IMAGES * (TILE + GAP) - GAP, LINE + TILE + 3 * GAP
    lines = -(-len(rows) // columns)
    top = MARGIN + 2 * LINE
    more = len(names) - len(rows)
    width = 2 * MARGIN + columns * block_width + (columns - 1) * MARGIN
    sheet = Image.new("RGB", (width, top + lines * block_height + (LINE if more else 0) + MARGIN // 2), PAPER)
    pen = ImageDraw.Draw(sheet)
    about = f"{len(source):,} images in {len(names):,} {more_than_one}"
    _write(pen, (MARGIN, MARGIN), drawable(title), about, size=26, width=width - 2 * MARGIN)
    for number, row in enumerate(rows):
        column, line = divmod(number, lines)  # fill the first column, then the second
        place = (MARGIN + column * (block_width + MARGIN), top + line * block_height)
        _draw_row(sheet, pen, place, row, block_width)
    if more:
        text = f"and {plural(more, f'more {one}', f'more {more_than_one}')}"
        pen.text((MARGIN, top + lines * block_height), text, fill=PALE, font=ImageFont.load_default(size=20))
    return sheet


def save_sheet(sheet: Image.Image, path: str | os.PathLike[str]) -> None:
    """Write a sheet as PNG, atomically."""
    path = Path(path)
    try:
        with atomic_write(path) as temporary:
            sheet.save(temporary, "PNG")
    except OSError as fault:
        raise DataError(f"the sheet {path} cannot be written: {reason_of(fault)}") from None


def _names(source: Source) -> tuple[tuple[str, ...], str, str]:
    """Return what the rows of a sheet show: classes, labels or ranges; and what one and several are called."""
    targets = targets_of(source)
    if targets is not None and targets.kind == "labels":
        return targets.names, "label", "labels"
    if targets is not None and targets.kind == "masks":
        return targets.names, "class", "classes"
    return (source.classes, "class", "classes") if targets is None else (source.classes, "range", "ranges")


def _row(source: Source, names: tuple[str, ...], label: int, seed: int) -> SheetRow:
    targets = targets_of(source)
    several, masks = targets is not None and targets.kind != "values", has_masks(source)
    has = targets.values[:, label] > 0 if targets is not None and several else source.labels == label
    members = np.flatnonzero(has)
    order = draws(seed, label, "sheet").permutation(len(members))[: IMAGES * TRIES]
    images: list[Pixels] = []
    for index in members[order].tolist():
        with contextlib.suppress(Exception):  # try another; `check_data` reports unreadable images
            pixels = _thumbnail(source.read(index))
            images.append(_tinted(pixels, mask_at(source, index) == label) if masks else pixels)
        if len(images) == IMAGES:
            break
    return SheetRow(drawable(names[label]) or f"class {label}", len(members), images)


def drawable(name: str) -> str:
    """Return a name in the characters of Pillow's font, without accents; empty if it has none of them.

    >>> drawable("café crème"), drawable("猫")
    ('cafe creme', '')
    """
    bare = "".join(c for c in unicodedata.normalize("NFKD", name) if not unicodedata.combining(c))
    text = bare.encode("ascii", "replace").decode()
    return text if text.strip("? ") else ""


def _thumbnail(stored: bytes | Pixels) -> Pixels:
    """Decode an image and fit it into a tile. A tiny one is enlarged by an integer factor, so that its pixels show."""
    image, channels = open_image(stored), stored_format(stored).channels
    ratio = TILE / max(image.height, image.width)
    pixels = image.pixels(channels, scale=min(1.0, ratio))
    if channels not in (1, 3):
        pixels = pixels[:, :, :3] if channels > 2 else pixels[:, :, :1]
    shown = Image.fromarray(np.ascontiguousarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])).convert("RGB")
    if ratio >= 2:
        factor = int(ratio)
        return np.asarray(shown.resize((shown.width * factor, shown.height * factor), Image.Resampling.NEAREST))
    size = (max(1, round(image.width * ratio)), max(1, round(image.height * ratio)))
    return np.asarray(shown.resize(size, Image.Resampling.LANCZOS))


def _tinted(pixels: Pixels, mask: NDArray[np.bool_]) -> Pixels:
    """Tint the pixels of a class."""
    height, width = pixels.shape[:2]
    here = np.asarray(Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST))
    return np.where(here[:, :, None], (pixels + np.array(TINT, np.uint16)) // 2, pixels).astype(np.uint8)


def _draw_row(sheet: Image.Image, pen: ImageDraw.ImageDraw, place: tuple[int, int], row: SheetRow, width: int) -> None:
    left, top = place
    _write(pen, place, row.name, f"{row.total:,}", size=20, width=width)
    for number, pixels in enumerate(row.images):
        corner = (left + number * (TILE + GAP), top + LINE)
        pen.rectangle((*corner, corner[0] + TILE - 1, corner[1] + TILE - 1), fill=GROUND)
        height, across = pixels.shape[:2]
        sheet.paste(Image.fromarray(pixels), (corner[0] + (TILE - across) // 2, corner[1] + (TILE - height) // 2))
    if not row.images:
        text = "no readable images among those tried" if row.total else "no images"
        pen.text((left, top + LINE), text, fill=PALE, font=ImageFont.load_default(size=18))


def _write(
    pen: ImageDraw.ImageDraw, place: tuple[int, int], name: str, remark: str, *, size: float, width: float
) -> None:
    """Write a name, shortened if too long, and a remark after it in a lighter colour."""
    font, small = ImageFont.load_default(size=size), ImageFont.load_default(size=size * 0.8)
    width -= small.getlength(remark) + size
    text = name
    while len(text) > 1 and font.getlength(text) > width:
        text = text[:-2] + "…"
    left, baseline = place[0], place[1] + size
    pen.text((left, baseline), text, fill=INK, font=font, anchor="ls")
    pen.text((left + font.getlength(text) + size / 2, baseline), remark, fill=PALE, font=small, anchor="ls")
