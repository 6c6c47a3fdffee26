"""Image operations: deterministic functions of a Pillow image and numbers.

An image is colour (mode RGB) or grey (mode L) and keeps its mode. Colour operations leave a grey image unchanged.
"""

import math
from collections.abc import Sequence

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the pixel at (x, y) is taken from (ax + by + c, dx + ey + f)."""

NEAREST, BILINEAR = Image.Resampling.NEAREST, Image.Resampling.BILINEAR


def brightness(image: Image.Image, factor: float) -> Image.Image:
    """Blend with black: 0 is black, 1 the image, 2 twice as bright."""
    return ImageEnhance.Brightness(image).enhance(factor)


def contrast(image: Image.Image, factor: float, level: int | None = None) -> Image.Image:
    """Blend with a uniform grey, by default the image's mean: 0 is that grey, 1 the image."""
    if level is None:
        return ImageEnhance.Contrast(image).enhance(factor)
    return Image.blend(Image.new(image.mode, image.size, _colour(image, level)), image, factor)


def saturation(image: Image.Image, factor: float) -> Image.Image:
    """Blend with the greyscale image: 0 is grey, 1 the image."""
    return image if image.mode == "L" else ImageEnhance.Color(image).enhance(factor)


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """Blend with the smoothed image: 0 is smooth, 1 the image, 2 sharper."""
    return ImageEnhance.Sharpness(image).enhance(factor)


def hue(image: Image.Image, turn: float) -> Image.Image:
    """Shift the hue; -0.5 and 0.5 are both half the colour circle."""
    if image.mode == "L":
        return image
    shift = int(turn * 255)
    hues, saturations, values = image.convert("HSV").split()
    hues = hues.point([(value + shift) % 256 for value in range(256)])
    return Image.merge("HSV", (hues, saturations, values)).convert("RGB")


def grey(image: Image.Image) -> Image.Image:
    """Convert to greyscale; the image keeps its mode."""
    return image if image.mode == "L" else image.convert("L").convert("RGB")


def blur(image: Image.Image, radius: float) -> Image.Image:
    """Gaussian blur with standard deviation `radius`, as Pillow approximates it."""
    return image.filter(ImageFilter.GaussianBlur(radius))


def solarize(image: Image.Image, threshold: float) -> Image.Image:
    """Invert every value at or above the threshold."""
    return _mapped(image, [value if value < threshold else 255 - value for value in range(256)])


def solarize_add(image: Image.Image, addition: int, threshold: float = 128) -> Image.Image:
    """Add to every value below the threshold, saturating at white."""
    return _mapped(image, [min(255, max(0, value + addition)) if value < threshold else value for value in range(256)])


def posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keep the most significant bits of every value, 0 to 8."""
    mask = 0xFF & ~(0xFF >> bits)
    return _mapped(image, [value & mask for value in range(256)])


def invert(image: Image.Image) -> Image.Image:
    """Invert the image."""
    return ImageOps.invert(image)


def equalize(image: Image.Image) -> Image.Image:
    """Equalise each channel's histogram."""
    return ImageOps.equalize(image)


def autocontrast(image: Image.Image) -> Image.Image:
    """Stretch each channel to the full range, 0 to 255."""
    return ImageOps.autocontrast(image)


def cutout(image: Image.Image, row: int, column: int, reach: int, fill: int = 128) -> Image.Image:
    """Cover a square of 2 × `reach` pixels around (row, column), clipped at the edges."""
    top, left = max(0, row - reach), max(0, column - reach)
    bottom, right = min(image.height, row + reach), min(image.width, column + reach)
    covered = image.copy()
    if bottom > top and right > left:
        covered.paste(_colour(image, fill), (left, top, right, bottom))
    return covered


def rotate(image: Image.Image, degrees: float, fill: int = 0, resample: Image.Resampling = NEAREST) -> Image.Image:
    """Rotate counter-clockwise around the centre; the size stays, and pixels from outside are filled."""
    return image.rotate(degrees, resample, fillcolor=_colour(image, fill))


def shear(
    image: Image.Image, along_x: float, along_y: float, fill: int = 0, resample: Image.Resampling = NEAREST
) -> Image.Image:
    """Shift each row left by `along_x` times its index, and each column up by `along_y` times its index."""
    return affine(image, (1.0, along_x, 0.0, along_y, 1.0, 0.0), fill, resample)


def translate(image: Image.Image, right: int, down: int, fill: int = 0) -> Image.Image:
    """Translate by whole pixels; pixels from outside are filled."""
    return affine(image, (1.0, 0.0, float(-right), 0.0, 1.0, float(-down)), fill, NEAREST)


def affine(image: Image.Image, matrix: Matrix, fill: int = 0, resample: Image.Resampling = BILINEAR) -> Image.Image:
    """Apply an affine transform; the size stays, and pixels from outside are filled."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=_colour(image, fill))


def affine_matrix(
    height: int,
    width: int,
    degrees: float = 0.0,
    right: float = 0.0,
    down: float = 0.0,
    scale: float = 1.0,
    shear_degrees: float = 0.0,
) -> Matrix:
    """Return the matrix that shears along x, scales, rotates clockwise around the centre, and then translates.

    The forward transform is (x, y) -> centre + translation + scale R S ((x, y) - centre), with R a rotation and S a
    shear of determinant 1; Pillow expects the inverse, from target to source pixels.
    """
    angle, slant = math.radians(degrees), math.tan(math.radians(shear_degrees))
    cos, sin = math.cos(angle), math.sin(angle)
    # The inverse of R S = [[cos, -cos slant - sin], [sin, -sin slant + cos]].
    a, b = (cos - sin * slant) / scale, (sin + cos * slant) / scale
    d, e = -sin / scale, cos / scale
    centre_x, centre_y = width / 2, height / 2
    back_x, back_y = -centre_x - right, -centre_y - down
    return a, b, a * back_x + b * back_y + centre_x, d, e, d * back_x + e * back_y + centre_y


def _mapped(image: Image.Image, table: Sequence[int]) -> Image.Image:
    """Apply a lookup table to every channel."""
    return image.point([*table] * len(image.getbands()))


def _colour(image: Image.Image, level: int) -> int | tuple[int, ...]:
    """Return a grey level in the image's mode."""
    return level if image.mode == "L" else (level,) * len(image.getbands())
