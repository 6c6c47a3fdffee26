"""Render maps as heatmaps over their image."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from vitrail.errors import ConfigError

Floats = NDArray[np.floating[Any]]

HEAT = ((26, 22, 66), (82, 31, 122), (152, 42, 121), (214, 71, 92), (246, 124, 62), (252, 184, 66), (253, 244, 170))
"""From low to high; lightness increases, so that it also works in greyscale."""
LEAST_SIDE = 224
"""Smaller images, such as 8×8 digits, are enlarged to this."""
GAP = 8
LABEL, CAPTION, MAX_CHARACTERS = 26, 36, 400
PAPER, INK = "#ffffff", "#22211f"


def heat(numbers: Floats) -> NDArray[np.uint8]:
    """Map numbers from 0 to 1, of any shape, to colours (…, 3)."""
    places = np.linspace(0, 1, len(HEAT))
    table = np.array(HEAT, np.float64)
    colours = np.stack([np.interp(numbers, places, table[:, i]) for i in range(3)], axis=-1)
    return colours.round().astype(np.uint8)


def stretched(numbers: Floats) -> Floats:
    """Scale numbers to the range 0 to 1; constant numbers become 0."""
    low, high = float(numbers.min()), float(numbers.max())
    return (numbers - low) / (high - low) if high > low else np.zeros_like(numbers)


def enlarged(image: Image.Image, side: int | None) -> Image.Image:
    """Resize an image to a longer side of `side`; None only enlarges images below `LEAST_SIDE`."""
    longer = max(image.size)
    if side is not None and side < 1:
        raise ConfigError(f"side is {side}; it is the longer side in pixels and should be 1 or more")
    target = max(longer, LEAST_SIDE) if side is None else side
    if target == longer:
        return image
    size = tuple(max(1, round(length * target / longer)) for length in image.size)
    # Tiny images keep square pixels, which is what the model sees; others are smoothed.
    kind = Image.Resampling.NEAREST if target >= 4 * longer else Image.Resampling.BICUBIC
    return image.resize((size[0], size[1]), kind)


def overlay(image: Image.Image, map: Floats, opacity: float, side: int | None) -> Image.Image:
    """Overlay a map (rows, columns), or colours (rows, columns, 3) from 0 to 1, on an image."""
    if not 0 <= opacity <= 1:
        raise ConfigError(f"opacity is {opacity}; it should be from 0 (only the image) to 1 (only the map)")
    ground = enlarged(image, side)
    layers = [map] if map.ndim == 2 else list(map.transpose(2, 0, 1))
    smooth = [_resized(layer if map.ndim == 3 else stretched(layer), ground.size) for layer in layers]
    colours = heat(smooth[0]) if map.ndim == 2 else (255 * np.stack(smooth, axis=-1)).round().astype(np.uint8)
    # The image fades to grey as the map covers it, so that all colour comes from the map.
    grey = Image.blend(ground, ground.convert("L").convert("RGB"), opacity)
    return Image.blend(grey, Image.fromarray(colours), opacity)


def side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """Place images of equal height side by side."""
    width = sum(image.width for image in images) + GAP * (len(images) - 1)
    sheet = Image.new("RGB", (width, images[0].height), PAPER)
    left = 0
    for image in images:
        sheet.paste(image, (left, 0))
        left += image.width + GAP
    return sheet


def tiled(images: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    """Arrange images of equal size on a sheet, row by row, each below its label."""
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
    """Add a caption line above a sheet, smaller or shortened in the middle if too wide; empty text adds nothing."""
    words = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    if not words:
        return sheet
    if len(words) > MAX_CHARACTERS:  # class names may be arbitrarily long
        words = f"{words[: MAX_CHARACTERS // 2]}{words[-MAX_CHARACTERS // 2 :]}"
    width = sheet.width - 2 * GAP
    sizes = (20, 17, 14, 12)
    font = next((font for size in sizes if (font := _font(size)).getlength(words) <= width), _font(sizes[-1]))
    full_text, kept = words, len(words)
    while font.getlength(words) > width and kept > 2:
        kept -= 1
        words = f"{full_text[: kept // 2]}…{full_text[len(full_text) - (kept + 1) // 2 :]}"
    canvas = Image.new("RGB", (sheet.width, sheet.height + CAPTION), PAPER)
    ImageDraw.Draw(canvas).text((GAP, CAPTION - 11), words, fill=INK, font=font, anchor="ls")
    canvas.paste(sheet, (0, CAPTION))
    return canvas


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size=size)


def _resized(numbers: Floats, size: tuple[int, int]) -> Floats:
    """Resize a map to an image, each value at the centre of its patch; overshoot is clipped."""
    image = Image.fromarray(np.ascontiguousarray(numbers, np.float32))
    larger: Floats = np.asarray(image.resize(size, Image.Resampling.BICUBIC))
    return larger.clip(0, 1)
