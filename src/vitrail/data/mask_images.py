"""Masks as images: files with a palette, and overlays on the image they belong to."""

import colorsys
import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.sources.masks import MOST_CLASSES
from vitrail.errors import InputError

FIRST = (
    (0, 114, 178), (230, 159, 0), (0, 158, 115), (204, 121, 167), (240, 228, 66), (86, 180, 233), (213, 94, 0),
    (150, 150, 150),
)  # fmt: skip
"""Colours that most people can tell apart (Okabe and Ito)."""
GOLDEN = 0.618033988749895
"""Hues that are apart by the golden ratio stay far from each other, however many there are."""
COVER = 55
"""How much of the image an overlay covers, in percent."""
ROWS = 256
"""Rows of an overlay that are computed at a time: its numbers are larger than the pixels of the image."""


def palette(classes: int) -> NDArray[np.uint8]:
    """Return a colour (K, 3) for each class, always the same."""
    if not 0 <= classes <= MOST_CLASSES:
        raise InputError(f"masks with {classes:,} classes cannot be drawn; there are at most {MOST_CLASSES}")
    more = [
        colorsys.hsv_to_rgb(number * GOLDEN % 1, 0.55 + 0.15 * (number % 3), 0.65 + 0.15 * (number % 2))
        for number in range(max(0, classes - len(FIRST)))
    ]
    return np.array([*FIRST, *(np.rint(np.array(colour) * 255) for colour in more)], np.uint8)[:classes]


def mask_png(mask: NDArray[np.uint8], classes: int) -> bytes:
    """Return a mask (height, width) of class indices as a PNG file, whose pixel values are those indices.

    Its palette makes it readable for people; ignored pixels are white.
    """
    _check_mask(mask)
    image = Image.fromarray(mask)
    colours = np.full((256, 3), 255, np.uint8)
    colours[:classes] = palette(classes)
    image.putpalette(colours.tobytes())  # the mode becomes P, the values stay
    file = io.BytesIO()
    image.save(file, "PNG")  # optimize=True takes ten times as long and saves little
    return file.getvalue()


def overlay(pixels: NDArray[np.uint8], mask: NDArray[np.uint8], classes: int) -> NDArray[np.uint8]:
    """Return an image (height, width, 1 or 3) in the colours of its mask; ignored pixels stay as they are."""
    _check_mask(mask)
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[:2] != mask.shape or pixels.shape[2] not in (1, 3):
        raise InputError(
            f"an image of {pixels.dtype} and shape {pixels.shape} with a mask of shape {mask.shape}; use uint8, 1 or 3 "
            "channels, and the same size"
        )
    colours = np.zeros((256, 3), np.uint16)
    colours[:classes] = palette(classes) * np.uint16(COVER) + 50
    made = np.empty((*mask.shape, 3), np.uint8)
    for top in range(0, len(mask), ROWS):
        rows = slice(top, top + ROWS)
        made[rows] = _mixed(pixels[rows], mask[rows], colours, classes)
    return made


def _mixed(
    pixels: NDArray[np.uint8], mask: NDArray[np.uint8], colours: NDArray[np.uint16], classes: int
) -> NDArray[np.uint8]:
    shown = np.broadcast_to(pixels, (*mask.shape, 3))
    # In integers: several times as fast as in floats, for images of many megapixels.
    mixed = ((shown * np.uint16(100 - COVER) + colours[mask]) // 100).astype(np.uint8)
    drawn = mask < classes
    return mixed if drawn.all() else np.where(drawn[:, :, None], mixed, shown)


def _check_mask(mask: NDArray[np.uint8]) -> None:
    if mask.dtype != np.uint8 or mask.ndim != 2 or not mask.size:
        raise InputError(f"a mask of {mask.dtype} and shape {mask.shape}; use uint8 and (height, width)")
