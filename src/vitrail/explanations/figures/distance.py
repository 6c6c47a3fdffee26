"""Mean attention distance (the paper's figure 11): how far each head looks, in pixels of the picture.

For one head of one layer: the attention between patches is taken and special tokens are left out, so every row is
divided by its sum to add up to 1 again. Each query's distance is the mean of the Euclidean distances between its
patch's centre and every patch's centre (its own included, at distance 0), weighted by its row. The head's number is
the mean over all queries of all pictures.
"""

from collections.abc import Iterable, Iterator
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoints.bundle import Bundle
from vitrail.errors import Diverged, InputError
from vitrail.explanations.figures.figure import Absent, Figure
from vitrail.models.blocks import Block
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT
from vitrail.runtime import choose_device

PICTURES = 128
"""As many pictures as in the paper."""
AT_ONCE = 2**26
"""Most attention weights that one layer may have in memory at a time: 256 MB."""


def attention_distance(model: ViT, batches: Iterable[Tensor]) -> NDArray[np.float64]:
    """Return the mean attention distance of every layer and head, (depth, heads), in pixels.

    `batches` are normalised pictures (B, C, H, W) on the model's device. One layer's attention is held at a time, so
    that memory does not grow with depth or with the number of batches.
    """
    raise NotImplementedError


def distance_figure(bundle: Bundle, pixels: Tensor, *, device: str = "auto") -> Figure | Absent:
    """Draw how far each head looks in pictures: `pixels` (N, C, H, W), uint8, as `preprocess.pixels` makes them.

    The paper takes 128 pictures; more than that are not looked at.
    """
    raise NotImplementedError


def even_distance(config: ViTConfig) -> float:
    """Return the distance of a head that looks at every patch alike, in pixels."""
    raise NotImplementedError
