"""The colours of a heat map: fractions from 0 to 1 as colours of matching strength, in two hues.

Hits and errors have two hues and one scale: at the same fraction both have the same lightness and chroma in OKLCH, a
perceptually uniform colour space. So an error of 20% never looks as strong as a hit of 80%.
"""

import math
from typing import NamedTuple

LEVELS = 10
"""The number of colour steps of a heat map."""
HUES = {"hit": 245.0, "miss": 50.0}
"""Blue and orange, safe for colour-blind readers, in degrees."""


class Scheme(NamedTuple):
    """The lightness and chroma of the weakest and the strongest colour."""

    lightness: tuple[float, float]
    chroma: tuple[float, float]


SCHEMES = {"light": Scheme((0.93, 0.43), (0.035, 0.1)), "dark": Scheme((0.3, 0.84), (0.035, 0.1))}
"""More is darker on a light page, and lighter on a dark page."""


def level(fraction: float) -> int:
    """Return the colour step of a fraction.

    >>> level(0.0), level(0.2), level(0.8), level(1.0)
    (0, 2, 8, 9)
    """
    return min(LEVELS - 1, int(fraction * LEVELS + 1e-9))


def colour(scheme: str, kind: str, step: int) -> tuple[int, int, int]:
    """Return the RGB colour of a step, 0 to 255."""
    (dim, strong), (grey, vivid) = SCHEMES[scheme]
    fraction = step / (LEVELS - 1)
    return _rgb(dim + (strong - dim) * fraction, grey + (vivid - grey) * fraction, HUES[kind])


def ink(background: tuple[int, int, int]) -> str:
    """Return black or white, whichever has more contrast with a background: always at least 4.58 to 1."""
    light, dark = contrast((255, 255, 255), background), contrast((0, 0, 0), background)
    return "#fff" if light > dark else "#000"


def contrast(one: tuple[int, int, int], other: tuple[int, int, int]) -> float:
    """Return the contrast of two colours as WCAG 2 defines it, from 1 to 21.

    >>> round(contrast((0, 0, 0), (255, 255, 255)), 1)
    21.0
    """
    lights = sorted((_luminance(one), _luminance(other)))
    return (lights[1] + 0.05) / (lights[0] + 0.05)


def rules(scheme: str) -> str:
    """Return the CSS of all steps: fill colours and text colours."""
    css = []
    for kind in HUES:
        for step in range(LEVELS):
            made = colour(scheme, kind, step)
            code = "#{:02x}{:02x}{:02x}".format(*made)
            css.append(f".chart .{kind}{step}{{fill:{code}}}.chart text.on-{kind}{step}{{fill:{ink(made)}}}")
    return "".join(css)


def _luminance(rgb: tuple[int, int, int]) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (value / 255 for value in rgb)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _rgb(lightness: float, chroma: float, hue: float) -> tuple[int, int, int]:
    """Convert OKLCH to sRGB (Björn Ottosson's matrices)."""
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    middle = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * middle + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * middle - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * middle + 1.7076147010 * short,
    )
    red, green, blue = (
        round(255 * max(0.0, min(1.0, 12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055))) for c in linear
    )
    return red, green, blue
