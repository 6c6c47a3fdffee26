"""What can be done to an image's colours and shape: plain functions of a Pillow image and numbers, nothing random.

An image is colour (mode RGB) or grey (mode L), and stays so. What makes no sense on a grey image leaves it alone.
"""

import math
from collections.abc import Sequence

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the pixel at (x, y) is taken from (ax + by + c, dx + ey + f)."""

NEAREST, BILINEAR = Image.Resampling.NEAREST, Image.Resampling.BILINEAR


def brightness(image: Image.Image, factor: float) -> Image.Image:
    """Mix with black: 0 is black, 1 the image, 2 twice as bright."""
    return ImageEnhance.Brightness(image).enhance(factor)


def contrast(image: Image.Image, factor: float, level: int | None = None) -> Image.Image:
    """Mix with one even grey, which is the image's mean unless `level` gives it: 0 is that grey, 1 the image."""
    if level is None:
        return ImageEnhance.Contrast(image).enhance(factor)
    return Image.blend(Image.new(image.mode, image.size, _colour(image, level)), image, factor)


def saturation(image: Image.Image, factor: float) -> Image.Image:
    """Mix with the image in grey: 0 is grey, 1 the image."""
    return image if image.mode == "L" else ImageEnhance.Color(image).enhance(factor)


def sharpness(image: Image.Image, factor: float) -> Image.Image:
    """Mix with a smoothed image: 0 is smooth, 1 the image, 2 sharper."""
    return ImageEnhance.Sharpness(image).enhance(factor)


def hue(image: Image.Image, turn: float) -> Image.Image:
    """Turn the colours around the colour circle; -0.5 and 0.5 are both half a turn."""
    if image.mode == "L":
        return image
    shift = int(turn * 255)
    hues, saturations, values = image.convert("HSV").split()
    hues = hues.point([(value + shift) % 256 for value in range(256)])
    return Image.merge("HSV", (hues, saturations, values)).convert("RGB")


def grey(image: Image.Image) -> Image.Image:
    """Take the colours away; the image keeps its mode."""
    return image if image.mode == "L" else image.convert("L").convert("RGB")


def blur(image: Image.Image, radius: float) -> Image.Image:
    """Blur by a Gaussian whose standard deviation is `radius` pixels, as Pillow approximates it."""
    return image.filter(ImageFilter.GaussianBlur(radius))


def solarize(image: Image.Image, threshold: float) -> Image.Image:
    """Invert every value from the threshold up."""
    return _mapped(image, [value if value < threshold else 255 - value for value in range(256)])


def solarize_add(image: Image.Image, addition: int, threshold: float = 128) -> Image.Image:
    """Add to every value below the threshold, up to white."""
    return _mapped(image, [min(255, max(0, value + addition)) if value < threshold else value for value in range(256)])


def posterize(image: Image.Image, bits: int) -> Image.Image:
    """Keep only the first bits of every value, 0 to 8."""
    mask = 0xFF & ~(0xFF >> bits)
    return _mapped(image, [value & mask for value in range(256)])


def invert(image: Image.Image) -> Image.Image:
    """Turn the image into its negative."""
    return ImageOps.invert(image)


def equalize(image: Image.Image) -> Image.Image:
    """Spread the values of each channel until all are about as frequent."""
    return ImageOps.equalize(image)


def autocontrast(image: Image.Image) -> Image.Image:
    """Stretch each channel until its darkest value is 0 and its brightest 255."""
    return ImageOps.autocontrast(image)


def cutout(image: Image.Image, row: int, column: int, reach: int, fill: int = 128) -> Image.Image:
    """Cover a square that reaches `reach` pixels from (row, column) up, down, left and right, cut off at the edges."""
    top, left = max(0, row - reach), max(0, column - reach)
    bottom, right = min(image.height, row + reach), min(image.width, column + reach)
    covered = image.copy()
    if bottom > top and right > left:
        covered.paste(_colour(image, fill), (left, top, right, bottom))
    return covered


def rotate(image: Image.Image, degrees: float, fill: int = 0, resample: Image.Resampling = NEAREST) -> Image.Image:
    """Rotate counter-clockwise around the centre; the size stays, and what comes in from outside is filled."""
    return image.rotate(degrees, resample, fillcolor=_colour(image, fill))


def shear(
    image: Image.Image, along_x: float, along_y: float, fill: int = 0, resample: Image.Resampling = NEAREST
) -> Image.Image:
    """Move each row left by `along_x` of its number, and each column up by `along_y` of its number."""
    return affine(image, (1.0, along_x, 0.0, along_y, 1.0, 0.0), fill, resample)


def translate(image: Image.Image, right: int, down: int, fill: int = 0) -> Image.Image:
    """Move the image by whole pixels; what comes in from outside is filled."""
    return affine(image, (1.0, 0.0, float(-right), 0.0, 1.0, float(-down)), fill, NEAREST)


def affine(image: Image.Image, matrix: Matrix, fill: int = 0, resample: Image.Resampling = BILINEAR) -> Image.Image:
    """Take every pixel from where the matrix says; the size stays, and what lies outside the image is filled."""
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
    """Return the matrix that shears along x, enlarges, rotates clockwise around the centre, and then moves an image.

    Forwards that is (x, y) -> centre + move + scale R S ((x, y) - centre), with R a rotation and S a shear of
    determinant 1; Pillow wants to know where a pixel comes from, which is the inverse.
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
    """Replace every value by what the table holds for it, in each channel alike."""
    return image.point([*table] * len(image.getbands()))


def _colour(image: Image.Image, level: int) -> int | tuple[int, ...]:
    """Return a grey of the image's own mode."""
    return level if image.mode == "L" else (level,) * len(image.getbands())
