"""Resize a batch of images of different sizes on their device, with Pillow's filters and rounding.

Pillow resizes one axis and then the other, and rounds after each. Here each axis is one batched matmul with a matrix of
weights per image, over images padded to the largest of the batch. The weights are Pillow's; a pixel differs by a grey
level where a sum is near the middle of two, and by more where bicubic or Lanczos overshoots at an edge and Pillow takes
the axes in the other order.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vitrail.data.preprocess import Interpolation, Preprocess, resized_size

CUBIC = -0.5
"""Pillow's parameter of the bicubic filter."""


class Axis(NamedTuple):
    """One axis of a resize: pixels [start, start + length) become `made` pixels, of which those from `first` on are
    kept; a negative `first` pads."""

    start: float
    length: float
    made: int
    first: int


class Window(NamedTuple):
    """A region of an image, in whole pixels, and how it is resized; the axes are relative to the region."""

    top: int
    left: int
    height: int
    width: int
    rows: Axis
    columns: Axis

    def is_padded(self, size: tuple[int, int]) -> bool:
        """Whether an output of (height, width) has pixels from outside the image."""
        axes = zip((self.rows, self.columns), size, strict=True)
        return any(axis.first < 0 or axis.first + side > axis.made for axis, side in axes)


def evaluation_window(preprocess: Preprocess, height: int, width: int) -> Window:
    """Return the resize and centre crop of the evaluation transform, for an image of (height, width)."""
    made_width, made_height = resized_size((width, height), preprocess.resize_to or preprocess.size, preprocess.resize)
    top, left = (
        preprocess.crop_start(made_height, preprocess.size[0]),
        preprocess.crop_start(made_width, preprocess.size[1]),
    )
    return Window(0, 0, height, width, Axis(0, height, made_height, top), Axis(0, width, made_width, left))


def resize(
    images: Sequence[Tensor],
    windows: Tensor,
    size: tuple[int, int],
    interpolation: Interpolation,
    fill: Sequence[int] | None = None,
) -> Tensor:
    """Resize images (C, h, w), uint8, to (B, C, *size), uint8.

    `windows` (B, 8): the two axes of each image, rows first. `fill`: the colour of padding; None: nothing is padded.
    """
    device, channels = images[0].device, images[0].shape[0]
    tall, wide = max(image.shape[1] for image in images), max(image.shape[2] for image in images)
    padded = torch.empty(len(images), channels, tall, wide, dtype=torch.uint8, device=device)
    for row, image in zip(padded, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]].copy_(image)
    sides = torch.tensor([image.shape[1:] for image in images], dtype=torch.float32).to(device)
    axes = windows.to(device, torch.float32)
    rows = axis_weights(axes[:, :4], sides[:, 0], tall, size[0], interpolation)
    columns = axis_weights(axes[:, 4:], sides[:, 1], wide, size[1], interpolation)
    made = padded.flatten(1, 2).float() @ columns.mT
    made = rows[:, None] @ _rounded(made).unflatten(1, (channels, tall))
    pixels = _rounded(made).to(torch.uint8)
    if fill is None:
        return pixels
    inside = _inside(axes[:, :4], size[0])[:, :, None] & _inside(axes[:, 4:], size[1])[:, None, :]
    colour = torch.tensor(fill, dtype=torch.uint8).to(device)[:, None, None]
    return torch.where(inside[:, None], pixels, colour)


def axis_weights(axes: Tensor, sides: Tensor, pixels: int, made: int, interpolation: Interpolation) -> Tensor:
    """Return weights (B, made, pixels): how much each pixel of an axis contributes to each output pixel.

    `axes` (B, 4) are `Axis` values, `sides` (B,) the length of the images; pixels from there on are padding.
    """
    weigh = FILTERS[interpolation]
    start, length, whole, first = axes[:, :, None].unbind(1)
    scale = length / whole
    stretch = scale.clamp(min=1.0)
    kept = torch.arange(made, device=axes.device, dtype=axes.dtype)
    places = torch.arange(pixels, device=axes.device, dtype=axes.dtype) + 0.5
    centres = start + (first + kept + 0.5) * scale
    weights = weigh((places - centres[:, :, None]) / stretch[:, :, None])
    weights = torch.where(places < sides[:, None, None], weights, 0.0)
    return weights / weights.sum(dim=2, keepdim=True).clamp(min=1e-6)


def _rounded(values: Tensor) -> Tensor:
    return values.add_(0.5).floor_().clamp_(0, 255)


def _inside(axes: Tensor, made: int) -> Tensor:
    """Return (B, made): whether an output pixel is inside the resized image."""
    place = axes[:, 3:] + torch.arange(made, device=axes.device)
    return (place >= 0) & (place < axes[:, 2:3])


# ── Pillow's filters ──


def _triangle(x: Tensor) -> Tensor:
    return (1 - x.abs()).clamp(min=0)


def _hamming(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 1, torch.sinc(x) * (0.54 + 0.46 * torch.cos(torch.pi * x)), 0.0)


def _cubic(x: Tensor) -> Tensor:
    x = x.abs()
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * CUBIC - 4 * CUBIC
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


def _lanczos(x: Tensor) -> Tensor:
    return torch.where(x.abs() < 3, torch.sinc(x) * torch.sinc(x / 3), 0.0)


FILTERS: dict[Interpolation, Callable[[Tensor], Tensor]] = {
    "bilinear": _triangle,
    "hamming": _hamming,
    "bicubic": _cubic,
    "lanczos": _lanczos,
}
"""The weight of a pixel by its distance, in output pixels. `nearest` and
`box` are not among them: their weights jump, and rounding would decide which pixel counts."""
