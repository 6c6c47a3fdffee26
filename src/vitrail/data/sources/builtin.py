"""Data that comes with the package."""

from importlib.resources import files

import numpy as np

from vitrail.data.sources.source import Arrays


def digits() -> Arrays:
    """Return 1,797 handwritten digits of 8×8 pixels, in grey: scikit-learn's, with 0…16 spread over 0…255."""
    with files("vitrail.data.sources").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    return Arrays(images, labels, tuple(str(digit) for digit in range(10)))
