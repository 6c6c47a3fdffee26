"""Where to cut an image, as pure functions of its height, its width and a generator; and `cut`, which cuts."""

import math
from typing import Literal, NamedTuple

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.augmentation.draws import below, between

Range = tuple[float, float]
Beyond = Literal["nothing", "fill", "mirror"]
"""What a box that reaches beyond the image finds there."""


class Box(NamedTuple):
    """A rectangle in the pixels of an image; it may begin between two pixels, or outside."""

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
    """Cut an even share of the area, with an even logarithm of width / height: torchvision's inception crop.

    A shape that does not fit is drawn again, ten times at most; then the box is the largest at the centre whose ratio
    is allowed.
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
    """Draw the (height, width) of a box: area even, logarithm of width / height even; None if no try fits."""
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
    """Cut as TensorFlow's `sample_distorted_bounding_box` does: an even ratio, then an even height in whole pixels.

    The height lies between those that give the smallest and the largest area allowed, so small areas are more frequent
    than in `inception_crop`. What does not fit is drawn again, a hundred times at most; then it is the whole image.
    """
    smallest, largest = area[0] * height * width, area[1] * height * width
    for _ in range(100):
        drawn_ratio = between(generator, *ratio)
        lowest, highest = round(math.sqrt(smallest / drawn_ratio)), round(math.sqrt(largest / drawn_ratio))
        if round(highest * drawn_ratio) > width:
            highest = int((width + 0.5 - 1e-7) / drawn_ratio)
        highest = min(highest, height)
        h = highest if lowest >= highest else lowest + below(generator, highest - lowest + 1)
        # Rounding may have left the area just outside its limits; one row more or less brings it back.
        if h * round(h * drawn_ratio) < smallest:
            h += 1
        if h * round(h * drawn_ratio) > largest:
            h -= 1
        w = round(h * drawn_ratio)
        if smallest <= h * w <= largest and 0 < h <= height and 0 < w <= width:
            # The last row and column are left out as TensorFlow leaves them out, unless the box is as high or wide.
            return Box(below(generator, height - h), below(generator, width - w), h, w)
    return Box(0, 0, height, width)


def padded_crop(height: int, width: int, generator: Generator, padding: int = 4) -> Box:
    """Move a box of the image's own size by up to `padding` pixels each way; what lies outside is to be filled."""
    return Box(below(generator, 2 * padding + 1) - padding, below(generator, 2 * padding + 1) - padding, height, width)


def simple_crop(height: int, width: int, generator: Generator, size: tuple[int, int], padding: int = 4) -> Box:
    """Cut as 3-Augment does: resize until `size` is covered, pad by `padding` pixels, cut `size` anywhere.

    The box is given in the original image. What lies outside is to be filled by reflection, so the padding is never
    more than what an image of this size can reflect.
    """
    # Fractions of a pixel are dropped, as torchvision does.
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
    """Cut a box of a given size out of the middle; where the rest is odd, one pixel nearer to the top left."""
    return Box((height - box_height) // 2, (width - box_width) // 2, box_height, box_width)


def cut(
    image: Image.Image | NDArray[np.uint8],
    box: Box,
    size: tuple[int, int],
    resample: Image.Resampling,
    beyond: Beyond = "nothing",
    fill: int = 0,
) -> Image.Image:
    """Cut a box out of an image and resize it to `size`, which is (height, width).

    Only the pixels that the box touches are read, except with `mirror`, which stands for an image that is resized as
    a whole before it is cut: there the neighbours of the box have their part in the pixels at its edges.
    """
    height, width = image.size[::-1] if isinstance(image, Image.Image) else image.shape[:2]
    rows, columns = _inside(box.top, box.height, height, size[0]), _inside(box.left, box.width, width, size[1])
    if rows.last <= rows.first or columns.last <= columns.first:
        return Image.fromarray(np.full((*size, 3) if _has_colours(image) else size, fill, np.uint8))
    top, left, bottom, right = 0, 0, height, width
    if beyond != "mirror":
        top, left = math.floor(rows.start), math.floor(columns.start)
        bottom, right = math.ceil(rows.end), math.ceil(columns.end)
    region = _region(image, top, left, bottom, right)
    made = region.resize(
        (columns.last - columns.first, rows.last - rows.first),
        resample,
        box=(columns.start - left, rows.start - top, columns.end - left, rows.end - top),
    )
    return made if made.size == size[::-1] else _extended(made, rows.first, columns.first, size, beyond, fill)


class _Inside(NamedTuple):
    """The part of one side of a box that lies inside the image."""

    start: float
    """In pixels of the image."""
    end: float
    first: int
    """In pixels of what is made."""
    last: int


def _inside(start: float, length: float, image: int, made: int) -> _Inside:
    inside_start, inside_end = max(0.0, start), min(float(image), start + length)
    pixel = length / made
    return _Inside(inside_start, inside_end, round((inside_start - start) / pixel), round((inside_end - start) / pixel))


def _has_colours(image: Image.Image | NDArray[np.uint8]) -> bool:
    return image.mode == "RGB" if isinstance(image, Image.Image) else image.ndim == 3


def _region(image: Image.Image | NDArray[np.uint8], top: int, left: int, bottom: int, right: int) -> Image.Image:
    """Return whole pixels of an image as a Pillow image; of an array, no other pixel is copied."""
    if isinstance(image, np.ndarray):
        pixels = np.ascontiguousarray(image[top:bottom, left:right])
        # What `fromarray` does, without a copy it makes first.
        mode = "RGB" if pixels.ndim == 3 else "L"
        return Image.frombuffer(mode, (pixels.shape[1], pixels.shape[0]), pixels, "raw", mode, 0, 1)
    whole = (left, top, right, bottom) == (0, 0, *image.size)
    return image if whole else image.crop((left, top, right, bottom))


def _extended(part: Image.Image, top: int, left: int, size: tuple[int, int], beyond: Beyond, fill: int) -> Image.Image:
    """Put a part in its place in an image of `size`; the rest is filled, or mirrors the part."""
    if beyond == "mirror":
        pixels = np.asarray(part)
        margins = [(top, size[0] - top - part.height), (left, size[1] - left - part.width), (0, 0)][: pixels.ndim]
        return Image.fromarray(np.pad(pixels, margins, mode="reflect"))
    whole = Image.new(part.mode, size[::-1], (fill,) * len(part.getbands()))  # a third of the time that np.pad takes
    whole.paste(part, (left, top))
    return whole
