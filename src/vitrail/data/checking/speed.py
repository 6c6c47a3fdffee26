"""Throughput of reading, decoding and augmenting on one core, and what limits training on this machine."""

import math
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Any, Literal, NamedTuple

import numpy as np

from vitrail.data.augmentation import augment
from vitrail.data.augmentation.augment import Augmentation
from vitrail.data.augmentation.draws import draws
from vitrail.data.checking.survey import SurveyProgress, stored_format
from vitrail.data.decode import open_image
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels, Source

SAMPLE, SECONDS = 256, 10.0

Step = Literal["reading", "decoding", "augmenting"]


class Bound(NamedTuple):
    """What limits training at a given compute speed."""

    images_per_second: float
    """Images/s that the device can process."""
    workers: int
    """Workers needed to feed it."""
    cores: int
    """Cores available for workers."""
    by: Literal["compute"] | Step
    """The bottleneck."""
    reached: float
    """Images/s that training reaches."""


@dataclass(frozen=True)
class Speed:
    """Time per image for each step, in milliseconds of one core: means over a sample."""

    images: int
    reading: float
    decoding: float
    """As in training: a JPEG at the smallest scale that still covers the crop."""
    decoding_full_size: float
    """As in evaluation."""
    augmenting: float

    @property
    def images_per_second(self) -> float:
        """Images/s that one worker prepares for training."""
        return 1000 / (self.reading + self.decoding + self.augmenting)

    @property
    def slowest(self) -> Step:
        """The step that takes longest."""
        steps: dict[Step, float] = {
            "reading": self.reading,
            "decoding": self.decoding,
            "augmenting": self.augmenting,
        }
        return max(steps, key=lambda step: steps[step])

    def bound(self, images_per_second: float, cores: int) -> Bound:
        """Return what limits training for a device speed in images/s and a number of cores for workers."""
        workers = max(1, math.ceil(images_per_second / self.images_per_second))
        enough = workers <= cores
        reached = images_per_second if enough else cores * self.images_per_second
        return Bound(images_per_second, workers, cores, "compute" if enough else self.slowest, reached)

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers as JSON-compatible values."""
        return {**asdict(self), "images_per_second": self.images_per_second, "slowest": self.slowest}


def measure_speed(
    source: Source,
    *,
    size: tuple[int, int] = (224, 224),
    augmentation: Augmentation | None = None,
    sample: int = SAMPLE,
    seconds: float = SECONDS,
    seed: int = 0,
    on_progress: SurveyProgress | None = None,
) -> Speed | None:
    """Prepare a sample of images as training does, and time each step; None if none of them can be read.

    The sample is drawn by `seed` and stops after `seconds`. Files may be in the page cache: a first read from disk can
    be slower.
    """
    augmentation = Augmentation() if augmentation is None else augmentation
    chosen = draws(seed, 0, "measure").choice(len(source), min(sample, len(source)), replace=False).tolist()
    end = perf_counter() + seconds
    times: list[tuple[float, ...]] = []
    for position, index in enumerate([chosen[0], *chosen]):  # the first one twice: its first run is a warm-up
        try:
            taken = _time_one(
                source, index, size, augmentation, draws(seed, position), full_size_first=position % 2 == 0
            )
        except Exception:  # unreadable images are not part of the sample; `check_data` reports them
            continue
        if position:
            times.append(taken)
        if on_progress is not None:
            on_progress(position, len(chosen))
        if times and perf_counter() > end:
            break
    if not times:
        return None
    reading, decoding, decoding_full_size, augmenting = (1000 * np.mean(times, axis=0)).tolist()
    return Speed(len(times), reading, decoding, decoding_full_size, augmenting)


def _time_one(
    source: Source,
    index: int,
    size: tuple[int, int],
    augmentation: Augmentation,
    generator: np.random.Generator,
    *,
    full_size_first: bool,
) -> tuple[float, float, float, float]:
    """Return the seconds for reading, decoding for training, full decoding and augmenting.

    The first decode runs with cold CPU caches, so the two kinds of decoding take turns.
    """
    start = perf_counter()
    stored = source.read(index)
    reading = perf_counter() - start
    channels = stored_format(stored).channels
    full_size = _time_full_size(stored, channels) if full_size_first else 0.0

    start = perf_counter()
    image = open_image(stored)
    opened = perf_counter()
    plan = augment.plan(augmentation, image.height, image.width, size, generator)
    planned = perf_counter()
    scale = 1.0 if plan.box is None else max(size[0] / plan.box.height, size[1] / plan.box.width)
    pixels = image.pixels(channels, scale=scale)
    decoded = perf_counter()
    if plan.box is None:
        half = (0.5,) * channels
        pixels = Preprocess(size=size, channels=channels, mean=half, std=half).fit(pixels)
    augment.apply(plan, pixels, size)
    applied = perf_counter()

    full_size = full_size or _time_full_size(stored, channels)
    return reading, (opened - start) + (decoded - planned), full_size, (planned - opened) + (applied - decoded)


def _time_full_size(stored: bytes | Pixels, channels: int) -> float:
    start = perf_counter()
    open_image(stored).pixels(channels)
    return perf_counter() - start
