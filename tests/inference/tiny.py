"""A tiny model and tiny images, for jobs with many rows."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vitrail.checkpoints.bundle import Bundle
from vitrail.data.preprocess import Preprocess
from vitrail.models.config import ViTConfig
from vitrail.models.vit import ViT

NAMES = ("cat", "dog", "fox")


def tiny_bundle(names: tuple[str, ...] | None = NAMES, *, channels: int = 3, classes: int = 3, seed: int = 0) -> Bundle:
    torch.manual_seed(seed)
    model = ViT(
        ViTConfig(image_size=8, patch_size=4, channels=channels, width=16, depth=1, heads=2, classes=classes)
    ).eval()
    if classes:
        torch.nn.init.normal_(model.head.weight)
    half = (0.5,) * channels
    return Bundle(model, Preprocess(size=8, channels=channels, mean=half, std=half), names)


def tiny_pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (9, 12, 3), np.uint8)


def tiny_images(folder: Path, count: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{number:05d}.png" for number in range(count)]
    for number, path in enumerate(paths):
        Image.fromarray(tiny_pixels(number)).save(path)
    return paths
