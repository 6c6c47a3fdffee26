"""mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899): pairs of neighbours in the stream, mixed on the device.

Partners are positions 2j and 2j + 1. One λ per pair is drawn from the seed and j, so a pair is mixed the same way
however the batch is sliced: each of the two keeps λ of itself and takes 1 - λ of the other.
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
CUTMIX_CHANCE = 0.5
"""Probability of CutMix for a pair if both methods are on, as in timm."""


class Mixing(Frozen):
    """How neighbours are mixed. Strength 0 turns a method off; with both on, one is drawn for each pair."""

    mixup: Strength = 0.0
    """α of the Beta(α, α) that λ is drawn from."""
    cutmix: Strength = 0.0
    """α of the Beta(α, α) that λ, the fraction of the area left uncovered, is drawn from."""
    chance: Chance = 1.0
    """Probability that a pair is mixed at all."""

    @property
    def on(self) -> bool:
        """Whether anything is ever mixed."""
        return self.chance > 0 and (self.mixup > 0 or self.cutmix > 0)


class Mix(NamedTuple):
    """How the images of a batch are mixed: one row per image, the same for both images of a pair."""

    lam: NDArray[np.float32]
    """λ: how much of its own label each image keeps."""
    box: NDArray[np.int64]
    """(top, left, bottom, right) of the box taken from the partner, in pixels; all zero where pixels are blended."""


def draw_mix(mixing: Mixing, seed: int, positions: NDArray[np.int64], size: tuple[int, int]) -> Mix:
    """Draw how the images at these positions are mixed: a pure function of the seed and each pair's index."""
    lam, box = np.ones(len(positions), np.float32), np.zeros((len(positions), 4), np.int64)
    if not mixing.on:
        return Mix(lam, box)
    if len(positions) % 2 or positions[0] % 2:
        raise ConfigError(
            f"mixup and CutMix mix neighbours, but {len(positions)} images from position {positions[0]} are not whole "
            f"pairs; use a batch that gives every process and micro-batch an even number of images"
        )
    for i in range(0, len(positions), 2):
        lam[i : i + 2], box[i : i + 2] = _draw_pair(mixing, seed, int(positions[i]) // 2, size)
    return Mix(lam, box)


def _draw_pair(mixing: Mixing, seed: int, pair: int, size: tuple[int, int]) -> tuple[float, tuple[int, int, int, int]]:
    generator = draws(seed, pair, "mix")
    mixed, cut, row, column = generator.random(4)
    nothing = (0, 0, 0, 0)
    if mixed >= mixing.chance:
        return 1.0, nothing
    if mixing.cutmix == 0 or (mixing.mixup > 0 and cut >= CUTMIX_CHANCE):
        return float(generator.beta(mixing.mixup, mixing.mixup)), nothing
    lam = float(generator.beta(mixing.cutmix, mixing.cutmix))
    box = _cut_box(lam, row, column, size)
    # λ is corrected to the area actually covered: the box is whole pixels and may be clipped at the edges.
    return 1 - (box[2] - box[0]) * (box[3] - box[1]) / (size[0] * size[1]), box


def _cut_box(lam: float, row: float, column: float, size: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return a box of 1 - lam of the area around a random point, clipped at the edges, as the paper's code does."""
    height, width = size
    cut = (1 - lam) ** 0.5
    tall, wide = int(height * cut), int(width * cut)
    middle, centre = int(row * height), int(column * width)
    top, bottom = max(0, middle - tall // 2), min(height, middle + tall // 2)
    left, right = max(0, centre - wide // 2), min(width, centre + wide // 2)
    return (top, left, bottom, right) if bottom > top and right > left else (0, 0, 0, 0)


def mix_pixels(pixels: Tensor, lam: Tensor, box: Tensor) -> Tensor:
    """Mix normalised images (B, C, H, W) with their partners, on their own device."""
    partners = _partners(pixels)
    height, width = pixels.shape[-2:]
    rows = torch.arange(height, device=pixels.device)[None, :, None]
    columns = torch.arange(width, device=pixels.device)[None, None, :]
    top, left, bottom, right = (edge[:, None, None] for edge in box.unbind(1))
    taken = ((rows >= top) & (rows < bottom) & (columns >= left) & (columns < right))[:, None]
    blended = (box == 0).all(dim=1)
    own = torch.where(blended, lam, 1.0).to(pixels.dtype)[:, None, None, None]
    return torch.where(taken, partners, own * pixels + (1 - own) * partners)


def mix_targets(targets: Tensor, lam: Tensor) -> Tensor:
    """Mix targets (B, classes) with their partners'; rows that sum to 1 still do."""
    own = lam.to(targets.dtype)[:, None]
    return own * targets + (1 - own) * _partners(targets)


def _partners(rows: Tensor) -> Tensor:
    """Swap each pair of neighbours along the first axis."""
    pairs: Tensor = rows.unflatten(0, (-1, 2))
    return pairs.flip(1).flatten(0, 1)
