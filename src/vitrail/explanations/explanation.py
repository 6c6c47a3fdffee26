"""`Explanation`: a map of what a model looked at, with the image it belongs to."""

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
from vitrail.explanations.overlay import beside, captioned, enlarged, overlay
from vitrail.explanations.request import Method

IMAGES = (".png", ".jpg", ".jpeg", ".webp")
OPACITY = 0.6


@dataclass(frozen=True, eq=False, repr=False)
class Explanation:
    """What a model looked at in one image."""

    map: NDArray[np.float32]
    """(rows, columns) on the grid of patches; (rows, columns, 3), colours from 0 to 1, for pca."""
    image: Image.Image
    """What the model saw: the image after resizing and cropping, in RGB."""
    method: Method
    target: str | int | None = None
    """The class that is explained: its name, or its number where the bundle has no names; None for other methods."""
    probability: float | None = None
    """How likely the model takes it to be, from 0 to 1."""
    predicted: str | int | None = None
    """The class that the model predicts; None where it predicts none for a whole image."""
    confidence: float | None = None
    """Its probability."""

    def __repr__(self) -> str:
        of = "" if self.target is None else f" of {self.target}, {percent(self.probability or 0)}%"
        return f"Explanation({self.method}{of}: {self.map.shape[0]}×{self.map.shape[1]} patches)"

    def overlay(self, opacity: float = OPACITY, side: int | None = None) -> Image.Image:
        """Return the image with the map laid over it, from the least of the map (dark) to the most (light).

        `side` is the length of the longer side in pixels. None: that of the image, or 224 if it is smaller.
        """
        return overlay(self.image, self.map, opacity, side)

    def side_by_side(self, opacity: float = OPACITY, side: int | None = None) -> Image.Image:
        """Return the image and beside it the overlay."""
        return beside([enlarged(self.image, side), self.overlay(opacity, side)])

    @property
    def caption(self) -> str:
        """What a file of it says above the image: the class that is explained, or predicted, and its probability."""
        found = "" if self.predicted is None else f"predicted {self.predicted}, {percent(self.confidence or 0)}%"
        if self.target is None:
            return f"{self.method}; {found}" if found else self.method
        said = f"{self.method} for {self.target}, {percent(self.probability or 0)}%"
        return f"{said}; {found}" if found and self.predicted != self.target else said

    @property
    def notes(self) -> dict[str, str]:
        """The same for programs, as a PNG holds it beside its pixels."""
        found = {"method": self.method, "target": self.target, "target_probability": self.probability}
        found |= {"class": self.predicted, "probability": self.confidence}
        return {key: str(value) for key, value in found.items() if value is not None}

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write image and overlay side by side to a .png, .jpg or .webp, or the map itself to a .npy.

        Above them stands the class that is explained, or predicted, with its probability.
        """
        target = Path(path)
        if target.suffix.lower() == ".npy":
            return save_array(self.map, target, overwrite=overwrite)
        if target.suffix.lower() not in IMAGES:
            raise ConfigError(
                f"{target} does not end as an image or an array does; use one of {', '.join(IMAGES)} or .npy"
            )
        return save_image(captioned(self.side_by_side(), self.caption), target, notes=self.notes, overwrite=overwrite)


def save_image(image: Image.Image, target: Path, *, overwrite: bool, notes: Mapping[str, str] | None = None) -> Path:
    """Write an image, all or nothing; a PNG also holds `notes`."""
    options: dict[str, Any] = {}
    if notes and target.suffix.lower() == ".png":
        options["pnginfo"] = PngInfo()
        for key, value in notes.items():
            options["pnginfo"].add_itxt(f"vitrail:{key}", value)
    with atomic_file(target, overwrite=overwrite) as temporary:
        image.save(temporary, **options)
    return target


def save_array(array: NDArray[np.float32], target: Path, *, overwrite: bool) -> Path:
    """Write an array as NumPy does, all or nothing."""
    with atomic_file(target, overwrite=overwrite) as temporary, temporary.open("wb") as file:
        np.save(file, array)
    return target
