"""mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899): pairs of neighbours in the stream, mixed on the device.

The partners are the positions 2j and 2j + 1. One share λ a pair is drawn from the seed and j, so a pair is mixed in the
same way however the batch is cut up: each of the two keeps λ of itself and takes 1 - λ of the other.
"""

from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field
from torch import Tensor

from vitrail.data.augmentation.draws import draws
from vitrail.errors import ConfigError
from vitrail.schema import Frozen

Strength = Annotated[float, Field(ge=0, le=100)]
Chance = Annotated[float, Field(ge=0, le=1)]


class Mixing(Frozen):
    """How neighbours are mixed. Strength 0 turns a kind off; with both on, one of them is drawn for each pair."""

    mixup: Strength = 0.0
    """α of the Beta(α, α) that the share of the first image is drawn from."""
    cutmix: Strength = 0.0
    """α of the Beta(α, α) that the uncovered share of the area is drawn from."""
    cutmix_chance: Chance = 0.5
    """How often a pair gets CutMix where both are on."""
    chance: Chance = 1.0
    """How often a pair is mixed at all."""

    @property
    def on(self) -> bool:
        """Whether anything is ever mixed."""
        return self.chance > 0 and (self.mixup > 0 or self.cutmix > 0)


class Mix(NamedTuple):
    """How the images of a batch are mixed; one row an image, the same for both of a pair."""

    share: NDArray[np.float32]
    """How much of each image's own label is left: λ."""
    box: NDArray[np.int64]
    """Top, left, bottom, right, in pixels, of what comes from the partner; all zero where pixels are blended."""


def draw_mix(mixing: Mixing, seed: int, positions: NDArray[np.int64], size: tuple[int, int]) -> Mix:
    """Draw how the images at these positions are mixed: a pure function of the seed and each pair's number."""
    share, box = np.ones(len(positions), np.float32), np.zeros((len(positions), 4), np.int64)
    if not mixing.on:
        return Mix(share, box)
    if len(positions) % 2 or positions[0] % 2:
        raise ConfigError(
            f"mixup and CutMix mix neighbours, but {len(positions)} images from position {positions[0]} are no whole "
            f"pairs; use a batch that every process and micro-batch gets an even part of"
        )
    for i in range(0, len(positions), 2):
        share[i : i + 2], box[i : i + 2] = _draw_pair(mixing, seed, int(positions[i]) // 2, size)
    return Mix(share, box)


def _draw_pair(mixing: Mixing, seed: int, pair: int, size: tuple[int, int]) -> tuple[float, tuple[int, int, int, int]]:
    generator = draws(seed, pair, "mix")
    mixed, cut, row, column = generator.random(4)
    nothing = (0, 0, 0, 0)
    if mixed >= mixing.chance:
        return 1.0, nothing
    if mixing.cutmix == 0 or (mixing.mixup > 0 and cut >= mixing.cutmix_chance):
        return float(generator.beta(mixing.mixup, mixing.mixup)), nothing
    share = float(generator.beta(mixing.cutmix, mixing.cutmix))
    box = _cut_box(share, row, column, size)
    # What counts is the area that was really covered: the box is whole pixels, and may lie over the edge.
    return 1 - (box[2] - box[0]) * (box[3] - box[1]) / (size[0] * size[1]), box


def _cut_box(share: float, row: float, column: float, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return a box of 1 - share of the area around a random point, cut off at the edges, as the paper's code does."""
    height, width = size
    cut = (1 - share) ** 0.5
    tall, wide = int(height * cut), int(width * cut)
    middle, centre = int(row * height), int(column * width)
    top, bottom = max(0, middle - tall // 2), min(height, middle + tall // 2)
    left, right = max(0, centre - wide // 2), min(width, centre + wide // 2)
    return (top, left, bottom, right) if bottom > top and right > left else (0, 0, 0, 0)


def mix_pixels(pixels: Tensor, share: Tensor, box: Tensor) -> Tensor:
    """Mix normalised images (B, C, H, W) with their partners, on whatever device they are."""
    partners = _partners(pixels)
    height, width = pixels.shape[-2:]
    rows = torch.arange(height, device=pixels.device)[None, :, None]
    columns = torch.arange(width, device=pixels.device)[None, None, :]
    top, left, bottom, right = (edge[:, None, None] for edge in box.unbind(1))
    taken = ((rows >= top) & (rows < bottom) & (columns >= left) & (columns < right))[:, None]
    blended = (box == 0).all(dim=1)
    own = torch.where(blended, share, 1.0).to(pixels.dtype)[:, None, None, None]
    return torch.where(taken, partners, own * pixels + (1 - own) * partners)


def mix_targets(targets: Tensor, share: Tensor) -> Tensor:
    """Mix targets (B, classes) with their partners'; rows that add up to 1 still do."""
    own = share.to(targets.dtype)[:, None]
    return own * targets + (1 - own) * _partners(targets)


def _partners(rows: Tensor) -> Tensor:
    """Exchange every two neighbours along the first axis."""
    pairs: Tensor = rows.unflatten(0, (-1, 2))
    return pairs.flip(1).flatten(0, 1)
