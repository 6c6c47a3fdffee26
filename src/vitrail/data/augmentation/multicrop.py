"""Multi-crop: several views of one image for self-supervised training, with DINO's augmentations (arXiv 2104.14294).

Two global views show most of the image, the local views a small portion at a lower resolution. Every view has its own
random generator, so no view changes with the number of the others.
"""

from collections.abc import Sequence as Many
from functools import lru_cache
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field, model_validator

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import (
    BLUR_RADIUS,
    Augmentation,
    AugmentationPlan,
    Chance,
    Jitter,
    Range,
    bernoulli,
    draw_jitter,
)
from vitrail.data.augmentation.draws import between, draws
from vitrail.data.augmentation.randaugment import Operation
from vitrail.errors import ConfigError
from vitrail.schema import Count, Frozen, Pair

Area = Range
"""Smallest and largest area of a view, as fractions of the image's."""
Colours = Literal["full", "jitter", "none"]
GLOBAL_VIEWS = 2
JITTER = Jitter(brightness=0.4, contrast=0.4, saturation=0.2, hue=0.1)
SOLARIZE_THRESHOLD = 128


class ColourChances(NamedTuple):
    """How likely each change of the colours is."""

    jitter: float = 0.8
    grey: float = 0.2
    blur: float = 0.0
    solarize: float = 0.0


FIRST_GLOBAL, SECOND_GLOBAL, LOCAL = (
    ColourChances(blur=1.0),
    ColourChances(blur=0.1, solarize=0.2),
    ColourChances(blur=0.5),
)
NO_COLOURS = ColourChances(jitter=0.0, grey=0.0)


class MultiCrop(Frozen):
    """The number, sizes and areas of the views. The size of global views is that of the model's images."""

    local_size: Pair
    """Height and width of local views, in pixels."""
    local_crops: Annotated[Count, Field(le=64)] = 6
    """Number of local views."""
    global_area: Area = (0.4, 1.0)
    """Range of the area of global views, as a fraction of the image's."""
    local_area: Area = (0.05, 0.4)
    """Range of the area of local views, as a fraction of the image's."""

    flip: Chance = 0.5
    """Probability of a horizontal flip."""
    colours: Colours = "full"
    """What changes the colours of views: `full` is colour jitter, grey, blur and solarisation; `jitter` leaves out blur
    and solarisation, which destroy tiny images."""

    @model_validator(mode="after")
    def _areas_are_fractions(self) -> Self:
        check_area("global_area", self.global_area)
        check_area("local_area", self.local_area)
        return self

    def views(self, size: tuple[int, int]) -> tuple["View", ...]:
        """Return the distribution of every view, global ones first; `size` is that of global views."""
        chances = (FIRST_GLOBAL, SECOND_GLOBAL, *(LOCAL,) * self.local_crops)
        return tuple(
            View(
                f"global view {number}" if number < GLOBAL_VIEWS else f"local view {number - GLOBAL_VIEWS}",
                size if number < GLOBAL_VIEWS else self.local_size,
                self.global_area if number < GLOBAL_VIEWS else self.local_area,
                self.flip,
                {"full": chance, "jitter": ColourChances(), "none": NO_COLOURS}[self.colours],
            )
            for number, chance in enumerate(chances)
        )


class View(NamedTuple):
    """From what one view is drawn."""

    name: str
    """The purpose of its draws."""
    size: tuple[int, int]
    area: tuple[float, float]
    flip: float
    """Probability of a horizontal flip."""
    chances: ColourChances


class PlannedView(NamedTuple):
    """All random choices for one view, and its size."""

    plan: AugmentationPlan
    size: tuple[int, int]


def check_area(name: str, area: tuple[float, float]) -> None:
    """Raise unless a range of areas is valid."""
    if area[0] > area[1]:
        raise ConfigError(f"{name} is {area}; put the smaller number first")
    if area[1] > 1:
        raise ConfigError(f"{name} is {area}; a view is at most the whole image, so use numbers up to 1")


def plan_views(
    crops: MultiCrop, height: int, width: int, size: tuple[int, int], seed: int, position: int
) -> tuple[PlannedView, ...]:
    """Draw the views of an image of (height, width) at a position of the stream: a pure function."""
    return tuple(
        PlannedView(_planned(view, height, width, draws(seed, position, view.name)), view.size)
        for view in crops.views(size)
    )


def _planned(view: View, height: int, width: int, generator: Generator) -> AugmentationPlan:
    plan = augment.plan(_geometry(view.area, view.flip), height, width, view.size, generator)
    return plan._replace(operations=_drawn_operations(view, generator))


@lru_cache(maxsize=16)  # two areas for millions of views
def _geometry(area: tuple[float, float], flip: float) -> Augmentation:
    return Augmentation(crop="inception", crop_area=area, interpolation="bicubic", flip=flip)


def _drawn_operations(view: View, generator: Generator) -> tuple[Operation, ...]:
    operations: list[Operation] = []
    chances = view.chances
    if bernoulli(chances.jitter, generator):
        operations += draw_jitter(JITTER, generator)
    if bernoulli(chances.grey, generator):
        operations.append(Operation("grey"))
    if bernoulli(chances.blur, generator):
        operations.append(Operation("blur", (between(generator, *BLUR_RADIUS),)))
    if bernoulli(chances.solarize, generator):
        operations.append(Operation("solarize", (SOLARIZE_THRESHOLD,)))
    return tuple(operations)


def decode_scale(views: Many[PlannedView]) -> float:
    """Return the scale at which no view needs to be enlarged because of decoding; may be above 1."""
    boxes = [(view.plan.box, view.size) for view in views if view.plan.box is not None]
    return max(max(size[0] / box.height, size[1] / box.width) for box, size in boxes)


def apply_views(views: Many[PlannedView], image: Image.Image | NDArray[Any]) -> list[NDArray[np.uint8]]:
    """Return the pixels of every view, (height, width, channels); the image may be decoded at a reduced scale."""
    return [augment.apply(view.plan, image, view.size) for view in views]
