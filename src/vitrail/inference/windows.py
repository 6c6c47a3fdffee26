"""Sliding windows: predict a large image in overlapping pieces, instead of shrinking it to the model's input.

The image is resized to `scale` times its size, rounded to whole patches, and cut into windows of the model's input that
overlap by half. Windows start at multiples of the patch size, so the logits of a patch are the mean over the windows
it is in, and the result is a grid of logits for the whole image. An image smaller than a window is enlarged.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrail.acceleration.engine import Engine
from vitrail.checkpoints.bundle import Bundle
from vitrail.data.batches import Failure
from vitrail.data.decode import LazyImage
from vitrail.data.image_files import PIXEL_LIMIT
from vitrail.data.inputs import Item, prepared
from vitrail.data.preprocess import Preprocess
from vitrail.data.sources.source import Pixels
from vitrail.errors import ConfigError, DataError, StorageError, VitrailError
from vitrail.tasks.lookup import task_of


@dataclass(frozen=True)
class Windows:
    """How the images of a job are cut into windows."""

    scale: float
    preprocess: Preprocess
    patch: tuple[int, int]
    """Height and width."""

    def canvas_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is resized to: whole patches, and at least a window."""
        tall, wide = self.preprocess.size
        scale = max(self.scale, tall / height, wide / width)
        sides = zip((height, width), (tall, wide), self.patch, strict=True)
        made_height, made_width = (max(least, round(side * scale / patch) * patch) for side, least, patch in sides)
        if made_height * made_width > PIXEL_LIMIT:
            raise DataError(
                f"an image of {height:,}×{width:,} pixels becomes {made_height:,}×{made_width:,} with windows of scale "
                f"{self.scale:g}, more than {PIXEL_LIMIT:,} pixels; use a smaller --window"
            )
        return made_height, made_width

    def canvas(self, item: Item) -> Pixels:
        """Read an image and resize it: (height, width, channels), uint8."""
        return prepared(item, self.preprocess, self._canvas)

    def _canvas(self, image: LazyImage, preprocess: Preprocess) -> Pixels:
        size = self.canvas_size(image.height, image.width)
        whole = preprocess.replace(size=size, resize="squash", resize_to=None)
        return whole.fit(image.pixels(preprocess.channels))

    def corners(self, height: int, width: int) -> list[tuple[int, int]]:
        """Return the top left corner of every window of a canvas; the last ones end at its edge."""
        tops, lefts = (
            _starts(side, window, patch)
            for side, window, patch in zip((height, width), self.preprocess.size, self.patch, strict=True)
        )
        return [(top, left) for top in tops for left in lefts]

    def outputs(self, engine: Engine, canvas: Tensor, batch: int) -> Tensor:
        """Return the logits (1, K, h, w) of the patches of a canvas (C, H, W), computed `batch` windows at a time."""
        tall, wide = self.preprocess.size
        high, broad = tall // self.patch[0], wide // self.patch[1]
        grid = canvas.shape[1] // self.patch[0], canvas.shape[2] // self.patch[1]
        total, count = torch.empty(0), torch.zeros(grid)
        corners = self.corners(canvas.shape[1], canvas.shape[2])
        for first in range(0, len(corners), batch):
            some = corners[first : first + batch]
            made = engine(torch.stack([canvas[:, top : top + tall, left : left + wide] for top, left in some]))
            total = total if len(total) else torch.zeros(made.shape[1], *grid)
            for logits, (top, left) in zip(made, some, strict=True):
                row, column = top // self.patch[0], left // self.patch[1]
                total[:, row : row + high, column : column + broad] += logits
                count[row : row + high, column : column + broad] += 1
        return (total / count)[None]


class Canvas(NamedTuple):
    """A decoded image, to be cut into windows."""

    pixels: Tensor
    """(C, H, W), uint8; empty if the image could not be read."""
    name: bytes
    error: str | None


@dataclass(frozen=True)
class CanvasDecoding(Dataset[Any]):
    """A worker's job: one image in, its canvas out."""

    windows: Windows

    def __getitem__(self, items: Sequence[Item]) -> Canvas | Failure:
        """Decode an image; if its storage fails, return the error, because the image may be fine."""
        (item,) = items
        try:
            return Canvas(as_canvas(self.windows.canvas(item)), item.name, None)
        except StorageError as error:
            return Failure(StorageError, str(error))
        except VitrailError as error:
            return Canvas(torch.empty(0), item.name, str(error))


def as_canvas(pixels: Pixels) -> Tensor:
    """Return pixels (height, width, channels) as a tensor (C, H, W)."""
    return torch.from_numpy(pixels.copy()).permute(2, 0, 1)


def windows_for(bundle: Bundle, scale: float) -> Windows:
    """Return the windows for a bundle; raise if its task has none, or the scale is not a positive number."""
    task = task_of(bundle)
    if not task.is_dense:
        raise ConfigError(
            f"--window is for segmentation, but the task of this model is {task.name}; leave out --window"
        )
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < math.inf:
        raise ConfigError(
            f"the window is {scale!r}; it should be the scale of the image, a number above 0: 1 keeps its size"
        )
    return Windows(float(scale), bundle.preprocess, bundle.model.config.patch_size)


def _starts(side: int, window: int, patch: int) -> list[int]:
    step = max(1, window // (2 * patch)) * patch
    return [*range(0, side - window, step), side - window]
