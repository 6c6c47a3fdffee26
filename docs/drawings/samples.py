"""Draw the images that the explorer page offers to begin with: `python -m docs.drawings.samples`.

All of them are made here: three scenes painted by code, the boat of the documentation, and digits that come with the
package. So the page has something to show before anyone has found an image of their own.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
from docs.drawings.draw import paint
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFilter

from vitrail.data.sources.source import digits

TARGET = Path(__file__).parents[2] / "src" / "vitrail" / "serving" / "page" / "samples"
SIDE, FINE = 256, 4
DIGITS = (3, 7, 8)

Colour = tuple[int, int, int]
Point = tuple[float, float]


class Canvas:
    """An image in a unit square, painted larger than it is kept so that edges come out soft."""

    def __init__(self, above: Colour, below: Colour) -> None:
        side = SIDE * FINE
        slope = np.linspace(0, 1, side, dtype=np.float32)[:, None, None]
        ground = np.array(above, np.float32) * (1 - slope) + np.array(below, np.float32) * slope
        self.image = Image.fromarray(np.broadcast_to(ground, (side, side, 3)).astype(np.uint8).copy())

    def polygon(self, points: list[Point], colour: Colour) -> None:
        """Fill a polygon."""
        ImageDraw.Draw(self.image).polygon([(x * SIDE * FINE, y * SIDE * FINE) for x, y in points], fill=colour)

    def ellipse(self, x: float, y: float, across: float, down: float, colour: Colour, turn: float = 0) -> None:
        """Fill an ellipse of two radii, turned by an angle."""
        turns = [2 * math.pi * i / 90 for i in range(90)]
        c, s = math.cos(turn), math.sin(turn)
        rim = [(across * math.cos(t), down * math.sin(t)) for t in turns]
        self.polygon([(x + c * a - s * b, y + s * a + c * b) for a, b in rim], colour)

    def line(self, points: list[Point], colour: Colour, width: float) -> None:
        """Draw a line."""
        scaled = [(x * SIDE * FINE, y * SIDE * FINE) for x, y in points]
        ImageDraw.Draw(self.image).line(scaled, fill=colour, width=round(width * SIDE * FINE), joint="curve")

    def blur(self, radius: float) -> None:
        """Soften what was painted so far, as what lies far away is."""
        self.image = self.image.filter(ImageFilter.GaussianBlur(radius * SIDE * FINE))

    def finished(self) -> Image.Image:
        """Return the image in its size, with a little grain."""
        small = np.asarray(self.image.resize((SIDE, SIDE), Image.Resampling.LANCZOS)).astype(np.float32)
        grain = np.random.default_rng(4).normal(0, 2.2, (SIDE, SIDE, 1)).astype(np.float32)
        return Image.fromarray((small + grain).clip(0, 255).astype(np.uint8))


def shaded(colour: Colour, light: float) -> Colour:
    """Return a colour lighter (above 1) or darker."""
    r, g, b = (max(0, min(255, round(part * light))) for part in colour)
    return r, g, b


def balloon() -> Image.Image:
    """Paint a striped balloon over hills."""
    canvas = Canvas((92, 150, 214), (236, 226, 206))
    for x, y, size in ((0.16, 0.20, 0.10), (0.28, 0.23, 0.07), (0.86, 0.36, 0.09), (0.76, 0.39, 0.06)):
        canvas.ellipse(x, y, size, size * 0.36, (250, 248, 244))
    canvas.blur(0.012)
    for base, swell, phase, colour in (
        (0.74, 0.05, 0.3, (132, 160, 150)),
        (0.82, 0.04, 2.2, (92, 136, 98)),
        (0.90, 0.03, 4.0, (62, 108, 70)),
    ):
        ridge = [(i / 60, base + swell * math.sin(i / 60 * 7 + phase)) for i in range(61)]
        canvas.polygon([*ridge, (1, 1), (0, 1)], colour)
    stripes: list[Colour] = [(214, 62, 54), (246, 196, 74), (38, 108, 168), (246, 240, 226)]
    x, y, across, down = 0.53, 0.37, 0.245, 0.27

    def rim(share: float) -> list[Point]:
        """Return one seam of the balloon from its top to its mouth, at a share of the width from −1 to 1."""
        heights = [i / 50 for i in range(51)]
        narrowing = [math.sin(math.pi * (0.04 + 0.86 * h)) ** 0.72 * (1 - 0.16 * h) for h in heights]
        return [(x + across * share * n, y - down + 2.1 * down * h) for h, n in zip(heights, narrowing, strict=True)]

    seams = [math.sin(math.pi / 2 * (i / 5 - 1)) for i in range(11)]
    for i, (left, right) in enumerate(pairwise(seams)):
        light = 1.1 - 0.34 * abs((left + right) / 2 - (-0.3))
        canvas.polygon([*rim(left), *reversed(rim(right))], shaded(stripes[i % 4], light))
    mouth = y + 1.1 * down
    for side in (-1, 1):
        canvas.line([(x + side * 0.052, mouth - 0.005), (x + side * 0.038, mouth + 0.09)], (70, 52, 40), 0.004)
    canvas.polygon(
        [
            (x - 0.045, mouth + 0.085),
            (x + 0.045, mouth + 0.085),
            (x + 0.036, mouth + 0.145),
            (x - 0.036, mouth + 0.145),
        ],
        (134, 86, 48),
    )
    canvas.line([(x - 0.045, mouth + 0.09), (x + 0.045, mouth + 0.09)], (88, 54, 30), 0.012)
    return canvas.finished()


def goldfish() -> Image.Image:
    """Paint a goldfish among weeds."""
    canvas = Canvas((58, 138, 156), (14, 60, 84))
    for i in range(7):
        left = 0.1 + 0.14 * i
        canvas.polygon([(left, 0), (left + 0.05, 0), (left - 0.10, 0.8), (left - 0.22, 0.8)], (74, 154, 168))
    canvas.blur(0.03)
    for root, tall, lean in ((0.10, 0.52, 0.06), (0.18, 0.36, -0.05), (0.86, 0.46, -0.07), (0.94, 0.60, 0.05)):
        stem = [(root + lean * math.sin(h / 20 * 5), 1 - tall * h / 20) for h in range(21)]
        canvas.line(stem, (38, 104, 72), 0.022)
    canvas.ellipse(0.5, 1.06, 0.75, 0.15, (150, 134, 98))
    for tip, bend in (((0.90, 0.30), 0.40), ((0.95, 0.46), 0.50), ((0.90, 0.64), 0.58)):
        canvas.polygon([(0.64, 0.44), tip, (0.82, bend), (0.64, 0.54)], (248, 150, 52))
    canvas.polygon([(0.36, 0.36), (0.46, 0.20), (0.62, 0.26), (0.62, 0.40)], (244, 138, 40))
    canvas.polygon([(0.42, 0.60), (0.48, 0.74), (0.56, 0.60)], (244, 138, 40))
    for i in range(24):
        share = i / 24
        colour = (round(236 + 16 * share), round(104 + 78 * share), round(26 + 46 * share))
        canvas.ellipse(0.43 - 0.02 * share, 0.49 - 0.05 * share, 0.265 - 0.22 * share, 0.155 - 0.13 * share, colour)
    for row in range(5):
        for column in range(6):
            x, y = 0.36 + 0.045 * column + 0.02 * (row % 2), 0.42 + 0.036 * row
            if ((x - 0.43) / 0.235) ** 2 + ((y - 0.49) / 0.13) ** 2 < 1:
                arc = [(x + 0.02 * math.cos(t / 8), y + 0.02 * math.sin(t / 8)) for t in range(-10, 11)]
                canvas.line(arc, (216, 92, 22), 0.004)
    canvas.ellipse(0.255, 0.455, 0.034, 0.034, (252, 240, 214))
    canvas.ellipse(0.249, 0.455, 0.020, 0.020, (24, 22, 26))
    canvas.ellipse(0.243, 0.448, 0.006, 0.006, (255, 255, 255))
    canvas.line([(0.176, 0.515), (0.20, 0.525), (0.215, 0.522)], (150, 52, 12), 0.008)
    canvas.polygon([(0.38, 0.52), (0.50, 0.50), (0.52, 0.60), (0.44, 0.60)], (250, 164, 66))
    for x, y, size in ((0.13, 0.34, 0.018), (0.10, 0.26, 0.013), (0.14, 0.20, 0.010)):
        canvas.ellipse(x, y, size, size, (168, 214, 222))
        canvas.ellipse(x, y, size * 0.72, size * 0.72, (92, 164, 180))
    return canvas.finished()


def daisy() -> Image.Image:
    """Paint a daisy with a ladybird on a leaf."""
    canvas = Canvas((140, 178, 112), (70, 118, 66))
    random = np.random.default_rng(2)
    for x, y, size in random.random((40, 3)):
        canvas.ellipse(x, y, 0.03 + 0.09 * size, 0.03 + 0.09 * size, (round(90 + 70 * y), round(140 + 50 * x), 84))
    canvas.blur(0.035)
    canvas.line([(0.56, 0.42), (0.53, 0.70), (0.56, 1.02)], (62, 112, 48), 0.026)
    leaf = [(0.10 + 0.44 * i / 30, 0.80 - 0.09 * math.sin(math.pi * i / 30) - 0.05 * i / 30) for i in range(31)]
    under = [(0.10 + 0.44 * i / 30, 0.80 + 0.11 * math.sin(math.pi * i / 30) - 0.05 * i / 30) for i in range(31)]
    canvas.polygon([*leaf, *reversed(under)], (84, 146, 62))
    canvas.line([(0.10, 0.80), (0.54, 0.75)], (128, 182, 96), 0.006)
    for ring, count, length, colour in ((0, 17, 0.165, (222, 224, 232)), (1, 17, 0.155, (250, 250, 252))):
        for i in range(count):
            turn = 2 * math.pi * (i + ring / 2) / count
            x, y = 0.56 + 0.17 * math.cos(turn), 0.36 + 0.17 * math.sin(turn)
            canvas.ellipse(x, y, length * 0.72, 0.034, colour, turn)
    for i in range(12):
        share = i / 12
        canvas.ellipse(
            0.56 - 0.014 * share, 0.36 - 0.016 * share, 0.094 * (1 - share), 0.090 * (1 - share),
            (round(214 + 38 * share), round(142 + 68 * share), round(22 + 50 * share)),
        )  # fmt: skip
    canvas.ellipse(0.245, 0.735, 0.03, 0.03, (28, 24, 26))
    canvas.ellipse(0.30, 0.725, 0.068, 0.056, (204, 40, 32), -0.15)
    canvas.line([(0.236, 0.735), (0.366, 0.714)], (30, 22, 22), 0.007)
    for x, y in ((0.275, 0.70), (0.325, 0.695), (0.285, 0.752), (0.335, 0.742)):
        canvas.ellipse(x, y, 0.012, 0.012, (28, 22, 22))
    return canvas.finished()


def boat() -> Image.Image:
    """Return the stained-glass boat of the documentation."""
    return Image.fromarray(paint(SIDE))


def digit(label: int) -> Image.Image:
    """Return the first of the built-in digits that shows a number."""
    arrays = digits()
    pixels: NDArray[np.uint8] = np.asarray(arrays.images[int(np.flatnonzero(arrays.labels == label)[0])])
    return Image.fromarray(pixels.reshape(8, 8))


SCENES: dict[str, Callable[[], Image.Image]] = {"balloon": balloon, "goldfish": goldfish, "daisy": daisy, "boat": boat}


def main(target: Path = TARGET) -> None:
    """Write every sample."""
    target.mkdir(parents=True, exist_ok=True)
    # The numbers keep the order; the server leaves them out of the names.
    for place, (name, scene) in enumerate(SCENES.items(), start=1):
        scene().quantize(160, dither=Image.Dither.FLOYDSTEINBERG).save(target / f"{place}-{name}.png", optimize=True)
    for place, number in enumerate(DIGITS, start=1 + len(SCENES)):
        digit(number).save(target / f"{place}-digit-{number}.png", optimize=True)


if __name__ == "__main__":
    main()
