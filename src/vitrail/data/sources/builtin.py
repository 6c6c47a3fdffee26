"""Datasets included in the package."""

from importlib.resources import files

import numpy as np

from vitrail.data.sources.source import Arrays


def digits() -> Arrays:
    """Return scikit-learn's 1,797 handwritten digits, 8×8 pixels in grey, rescaled from 0…16 to 0…255."""
    with files("vitrail.data.sources").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        images, labels = arrays["images"], arrays["labels"].astype(np.int64)
    return Arrays(images, labels, tuple(str(digit) for digit in range(10)))
