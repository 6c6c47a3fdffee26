"""Images whose labels are masks: discs and squares on noise, as a folder with images/ and masks/."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SHAPES = ("background", "disc", "square")
"""What the pixel values 0, 1 and 2 of a mask stand for."""
_COLOURS = np.array([[0, 0, 0], [220, 60, 40], [40, 80, 220]])


def write_shapes(folder: Path, images: int, size: int | tuple[int, int] = 32, seed: int = 0) -> Path:
    """Write noise images with discs and squares to images/, their masks to masks/, and classes.txt; return the folder.

    `size` is a side, or (height, width). A mask is 0 in the background, 1 on a disc and 2 on a square.
    """
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "classes.txt").write_text("\n".join(f"{value} {name}" for value, name in enumerate(SHAPES)))
    generator = np.random.default_rng(seed)
    for number in range(images):
        pixels, mask = shapes_image((size, size) if isinstance(size, int) else size, generator)
        Image.fromarray(pixels).save(folder / "images" / f"{number:04}.png")
        Image.fromarray(mask).save(folder / "masks" / f"{number:04}.png")
    return folder


def shapes_image(size: tuple[int, int], generator: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return an image (H, W, 3) with a disc, a square, or both, and its mask (H, W)."""
    height, width = size
    mask = np.zeros(size, np.uint8)
    kinds = ((1,), (2,), (1, 2))[int(generator.integers(3))]
    rows, columns = np.ogrid[:height, :width]
    for kind in kinds:
        radius = generator.uniform(0.15, 0.3) * min(size)
        row, column = (generator.uniform(radius, side - radius) for side in size)
        down, across = rows + 0.5 - row, columns + 0.5 - column
        inside = down**2 + across**2 <= radius**2 if kind == 1 else np.maximum(abs(down), abs(across)) <= radius
        mask[inside] = kind
    noise = generator.integers(60, 160, (height, width, 3))
    pixels = np.where(mask[:, :, None] > 0, 0.75 * _COLOURS[mask] + 0.25 * noise, noise)
    return pixels.astype(np.uint8), mask
