"""A segmentation model that knows its images: it tells red, green and blue patches apart."""

import numpy as np
import torch
from numpy.typing import NDArray

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

COLOURS = ("red", "green", "blue")
SIDE, PATCH = 32, 4


def colour_bundle(
    names: tuple[str, ...] | None = COLOURS, *, classes: int = 3, preprocess: Preprocess | None = None
) -> Bundle:
    """Return a bundle whose model gives a patch the class of its largest colour channel, wherever it is."""
    torch.manual_seed(0)
    model = ViT(
        ViTConfig(
            image_size=SIDE, patch_size=PATCH, width=32, depth=1, heads=2, classes=classes, pool="patches",
            class_token="none", position="none",
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        weight = model.patch_embed.proj.weight
        for channel in range(3):
            weight[channel, channel] = 1 / PATCH**2
        model.norm.weight.fill_(1)
        for channel in range(min(3, classes)):
            model.head.weight[channel, channel] = 10
    return Bundle(model, preprocess or Preprocess(size=SIDE), names, task="segmentation")


def colour_image(height: int, width: int, seed: int = 0) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return an image of three stripes of different colours, and its mask; the stripes end at eighths of the width."""
    first, second = sorted(np.random.default_rng(seed).choice(np.arange(1, 8), 2, replace=False) * width // 8)
    mask = np.zeros((height, width), np.uint8)
    mask[:, first:second], mask[:, second:] = 1, 2
    return np.eye(3, dtype=np.uint8)[mask] * 220, mask
