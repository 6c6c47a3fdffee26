"""Resizing and flipping with vector instructions: torch's kernels for uint8 images, three times as fast as Pillow's.

The resize rounds its weights to 16 bits, so some pixels differ from Pillow's by a grey level, and where bicubic
overshoots at an edge by a few. It is used for the crops of training, and for predictions in bf16 and fp16, which change
more by their precision. Evaluation and predictions in float32 have Pillow's pixels. CPUs without AVX2 lack the
kernel, and use Pillow.
"""

import functools

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

MODES = {Image.Resampling.BILINEAR: "bilinear", Image.Resampling.BICUBIC: "bicubic"}


@functools.cache
def _has_kernel() -> bool:
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


def can_resize(image: NDArray[np.uint8], resample: Image.Resampling) -> bool:
    """Return whether the kernel fits: an RGB image, and a filter that torch has."""
    return image.ndim == 3 and resample in MODES and _has_kernel()


def resized(region: NDArray[np.uint8], size: tuple[int, int], resample: Image.Resampling) -> NDArray[np.uint8]:
    """Resize an RGB image (H, W, 3) to `size`, (height, width)."""
    pixels = _tensor(np.ascontiguousarray(region))
    # In this order, torch sees a batch with channels last, which its fast kernel needs.
    made = F.interpolate(pixels[None].permute(0, 3, 1, 2), size, mode=MODES[resample], antialias=True)
    array: NDArray[np.uint8] = made[0].permute(1, 2, 0).numpy()
    return array


def flipped(image: NDArray[np.uint8], horizontally: bool, vertically: bool) -> NDArray[np.uint8]:
    """Flip an image (H, W, C); numpy would copy byte by byte."""
    axes = [axis for axis, flip in ((0, vertically), (1, horizontally)) if flip]
    array: NDArray[np.uint8] = torch.flip(_tensor(image), axes).numpy() if axes else image
    return array


def _tensor(array: NDArray[np.uint8]) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())  # torch warns about read-only memory
