"""Data with several labels or a number per image, made from the built-in digits."""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from vitrail.data.sources.source import digits

LARGEST_ANGLE = 45.0


class MadeData(NamedTuple):
    """Images with what they are labelled with, as `vitrail.train` takes them."""

    images: NDArray[np.uint8]
    """(N, H, W)."""
    labels: Any


def pairs_of_digits(count: int, seed: int = 0) -> MadeData:
    """Return images of two digits side by side; the labels of an image are the names of its digits."""
    own, generator = digits(), np.random.default_rng(seed)
    chosen = generator.integers(0, len(own), (count, 2))
    images = np.concatenate([own.images[chosen[:, 0]], own.images[chosen[:, 1]]], axis=2).astype(np.uint8)
    names = np.array(own.classes)[own.labels[chosen]]
    return MadeData(images, [sorted(set(row)) for row in names.tolist()])


def turned_digits(count: int, seed: int = 0) -> MadeData:
    """Return digits turned by an angle of up to 45 degrees; the number of an image is its angle."""
    own, generator = digits(), np.random.default_rng(seed)
    angles = generator.uniform(-LARGEST_ANGLE, LARGEST_ANGLE, count).round(2)
    images = np.stack(
        [
            np.asarray(
                Image.fromarray(np.asarray(own.images[index]).astype(np.uint8))
                .resize((16, 16), Image.Resampling.BICUBIC)
                .rotate(angle, Image.Resampling.BICUBIC)
            )
            for index, angle in zip(generator.integers(0, len(own), count), angles, strict=True)
        ]
    )
    return MadeData(images, angles)
