"""`apply_all`: what was planned for a batch of small images, done to all of them at once, on the device they are on.

The plans are the same as for one image (`augment.plan`); so is what is done, up to the rounding of a few pixels. It
is for images that have their size already, so that nothing has to be resized: crops by whole pixels or none.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrail.data.augmentation.augment import MIDDLE_GREY, Augmentation, AugmentationPlan
from vitrail.data.augmentation.device_operations import Blends, Maps, Moves, Orders, Warps, write_orders
from vitrail.data.packing import PackedArrays
from vitrail.errors import ConfigError

LUMA = (19595, 38470, 7471)
"""Pillow's weights of red, green and blue in grey, in 65536ths."""


def check_on_device(augmentation: Augmentation) -> None:
    """Refuse an augmentation that needs single images."""
    if augmentation.crop not in ("padded", "none"):
        raise ConfigError(
            f'augmentation.crop = "{augmentation.crop}" resizes each image, which is not done on the device; '
            'use "padded" or "none", or data.on_device = false'
        )
    for name, wanted in (("blur", augmentation.blur > 0), ("three_augment", augmentation.three_augment)):
        if wanted:
            raise ConfigError(f"augmentation.{name} is not done on the device; leave it out, or data.on_device = false")
    if augmentation.jitter is not None and augmentation.jitter.hue:
        raise ConfigError("augmentation.jitter.hue is not done on the device; leave it out, or data.on_device = false")
    if augmentation.erasing_fill == "noise":
        raise ConfigError('augmentation.erasing_fill = "noise" is not done on the device; use "grey"')


def apply_all(plans: Sequence[AugmentationPlan], pixels: Tensor) -> Tensor:
    """Do to each image of (B, C, H, W), uint8, what was planned for it."""
    packed = PackedArrays()
    orders = write_orders(plans, (pixels.shape[2], pixels.shape[3]), packed)
    return carry_out(orders, packed.memory().to(pixels.device), pixels)


def carry_out(orders: Orders, memory: Tensor, pixels: Tensor) -> Tensor:
    """Do to each image of (B, C, H, W), uint8, what its orders say, whose parcel's memory is on the same device.

    Nothing here asks the device for a number, so nobody waits for it.
    """
    places = orders.rows.of(memory)[:, :, None].long() + orders.columns.of(memory)[:, None, :]
    pixels = _taken(pixels, places.flatten(1).clamp_(max=pixels.shape[2] * pixels.shape[3]), orders.fill)
    if orders.warps is not None:
        _warp(orders.warps, memory, pixels, orders.fill)
    for layer in orders.layers:
        if layer.moves is not None:
            _move(layer.moves, memory, pixels, orders.fill)
        if layer.maps is not None:
            _map(layer.maps, memory, pixels)
        if layer.grey is not None and pixels.shape[1] == 3:
            _blend_with_grey(layer.grey, memory, pixels)
        if layer.smooth is not None:
            _blend_with_smooth(layer.smooth, memory, pixels)
    if orders.erased is not None:
        rows, columns = (slot.of(memory) for slot in orders.erased)
        pixels.masked_fill_((rows[:, :, None] & columns[:, None, :])[:, None], MIDDLE_GREY)
    return pixels


# ── what moves pixels ──


def _taken(pixels: Tensor, places: Tensor, fill: int) -> Tensor:
    """Take each pixel from a place (B, H·W); H·W itself lies outside, and is filled."""
    B, C, H, W = pixels.shape
    with_outside = F.pad(pixels.flatten(2), (0, 1), value=fill)
    return with_outside.gather(2, places[:, None].expand(B, C, H * W)).view(B, C, H, W)


def _move(moves: Moves, memory: Tensor, pixels: Tensor, fill: int) -> None:
    at = moves.images.of(memory)
    places = moves.places.of(memory).long().index_select(0, moves.ways.of(memory))
    pixels.index_copy_(0, at, _taken(pixels.index_select(0, at), places, fill))


def _warp(warps: Warps, memory: Tensor, pixels: Tensor, fill: int) -> None:
    """As Pillow: filled where the place itself is outside, the edge repeated for neighbours that are."""
    at, H, W = warps.images.of(memory), *pixels.shape[2:]
    a, b, c, d, e, f = warps.matrices.of(memory).T[:, :, None, None]
    down = torch.arange(H, device=pixels.device, dtype=torch.float64)[:, None] + 0.5
    right = torch.arange(W, device=pixels.device, dtype=torch.float64)[None, :] + 0.5
    x, y = a * right + b * down + c, d * right + e * down + f
    there = (x >= 0) & (x < W) & (y >= 0) & (y < H)
    grid = torch.stack([2 * x / W - 1, 2 * y / H - 1], dim=-1).float()
    some = pixels.index_select(0, at).float()
    mixed = F.grid_sample(some, grid, mode="bilinear", padding_mode="border", align_corners=False)
    made = torch.where(there[:, None], (mixed + 0.5).floor().clamp(0, 255), float(fill)).to(torch.uint8)
    pixels.index_copy_(0, at, made)


# ── what changes colours ──


def _map(maps: Maps, memory: Tensor, pixels: Tensor) -> None:
    """Look up what becomes of each value, in a table for each image and channel."""
    at, ramp, known = maps.images.of(memory), maps.ramp.of(memory), maps.tables.of(memory)
    factors = maps.contrasts.of(memory)
    some = pixels.index_select(0, at)
    values = some.flatten(2).long()
    counts = (len(known), len(factors), maps.autocontrasts, maps.equalizes)
    _, contrasts, autocontrasts, equalizes = some.split(counts)
    tables = [known[:, None].expand(-1, pixels.shape[1], -1)]
    if len(contrasts):
        tables.append(_contrast(contrasts, factors, ramp))
    if len(autocontrasts):
        tables.append(_autocontrast(autocontrasts, ramp))
    if len(equalizes):
        tables.append(_equalize(values[-len(equalizes) :], ramp))
    pixels.index_copy_(0, at, torch.cat(tables).gather(2, values).view(some.shape))


def _contrast(pixels: Tensor, factors: Tensor, ramp: Tensor) -> Tensor:
    """Mix with the image's mean grey, rounded to the nearest."""
    count = pixels.shape[2] * pixels.shape[3]
    mean = (2 * _luma(pixels).sum(dim=(1, 2)) + count) // (2 * count)
    table = mean[:, None] + factors[:, None] * (ramp - mean[:, None])
    return table.clamp(0, 255).to(torch.uint8)[:, None].expand(-1, pixels.shape[1], -1)


def _autocontrast(pixels: Tensor, ramp: Tensor) -> Tensor:
    """Stretch each channel until its darkest value is 0 and its brightest 255."""
    low, high = (edge.double() for edge in pixels.flatten(2).aminmax(dim=2, keepdim=True))
    scale = 255.0 / (high - low).clamp(min=1e-9)
    stretched = (ramp * scale - low * scale).clamp(0, 255).to(torch.uint8)
    return torch.where(high <= low, ramp, stretched)


def _equalize(values: Tensor, ramp: Tensor) -> Tensor:
    """Map each channel so that its values become about equally frequent, as Pillow counts it."""
    counts = values.new_zeros(*values.shape[:2], 256)
    counts.scatter_add_(2, values, values.new_ones(()).expand_as(values))
    step = (values.shape[2] - counts.gather(2, values.amax(dim=2, keepdim=True))) // 255
    before = counts.cumsum(dim=2) - counts
    table = ((step // 2 + before) // step.clamp(min=1)).clamp(0, 255).to(torch.uint8)
    return torch.where(step == 0, ramp, table)  # also where there is but one value


def _blend_with_grey(blends: Blends, memory: Tensor, pixels: Tensor) -> None:
    at = blends.images.of(memory)
    some = pixels.index_select(0, at)
    pixels.index_copy_(0, at, _blended(_luma(some)[:, None], some, blends.factors.of(memory)))


def _blend_with_smooth(blends: Blends, memory: Tensor, pixels: Tensor) -> None:
    """Smooth by Pillow's kernel of ones around a five; the edge stays as it is."""
    at = blends.images.of(memory)
    some = pixels.index_select(0, at)
    inner = some[:, :, 1:-1, 1:-1]
    # Whole numbers until the division, so that the result does not depend on how a device convolves.
    sums = F.avg_pool2d(some.float(), 3, stride=1, divisor_override=1).add_(inner, alpha=4)
    inner.copy_(_blended(sums.add_(6.5).div_(13).floor_(), inner, blends.factors.of(memory)))
    pixels.index_copy_(0, at, some)


def _blended(first: Tensor, second: Tensor, factors: Tensor) -> Tensor:
    """Go from the first to the second by a factor for each image, which may lie beyond them."""
    return (first + factors * (second - first)).clamp_(0, 255).to(torch.uint8)


def _luma(pixels: Tensor) -> Tensor:
    """Return grey as Pillow makes it, (B, H, W), int32."""
    if pixels.shape[1] == 1:
        return pixels[:, 0].int()
    red, green, blue = pixels[:, :3].unbind(1)
    total = (red.int() * LUMA[0]).add_(green, alpha=LUMA[1]).add_(blue, alpha=LUMA[2])
    return total.add_(0x8000).bitwise_right_shift_(16)
