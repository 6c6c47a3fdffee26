"""What can be done to a picture's colours and shape: plain functions of a Pillow picture and numbers, nothing random.

A picture is colour (mode RGB) or grey (mode L), and stays so. What makes no sense on a grey picture leaves it alone.
"""

import math
from collections.abc import Sequence

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Matrix = tuple[float, float, float, float, float, float]
"""(a, b, c, d, e, f): the pixel at (x, y) is taken from (ax + by + c, dx + ey + f)."""

NEAREST, BILINEAR = Image.Resampling.NEAREST, Image.Resampling.BILINEAR


def brightness(picture: Image.Image, factor: float) -> Image.Image:
    """Mix with black: 0 is black, 1 the picture, 2 twice as bright."""
    return ImageEnhance.Brightness(picture).enhance(factor)


def contrast(picture: Image.Image, factor: float, level: int | None = None) -> Image.Image:
    """Mix with one even grey, which is the picture's mean unless `level` gives it: 0 is that grey, 1 the picture."""
    if level is None:
        return ImageEnhance.Contrast(picture).enhance(factor)
    return Image.blend(Image.new(picture.mode, picture.size, _colour(picture, level)), picture, factor)


def saturation(picture: Image.Image, factor: float) -> Image.Image:
    """Mix with the picture in grey: 0 is grey, 1 the picture."""
    return picture if picture.mode == "L" else ImageEnhance.Color(picture).enhance(factor)


def sharpness(picture: Image.Image, factor: float) -> Image.Image:
    """Mix with a smoothed picture: 0 is smooth, 1 the picture, 2 sharper."""
    return ImageEnhance.Sharpness(picture).enhance(factor)


def hue(picture: Image.Image, turn: float) -> Image.Image:
    """Turn the colours around the colour circle; -0.5 and 0.5 are both half a turn."""
    if picture.mode == "L":
        return picture
    shift = int(turn * 255)
    hues, saturations, values = picture.convert("HSV").split()
    hues = hues.point([(value + shift) % 256 for value in range(256)])
    return Image.merge("HSV", (hues, saturations, values)).convert("RGB")


def grey(picture: Image.Image) -> Image.Image:
    """Take the colours away; the picture keeps its mode."""
    return picture if picture.mode == "L" else picture.convert("L").convert("RGB")


def blur(picture: Image.Image, radius: float) -> Image.Image:
    """Blur by a Gaussian whose standard deviation is `radius` pixels, as Pillow approximates it."""
    return picture.filter(ImageFilter.GaussianBlur(radius))


def solarize(picture: Image.Image, threshold: float) -> Image.Image:
    """Invert every value from the threshold up."""
    return _mapped(picture, [value if value < threshold else 255 - value for value in range(256)])


def solarize_add(picture: Image.Image, addition: int, threshold: float = 128) -> Image.Image:
    """Add to every value below the threshold, up to white."""
    return _mapped(
        picture, [min(255, max(0, value + addition)) if value < threshold else value for value in range(256)]
    )


def posterize(picture: Image.Image, bits: int) -> Image.Image:
    """Keep only the first bits of every value, 0 to 8."""
    mask = 0xFF & ~(0xFF >> bits)
    return _mapped(picture, [value & mask for value in range(256)])


def invert(picture: Image.Image) -> Image.Image:
    """Turn the picture into its negative."""
    return ImageOps.invert(picture)


def equalize(picture: Image.Image) -> Image.Image:
    """Spread the values of each channel until all are about as frequent."""
    return ImageOps.equalize(picture)


def autocontrast(picture: Image.Image) -> Image.Image:
    """Stretch each channel until its darkest value is 0 and its brightest 255."""
    return ImageOps.autocontrast(picture)


def cutout(picture: Image.Image, row: int, column: int, reach: int, fill: int = 128) -> Image.Image:
    """Cover a square that reaches `reach` pixels from (row, column) up, down, left and right, cut off at the edges."""
    top, left = max(0, row - reach), max(0, column - reach)
    bottom, right = min(picture.height, row + reach), min(picture.width, column + reach)
    covered = picture.copy()
    if bottom > top and right > left:
        covered.paste(_colour(picture, fill), (left, top, right, bottom))
    return covered


def rotate(picture: Image.Image, degrees: float, fill: int = 0, resample: Image.Resampling = NEAREST) -> Image.Image:
    """Rotate counter-clockwise around the centre; the size stays, and what comes in from outside is filled."""
    return picture.rotate(degrees, resample, fillcolor=_colour(picture, fill))


def shear(
    picture: Image.Image, along_x: float, along_y: float, fill: int = 0, resample: Image.Resampling = NEAREST
) -> Image.Image:
    """Move each row left by `along_x` of its number, and each column up by `along_y` of its number."""
    return affine(picture, (1.0, along_x, 0.0, along_y, 1.0, 0.0), fill, resample)


def translate(picture: Image.Image, right: int, down: int, fill: int = 0) -> Image.Image:
    """Move the picture by whole pixels; what comes in from outside is filled."""
    return affine(picture, (1.0, 0.0, float(-right), 0.0, 1.0, float(-down)), fill, NEAREST)


def affine(picture: Image.Image, matrix: Matrix, fill: int = 0, resample: Image.Resampling = BILINEAR) -> Image.Image:
    """Take every pixel from where the matrix says; the size stays, and what lies outside the picture is filled."""
    return picture.transform(picture.size, Image.Transform.AFFINE, matrix, resample, fillcolor=_colour(picture, fill))


def affine_matrix(
    height: int,
    width: int,
    degrees: float = 0.0,
    right: float = 0.0,
    down: float = 0.0,
    scale: float = 1.0,
    shear_degrees: float = 0.0,
) -> Matrix:
    """Return the matrix that shears along x, enlarges, rotates clockwise around the centre, and then moves a picture.

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


def _mapped(picture: Image.Image, table: Sequence[int]) -> Image.Image:
    """Replace every value by what the table holds for it, in each channel alike."""
    return picture.point([*table] * len(picture.getbands()))


def _colour(picture: Image.Image, level: int) -> int | tuple[int, ...]:
    """Return a grey of the picture's own mode."""
    return level if picture.mode == "L" else (level,) * len(picture.getbands())
