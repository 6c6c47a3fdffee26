"""Random crops: boxes as pure functions of height, width and a generator; and `cut`, which applies one."""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.augmentation.draws import below, between
from vitrail.data.augmentation.vectorised import can_resize, resized

Range = tuple[float, float]
Beyond = Literal["nothing", "fill", "mirror"]
"""How a box that extends beyond the image is padded."""


class Box(NamedTuple):
    """A rectangle in pixels; it may start between two pixels, or outside the image."""

    top: float
    left: float
    height: float
    width: float

    @property
    def bottom(self) -> float:
        """The first row below the box."""
        return self.top + self.height

    @property
    def right(self) -> float:
        """The first column to the right of the box."""
        return self.left + self.width


def inception_crop(
    height: int, width: int, generator: Generator, area: Range = (0.08, 1.0), ratio: Range = (3 / 4, 4 / 3)
) -> Box:
    """Crop with uniform area and uniform log aspect ratio: torchvision's inception crop.

    A shape that does not fit is redrawn, at most ten times; then the box is the largest centre crop with an allowed
    ratio.
    """
    shape = shape_that_fits(height, width, generator, area, ratio)
    if shape is not None:
        h, w = shape
        return Box(below(generator, height - h + 1), below(generator, width - w + 1), h, w)
    if width / height < ratio[0]:
        return centre(height, width, max(1, round(width / ratio[0])), width)
    if width / height > ratio[1]:
        return centre(height, width, height, max(1, round(height * ratio[1])))
    return Box(0, 0, height, width)


def shape_that_fits(
    height: int, width: int, generator: Generator, area: Range, ratio: Range, tries: int = 10
) -> tuple[int, int] | None:
    """Draw the (height, width) of a box with uniform area and uniform log aspect ratio; None if no try fits."""
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(tries):
        pixels = height * width * between(generator, *area)
        drawn_ratio = math.exp(between(generator, low, high))
        w, h = round(math.sqrt(pixels * drawn_ratio)), round(math.sqrt(pixels / drawn_ratio))
        if 0 < w <= width and 0 < h <= height:
            return h, w
    return None


def inception_crop_tf(
    height: int, width: int, generator: Generator, area: Range = (0.05, 1.0), ratio: Range = (0.75, 1.33)
) -> Box:
    """Crop like TensorFlow's `sample_distorted_bounding_box`: a uniform ratio, then a uniform integer height.

    The height is between those of the smallest and largest allowed area, so small areas are more frequent than in
    `inception_crop`. A shape that does not fit is redrawn, at most a hundred times; then it is the whole image.
    """
    smallest, largest = area[0] * height * width, area[1] * height * width
    for _ in range(100):
        drawn_ratio = between(generator, *ratio)
        lowest, highest = round(math.sqrt(smallest / drawn_ratio)), round(math.sqrt(largest / drawn_ratio))
        if round(highest * drawn_ratio) > width:
            highest = int((width + 0.5 - 1e-7) / drawn_ratio)
        highest = min(highest, height)
        h = highest if lowest >= highest else lowest + below(generator, highest - lowest + 1)
        # Rounding may push the area just outside its limits; one row more or less corrects that.
        if h * round(h * drawn_ratio) < smallest:
            h += 1
        if h * round(h * drawn_ratio) > largest:
            h -= 1
        w = round(h * drawn_ratio)
        if smallest <= h * w <= largest and 0 < h <= height and 0 < w <= width:
            # Like TensorFlow, never start so that the box ends at the last row or column, unless it is as high or wide.
            return Box(below(generator, height - h), below(generator, width - w), h, w)
    return Box(0, 0, height, width)


def padded_crop(height: int, width: int, generator: Generator, padding: int = 4) -> Box:
    """Shift a box of the image's size by up to `padding` pixels in each direction; the outside is filled."""
    return Box(below(generator, 2 * padding + 1) - padding, below(generator, 2 * padding + 1) - padding, height, width)


def simple_crop(height: int, width: int, generator: Generator, size: tuple[int, int], padding: int = 4) -> Box:
    """Crop like 3-Augment: resize to cover `size`, pad by `padding` pixels, crop `size` at random.

    The box is in pixels of the original image. The outside is filled by reflection, so the padding is at most what an
    image of this size can reflect.
    """
    # Truncate fractions of a pixel, like torchvision.
    if size[0] * width >= size[1] * height:
        resized = size[0], max(size[1], int(size[0] * width / height))
    else:
        resized = max(size[0], int(size[1] * height / width)), size[1]
    starts = []
    for covered, side in zip(resized, size, strict=True):
        edge = min(padding, (side - 1) // 2)
        starts.append(below(generator, covered + 2 * edge - side + 1) - edge)
    pixel_height, pixel_width = height / resized[0], width / resized[1]
    return Box(starts[0] * pixel_height, starts[1] * pixel_width, size[0] * pixel_height, size[1] * pixel_width)


def centre(height: int, width: int, box_height: int, box_width: int) -> Box:
    """Return a centre crop; an odd margin is rounded towards the top left."""
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def whole_pixels(box: Box, height: int, width: int) -> Box:
    """Round the edges of a box to pixels of the image of (height, width) that it is in."""
    top, left = min(round(box.top), height - 1), min(round(box.left), width - 1)
    bottom, right = min(max(round(box.bottom), top + 1), height), min(max(round(box.right), left + 1), width)
    return Box(top, left, bottom - top, right - left)


def cut(
    image: Image.Image | NDArray[np.uint8],
    box: Box,
    size: tuple[int, int],
    resample: Image.Resampling,
    beyond: Beyond = "nothing",
    fill: int = 0,
) -> Image.Image | NDArray[np.uint8]:
    """Crop a box and resize it to `size`, (height, width); an array where the vectorised kernel is used.

    Only the pixels of the box are read, except with `mirror`, which is equivalent to resizing the whole image before
    cropping: there, pixels next to the box contribute to its edges.
    """
    height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[:2]
    rows, columns = _inside(box.top, box.height, height, size[0]), _inside(box.left, box.width, width, size[1])
    if rows.last <= rows.first or columns.last <= columns.first:
        return Image.fromarray(np.full((*size, 3) if _has_colours(image) else size, fill, np.uint8))
    top, left, bottom, right = 0, 0, height, width
    if beyond != "mirror":
        top, left = math.floor(rows.start), math.floor(columns.start)
        bottom, right = math.ceil(rows.end), math.ceil(columns.end)
    target = (columns.last - columns.first, rows.last - rows.first)
    inside = (columns.start - left, rows.start - top, columns.end - left, rows.end - top)
    whole = inside == (0, 0, right - left, bottom - top) and target == size[::-1]
    if whole and isinstance(image, np.ndarray) and can_resize(image, resample):
        return resized(image[top:bottom, left:right], size, resample)
    made = _region(image, top, left, bottom, right).resize(target, resample, box=inside)
    return made if made.size == size[::-1] else _extended(made, rows.first, columns.first, size, beyond, fill)


class _Inside(NamedTuple):
    """The portion of one side of a box that is inside the image."""

    start: float
    """In pixels of the image."""
    end: float
    first: int
    """In pixels of the output."""
    last: int


def _inside(start: float, length: float, image: int, made: int) -> _Inside:
    inside_start, inside_end = max(0.0, start), min(float(image), start + length)
    pixel = length / made
    return _Inside(inside_start, inside_end, round((inside_start - start) / pixel), round((inside_end - start) / pixel))


def _has_colours(image: Image.Image | NDArray[np.uint8]) -> bool:
    return image.mode == "RGB" if isinstance(image, Image.Image) else image.ndim == 3


def _region(image: Image.Image | NDArray[np.uint8], top: int, left: int, bottom: int, right: int) -> Image.Image:
    """Return a region of whole pixels as a Pillow image; of an array, only that region is copied."""
    if isinstance(image, np.ndarray):
        pixels = np.ascontiguousarray(image[top:bottom, left:right])
        # Like `fromarray`, without its extra copy.
        mode = "RGB" if pixels.ndim == 3 else "L"
        return Image.frombuffer(mode, (pixels.shape[1], pixels.shape[0]), pixels, "raw", mode, 0, 1)
    complete = (left, top, right, bottom) == (0, 0, *image.size)
    return image if complete else image.crop((left, top, right, bottom))


def _extended(
    region: Image.Image, top: int, left: int, size: tuple[int, int], beyond: Beyond, fill: int
) -> Image.Image:
    """Paste a region into an image of `size`; the rest is filled, or mirrors the region."""
    if beyond == "mirror":
        pixels = np.asarray(region)
        margins = [(top, size[0] - top - region.height), (left, size[1] - left - region.width), (0, 0)][: pixels.ndim]
        return Image.fromarray(np.pad(pixels, margins, mode="reflect"))
    canvas = Image.new(region.mode, size[::-1], (fill,) * len(region.getbands()))  # three times faster than np.pad
    canvas.paste(region, (left, top))
    return canvas
