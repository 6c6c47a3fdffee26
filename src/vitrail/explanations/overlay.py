"""Maps as images: colours for numbers, laid over the image that was explained."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.errors import ConfigError

Floats = NDArray[np.floating[Any]]

HEAT = ((26, 22, 66), (82, 31, 122), (152, 42, 121), (214, 71, 92), (246, 124, 62), (252, 184, 66), (253, 244, 170))
"""From the least to the most; each is lighter than the one before, so that it also reads in grey."""
LEAST_SIDE = 224
"""Smaller images, such as digits of 8×8 pixels, are enlarged to this to be seen."""
GAP = 8
LABEL, CAPTION, MOST_LETTERS = 26, 36, 400
PAPER, INK = "#ffffff", "#22211f"


def heat(numbers: Floats) -> NDArray[np.uint8]:
    """Turn numbers from 0 to 1, of any shape, into colours (…, 3)."""
    places = np.linspace(0, 1, len(HEAT))
    table = np.array(HEAT, np.float64)
    colours = np.stack([np.interp(numbers, places, table[:, i]) for i in range(3)], axis=-1)
    return colours.round().astype(np.uint8)


def stretched(numbers: Floats) -> Floats:
    """Scale numbers so that the least is 0 and the most is 1; where all are the same, all are 0."""
    low, high = float(numbers.min()), float(numbers.max())
    return (numbers - low) / (high - low) if high > low else np.zeros_like(numbers)


def enlarged(image: Image.Image, side: int | None) -> Image.Image:
    """Return an image whose longer side is `side`; None leaves it as it is, unless it is too small to be seen."""
    longer = max(image.size)
    if side is not None and side < 1:
        raise ConfigError(f"side is {side}; it is the longer side of the image in pixels, 1 or more")
    request = max(longer, LEAST_SIDE) if side is None else side
    if request == longer:
        return image
    size = tuple(max(1, round(length * request / longer)) for length in image.size)
    # Pixels that are few stay squares, which is what the model sees; others are smoothed.
    kind = Image.Resampling.NEAREST if request >= 4 * longer else Image.Resampling.BICUBIC
    return image.resize((size[0], size[1]), kind)


def overlay(image: Image.Image, map: Floats, opacity: float, side: int | None) -> Image.Image:
    """Lay a map (rows, columns), or colours (rows, columns, 3) from 0 to 1, over an image."""
    if not 0 <= opacity <= 1:
        raise ConfigError(f"opacity is {opacity}; it goes from 0, the image alone, to 1, the map alone")
    ground = enlarged(image, side)
    layers = [map] if map.ndim == 2 else list(map.transpose(2, 0, 1))
    smooth = [_resized(layer if map.ndim == 3 else stretched(layer), ground.size) for layer in layers]
    colours = heat(smooth[0]) if map.ndim == 2 else (255 * np.stack(smooth, axis=-1)).round().astype(np.uint8)
    # The image turns grey as the map covers it, so that what has a colour has it from the map.
    grey = Image.blend(ground, ground.convert("L").convert("RGB"), opacity)
    return Image.blend(grey, Image.fromarray(colours), opacity)


def beside(images: Sequence[Image.Image]) -> Image.Image:
    """Put images of one height side by side."""
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    sheet = Image.new("RGB", (width, images[0].height), PAPER)
    left = 0
    for image in images:
        sheet.paste(image, (left, 0))
        left += image.width + GAP
    return sheet


def tiled(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Put images of one size on a sheet, row by row, each with its label above it."""
    columns = min(len(images), max(4, round(len(images) ** 0.5)))
    width, height = images[0].width + GAP, images[0].height + LABEL
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width + GAP, rows * height + GAP), PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=16)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        row, column = divmod(number, columns)
        left, top = GAP + column * width, row * height
        pen.text((left, top + LABEL - 4), label, fill=INK, font=font, anchor="ls")
        sheet.paste(image, (left, top + LABEL))
    return sheet


def captioned(sheet: Image.Image, text: str) -> Image.Image:
    """Write a line above a sheet, smaller or cut in its middle where it would be too wide; without text, as it is."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if not words:
        return sheet
    if len(words) > MOST_LETTERS:  # somebody's class name may be a book
        words = f"{words[: MOST_LETTERS // 2]}{words[-MOST_LETTERS // 2 :]}"
    room = sheet.width - 2 * GAP
    sizes = (20, 17, 14, 12)
    font = next((font for size in sizes if (font := _font(size)).getlength(words) <= room), _font(sizes[-1]))
    whole_text, kept = words, len(words)
    while font.getlength(words) > room and kept > 2:
        kept -= 1
        words = f"{whole_text[: kept // 2]}…{whole_text[len(whole_text) - (kept + 1) // 2 :]}"
    whole = Image.new("RGB", (sheet.width, sheet.height + CAPTION), PAPER)
    ImageDraw.Draw(whole).text((GAP, CAPTION - 11), words, fill=INK, font=font, anchor="ls")
    whole.paste(sheet, (0, CAPTION))
    return whole


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _resized(numbers: Floats, size: tuple[int, int]) -> Floats:
    """Bring a map to the size of an image, each number in the middle of its patch; what overshoots between is cut."""
    image = Image.fromarray(np.ascontiguousarray(numbers, np.float32))
    larger: Floats = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    return larger.clip(0, 1)
