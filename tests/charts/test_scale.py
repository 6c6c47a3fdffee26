"""The colours of a heat map: readable in every cell, and as strong as the fraction in both hues."""

import re
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from vitrail.charts.heat import heat_map
from vitrail.charts.svg import HUES, LEVELS, SCHEMES, STYLE, colour, contrast

SVG = "{http://www.w3.org/2000/svg}"
READABLE = 4.5
PAPER = {"light": (255, 255, 255), "dark": (0x15, 0x18, 0x1C)}
Colour = tuple[int, int, int]


def as_rgb(code: str) -> Colour:
    digits = code.lstrip("#")
    digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
    return int(digits[:2], 16), int(digits[2:4], 16), int(digits[4:], 16)


def fills(scheme: str) -> dict[str, Colour]:
    """Parse the fill colour of each class from the stylesheet; the dark scheme comes last and wins."""
    plain, _, dark = STYLE.partition("@media screen and (prefers-color-scheme:dark)")
    results: dict[str, Colour] = {}
    for part in (plain, dark) if scheme == "dark" else (plain,):
        results |= {
            name: as_rgb(code) for name, code in re.findall(r"\.chart (?:text)?\.([\w-]+)\{fill:(#\w+)\}", part)
        }
    return results


def strength(rgb: Colour, scheme: str) -> float:
    """Return the difference in lightness (CIE L*) between a colour and the page."""

    def lightness(one: Colour) -> float:
        y = (contrast(one, (0, 0, 0)) * 0.05) - 0.05
        return 116 * (y ** (1 / 3) if y > 0.008856 else 7.787 * y + 16 / 116) - 16

    return abs(lightness(rgb) - lightness(PAPER[scheme]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_cell_is_readable(scheme: str) -> None:
    """A matrix with every fraction, hits and errors: the text of every cell has a contrast of at least 4.5."""
    fractions = np.arange(1, 21).reshape(20, 1) / 20 * np.ones((1, 20))
    names = [f"c{i}" for i in range(20)]
    svg = heat_map(
        fractions.tolist(),
        counts=(100 * fractions).astype(int).tolist(),
        rows=names,
        columns=names,
        title="t",
        width=900,
    )
    colours, seen = fills(scheme), set()
    for cell in ET.fromstring(svg).iterfind(f"{SVG}g"):
        (rect,), (text,) = cell.findall(f"{SVG}rect"), cell.findall(f"{SVG}text")
        kind, written = str(rect.get("class")), str(text.get("class")).split()[0]
        seen.add(kind)
        assert contrast(colours[kind], colours[written]) >= READABLE, (kind, written)
    assert seen == {f"{kind}{step}" for kind in HUES for step in range(LEVELS)}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colour_strength_matches_the_fraction(scheme: str) -> None:
    colours = fills(scheme)
    hits, misses = ([strength(colours[f"{kind}{step}"], scheme) for step in range(LEVELS)] for kind in HUES)
    for each in (hits, misses):
        assert min(np.diff(each)) > 3, "every step is stronger than the one before"
    assert max(abs(np.subtract(hits, misses))) < 3, "hits and errors of one fraction are equally strong"
    assert misses[2] < hits[8] / 2, "an error of 20% is far from a hit of 80%"


def test_the_stylesheet_has_the_colours_of_the_scale() -> None:
    for scheme in SCHEMES:
        assert fills(scheme)["miss3"] == colour(scheme, "miss", 3)


def test_the_legend_is_inside_the_drawing() -> None:
    drawn = heat_map([[1.0, 0.0], [0.5, 0.5]], title="t", rows=["0", "1"], columns=["0", "1"])
    (right,) = re.findall(r'<text[^>]* x="([\d.]+)"[^>]*>wrong<', drawn)
    assert float(right) > 5 * 6.6  # five letters end there
