"""RandAugment: a few operations drawn uniformly from a set, all of one magnitude.

Operations are drawn as plain values (`Operation`) and applied by `perform`. The two sets are those of published
results: the usual one is torchvision's, the other big_vision's.
"""

from functools import lru_cache
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from numpy.random import Generator
from PIL import Image
from pydantic import Field, model_validator

from vitrail.data.augmentation import colours
from vitrail.data.augmentation.draws import below
from vitrail.errors import ConfigError
from vitrail.schema import Count, Frozen

USUAL = (
    "identity", "shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "saturation", "contrast",
    "sharpness", "posterize", "solarize", "autocontrast", "equalize",
)  # fmt: skip
BIG_VISION = (
    "autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "saturation", "contrast", "brightness",
    "sharpness", "shear_x", "shear_y", "translate_x", "translate_y", "cutout", "solarize_add",
)  # fmt: skip
SIGNED_BY_BIG_VISION = frozenset({"rotate", "shear_x", "shear_y", "translate_x", "translate_y"})
SIGNED_USUALLY = SIGNED_BY_BIG_VISION | {"brightness", "saturation", "contrast", "sharpness"}
BINS = 31
"""Number of magnitudes of the usual set, starting at 0."""


class RandAugment(Frozen):
    """Number, magnitude and set of the operations."""

    layers: Annotated[Count, Field(le=16)] = 2
    """Number of operations per image, drawn with replacement."""
    magnitude: Annotated[float, Field(ge=0, le=30)] = 9
    """An integer from 0 to 30 for the usual set; big_vision's has its full strength at 10."""
    operations: Literal["usual", "big_vision"] = "usual"
    """`usual` is torchvision's set; `big_vision` is the set of AugReg and the plain baseline."""

    @model_validator(mode="after")
    def _usual_magnitudes_are_bins(self) -> Self:
        if self.operations == "usual" and self.magnitude != int(self.magnitude):
            raise ConfigError(
                f"randaugment.magnitude is {self.magnitude}; the usual operations have integer magnitudes from 0 to 30"
            )
        return self


class Operation(NamedTuple):
    """One operation with its parameters."""

    name: str
    values: tuple[float, ...] = ()


def draw(settings: RandAugment, size: tuple[int, int], generator: Generator) -> tuple[Operation, ...]:
    """Draw the operations for one image of (height, width)."""
    names = USUAL if settings.operations == "usual" else BIG_VISION
    choose = _usual if settings.operations == "usual" else _big_vision
    return tuple(
        choose(names[below(generator, len(names))], settings.magnitude, size, generator) for _ in range(settings.layers)
    )


@lru_cache(maxsize=256)  # a recipe needs the same few values for every image
def usual_magnitude(name: str, step: int, size: tuple[int, int]) -> float:
    """Return the parameter of one of the usual operations for a magnitude, before its sign is drawn."""
    match name:
        case "shear_x" | "shear_y":
            return _spaced(0.0, 0.3, step)
        case "translate_x" | "translate_y":
            return _spaced(0.0, 150.0 / 331.0 * (size[1] if name == "translate_x" else size[0]), step)
        case "rotate":
            return _spaced(0.0, 30.0, step)
        case "brightness" | "saturation" | "contrast" | "sharpness":
            return _spaced(0.0, 0.9, step)
        case "posterize":
            return 8 - round(step / ((BINS - 1) / 4))
        case "solarize":
            return _spaced(255.0, 0.0, step)
        case _:
            return 0.0


def _spaced(start: float, end: float, step: int) -> float:
    """Return one of 31 evenly spaced numbers like torchvision, in single precision and from the nearer end.

    The last digit matters where a number of pixels is then truncated to an integer.
    """
    single = np.float32
    stride = (single(end) - single(start)) / single(BINS - 1)
    if step < BINS // 2:
        return float(single(start) + stride * single(step))
    return float(single(end) - stride * single(BINS - 1 - step))


def _usual(name: str, magnitude: float, size: tuple[int, int], generator: Generator) -> Operation:
    """Draw the sign, and convert torchvision's magnitude to the operation's parameter."""
    value = usual_magnitude(name, int(magnitude), size)
    if name in SIGNED_USUALLY and below(generator, 2):
        value = -value
    match name:
        case "brightness" | "saturation" | "contrast" | "sharpness":
            return Operation(name, (1.0 + value,))
        case "translate_x" | "translate_y":
            return Operation(name, (int(value),))
        case "identity" | "autocontrast" | "equalize":
            return Operation(name)
        case _:
            return Operation(name, (value,))


def _big_vision(name: str, magnitude: float, size: tuple[int, int], generator: Generator) -> Operation:
    """Convert the magnitude to the operation's parameter like big_vision, and draw the sign or the position."""
    level = magnitude / 10
    sign = 1 if name in SIGNED_BY_BIG_VISION and below(generator, 2) else -1
    match name:
        case "rotate":
            return Operation(name, (sign * level * 30,))
        case "shear_x" | "shear_y":
            return Operation(name, (sign * level * 0.3,))
        case "translate_x" | "translate_y":
            return Operation(name, (sign * round(level * 100),))
        case "posterize":
            # TensorFlow shifts a byte by at most seven bits, so one bit always stays.
            return Operation(name, (min(8, max(1, int(level * 4))),))
        case "solarize":
            # big_vision compares bytes, in which 256 wraps to 0: from magnitude 10 on, the whole image is inverted.
            return Operation(name, (int(level * 256) % 256,))
        case "solarize_add":
            return Operation(name, (int(level * 110),))
        case "contrast":
            # Meant to be the mean, but it is the number of pixels / 256, and all published results use that.
            return Operation(name, (level * 1.8 + 0.1, min(255, size[0] * size[1] // 256)))
        case "saturation" | "brightness" | "sharpness":
            return Operation(name, (level * 1.8 + 0.1,))
        case "cutout":
            return Operation(name, (below(generator, size[0]), below(generator, size[1]), int(level * 40)))
        case _:
            return Operation(name)


def perform(operation: Operation, image: Image.Image, fill: int = 0) -> Image.Image:
    """Apply an operation to an image; pixels from outside are filled."""
    match operation:
        case ("rotate", (degrees,)):
            return colours.rotate(image, degrees, fill)
        case ("shear_x", (factor,)):
            return colours.shear(image, factor, 0.0, fill)
        case ("shear_y", (factor,)):
            return colours.shear(image, 0.0, factor, fill)
        case ("translate_x", (pixels,)):
            return colours.translate(image, int(pixels), 0, fill)
        case ("translate_y", (pixels,)):
            return colours.translate(image, 0, int(pixels), fill)
        case ("cutout", (row, column, reach)):
            return colours.cutout(image, int(row), int(column), int(reach), fill)
        case _:
            return _recolour(operation, image)


def _recolour(operation: Operation, image: Image.Image) -> Image.Image:
    """Apply a colour operation."""
    match operation:
        case ("brightness", (factor,)):
            return colours.brightness(image, factor)
        case ("contrast", (factor,)):
            return colours.contrast(image, factor)
        case ("contrast", (factor, level)):
            return colours.contrast(image, factor, int(level))
        case ("saturation", (factor,)):
            return colours.saturation(image, factor)
        case ("sharpness", (factor,)):
            return colours.sharpness(image, factor)
        case ("hue", (turn,)):
            return colours.hue(image, turn)
        case ("blur", (radius,)):
            return colours.blur(image, radius)
        case ("posterize", (bits,)):
            return colours.posterize(image, int(bits))
        case ("solarize", (threshold,)):
            return colours.solarize(image, threshold)
        case ("solarize_add", (addition,)):
            return colours.solarize_add(image, int(addition))
        case ("grey", ()):
            return colours.grey(image)
        case ("autocontrast", ()):
            return colours.autocontrast(image)
        case ("equalize", ()):
            return colours.equalize(image)
        case ("invert", ()):
            return colours.invert(image)
        case ("identity", ()):
            return image
        case _:
            raise ValueError(f"unknown operation {operation}")
