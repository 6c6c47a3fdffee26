"""`Explanation`: a map of what a model attended to, with its image."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from vitrail.checkpoints.writing import atomic_file
from vitrail.errors import ConfigError
from vitrail.evaluation import percent
from vitrail.explanations.overlay import captioned, enlarged, overlay, side_by_side
from vitrail.explanations.request import Method

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
OPACITY = 0.6


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What a model attended to in one image."""

    map: NDArray[np.float32]
    """(rows, columns) on the grid of patches; for pca (rows, columns, 3), colours from 0 to 1."""
    image: Image.Image
    """What the model saw: the image after resizing and cropping, in RGB."""
    method: Method
    target: str | int | None = None
    """The explained class: its name, or its index if the bundle has no names; None for methods without a class."""
    probability: float | None = None
    """Its probability, from 0 to 1."""
    predicted: str | int | None = None
    """The predicted class; None if the model has no prediction for a whole image."""
    confidence: float | None = None
    """The probability of the predicted class."""

    def __repr__(self) -> str:
        of = "" if self.target is None else f" of {self.target}, {percent(self.probability or 0)}%"
        return f"Explanation({self.method}{of}: {self.map.shape[0]}×{self.map.shape[1]} patches)"

    def overlay(self, opacity: float = OPACITY, side: int | None = None) -> Image.Image:
        """Return the image with the map overlaid, from its minimum (dark) to its maximum (light).

        `side` is the longer side in pixels; by default that of the image, or 224 if it is smaller.
        """
        return overlay(self.image, self.map, opacity, side)

    def side_by_side(self, opacity: float = OPACITY, side: int | None = None) -> Image.Image:
        """Return the image next to its overlay."""
        return side_by_side([enlarged(self.image, side), self.overlay(opacity, side)])

    @property
    def caption(self) -> str:
        """The line above a saved image: the explained or predicted class and its probability."""
        predicted = "" if self.predicted is None else f"predicted {self.predicted}, {percent(self.confidence or 0)}%"
        if self.target is None:
            return f"{self.method}; {predicted}" if predicted else self.method
        explained = f"{self.method} for {self.target}, {percent(self.probability or 0)}%"
        return f"{explained}; {predicted}" if predicted and self.predicted != self.target else explained

    @property
    def notes(self) -> dict[str, str]:
        """The same as key-value pairs, stored as PNG text chunks."""
        notes = {"method": self.method, "target": self.target, "target_probability": self.probability}
        notes |= {"class": self.predicted, "probability": self.confidence}
        return {key: str(value) for key, value in notes.items() if value is not None}

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Save image and overlay side by side as .png, .jpg or .webp, or the map itself as .npy.

        The line above them names the explained or predicted class and its probability.
        """
        target = Path(path)
        if target.suffix.lower() == ".npy":
            return save_array(self.map, target, overwrite=overwrite)
        if target.suffix.lower() not in IMAGES:
            raise ConfigError(f"{target} has no suffix of an image or an array; use one of {', '.join(IMAGES)} or .npy")
        return save_image(captioned(self.side_by_side(), self.caption), target, notes=self.notes, overwrite=overwrite)


def save_image(image: Image.Image, target: Path, *, overwrite: bool, notes: Mapping[str, str] | None = None) -> Path:
    """Write an image atomically; a PNG also stores `notes`."""
    options: dict[str, Any] = {}
    if notes and target.suffix.lower() == ".png":
        options["pnginfo"] = PngInfo()
        for key, value in notes.items():
            options["pnginfo"].add_itxt(f"vitrail:{key}", value)
    with atomic_file(target, overwrite=overwrite) as temporary:
        image.save(temporary, **options)
    return target


def save_array(array: NDArray[np.float32], target: Path, *, overwrite: bool) -> Path:
    """Write a .npy file atomically."""
    with atomic_file(target, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.save(file, array)
    return target
