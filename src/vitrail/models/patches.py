"""Split images into patches, and put them back together.

Axes: B batch, C channels, H W image, h w patch, N patches (row by row).
"""

from typing import Literal

from torch import Tensor

Order = Literal["chw", "hwc"]
"""The layout of a flattened patch: channels first (as in a convolution kernel) or channels last."""


def patchify(x: Tensor, patch: tuple[int, int], order: Order = "chw") -> Tensor:
    """Split (B, C, H, W) into (B, N, C·h·w), patches in row-major order."""
    B, C, H, W = x.shape
    h, w = patch
    x = x.reshape(B, C, H // h, h, W // w, w)
    axes = (0, 2, 4, 1, 3, 5) if order == "chw" else (0, 2, 4, 3, 5, 1)
    return x.permute(axes).reshape(B, (H // h) * (W // w), C * h * w)


def unpatchify(
    patches: Tensor, grid: tuple[int, int], patch: tuple[int, int], channels: int, order: Order = "chw"
) -> Tensor:
    """Invert `patchify`: (B, N, C·h·w) to (B, C, H, W)."""
    B, (rows, columns), (h, w) = patches.shape[0], grid, patch
    if order == "chw":
        x = patches.reshape(B, rows, columns, channels, h, w).permute(0, 3, 1, 4, 2, 5)
    else:
        x = patches.reshape(B, rows, columns, h, w, channels).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(B, channels, rows * h, columns * w)
