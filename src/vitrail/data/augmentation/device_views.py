"""Multi-crop on the device: the views of a whole batch at once, from images that are already there.

The same distributions as in `multicrop`, computed from uniform draws: a pure function of images and draws. Cropping and
resizing is one matmul along each axis, with Pillow's bicubic weights, so a batch needs few kernels and its backward
pass is not needed. Two details differ from `multicrop`: a crop that does not fit into the image is clipped instead of
drawn again, and colour jitter has a fixed order. Images must be small or already near the size of the views: a crop is
enlarged from these pixels, not from the file's.

Axes: B images, V views.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vitrail.data.augmentation.augment import BLUR_RADIUS
from vitrail.data.augmentation.multicrop import GLOBAL_VIEWS, JITTER, SOLARIZE_THRESHOLD, MultiCrop, View

DRAWS = 14
"""Uniform draws per view."""
RATIO = (3 / 4, 4 / 3)
"""Range of a crop's width / height."""
CUBIC = -0.5
"""Pillow's parameter of the bicubic filter."""
LUMA = (0.299, 0.587, 0.114)
_TO_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))
_FROM_YIQ = ((1.0, 0.956, 0.619), (1.0, -0.272, -0.647), (1.0, -1.106, 1.703))


def device_views(pixels: Tensor, drawn: Tensor, crops: MultiCrop) -> tuple[Tensor, Tensor]:
    """Return global views (B, 2, C, H, W) and local views (B, V, C, h, w) of images (B, C, H, W) from 0 to 1.

    `drawn` (B, (2 + V) · DRAWS) is uniform in [0, 1). Global views have the size of the images.
    """
    size = (pixels.shape[2], pixels.shape[3])
    views = crops.views(size)
    numbers = drawn.unflatten(1, (len(views), DRAWS))
    large = _made(pixels, numbers[:, :GLOBAL_VIEWS], views[:GLOBAL_VIEWS], size)
    small = _made(pixels, numbers[:, GLOBAL_VIEWS:], views[GLOBAL_VIEWS:], crops.local_size)
    return large, small


def _made(pixels: Tensor, numbers: Tensor, views: Sequence[View], size: tuple[int, int]) -> Tensor:
    if not views:
        return pixels.new_zeros(len(pixels), 0, pixels.shape[1], *size)
    area, ratio, top, left, flip = numbers[..., :5].unbind(-1)
    low, high = (_column([view.area[end] for view in views], pixels) for end in (0, 1))
    area = low + (high - low) * area
    ratio = torch.exp(math.log(RATIO[0]) + (math.log(RATIO[1]) - math.log(RATIO[0])) * ratio)
    H, W = pixels.shape[2:]
    # In fractions of the image's sides, whose own ratio the crop's is relative to.
    height = (area / ratio * (W / H)).sqrt().clamp(max=1.0)
    width = (area * ratio * (H / W)).sqrt().clamp(max=1.0)
    rows = resize_matrix(top * (1 - height) * H, height * H, H, size[0])
    columns = resize_matrix(left * (1 - width) * W, width * W, W, size[1])
    flipped = flip < _column([view.flip for view in views], pixels)
    columns = torch.where(flipped[..., None, None], columns.flip(-2), columns)
    made = torch.einsum("bvhy,bcyx,bvwx->bvchw", rows, pixels, columns).clamp(0, 1)
    return _coloured(made, numbers[..., 5:], views) if any(any(view.chances) for view in views) else made


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, device=like.device, dtype=like.dtype)


def resize_matrix(start: Tensor, length: Tensor, pixels: int, made: int) -> Tensor:
    """Return weights (…, made, pixels) that resize [start, start + length) of an axis as Pillow's bicubic does."""
    steps = torch.arange(made, device=start.device, dtype=start.dtype) + 0.5
    places = torch.arange(pixels, device=start.device, dtype=start.dtype) + 0.5
    scale = (length / made)[..., None]
    centres = start[..., None] + steps * scale
    distance = (places - centres[..., None]).abs() / scale.clamp(min=1.0)[..., None]
    weights = _cubic(distance)
    return weights / weights.sum(dim=-1, keepdim=True)


def _cubic(x: Tensor) -> Tensor:
    near = ((CUBIC + 2) * x - (CUBIC + 3)) * x * x + 1
    far = ((x - 5) * x + 8) * x * CUBIC - 4 * CUBIC
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


# ── colours ──


def _coloured(made: Tensor, numbers: Tensor, views: Sequence[View]) -> Tensor:
    """Jitter, grey, blur, solarise: each for the views that are drawn for it."""
    jittered, bright, contrast, saturation, hue, grey, blurred, radius, inverted = numbers.unbind(-1)
    happens = [
        (draw < _column([getattr(view.chances, name) for view in views], made))[..., None, None, None]
        for name, draw in (("jitter", jittered), ("grey", grey), ("blur", blurred), ("solarize", inverted))
    ]
    factors = [
        (1 + strength * (2 * draw - 1))[..., None, None, None]
        for strength, draw in (
            (JITTER.brightness, bright),
            (JITTER.contrast, contrast),
            (JITTER.saturation, saturation),
        )
    ]
    made = torch.where(happens[0], _jittered(made, factors, JITTER.hue * (2 * hue - 1)), made)
    if made.shape[2] == 3:
        made = torch.where(happens[1], _luma(made), made)
    if any(view.chances.blur for view in views):
        radius = BLUR_RADIUS[0] + (BLUR_RADIUS[1] - BLUR_RADIUS[0]) * radius
        made = torch.where(happens[2], _blurred(made, radius), made)
    return torch.where(happens[3] & (made >= SOLARIZE_THRESHOLD / 255), 1 - made, made)


def _jittered(made: Tensor, factors: list[Tensor], turn: Tensor) -> Tensor:
    bright, contrast, saturation = factors
    made = (made * bright).clamp(0, 1)
    mean = _luma(made).mean(dim=(2, 3, 4), keepdim=True)
    made = (mean + contrast * (made - mean)).clamp(0, 1)
    if made.shape[2] != 3:
        return made
    luma = _luma(made)
    made = (luma + saturation * (made - luma)).clamp(0, 1)
    # The hue turns in YIQ, where it is an angle and the turn is a matrix.
    angle, to_yiq, from_yiq = 2 * math.pi * turn, made.new_tensor(_TO_YIQ), made.new_tensor(_FROM_YIQ)
    cos, sin, zero, one = angle.cos(), angle.sin(), torch.zeros_like(angle), torch.ones_like(angle)
    turned = torch.stack([one, zero, zero, zero, cos, -sin, zero, sin, cos], dim=-1).unflatten(-1, (3, 3))
    matrix = from_yiq @ turned @ to_yiq
    return torch.einsum("bvdc,bvchw->bvdhw", matrix, made).clamp(0, 1)


def _luma(made: Tensor) -> Tensor:
    if made.shape[2] != 3:
        return made
    return (made * _column(LUMA, made)[:, None, None]).sum(dim=2, keepdim=True)


def _blurred(made: Tensor, radius: Tensor) -> Tensor:
    """Blur with a Gaussian of standard deviation `radius` (B, V); weights outside the image are dropped."""
    rows, columns = (_gaussian(radius, side) for side in made.shape[3:])
    return torch.einsum("bvhy,bvcyx,bvwx->bvchw", rows, made, columns)


def _gaussian(radius: Tensor, side: int) -> Tensor:
    places = torch.arange(side, device=radius.device, dtype=radius.dtype)
    weights = (-((places[:, None] - places) ** 2) / (2 * radius[..., None, None] ** 2)).exp()
    return weights / weights.sum(dim=-1, keepdim=True)
